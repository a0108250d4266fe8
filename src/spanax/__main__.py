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
    """Run the command line; Ctrl-C ends it without a traceback, whatever it is doing."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _interrupt)
        sys.unraisablehook = _unraisable
        # Registered first, so called last: Python then gives SIGINT back to the system, which would end it by signal.
        atexit.register(signal.signal, signal.SIGINT, signal.SIG_IGN)
    # A start makes a million objects that stay; as often as by default (700), they are gone through for 0.3 s of it.
    gc.set_threshold(10_000, *gc.get_threshold()[1:])
    from spanax.cli import main as carry_out

    carry_out()


def _interrupt(number: int, frame: FrameType | None) -> None:
    # Half an import cannot be left: JAX's extensions make another error of an interrupt, or crash.
    while frame:
        if frame.f_globals.get("__name__", "").startswith("importlib._bootstrap"):
            print("spanax: interrupted", file=sys.stderr, flush=True)
            os._exit(130)
        frame = frame.f_back
    raise KeyboardInterrupt


def _unraisable(lost: Any) -> None:
    # One that hits a callback of JAX's is told of there, and forgotten: so it comes once more, a moment later.
    if issubclass(lost.exc_type, KeyboardInterrupt):
        threading.Timer(0.05, signal.pthread_kill, (threading.main_thread().ident, signal.SIGINT)).start()
    else:
        sys.__unraisablehook__(lost)


if __name__ == "__main__":
    main()
