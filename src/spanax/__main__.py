"""The entry point of `spanax` and `python -m spanax`."""

import atexit
import gc
import os
import signal
import sys
import threading
from types import FrameType
from typing import Any


def main() -> None:
    """Runs the command line; Ctrl-C exits without a traceback at any time."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _interrupt)
        sys.unraisablehook = _unraisable
        # Registered first, so called last: Python then restores the default SIGINT handler, which kills the process.
        atexit.register(signal.signal, signal.SIGINT, signal.SIG_IGN)
    # Startup creates a million permanent objects, whose collection takes 0.3 s at the default threshold (700).
    gc.set_threshold(10_000, *gc.get_threshold()[1:])
    from spanax.cli import main as carry_out

    carry_out()


def _interrupt(number: int, frame: FrameType | None) -> None:
    # An import cannot be interrupted: JAX's extensions raise another error or crash.
    while frame:
        if frame.f_globals.get("__name__", "").startswith("importlib._bootstrap"):
            print("spanax: interrupted", file=sys.stderr, flush=True)
            os._exit(130)
        frame = frame.f_back
    raise KeyboardInterrupt


def _unraisable(unraisable: Any) -> None:
    # An interrupt in a callback of JAX is printed and discarded there, so it is sent again a moment later.
    if issubclass(unraisable.exc_type, KeyboardInterrupt):
        threading.Timer(0.05, signal.pthread_kill, (threading.main_thread().ident, signal.SIGINT)).start()
    else:
        sys.__unraisablehook__(unraisable)


if __name__ == "__main__":
    main()
