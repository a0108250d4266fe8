"""Locks a run folder for one run, with kernel locks that are released when their process ends for any reason.

A supervisor, or a `train` without one, locks `LOCK`. The first process of a supervised run locks `LOCK.leader`, which
excludes other runs even if its supervisor is killed. On a cluster with a supervisor on every host, each further
supervisor locks `LOCK.rank<N>`.
"""

import fcntl
import os
import re
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from spanax.entries.folder import Folder
from spanax.entries.kind import Kind, refused
from spanax.entries.names import (
    CHECKPOINTS,
    FOLDERS,
    HEARTBEATS,
    IN_RUN,
    LEADER_LOCK,
    LOCK,
    METRICS,
    RANK_LOCK,
    Name,
)
from spanax.errors import InUseError, WriteError
from spanax.run.record import heartbeat
from spanax.run.store import manifest


@dataclass(eq=False)
class RunLock:
    """A lock on a run folder.

    Attributes:
      folder: the run folder.
    """

    folder: Path
    _name: Name
    _lock: ExitStack
    _descriptor: int

    def renew(self) -> bool:
        """Locks the folder again if it was removed, and returns whether it was.

        Raises:
          EntryError: the folder contains something other than regular files and folders.
          WriteError: another run locked the folder, or it cannot be created.
        """
        if _is_named(Folder.of(self.folder), self._name, self._descriptor):
            return False
        new = _locked(self.folder, self._name)
        try:
            _check_empty(self.folder)
        except WriteError:
            new._lock.close()
            raise
        self._lock.close()
        self._lock, self._descriptor = new._lock, new._descriptor
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
            _check_free(folder, LEADER_LOCK)
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
            _check_free(folder, LEADER_LOCK)
        yield


@contextmanager
def _lock(folder: Path, name: Name) -> Iterator[RunLock]:
    run_lock = _locked(folder, name)
    try:
        yield run_lock
    finally:
        with suppress(OSError):
            if name == LOCK:
                _remove_if_unused(Folder.of(folder))
        run_lock._lock.close()


def _locked(folder: Path, name: Name) -> RunLock:
    """Returns a lock of this name on a run folder, which is created if missing."""
    place = Folder.of(folder)
    while True:
        lock = ExitStack()
        try:
            place.make()
            check_entries(place)
            descriptor = lock.enter_context(place.appending(name))
        except OSError as error:
            raise WriteError(f"cannot write to the run folder '{folder}'.", where=str(error)) from None
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if _is_named(place, name, descriptor):  # its previous owner may have removed the file
                os.truncate(descriptor, 0)
                os.write(descriptor, f"process {os.getpid()} on {socket.gethostname()}\n".encode())
                return RunLock(folder, name, lock, descriptor)
        except BlockingIOError:
            lock.close()
            raise _in_use(folder, name) from None
        except OSError as error:
            lock.close()
            raise WriteError(f"cannot lock the run folder '{folder}'.", where=str(error)) from None
        lock.close()


def _is_named(place: Folder, name: Name, descriptor: int) -> bool:
    """Returns whether a descriptor refers to the file that has this name now."""
    status = place.stat(name)
    return status is not None and os.path.samestat(status, os.fstat(descriptor))


def _check_free(folder: Path, name: Name) -> None:
    """Raises if a process has the lock of this name."""
    place = Folder.of(folder)
    if place.kind(name) is None:
        return
    with place.appending(name) as descriptor:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise _in_use(folder, name) from None


def _in_use(folder: Path, name: Name) -> WriteError:
    return InUseError(
        f"the run folder '{folder}' is in use.",
        where=_owner(folder, name),
        fix="another --output-dir, or end that run first",
    )


def _owner(folder: Path, name: Name) -> str:
    """Describes the process recorded in a lock file, and whether it is still running."""
    with suppress(OSError, ValueError):
        owner = Folder.of(folder).read(name).decode().strip()
        match = re.fullmatch(r"process (\d+) on (.+)", owner)
        is_here = match is not None and match[2] == socket.gethostname()
        if match is not None and is_here and not Path("/proc", match[1]).exists() and Path("/proc/self").exists():
            return f"{owner}, which has ended: a process that it started still has the lock"
        return owner or "locked by another process"
    return "locked by another process"


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
        raise InUseError(
            f"the run folder '{folder}' already contains a run.", where=last, fix="--resume, or another --output-dir"
        )


def _remove_if_unused(place: Folder) -> None:
    """Removes a run folder that contains only locks and heartbeats, after a request that was rejected."""
    if set(place.names()) <= {LOCK, LEADER_LOCK, HEARTBEATS}:
        heartbeat.remove(place.root)
        if place.kind(HEARTBEATS) is None or place.remove_if_empty(HEARTBEATS):
            place.remove(LEADER_LOCK)
            place.remove(LOCK)
            place.remove_if_empty()
