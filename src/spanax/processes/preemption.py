"""Stops every process of a run after the same step when one of them receives a signal."""

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from spanax.printable import to_stderr

SIGNALS = (signal.SIGTERM, signal.SIGINT)


@contextmanager
def listening() -> Iterator[Callable[[int], bool]]:
    """Yields a function of the poll number (1, 2, ...) that returns whether to stop, the same on every process.

    SIGTERM and SIGINT request a stop while the context is active; a second signal ends the process immediately. With
    several processes the signal may reach any of them: JAX's preemption service receives SIGTERM and synchronizes all
    processes on one step.

    Example:
      >>> with listening() as is_over:
      ...     before = is_over(1)
      ...     os.kill(os.getpid(), signal.SIGTERM)
      ...     before, is_over(2)
      (False, True)
    """
    import jax

    if threading.current_thread() is not threading.main_thread():
        yield lambda time: False  # Python delivers signals to the main thread only
        return
    is_requested = threading.Event()
    is_group = jax.process_count() > 1

    def request_stop(number: int, frame: Any) -> None:
        if is_requested.is_set():
            raise KeyboardInterrupt
        is_requested.set()
        to_stderr("stopping after this step; signal again to stop now")
        if is_group:
            os.kill(os.getpid(), signal.SIGTERM)

    # With several processes JAX handles SIGTERM; another handler would replace its own.
    previous = {number: signal.signal(number, request_stop) for number in (SIGNALS[1:] if is_group else SIGNALS)}
    try:
        yield _reached_sync_point if is_group else lambda time: is_requested.is_set()
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def _reached_sync_point(time: int) -> bool:
    from jax.experimental import multihost_utils

    return bool(multihost_utils.reached_preemption_sync_point(time))
