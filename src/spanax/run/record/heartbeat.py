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

from spanax.documents import read_json
from spanax.schema import Count, Seconds, Within, parsed

FOLDER = "heartbeats"

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
        path = self.folder / FOLDER / f"{self.rank}.json"
        try:
            path.parent.mkdir(exist_ok=True)
            new = path.with_suffix(".new")
            new.write_text(json.dumps(asdict(said)))
            os.replace(new, path)
        except OSError:
            # A full disk still takes a time: alive is alive.
            with suppress(OSError):
                os.utime(path)


def read(folder: Path) -> dict[int, Heartbeat]:
    """The last beat of every process of a run, by rank; a file that holds none is left out, and `damaged` names it."""
    beats = (_beat(path) for path in _files(folder))
    return {beat.rank: beat for beat in beats if isinstance(beat, Heartbeat)}


def damaged(folder: Path) -> list[str]:
    """What is wrong with the files that should hold a beat, a line each."""
    beats = ((path, _beat(path)) for path in _files(folder))
    return [f"{FOLDER}/{path.name}: {beat}" for path, beat in beats if not isinstance(beat, Heartbeat)]


def stamp(folder: Path, rank: int) -> int | None:
    """What changes with every beat of a process: two reads tell life without comparing two machines' clocks."""
    try:
        return (folder / FOLDER / f"{rank}.json").stat().st_mtime_ns
    except OSError:
        return None


def forget(folder: Path) -> None:
    """Take the beats of an earlier attempt away, so that nobody takes them for life."""
    for path in (folder / FOLDER).glob("*"):
        path.unlink(missing_ok=True)


def _files(folder: Path) -> list[Path]:
    return sorted((folder / FOLDER).glob("*.json"))


def _beat(path: Path) -> Heartbeat | Exception:
    """The beat in a file, or why there is none."""
    try:
        beat = parsed(Heartbeat, read_json(path), is_open=True, is_strict=False)
    except (OSError, ValueError) as error:
        return error
    return beat if path.stem == str(beat.rank) else ValueError(f"it is the beat of rank {beat.rank}")
