"""Preemption: asked by a signal to stop, every process of a run stops behind the same step."""

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
    """What says whether to stop, the same on every process, each time it is asked: the first, the second, ...

    It does so while this lasts.

    SIGTERM and SIGINT ask for it; the second one ends the process at once. In a group the signal may reach any of
    the processes: JAX's preemption service takes SIGTERM, and lets all of them meet at one step.

    Example:
      >>> with listening() as is_over:
      ...     before = is_over(1)
      ...     os.kill(os.getpid(), signal.SIGTERM)
      ...     before, is_over(2)
      (False, True)
    """
    import jax

    if threading.current_thread() is not threading.main_thread():
        yield lambda time: False  # Python hands signals to the main thread alone
        return
    asked = threading.Event()
    is_group = jax.process_count() > 1

    def ask(number: int, frame: Any) -> None:
        if asked.is_set():
            raise KeyboardInterrupt
        asked.set()
        to_stderr("stopping behind this step; once more to stop now")
        if is_group:
            os.kill(os.getpid(), signal.SIGTERM)

    # In a group SIGTERM is JAX's own; a handler of ours would take it away.
    before = {number: signal.signal(number, ask) for number in (SIGNALS[1:] if is_group else SIGNALS)}
    try:
        yield _meeting if is_group else lambda time: asked.is_set()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _meeting(time: int) -> bool:
    from jax.experimental import multihost_utils

    return bool(multihost_utils.reached_preemption_sync_point(time))
