"""Locks a run folder for one run, with kernel locks that are released when their process ends for any reason.

A supervisor, or a `train` without one, locks `LOCK`. The first process of a supervised run locks `LOCK.leader`, which
excludes other runs even if its supervisor is killed. On a cluster with a supervisor on every host, each further
supervisor locks `LOCK.rank<N>`.
"""

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from spanax.entries.folder import Folder
from spanax.entries.folder_lock import FolderLock, check_free, lock
from spanax.entries.kind import Kind, refused
from spanax.entries.names import (
    CHECKPOINTS,
    CONFIG,
    FOLDERS,
    HEARTBEATS,
    IN_RUN,
    LEADER_LOCK,
    LOCK,
    METRICS,
    RANK_LOCK,
    Name,
)
from spanax.errors import FileErrors, InUseError, WriteError
from spanax.train.record import heartbeat
from spanax.train.store import manifest, writer

TITLE = "run folder"


@dataclass(eq=False)
class RunLock:
    """A lock on a run folder.

    Attributes:
      folder: the run folder.
    """

    folder: Path
    _lock: FolderLock

    def renew(self) -> bool:
        """Locks the folder again if it was removed, and returns whether it was.

        Raises:
          EntryError: the folder contains something other than regular files and folders.
          WriteError: another run locked the folder, or it cannot be created.
        """
        if not self._lock.is_lost():
            return False
        new = _locked(self.folder, self._lock.name)
        try:
            _check_empty(self.folder)
        except WriteError:
            new.close()
            raise
        self._lock.close()
        self._lock = new
        return True


@contextmanager
def claimed(folder: Path, *, resume: bool, is_supervised: bool = False) -> Iterator[RunLock]:
    """Locks a run folder for the duration of a run.

    Args:
      folder: the run folder; created if missing.
      resume: whether the folder may already contain a run.
      is_supervised: whether this process was started by a supervisor, which locks the folder itself.

    Raises:
      EntryError: the folder contains something other than regular files and folders.
      WriteError: another run locked the folder, it already contains a run, or it cannot be written.
    """
    with _lock(folder, LEADER_LOCK if is_supervised else LOCK) as run_lock:
        if not is_supervised:
            _check_free(folder)
        writer.check_unclaimed(Folder.of(folder))
        writer.check_unclaimed(Folder.of(folder).inner(CHECKPOINTS))
        if not resume:
            _check_empty(folder)
        Folder.of(folder).sweep()
        yield run_lock


@contextmanager
def supervised(folder: Path, rank: int) -> Iterator[None]:
    """Locks a run folder while a supervisor monitors its run.

    Args:
      folder: the run folder; created if missing.
      rank: the index of the first process that this supervisor starts.

    Raises:
      EntryError: the folder contains something other than regular files and folders.
      WriteError: a run or another supervisor locked the folder, or it cannot be written.
    """
    with _lock(folder, RANK_LOCK.of(rank) if rank else LOCK):
        if not rank:
            _check_free(folder)
        yield


@contextmanager
def _lock(folder: Path, name: Name) -> Iterator[RunLock]:
    run_lock = RunLock(folder, _locked(folder, name))
    try:
        yield run_lock
    finally:
        with suppress(OSError):
            if name == LOCK:
                _remove_if_unused(Folder.of(folder))
        run_lock._lock.close()


def _locked(folder: Path, name: Name) -> FolderLock:
    with FileErrors(WriteError, f"cannot write to the run folder '{folder}'."):
        return lock(Folder.of(folder), name, TITLE, check_entries)


def _check_free(folder: Path) -> None:
    """Raises if the first process of a supervised run has locked the folder."""
    check_free(Folder.of(folder), LEADER_LOCK, TITLE)


def check_entries(place: Folder) -> None:
    """Checks, before anything is changed, that the known names in a run folder are regular files and folders.

    Raises:
      EntryError: one of them is a link, or of another kind.
    """
    expected = {name: Kind.FILE for name in IN_RUN if "/" not in name} | dict.fromkeys(FOLDERS, Kind.FOLDER)
    for name in place.names():
        kind = place.kind(name)
        required = expected.get(name) or (Kind.FILE if RANK_LOCK.value(name) else None)
        if kind and required and kind is not required:
            raise refused(place.root, name, kind, required, place.link(name) if kind is Kind.LINK else "")


def holds_run(place: Folder) -> bool:
    """Returns whether a folder contains metrics or checkpoints of a run."""
    return place.kind(METRICS) is not None or bool(manifest.steps(place.inner(CHECKPOINTS)))


def _check_empty(folder: Path) -> None:
    place = Folder.of(folder)
    if holds_run(place):
        saved = manifest.steps(place.inner(CHECKPOINTS))
        last = f"its newest checkpoint is step {saved[-1]}" if saved else "it has no checkpoint"
        fix = "another --output-dir" if place.kind(CONFIG) is None else "--resume, or another --output-dir"
        raise InUseError(f"the run folder '{folder}' already contains a run.", where=last, fix=fix)


def _remove_if_unused(place: Folder) -> None:
    """Removes a run folder that contains only locks and heartbeats, after a request that was rejected."""
    if set(place.names()) <= {LOCK, LEADER_LOCK, HEARTBEATS}:
        heartbeat.remove(place.root)
        if place.kind(HEARTBEATS) is None or place.remove_if_empty(HEARTBEATS):
            place.remove(LEADER_LOCK)
            place.remove(LOCK)
            place.remove_if_empty()
