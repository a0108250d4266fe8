"""Schedules: every device does all of its work once, in the published order, and what cannot be is refused."""

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from spanax.errors import SpanaxError
from spanax.plan.pipeline.schedules import SCHEDULES, Task, check_counts, orders

SIZES = [
    (name, p, m, v)
    for name, p, m, v in itertools.product(SCHEDULES, (1, 2, 3, 7), (1, 2, 3, 7, 12), (1, 2, 3))
    if (v > 1 and m % p == 0 if name == "interleaved" else v == 1)
]


def text(schedule: str, num_stages: int, num_microbatches: int, num_chunks: int = 1) -> list[str]:
    """Each device's order in one line; the chunk as a letter, counting microbatches from 0."""
    letters = "abcd" if num_chunks > 1 else [""]
    actual = orders(schedule, num_stages, num_microbatches, num_chunks)
    return [" ".join(f"{task.kind}{task.microbatch}{letters[task.chunk]}" for task in order) for order in actual]


@pytest.mark.parametrize("schedule, p, m, v", SIZES)
def test_every_device_does_all_of_its_work_once(schedule: str, p: int, m: int, v: int) -> None:
    kinds = "FBW" if schedule == "zero-bubble" else "FB"
    work = {Task(kind, i, c) for kind in kinds for i in range(m) for c in range(v)}
    for order in orders(schedule, p, m, v):
        assert len(order) == len(work) and set(order) == work


@pytest.mark.parametrize("schedule, p, m, v", SIZES)
def test_a_gradient_is_computed_after_its_forward_value(schedule: str, p: int, m: int, v: int) -> None:
    for order in orders(schedule, p, m, v):
        when = {task: index for index, task in enumerate(order)}
        for kind, microbatch, chunk in order:
            before = {"B": "F", "W": "B"}.get(kind)
            assert before is None or when[Task(before, microbatch, chunk)] < when[Task(kind, microbatch, chunk)]


def test_gpipe_is_all_forward_then_all_backward_in_reverse() -> None:
    assert text("gpipe", 2, 3) == ["F0 F1 F2 B2 B1 B0"] * 2


def test_1f1b_as_published() -> None:
    """Figure 4 (top) of arXiv 2104.04473, microbatches from 0: four devices, eight microbatches."""
    assert text("1f1b", 4, 8) == [
        "F0 F1 F2 F3 B0 F4 B1 F5 B2 F6 B3 F7 B4 B5 B6 B7",
        "F0 F1 F2 B0 F3 B1 F4 B2 F5 B3 F6 B4 F7 B5 B6 B7",
        "F0 F1 B0 F2 B1 F3 B2 F4 B3 F5 B4 F6 B5 F7 B6 B7",
        "F0 B0 F1 B1 F2 B2 F3 B3 F4 B4 F5 B5 F6 B6 F7 B7",
    ]


def test_interleaved_as_published() -> None:
    """Figure 4 (bottom) of arXiv 2104.04473: the last device starts its first backward after five forwards."""
    last = text("interleaved", 4, 8, 2)[3].split()
    assert last[:6] == ["F0a", "F1a", "F2a", "F3a", "F0b", "B0b"]
    assert last[-4:] == ["B4a", "B5a", "B6a", "B7a"]
    assert text("interleaved", 4, 8, 2)[0].split().index("B0b") == 2 * 3 + 4 + 1


def test_zero_bubble_as_published() -> None:
    """Figure 3 (top) of arXiv 2401.10241: device d does weight gradients d microbatches late."""
    assert text("zero-bubble", 3, 4) == [
        "F0 F1 F2 B0 W0 F3 B1 W1 B2 W2 B3 W3",
        "F0 F1 B0 F2 B1 W0 F3 B2 W1 B3 W2 W3",
        "F0 B0 F1 B1 F2 B2 W0 F3 B3 W1 W2 W3",
    ]


def test_one_stage_is_a_loop_over_microbatches() -> None:
    assert text("1f1b", 1, 3) == ["F0 B0 F1 B1 F2 B2"]
    assert text("zero-bubble", 1, 2) == ["F0 B0 W0 F1 B1 W1"]


def test_fewer_microbatches_than_stages() -> None:
    assert text("1f1b", 3, 1) == ["F0 B0"] * 3
    assert text("zero-bubble", 3, 1) == ["F0 B0 W0"] * 3


REFUSED: dict[str, tuple[Callable[[], Any], str, str]] = {
    "an unknown schedule": (lambda: orders("1f1", 4, 8), "unknown schedule '1f1'.", "did you mean '1f1b'?"),
    "no stages": (lambda: orders("1f1b", 0, 8), "num_stages is 0; it must be an integer >= 1.", ""),
    "fewer than no microbatches": (lambda: orders("gpipe", 4, -8), "num_microbatches is -8;", ""),
    "half a microbatch": (lambda: orders("gpipe", 4, 2.5), "num_microbatches is 2.5;", ""),  # type: ignore[arg-type]
    "a truth value": (lambda: orders("gpipe", 4, True), "num_microbatches is True;", ""),
    "no chunks": (lambda: orders("interleaved", 4, 8, 0), "num_chunks is 0;", ""),
    "chunks without interleaving": (
        lambda: orders("1f1b", 4, 8, 2),
        "schedule '1f1b' needs 1 chunk of layers per stage (num_chunks), and 2 are requested.",
        "schedule 'interleaved'",
    ),
    "interleaving without chunks": (
        lambda: orders("interleaved", 4, 8),
        "schedule 'interleaved' needs 2 or more chunks of layers per stage (num_chunks), and 1 are requested.",
        "2 chunks, or schedule '1f1b'",
    ),
    "uneven groups": (
        lambda: orders("interleaved", 4, 10, 2),
        "10 microbatches are not a multiple of 4 stages: 10 % 4 = 2.",
        "8 or 12 microbatches, or schedule '1f1b'",
    ),
    "less than a group": (
        lambda: orders("interleaved", 4, 3, 2),
        "3 microbatches are not a multiple of 4 stages: 3 % 4 = 3.",
        "4 microbatches",
    ),
    "one of many": (
        lambda: check_counts("interleaved", np.array([2, 4]), np.array([[4], [6]]), 2),
        "6 microbatches are not a multiple of 4 stages",
        "4 or 8 microbatches",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_invalid_schedules_raise(name: str) -> None:
    call, what, fix = REFUSED[name]
    with pytest.raises(SpanaxError) as caught:
        call()
    lines = str(caught.value).splitlines()
    assert lines[0].startswith(what) and len(lines) <= 4
    assert not fix or f"  fix: {fix}" in str(caught.value)


def test_a_search_without_candidates_does_not_raise() -> None:
    check_counts("interleaved", np.array([], int), np.array([], int), 2)
