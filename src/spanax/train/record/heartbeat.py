"""Heartbeats: heartbeats/<rank>.json, which the training loop of each process rewrites as it makes progress.

They are written by the loop and not by a thread, which would continue while the loop hangs. Their readers decide how
long a silence may last.
"""

import json
import os
import socket
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated

from spanax.documents import parse_json
from spanax.entries.folder import Folder
from spanax.entries.kind import Kind, refused
from spanax.entries.names import HEARTBEAT, HEARTBEATS, Name
from spanax.errors import first_line
from spanax.schema import Count, Seconds, Within, parsed

Pid = Annotated[int, Within(1, (1 << 31) - 1)]

FOLDER_VARIABLE = "SPANAX_HEARTBEATS"
"""The environment variable with the folder of the heartbeats of a program that is not a run."""

MIN_INTERVAL_SECONDS = 0.1
"""The minimal time between heartbeats of one phase: a small model takes thousands of steps per second."""


@dataclass(frozen=True)
class Heartbeat:
    """The latest state of one process.

    Attributes:
      rank: the index of the process in the run.
      pid: its process id on `host`.
      host: its host name.
      attempt: the number of restarts of the run so far.
      phase: `start`, `compile`, `step`, `save`, `evaluate`, `restore` or `end`.
      step: the number of steps taken.
      step_seconds: the median time of recent steps; 0 before the first.
      time: the time of the heartbeat on the clock of the process, in Unix seconds.
      seconds: its wall time so far by bucket (`run.record.time_ledger`).
    """

    rank: Count
    pid: Pid
    host: str
    attempt: Count
    phase: str
    step: Count
    step_seconds: Seconds
    time: Seconds
    seconds: Mapping[str, Seconds] = field(default_factory=dict)


@dataclass
class Pulse:
    """Writes the heartbeats of one process.

    Example:
      >>> import tempfile
      >>> pulse = Pulse(Path(tempfile.mkdtemp()), rank=1, attempt=0)
      >>> pulse.beat("step", 7, step_seconds=0.25)
      >>> heartbeat = read(pulse.folder)[1]
      >>> heartbeat.phase, heartbeat.step, heartbeat.pid == os.getpid()
      ('step', 7, True)
    """

    folder: Path
    rank: int
    attempt: int
    _phase: str = ""
    _last_beat: float = 0.0

    def beat(
        self, phase: str, step: int, *, step_seconds: float = 0.0, seconds: Mapping[str, float] | None = None
    ) -> None:
        """Writes a heartbeat, unless this phase just had one; on a full disk only the time of the file is updated."""
        if phase == self._phase and time.monotonic() - self._last_beat < MIN_INTERVAL_SECONDS:
            return
        self._phase = phase
        self._last_beat = time.monotonic()
        heartbeat = Heartbeat(
            self.rank,
            os.getpid(),
            socket.gethostname(),
            self.attempt,
            phase,
            step,
            step_seconds,
            time.time(),
            dict(seconds or {}),
        )
        place = Folder.of(self.folder)
        name = HEARTBEAT.of(self.rank)
        try:
            place.make(HEARTBEATS)
            place.replace(name, [json.dumps(asdict(heartbeat))], is_durable=False)
        except OSError:
            # A full disk can still update the time of a file.
            with suppress(OSError):
                place.touch(name)


def read(folder: Path) -> dict[int, Heartbeat]:
    """Returns the last heartbeat of every process by rank, without damaged files, which `damaged` lists."""
    place = Folder.of(folder)
    beats = (_beat(place, name) for name in _names(place))
    return {beat.rank: beat for beat in beats if isinstance(beat, Heartbeat)}


def damaged(folder: Path) -> list[str]:
    """Returns one message for each file that is not a valid heartbeat."""
    place = Folder.of(folder)
    beats = ((name, _beat(place, name)) for name in _names(place))
    return [f"{name}: {first_line(beat)}" for name, beat in beats if not isinstance(beat, Heartbeat)]


def stamp(folder: Path, rank: int) -> int | None:
    """Returns a number that changes with every heartbeat, so that progress is visible without comparing clocks."""
    try:
        status = Folder.of(folder).stat(HEARTBEAT.of(rank))
    except OSError:
        return None
    return None if status is None else status.st_mtime_ns


def remove(folder: Path) -> None:
    """Removes the heartbeats of an earlier attempt.

    Raises:
      EntryError: `heartbeats` is not a folder, or a heartbeat is not a regular file.
    """
    place = Folder.of(folder)
    for name in _names(place):
        kind = place.kind(name)
        if kind is Kind.FOLDER:
            raise refused(place.root, name, kind, Kind.FILE)
        place.remove(name)
    place.inner(HEARTBEATS).sweep()


def _names(place: Folder) -> list[Name]:
    """Returns the names of the heartbeats in a run folder."""
    ranks = (HEARTBEAT.value(f"{HEARTBEATS}/{name}") for name in place.inner(HEARTBEATS).names())
    return [HEARTBEAT.of(rank) for rank in ranks if rank is not None and rank.isdecimal() and rank.isascii()]


def _beat(place: Folder, name: Name) -> Heartbeat | Exception:
    """Returns the heartbeat in a file, or the error of reading it."""
    try:
        beat = parsed(Heartbeat, parse_json(place.read(name)), is_open=True, is_strict=False)
    except (OSError, ValueError) as error:
        return error
    return beat if HEARTBEAT.value(name) == str(beat.rank) else ValueError(f"it is the beat of rank {beat.rank}")
