"""Claim: a run folder that one run holds. The locks are the kernel's, so they go with a process, however it ends.

`LOCK` is held by what decides which processes run in the folder: a supervisor, or a `train` that has none. The leader
of a supervised run holds `LOCK.leader`, so that it keeps others out where its supervisor was killed. On a cluster that
has a supervisor on every host, each of the others holds `LOCK.rank<N>`.
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
from spanax.errors import WriteError
from spanax.run.record import heartbeat
from spanax.run.store import manifest


@dataclass(eq=False)
class RunLock:
    """A run folder that is held.

    Attributes:
      folder: the run folder.
    """

    folder: Path
    _name: Name
    _lock: ExitStack
    _descriptor: int

    def renew(self) -> bool:
        """Hold the folder again where somebody removed it; whether that was so.

        Raises:
          EntryError: something other than a regular file or folder is in it.
          WriteError: another run has it now, or it cannot be made again.
        """
        if _is_named(Folder.of(self.folder), self._name, self._descriptor):
            return False
        again = _locked(self.folder, self._name)
        try:
            _check_empty(self.folder)
        except WriteError:
            again._lock.close()
            raise
        self._lock.close()
        self._lock, self._descriptor = again._lock, again._descriptor
        return True


@contextmanager
def claimed(folder: Path, *, resume: bool, is_supervised: bool = False) -> Iterator[RunLock]:
    """Hold a run folder while the run lasts.

    Args:
      folder: the run folder; made if missing.
      resume: whether it may hold a run already.
      is_supervised: whether a supervisor, which holds the folder, started this process.

    Raises:
      EntryError: something other than a regular file or folder is in it.
      WriteError: another run holds it, it already has a run in it, or it cannot be written.
    """
    with _held(folder, LEADER_LOCK if is_supervised else LOCK) as claim:
        if not is_supervised:
            _check_free(folder, LEADER_LOCK)
        if not resume:
            _check_empty(folder)
        Folder.of(folder).sweep()
        yield claim


@contextmanager
def supervised(folder: Path, rank: int) -> Iterator[None]:
    """Hold a run folder while a supervisor watches over its run.

    Args:
      folder: the run folder; made if missing.
      rank: the first of the processes that this supervisor starts.

    Raises:
      EntryError: something other than a regular file or folder is in it.
      WriteError: a run is in it, another supervisor holds it, or it cannot be written.
    """
    with _held(folder, RANK_LOCK.of(rank) if rank else LOCK):
        if not rank:
            _check_free(folder, LEADER_LOCK)
        yield


@contextmanager
def _held(folder: Path, name: Name) -> Iterator[RunLock]:
    claim = _locked(folder, name)
    try:
        yield claim
    finally:
        with suppress(OSError):
            if name == LOCK:
                _remove_if_unused(Folder.of(folder))
        claim._lock.close()


def _locked(folder: Path, name: Name) -> RunLock:
    """A claim on a run folder by a lock of this name."""
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
            if _is_named(place, name, descriptor):  # whoever held it before may have removed it
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
    """Whether a descriptor is that of the file which has the name now."""
    status = place.stat(name)
    return status is not None and os.path.samestat(status, os.fstat(descriptor))


def _check_free(folder: Path, name: Name) -> None:
    """Raises if a process holds the lock of this name."""
    place = Folder.of(folder)
    if place.kind(name) is None:
        return
    with place.appending(name) as descriptor:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise _in_use(folder, name) from None


def _in_use(folder: Path, name: Name) -> WriteError:
    return WriteError(
        f"the run folder '{folder}' is in use.", where=_holder(folder, name), fix="another --out, or end that run first"
    )


def _holder(folder: Path, name: Name) -> str:
    """The process that wrote itself into a lock, and whether it still runs."""
    with suppress(OSError, ValueError):
        holder = Folder.of(folder).read(name).decode().strip()
        match = re.fullmatch(r"process (\d+) on (.+)", holder)
        is_here = match is not None and match[2] == socket.gethostname()
        if match is not None and is_here and not Path("/proc", match[1]).exists() and Path("/proc/self").exists():
            return f"{holder}, which has ended: a process that it started holds it"
        return holder or "held by another process"
    return "held by another process"


def check_entries(place: Folder) -> None:
    """Raises unless what has a name of ours in a run folder is what it has to be: nothing was touched yet.

    Raises:
      EntryError: it is a link, or another kind of thing.
    """
    expected = {name: Kind.FILE for name in IN_RUN if "/" not in name} | dict.fromkeys(FOLDERS, Kind.FOLDER)
    for name in place.names():
        kind = place.kind(name)
        required = expected.get(name) or (Kind.FILE if RANK_LOCK.value(name) else None)
        if kind and required and kind is not required:
            raise refused(place.root, name, kind, required, place.link(name) if kind is Kind.LINK else "")


def holds_run(place: Folder) -> bool:
    """Whether a run took or saved a step in a folder."""
    return place.kind(METRICS) is not None or bool(manifest.steps(place.inner(CHECKPOINTS)))


def _check_empty(folder: Path) -> None:
    place = Folder.of(folder)
    if holds_run(place):
        saved = manifest.steps(place.inner(CHECKPOINTS))
        last = f"its newest checkpoint is step {saved[-1]}" if saved else "it has no checkpoint"
        raise WriteError(
            f"the run folder '{folder}' already holds a run.", where=last, fix="--resume, or another --out"
        )


def _remove_if_unused(place: Folder) -> None:
    """Removes the folder of a request that was refused, where there is nothing in it but locks and heartbeats."""
    if set(place.names()) <= {LOCK, LEADER_LOCK, HEARTBEATS}:
        heartbeat.forget(place.root)
        if place.kind(HEARTBEATS) is None or place.remove_if_empty(HEARTBEATS):
            place.remove(LEADER_LOCK)
            place.remove(LOCK)
            place.remove_if_empty()
