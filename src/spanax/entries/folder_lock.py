"""Locks a folder for one process, with a kernel lock that is released when the process ends for any reason."""

import fcntl
import os
import re
import socket
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path

from spanax.entries.folder import Folder
from spanax.entries.names import Name
from spanax.errors import InUseError


@dataclass(frozen=True, eq=False)
class FolderLock:
    """A lock on a folder, by a file of this name in it."""

    folder: Folder
    name: Name
    _file: ExitStack
    _descriptor: int

    def is_lost(self) -> bool:
        """Returns whether the file no longer has its name, so that another process could lock the folder."""
        status = self.folder.stat(self.name)
        return status is None or not os.path.samestat(status, os.fstat(self._descriptor))

    def close(self) -> None:
        """Releases the lock."""
        self._file.close()


def lock(folder: Folder, name: Name, title: str, check: Callable[[Folder], None] = lambda folder: None) -> FolderLock:
    """Locks a folder, which is created if missing.

    Args:
      folder: the folder.
      name: the name of the file in it that is locked.
      title: what the folder is, for messages.
      check: called before anything in the folder is changed.

    Raises:
      OSError: the file cannot be created or locked.
      WriteError: another process has locked the folder.
    """
    while True:
        file = ExitStack()
        folder.make()
        check(folder)
        new = FolderLock(folder, name, file, file.enter_context(folder.appending(name)))
        try:
            _acquire(new._descriptor)
            if not new.is_lost():  # its previous owner may have removed the file
                os.truncate(new._descriptor, 0)
                os.write(new._descriptor, f"process {os.getpid()} on {socket.gethostname()}\n".encode())
                return new
        except BlockingIOError:
            new.close()
            raise _in_use(folder, name, title) from None
        except OSError:
            new.close()
            raise
        new.close()


def check_free(folder: Folder, name: Name, title: str) -> None:
    """Checks that no process has locked a folder.

    Raises:
      WriteError: one has.
    """
    with suppress(FileNotFoundError), folder.reading(name) as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            raise _in_use(folder, name, title) from None


def _acquire(descriptor: int) -> None:
    """Acquires the lock; a process that only checks whether it is free has it for a moment."""
    for _ in range(10):
        with suppress(BlockingIOError):
            return fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        time.sleep(0.01)
    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)


def _in_use(folder: Folder, name: Name, title: str) -> InUseError:
    fix = "another folder, or end that process first"
    return InUseError(f"the {title} '{folder}' is in use.", where=_owner(folder, name), fix=fix)


def _owner(folder: Folder, name: Name) -> str:
    """Describes the process recorded in a lock file, and whether it is still running."""
    with suppress(OSError, ValueError):
        owner = folder.read(name).decode().strip()
        match = re.fullmatch(r"process (\d+) on (.+)", owner)
        is_here = match is not None and match[2] == socket.gethostname()
        if match is not None and is_here and not Path("/proc", match[1]).exists() and Path("/proc/self").exists():
            return f"{owner}, which has ended: a process that it started still has the lock"
        return owner or "locked by another process"
    return "locked by another process"
