"""Heartbeat: the sign of life of one process of a run, heartbeats/<rank>.json, beaten by its loop and by no thread.

A thread would go on beating while the loop hangs. What is written are facts; how long a silence may last is for the
one who reads them to decide.
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

APART_SECONDS = 0.1
"""Beats of one phase are at least so far apart: a small model takes thousands of steps a second."""


@dataclass(frozen=True)
class Heartbeat:
    """What a process last said of itself.

    Attributes:
      rank: its number among the processes of the run.
      pid: its process on `host`.
      attempt: how often the run was started again before.
      phase: `start`, `compile`, `step`, `save`, `evaluate`, `restore` or `end`.
      step: steps taken.
      step_seconds: the median of its steps so far; 0 before the first.
      time: when, by its own clock, in Unix seconds.
      seconds: what its wall time went to so far, by bucket (`run.ledger`).
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
    """The heart of one process.

    Example:
      >>> import tempfile
      >>> pulse = Pulse(Path(tempfile.mkdtemp()), rank=1, attempt=0)
      >>> pulse.beat("step", 7, step_seconds=0.25)
      >>> found = read(pulse.folder)[1]
      >>> found.phase, found.step, found.pid == os.getpid()
      ('step', 7, True)
    """

    folder: Path
    rank: int
    attempt: int
    _phase: str = ""
    _beaten: float = 0.0

    def is_due(self, phase: str) -> bool:
        """Whether a beat of this phase would be written now."""
        return phase != self._phase or time.monotonic() - self._beaten >= APART_SECONDS

    def beat(
        self, phase: str, step: int, *, step_seconds: float = 0.0, seconds: Mapping[str, float] | None = None
    ) -> None:
        """Say where the loop is; a disk without room must not end a run, so an error only leaves the old beat."""
        if not self.is_due(phase):
            return
        self._phase, self._beaten = phase, time.monotonic()
        said = Heartbeat(
            self.rank, os.getpid(), socket.gethostname(), self.attempt, phase, step, step_seconds, time.time(),
            dict(seconds or {}),
        )  # fmt: skip
        place, name = Folder.of(self.folder), HEARTBEAT.of(self.rank)
        try:
            place.make(HEARTBEATS)
            place.replace(name, [json.dumps(asdict(said))], is_durable=False)
        except OSError:
            # A full disk still takes a time: alive is alive.
            with suppress(OSError):
                place.touch(name)


def read(folder: Path) -> dict[int, Heartbeat]:
    """The last beat of every process of a run, by rank; a file that holds none is left out, and `damaged` names it."""
    place = Folder.of(folder)
    beats = (_beat(place, name) for name in _names(place))
    return {beat.rank: beat for beat in beats if isinstance(beat, Heartbeat)}


def damaged(folder: Path) -> list[str]:
    """What is wrong with the files that should hold a beat, a line each."""
    place = Folder.of(folder)
    beats = ((name, _beat(place, name)) for name in _names(place))
    return [f"{name}: {first_line(beat)}" for name, beat in beats if not isinstance(beat, Heartbeat)]


def stamp(folder: Path, rank: int) -> int | None:
    """What changes with every beat of a process: two reads tell life without comparing two machines' clocks."""
    try:
        status = Folder.of(folder).stat(HEARTBEAT.of(rank))
    except OSError:
        return None
    return None if status is None else status.st_mtime_ns


def forget(folder: Path) -> None:
    """Take the beats of an earlier attempt away, so that nobody takes them for life.

    Raises:
      EntryError: the folder of the beats, or what has the name of one, is something else.
    """
    place = Folder.of(folder)
    for name in _names(place):
        kind = place.kind(name)
        if kind is Kind.FOLDER:
            raise refused(place.root, name, kind, Kind.FILE)
        place.remove(name)
    place.inner(HEARTBEATS).sweep()


def _names(place: Folder) -> list[Name]:
    """The names of the beats in a run folder."""
    ranks = (HEARTBEAT.value(f"{HEARTBEATS}/{name}") for name in place.inner(HEARTBEATS).names())
    return [HEARTBEAT.of(rank) for rank in ranks if rank is not None and rank.isdecimal() and rank.isascii()]


def _beat(place: Folder, name: Name) -> Heartbeat | Exception:
    """The beat in a file, or why there is none."""
    try:
        beat = parsed(Heartbeat, parse_json(place.read(name)), is_open=True, is_strict=False)
    except (OSError, ValueError) as error:
        return error
    return beat if HEARTBEAT.value(name) == str(beat.rank) else ValueError(f"it is the beat of rank {beat.rank}")
