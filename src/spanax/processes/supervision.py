"""Connects a process to the supervisor that started it, if any."""

import faulthandler
import os
import signal
import sys
from collections.abc import Mapping
from types import TracebackType

from spanax.errors import SpanaxError
from spanax.processes.environment import number
from spanax.processes.lockstep import fail

STDERR = 2

ERROR = 1
INTERRUPTED = 130
"""Exit codes of Python after an error, and of a shell after Ctrl-C."""


def is_supervised(environ: Mapping[str, str] = os.environ) -> bool:
    """Returns whether a supervisor started this process."""
    return "SPANAX_SUPERVISOR" in environ


def attach_supervisor(environ: Mapping[str, str] = os.environ) -> bool:
    """Returns whether a supervisor started this process, and installs its handlers if so.

    SIGUSR1 and every crash dump all stacks to standard error.
    """
    if not is_supervised(environ):
        return False
    faulthandler.enable(STDERR)
    faulthandler.register(signal.SIGUSR1, STDERR)
    supervisor = number(environ, "SPANAX_SUPERVISOR", None)
    if supervisor == 0:
        return True
    if supervisor != os.getppid() and not _runs(supervisor):
        sys.exit("spanax: the supervisor has exited")
    return True


def exit_on_error() -> None:
    """Makes an uncaught exception end this process at once, with its exit code if it is a SpanaxError.

    A regular exit would first wait for the other processes of the group, which wait for this one in a collective; JAX
    then aborts all of them, and the exit code is lost.
    """
    previous = sys.excepthook
    if getattr(previous, "__module__", "") == __name__:
        return

    def leave(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        fail(error)
        previous(kind, error, trace)
        sys.stdout.flush()
        sys.stderr.flush()
        if isinstance(error, SpanaxError):
            os._exit(error.exit_code)
        os._exit(INTERRUPTED if issubclass(kind, KeyboardInterrupt) else ERROR)

    sys.excepthook = leave


def _runs(pid: int) -> bool:
    """Returns whether a process exists."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
