"""Ledger: where the wall time of one attempt at a run goes, and how much of it was training.

    start or restart | compile | restore | step ... data ... step ... save ... evaluate | idle

Every moment belongs to one bucket, so the buckets add up to the wall. `run.record.account` adds the attempts of a run.
"""

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

BUCKETS = ("step", "recomputed", "compile", "data", "save", "restore", "evaluate", "start", "restart", "idle")
"""What wall time goes to. `step` is all that training gains by; `recomputed` are steps that were taken before and lost;
`start` is all before a run is ready for its first step, `restart` the same after a fault, with the time in between."""


@dataclass(frozen=True)
class _Moment:
    """What was spent until now; replaced whole, so that a thread or a signal's handler never reads half a change."""

    nanoseconds: dict[str, int]
    bucket: str
    since: int


@dataclass(eq=False)
class Ledger:
    """The wall time of one attempt by bucket, from `age_seconds` before the ledger was made.

    Attributes:
      attempt: 0, or how often the run was started anew.
      reached: the last step that was finished, in this attempt or an earlier one; up to it, steps are `recomputed`.
      age_seconds: how long the attempt had gone on when the ledger was made; see `process_age_seconds`.
      clock: nanoseconds that never go back.

    Example:
      >>> times = iter([0, 2_000_000_000, 5_000_000_000, 6_000_000_000])
      >>> ledger = Ledger(clock=lambda: next(times))
      >>> ledger.take(1)
      >>> ledger.enter("idle")
      >>> {name: seconds for name, seconds in ledger.seconds().items() if seconds}
      {'step': 3.0, 'start': 2.0, 'idle': 1.0}
    """

    attempt: int = 0
    reached: int = 0
    age_seconds: float = 0.0
    clock: Callable[[], int] = time.monotonic_ns
    _now: _Moment = field(init=False, repr=False)

    def __post_init__(self) -> None:
        born = self.clock() - round(self.age_seconds * 1e9)
        self._now = _Moment(dict.fromkeys(BUCKETS, 0), "restart" if self.attempt else "start", born)

    @property
    def bucket(self) -> str:
        """The bucket of this moment."""
        return self._now.bucket

    def enter(self, bucket: str) -> None:
        """End the bucket before and begin this one."""
        if bucket not in BUCKETS:
            raise KeyError(bucket)
        time, before = self.clock(), self._now
        spent = before.nanoseconds | {before.bucket: before.nanoseconds[before.bucket] + time - before.since}
        self._now = _Moment(spent, bucket, time)

    def take(self, step: int) -> None:
        """Begin a step, the one before it being finished: `recomputed` if it was finished in vain already."""
        self.enter("recomputed" if step <= self.reached else "step")
        self.reached = max(self.reached, step - 1)

    @contextmanager
    def within(self, bucket: str) -> Iterator[None]:
        """A bucket while this lasts, then the one before again."""
        before = self.bucket
        self.enter(bucket)
        try:
            yield
        finally:
            self.enter(before)

    def seconds(self) -> dict[str, float]:
        """Seconds by bucket until now; together they are the wall time of the attempt."""
        now = self._now
        spent = now.nanoseconds | {now.bucket: now.nanoseconds[now.bucket] + self.clock() - now.since}
        return {bucket: nanoseconds / 1e9 for bucket, nanoseconds in spent.items()}

    def record(self, step: int) -> dict[str, Any]:
        """What an event or a heartbeat says of the ledger, `step` being the last one that was finished."""
        self.reached = max(self.reached, step)
        seconds = self.seconds()
        return {"step": step, "seconds": seconds, "wall_seconds": sum(seconds.values())}


def process_age_seconds() -> float:
    """How long this process has run, to 10 ms: what its imports took is part of the attempt. 0 where unknown.

    Example:
      >>> 0 <= process_age_seconds() < 86_400
      True
    """
    try:
        with open("/proc/self/stat") as file:
            # The name, in brackets, may hold spaces; the time it started is field 22 (proc_pid_stat(5)).
            ticks = int(file.read().rpartition(")")[2].split()[19])
        return max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK"))
    except (OSError, ValueError, IndexError, AttributeError):
        return 0.0
