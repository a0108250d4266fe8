"""Saves that run in the background: waiting for them, their errors, and their end when the program exits."""

from __future__ import annotations

import contextlib
import functools
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import final

from spanax.compat import before_exit
from spanax.entries.folder import Folder
from spanax.errors import DiskFullError, WriteError, first_line
from spanax.printable import to_stderr
from spanax.processes.processes import all_processes
from spanax.train.store import manifest

FULL = "no space left on the device"

RUNNING: dict[Path, Pending] = {}
"""The last save into each folder, until it was waited for."""

_FORGETTING = threading.Lock()


@final
class Pending:
    """A save that runs in the background; `wait` blocks until it has finished, at the latest when the program exits.

    `seconds` is the duration, once it has finished.
    """

    def __init__(self, root: Folder, step: int, finish: Callable[[], None]):
        self.step = step
        self._root = root
        self._finish = finish
        self._error: WriteError | None = None
        self._began = time.monotonic()
        self.seconds = 0.0
        self._thread = threading.Thread(target=self._run, name=f"spanax-save-{step}")

    def is_running(self, after_seconds: float) -> bool:
        """Returns whether the save still runs on any process after this time; a collective: all processes call it."""
        self._thread.join(after_seconds)
        return not all_processes(not self._thread.is_alive())

    def wait(self) -> None:
        """Blocks until the step is finished on disk and steps beyond `keep` are removed.

        With several processes, all of them must call it at the same point.

        Raises:
          WriteError: the step could not be written; its files are removed. Raised by every call.
        """
        self._thread.join()
        is_saved_everywhere = all_processes(self._error is None)
        with _FORGETTING:
            if RUNNING.get(self._root.path) is self:
                del RUNNING[self._root.path]
        if self._error is not None:
            raise self._error
        if not is_saved_everywhere:
            raise WriteError(f"step {self.step} was not saved: another process failed.", where=str(self._root))

    def _run(self) -> None:
        try:
            self._finish()
        except WriteError as error:
            self._error = error
        except BaseException as error:
            self._error = failure(self._root, self.step, error)
        finally:
            # Frees the host's copy of the arrays.
            del self._finish
            self.seconds = time.monotonic() - self._began


def join_running(root: Folder) -> None:
    """Waits for the end of the save that runs in a folder, if there is one; its error is raised by `wait`."""
    if (pending := RUNNING.get(root.path)) is not None:
        pending._thread.join()


@functools.cache
def finish_at_exit() -> None:
    """Has the interpreter wait for running saves before it exits."""
    before_exit(_finish_running)  # Orbax uses executors, which accept no work later


def _finish_running() -> None:
    """Waits for running saves, and prints the error of each that failed: no caller can raise it."""
    for pending in list(RUNNING.values()):
        pending._thread.join()
        if pending._error is not None:
            to_stderr(f"WARNING: {first_line(pending._error)}")


def failure(root: Folder, step: int, error: BaseException) -> WriteError:
    # By text: TensorStore, which writes the arrays, raises ValueError for every error of its C++ code.
    is_out = any(sign in str(error) for sign in ("No space left", "Disk quota exceeded"))  # text: TensorStore
    reason = FULL if is_out else first_line(error)
    fix = "free disk space, or use another folder"
    with contextlib.suppress(OSError):
        fix += f"; finished steps there: {', '.join(map(str, manifest.steps(root))) or 'none'}"
    kind = DiskFullError if is_out else WriteError
    return kind(f"step {step} was not saved: {reason}.", where=str(root), fix=fix)
