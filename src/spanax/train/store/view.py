"""Provides a consistent view of the steps in a folder while a run saves and removes steps.

A process that saves holds a lock (`writer`), which distinguishes a save in progress from an interrupted one; some file
systems do not show locks to other machines. Neither counts as damage, because neither was a checkpoint yet. A step that
was removed or replaced during a read is looked up again.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from spanax.entries.folder import Folder, Place
from spanax.entries.kind import Kind
from spanax.errors import CheckpointError, DataError, EntryError, SpanaxError, first_line
from spanax.train.store import manifest, writer

SAVING = "saving"

MAX_ROUNDS = 10
"""How often a folder is listed again if every step was replaced while it was read."""

Content = TypeVar("Content")


@dataclass(frozen=True)
class SavedStep:
    """A step on disk: `when` is UTC in ISO 8601, `bytes` the size on disk, `folder` the name of its folder.

    `state` is `good`, `bad`, `saving`, or `unfinished`: interrupted, or still running with a lock that is not visible.
    """

    step: int
    state: str
    bytes: int
    num_leaves: int
    when: str
    problems: tuple[str, ...]
    meta: dict[str, Any]
    folder: str = ""


def verify(directory: Place, steps: list[SavedStep] | None = None) -> list[str]:
    """Returns one line for each difference between steps on disk and their manifests; skips unfinished steps.

    Args:
      directory: the folder of all steps.
      steps: what `describe` returned; by default it is called.

    Example:
      >>> verify("no/such/folder")
      ['no/such/folder: no checkpoint here']
    """
    steps = describe(directory) if steps is None else steps
    lines = [f"step {saved.folder}: {problem}" for saved in steps for problem in saved.problems]
    return lines if steps else [f"{directory}: no checkpoint here"]


def problems(folder: Folder) -> list[str] | None:
    """Returns `manifest.problems`, or None if the folder was removed or renamed meanwhile."""
    before = _identity(folder)
    problems_now = manifest.problems(folder)
    return None if before is None or (problems_now and _identity(folder) != before) else problems_now


def newest(directory: Place, read: Callable[[int, Folder], Content]) -> Content | None:
    """Calls `read` with the number and the folder of the newest finished step; returns None if no step is finished.

    If a run removes or renames that step before `read` returns, the next newest step is read.

    Raises:
      DataError: every step was removed before it was read; also any error of `read`.

    Example:
      >>> newest("no/such/folder", lambda step, folder: step) is None
      True
    """
    for _ in range(MAX_ROUNDS):
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
    raise CheckpointError(f"every step in '{directory}' was removed while it was being read.", fix="retry")


def unreadable(step: int, folder: Folder, error: Exception) -> DataError:
    """Returns the error for a step that passed verification but cannot be loaded."""
    if folder.kind() is None:
        message = f"checkpoint step {step} was removed or renamed while it was being read."
        return CheckpointError(
            message, where=str(folder), fix="retry; a larger --keep-last of the run that saves here avoids this"
        )
    message = f"checkpoint step {step} passes verification but cannot be loaded: {first_line(error)}"
    return CheckpointError(message, where=str(folder))


def describe(directory: Place) -> list[SavedStep]:
    """Returns every entry with the name of a step in its current state, newest last; verifies every byte of each.

    Example:
      >>> describe("no/such/folder")
      []
    """
    for _ in range(MAX_ROUNDS):
        by_folder: dict[str, SavedStep] = {}
        num_removed = 0
        for path in manifest.entries(directory):
            if manifest.step_of(path) is None:
                continue
            # A save that finished since the listing has been renamed to its number.
            for folder in dict.fromkeys((path, path.outer.inner(path.path.with_suffix("").name))):
                if folder.name not in by_folder and (saved := _seen(folder)) is not None:
                    by_folder[folder.name] = saved
                    break
            else:
                num_removed += 1
        if not num_removed or any(saved.state in ("good", "bad") for saved in by_folder.values()):
            break
    return sorted(by_folder.values(), key=lambda saved: (saved.step, len(saved.folder), saved.folder))


def _seen(folder: Folder) -> SavedStep | None:
    """Returns the current state of a step; None if it was removed or renamed before all of it was read."""
    before = _identity(folder)
    if before is None:
        return None
    step = manifest.step_of(folder)
    is_new = folder.kind() is Kind.FOLDER and folder.name != str(step)
    # In this order: a released lock means that the save finished or failed, which the second lookup distinguishes.
    is_claimed = is_new and writer.is_claimed(folder.outer)
    is_finished = manifest.has_manifest(folder)
    is_saving = is_claimed and not is_finished
    problems_now = [] if is_saving or (is_new and not is_finished) else manifest.problems(folder)
    try:
        record = manifest.read_meta(folder)
    except (OSError, ValueError):
        if (status := folder.stat()) is None:
            return None
        record = manifest.Meta(manifest.utc(status.st_mtime), {}, {})
    if (problems_now or not record.leaves) and _identity(folder) != before:
        return None
    state = "unfinished"
    if is_saving:
        state = SAVING
    elif is_finished:
        state = "bad" if problems_now else "good"
    return SavedStep(
        step or 0,
        state,
        _num_bytes(folder),
        len(record.leaves),
        record.saved_at,
        tuple(problems_now),
        dict(record.meta),
        folder.name,
    )


def _num_bytes(folder: Folder) -> int:
    """Returns the size of the files in a folder; 0 if it is not a folder, or is being removed."""
    try:
        return sum(manifest.walk(folder)[0].values()) if folder.kind() is Kind.FOLDER else 0
    except (OSError, EntryError):
        return 0


def _identity(folder: Folder) -> tuple[int, int] | None:
    """Returns the device and the inode of a folder, which identify it; None if it does not exist."""
    status = folder.stat()
    return None if status is None else (status.st_dev, status.st_ino)
