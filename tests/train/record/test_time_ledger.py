"""The ledger of an attempt: every moment in one bucket, none twice."""

import itertools
import random
import subprocess
import sys

import pytest

from spanax.train.record.time_ledger import BUCKETS, Ledger, process_age_seconds


class Clock:
    """A clock in nanoseconds that advances on request."""

    def __init__(self) -> None:
        self.now = 10**15

    def __call__(self) -> int:
        return self.now

    def advance(self, seconds: float) -> None:
        self.now += round(seconds * 1e9)


def spent(ledger: Ledger) -> dict[str, float]:
    return {name: seconds for name, seconds in ledger.seconds().items() if seconds}


def test_time_is_counted_in_the_current_bucket() -> None:
    clock = Clock()
    ledger = Ledger(clock=clock, age_seconds=1.5)
    clock.advance(0.5)
    ledger.enter("compile")
    clock.advance(4)
    for step in (1, 2):
        ledger.enter("data")
        clock.advance(0.25)
        ledger.take(step)
        clock.advance(1)
        with ledger.within("save"):
            clock.advance(0.125)
            with ledger.within("idle"):
                clock.advance(2)
        assert ledger.bucket == "step"
        clock.advance(1)
    assert spent(ledger) == {
        "step": 4.0, "compile": 4.0, "data": 0.5, "save": 0.25, "start": 2.0, "idle": 4.0
    }  # fmt: skip


def test_any_walk_through_the_buckets_adds_up_to_the_wall() -> None:
    chance, clock = random.Random(0), Clock()
    ledger = Ledger(clock=clock, age_seconds=0.1)
    began = clock.now - 100_000_000
    for step in range(1, 2000):
        ledger.take(step) if chance.random() < 0.5 else ledger.enter(chance.choice(BUCKETS))
        clock.now += chance.randrange(10**10)
    assert sum(ledger.seconds().values()) == pytest.approx((clock.now - began) / 1e9, abs=1e-6)
    assert ledger.record(1999)["wall_seconds"] == sum(ledger.seconds().values())


def test_a_bucket_ends_when_its_work_raises() -> None:
    clock = Clock()
    ledger = Ledger(clock=clock)
    with pytest.raises(OSError), ledger.within("save"):
        clock.advance(1)
        raise OSError
    clock.advance(2)
    assert spent(ledger) == {"save": 1.0, "start": 2.0}


def test_exactly_the_repeated_steps_are_recomputed() -> None:
    """The attempt before had finished step 5; this one continues from step 2, and later returns to step 6."""
    clock = Clock()
    ledger = Ledger(attempt=1, reached=5, clock=clock)
    clock.advance(100)
    for step in itertools.chain(range(3, 10), range(7, 12)):
        ledger.take(step)
        clock.advance(step)
    ledger.enter("idle")
    again, new = (3 + 4 + 5) + (7 + 8), (6 + 7 + 8 + 9) + (9 + 10 + 11)
    assert spent(ledger) == {"restart": 100.0, "recomputed": again, "step": new}
    assert ledger.record(11)["step"] == ledger.reached == 11


def test_an_unknown_bucket_raises() -> None:
    with pytest.raises(KeyError, match="stpe"):
        Ledger().enter("stpe")


def test_the_age_of_a_process_counts_from_its_start() -> None:
    imports = "import time; time.sleep(0.5); from spanax.train.record.time_ledger import process_age_seconds as age"
    code = f"{imports}; print(age())"
    age = float(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout)
    assert 0.5 <= age < process_age_seconds(), "this process is older than the one that it started"


def test_a_step_costs_one_reading_of_the_clock() -> None:
    readings = itertools.count()
    ledger = Ledger(clock=lambda: next(readings))
    for step in range(2000):
        ledger.take(step)
    assert next(readings) == 1 + 2000
