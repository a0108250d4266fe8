"""The wall time of one attempt at a run by bucket, such as training, compiling and saving.

    start or restart | compile | restore | step ... data ... step ... save ... evaluate | idle

Every moment belongs to one bucket, so the buckets sum to the wall time. `run.record.time_account` adds up attempts.
"""

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

BUCKETS = ("step", "recomputed", "compile", "data", "save", "restore", "evaluate", "start", "restart", "idle")
"""Buckets of wall time. `step` is productive; `recomputed` are steps repeated after a fault; `start` is the time until
a run is ready for its first step, and `restart` the same after a fault, including the time between attempts."""


@dataclass(frozen=True)
class _Totals:
    """The time spent so far; immutable, so that threads and signal handlers read a consistent value."""

    nanoseconds: dict[str, int]
    bucket: str
    since: int


@dataclass(eq=False)
class Ledger:
    """Measures the wall time of one attempt by bucket, from `age_seconds` before the ledger was created.

    Attributes:
      attempt: the number of restarts of the run so far.
      reached: the last step finished in this attempt or an earlier one; steps up to it are `recomputed`.
      age_seconds: the age of the attempt when the ledger was created; see `process_age_seconds`.
      clock: a monotonic clock in nanoseconds.

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
    _totals: _Totals = field(init=False, repr=False)

    def __post_init__(self) -> None:
        start = self.clock() - round(self.age_seconds * 1e9)
        self._totals = _Totals(dict.fromkeys(BUCKETS, 0), "restart" if self.attempt else "start", start)

    @property
    def bucket(self) -> str:
        """The current bucket."""
        return self._totals.bucket

    def enter(self, bucket: str) -> None:
        """Makes `bucket` the current bucket."""
        if bucket not in BUCKETS:
            raise KeyError(bucket)
        time = self.clock()
        before = self._totals
        spent = before.nanoseconds | {before.bucket: before.nanoseconds[before.bucket] + time - before.since}
        self._totals = _Totals(spent, bucket, time)

    def take(self, step: int) -> None:
        """Enters the bucket of a step, after finishing the one before: `recomputed` if it was finished earlier."""
        self.enter("recomputed" if step <= self.reached else "step")
        self.reached = max(self.reached, step - 1)

    @contextmanager
    def within(self, bucket: str) -> Iterator[None]:
        """Enters a bucket for the duration of a `with` block."""
        before = self.bucket
        self.enter(bucket)
        try:
            yield
        finally:
            self.enter(before)

    def seconds(self) -> dict[str, float]:
        """Returns the seconds by bucket so far, which sum to the wall time of the attempt."""
        totals = self._totals
        current = totals.nanoseconds[totals.bucket] + self.clock() - totals.since
        spent = totals.nanoseconds | {totals.bucket: current}
        return {bucket: nanoseconds / 1e9 for bucket, nanoseconds in spent.items()}

    def record(self, step: int) -> dict[str, Any]:
        """Returns the JSON values of the `ledger` event after `step` was finished."""
        self.reached = max(self.reached, step)
        seconds = self.seconds()
        return {"step": step, "seconds": seconds, "wall_seconds": sum(seconds.values())}


def process_age_seconds() -> float:
    """Returns the age of this process with a resolution of 10 ms, including its imports; 0 if unknown.

    Example:
      >>> 0 <= process_age_seconds() < 86_400
      True
    """
    try:
        with open("/proc/self/stat") as file:
            # The process name, in parentheses, may contain spaces; the start time is field 22 (proc_pid_stat(5)).
            ticks = int(file.read().rpartition(")")[2].split()[19])
        return max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK"))
    except (OSError, ValueError, IndexError, AttributeError):
        return 0.0
