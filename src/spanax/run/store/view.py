"""A consistent view of the steps in a folder, for readers of a run that saves and removes steps meanwhile.

A process that saves a step holds a lock on the step's folder; the kernel releases it however the process ends. On the
machine that saves, the lock tells a save in progress from an interrupted one; not every file system shows its locks to
other machines. Neither is damage, because neither was a checkpoint yet. A step that was removed or replaced during a
read is looked up again.
"""

import fcntl
import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from spanax.entries.folder import Folder, Place
from spanax.entries.kind import Kind
from spanax.errors import DataError, EntryError, SpanaxError, first_line
from spanax.run.store import manifest

SAVING = "saving"

MOST_ROUNDS = 10
"""How often a folder is listed again in which every step was replaced while it was read."""

_LOCKS: dict[Path, int] = {}

Content = TypeVar("Content")


@dataclass(frozen=True)
class SavedStep:
    """One step on disk: `when` is UTC in ISO 8601, bytes are on disk.

    `state` is `good`, `bad`, `saving`, or `unfinished` where the save was cut short, or goes on where its lock is not
    seen; `folder` is its folder's name.
    """

    step: int
    state: str
    bytes: int
    num_leaves: int
    when: str
    problems: tuple[str, ...]
    meta: dict[str, Any]
    folder: str = ""


def begin(staging: Folder) -> None:
    """Makes the folder that a step is written into, locked before anybody sees it.

    Raises:
      OSError: it cannot be made.
    """
    new = manifest.hidden(staging)
    new.make_new()
    lock = _descriptor(new)
    try:
        with suppress(OSError):  # a file system without locks: readers see the save as unfinished
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        staging.outer.rename(new.name, staging.name)
    except OSError:
        os.close(lock)
        new.remove_if_empty()
        raise
    _LOCKS[staging.path] = lock


def end(staging: Folder) -> None:
    """Unlocks what `begin` made; without effect the second time, and on processes that made nothing."""
    if staging.path in _LOCKS:
        os.close(_LOCKS.pop(staging.path))


def describe(directory: Place) -> list[SavedStep]:
    """Every step on disk, newest last, each checked byte by byte.

    Example:
      >>> describe("no/such/folder")
      []
    """
    return [saved for saved in look(directory) if manifest.step_of(saved.folder) is not None]


def verify(directory: Place) -> list[str]:
    """Every difference between the steps on disk and what was saved, a line each; unfinished steps have none.

    Example:
      >>> verify("no/such/folder")
      ['no/such/folder: no checkpoint here']
    """
    return differences(directory, look(directory))


def differences(directory: Place, steps: list[SavedStep]) -> list[str]:
    """What `verify` returns for the steps that `look` returned."""
    lines = [f"step {saved.folder}: {problem}" for saved in steps for problem in saved.problems]
    return lines if steps else [f"{directory}: no checkpoint here"]


def problems(folder: Folder) -> list[str] | None:
    """As `manifest.problems`; None where the folder was removed, or took another name, meanwhile."""
    before = _identity(folder)
    found = manifest.problems(folder)
    return None if before is None or (found and _identity(folder) != before) else found


def newest(directory: Place, read: Callable[[int, Folder], Content]) -> Content | None:
    """What `read` makes of the newest finished step, from its number and folder; None where no step is finished.

    Where a run removes that step, or gives it its number, before `read` returns, the then newest one is read.

    Raises:
      DataError: every step was removed before it was read; also what `read` raises.

    Example:
      >>> newest("no/such/folder", lambda step, folder: step) is None
      True
    """
    for _ in range(MOST_ROUNDS):
        finished = manifest.finished(directory)
        if not finished:
            return None
        step, folder = finished[-1]
        before = _identity(folder)
        try:
            content = read(step, folder)
        except (SpanaxError, OSError):
            if before is not None and _identity(folder) == before:
                raise
            continue
        if before is not None and _identity(folder) == before:
            return content
    raise DataError(f"every step in '{directory}' was removed while it was read.", fix="read it again")


def unreadable(step: int, folder: Folder, error: Exception) -> DataError:
    """The error of a step that was good when it was chosen, and could not be read then."""
    if folder.kind() is None:
        what = f"checkpoint step {step} was removed, or took its number, while it was read."
        return DataError(what, where=str(folder), fix="read it again; a run that saves there has --keep for more steps")
    what = f"checkpoint step {step} is as it was saved but cannot be loaded: {first_line(error)}"
    return DataError(what, where=str(folder))


def look(directory: Place) -> list[SavedStep]:
    """Every entry with the name of a step or of a temporary, as it is now, newest last."""
    for _ in range(MOST_ROUNDS):
        by_folder: dict[str, SavedStep] = {}
        num_gone = 0
        for path in _listed(directory):
            # A save that has ended since it was listed has its plain number now.
            for folder in dict.fromkeys((path, path.outer.inner(path.path.with_suffix("").name))):
                if folder.name not in by_folder and (saved := _seen(folder)) is not None:
                    by_folder[folder.name] = saved
                    break
            else:
                num_gone += 1
        if not num_gone or any(saved.state in ("good", "bad") for saved in by_folder.values()):
            break
    return sorted(by_folder.values(), key=lambda saved: (saved.step, len(saved.folder), saved.folder))


def _listed(directory: Place) -> list[Folder]:
    paths = manifest.entries(directory)
    return [path for path in paths if manifest.step_of(path) is not None or manifest.ORBAX_TEMPORARY in path.name]


def _seen(folder: Folder) -> SavedStep | None:
    """A step as it is now; None where it is gone, or took another name before all of it was read."""
    before = _identity(folder)
    if before is None:
        return None
    # In this order: a lock that is gone belongs to a save that has finished or failed, which the second look tells.
    is_saving = not manifest.has_manifest(folder) and _is_locked(folder) and not manifest.has_manifest(folder)
    is_finished = manifest.has_manifest(folder)
    is_new = folder.kind() is Kind.FOLDER and manifest.is_staging(folder)
    found = [] if is_saving or (is_new and not is_finished) else manifest.problems(folder)
    try:
        when, leaves, meta = manifest.read_meta(folder)
    except (OSError, ValueError):
        leaves, meta = {}, {}
        if (status := folder.stat()) is None:
            return None
        when = manifest.utc(status.st_mtime)
    if (found or not leaves) and _identity(folder) != before:
        return None
    state = SAVING if is_saving else "bad" if found and is_finished else "good" if is_finished else "unfinished"
    step = manifest.step_of(folder) or 0
    return SavedStep(step, state, _num_bytes(folder), len(leaves), when, tuple(found), meta, folder.name)


def _num_bytes(folder: Folder) -> int:
    """Of the files in a folder; 0 where it is something else, or is being removed."""
    try:
        return sum(manifest.walk(folder)[0].values()) if folder.kind() is Kind.FOLDER else 0
    except (OSError, EntryError):
        return 0


def _identity(folder: Folder) -> tuple[int, int] | None:
    """Tells a folder from another one of its name; None where there is none."""
    status = folder.stat()
    return None if status is None else (status.st_dev, status.st_ino)


def _is_locked(folder: Folder) -> bool:
    """Whether some process holds the lock of a step's folder."""
    try:
        descriptor = _descriptor(folder)
    except (OSError, EntryError):
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:  # a file system without locks
        return False
    finally:
        os.close(descriptor)
    return False


def _descriptor(folder: Folder) -> int:
    with folder.opened() as descriptor:
        return os.dup(descriptor)
