"""Locks a folder of checkpoints for the one process that writes it.

In a group of processes the first one has the lock: it alone decides about steps.
"""

import os
from pathlib import Path

from spanax.entries.folder import Folder
from spanax.entries.folder_lock import FolderLock, check_free, lock
from spanax.entries.names import STEPS_LOCK
from spanax.errors import EntryError, WriteError

TITLE = "folder of checkpoints"

_LOCKS: dict[Path, FolderLock] = {}


def claim(root: Folder) -> None:
    """Locks a folder until `release`, or until this process ends; a no-op if this process has the lock.

    Raises:
      OSError: the folder cannot be written.
      WriteError: another process has locked the folder.
    """
    before = _LOCKS.get(root.path)
    if before is None or before.is_lost():  # the folder was removed
        _LOCKS[root.path] = lock(root, STEPS_LOCK, TITLE)
        if before is not None:
            before.close()


def release(root: Folder) -> None:
    """Releases the lock of this process on a folder, if it has one, and removes its file."""
    claimed = _LOCKS.pop(root.path, None)
    if claimed is not None:
        if not claimed.is_lost():
            root.remove(STEPS_LOCK)
        claimed.close()


def is_claimed(root: Folder) -> bool:
    """Returns whether a process writes checkpoints into a folder, as far as this machine can see."""
    try:
        check_free(root, STEPS_LOCK, TITLE)
    except WriteError:
        return True
    except (OSError, EntryError):
        return False
    return False


def check_unclaimed(root: Folder) -> None:
    """Checks that no other process writes checkpoints into a folder.

    Raises:
      WriteError: one does.
    """
    if root.resolved().path not in _LOCKS:
        check_free(root, STEPS_LOCK, TITLE)


def _forget() -> None:
    """Closes the locks that a forked process inherited: it is another writer, and may outlive its parent."""
    for claimed in _LOCKS.values():
        claimed.close()
    _LOCKS.clear()


os.register_at_fork(after_in_child=_forget)
