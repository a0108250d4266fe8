"""Heartbeats of a user's loop: the phases and intervals that the supervisor reads."""

from pathlib import Path

import pytest

import spanax
from spanax.errors import SpanaxError
from spanax.train import user_heartbeat
from spanax.train.record import heartbeat
from spanax.train.record.heartbeat import Pulse
from spanax.train.user_heartbeat import LoopPulse


def test_the_first_step_may_compile_and_the_next_ones_have_a_median(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    loop = LoopPulse(Pulse(tmp_path, rank=2, attempt=1))
    seen = []
    for wait, step, phase in (
        (1, 1, "step"), (30, 2, "step"), (2, 3, "step"), (4, 4, "step"), (1, 4, "save"), (9, 5, "step"), (1, 5, "end"),
    ):  # fmt: skip
        now[0] += wait
        loop.beat(step, phase)
        beat = heartbeat.read(tmp_path)[2]
        seen.append((beat.phase, beat.step, beat.step_seconds))
    assert seen == [
        ("compile", 1, 0), ("step", 2, 30), ("step", 3, 16), ("step", 4, 4), ("save", 4, 4), ("step", 5, 7),
        ("end", 5, 7),
    ]  # fmt: skip
    assert heartbeat.read(tmp_path)[2].attempt == 1


def test_without_a_supervisor_nothing_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPANAX_HEARTBEATS", str(tmp_path))  # as a program that a supervised one starts
    user_heartbeat._loop.cache_clear()
    try:
        spanax.heartbeat(3)
    finally:
        user_heartbeat._loop.cache_clear()
    assert not list(tmp_path.iterdir())


def test_bad_arguments() -> None:
    for wrong in (-1, 2.5, "3"):
        with pytest.raises(SpanaxError, match="expected an integer >= 0"):
            spanax.heartbeat(wrong)
    with pytest.raises(SpanaxError, match="did you mean 'save'"):
        spanax.heartbeat(3, phase="saves")
