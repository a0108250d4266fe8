"""Timelines: every task starts as soon as its device and dependencies allow; orders that deadlock raise."""

import itertools
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from spanax.errors import SpanaxError
from spanax.plan.pipeline.schedules import Orders, Task, orders
from timeline import StageSeconds, Timeline, simulate

CASES = [
    ("gpipe", 4, 6, 1),
    ("1f1b", 4, 8, 1),
    ("1f1b", 5, 3, 1),
    ("interleaved", 4, 8, 2),
    ("interleaved", 3, 6, 4),
    ("interleaved", 1, 3, 2),
    ("zero-bubble", 4, 8, 1),
    ("zero-bubble", 6, 4, 1),
]


def needs(task: Task, device: int, num_devices: int, num_parts: int) -> tuple[int, Task] | None:
    """The device and the task that this one waits for: the rule, written a second time."""
    kind, microbatch, chunk = task
    part = chunk * num_devices + device
    if kind == "W":
        return device, Task("B", microbatch, chunk)
    if kind == "F" and part == 0:
        return None
    if kind == "B" and part == num_parts - 1:
        return device, Task("F", microbatch, chunk)
    other = part + (1 if kind == "B" else -1)
    return other % num_devices, Task(kind, microbatch, other // num_devices)


def seconds_of(task: Task, device: int, actual: Orders, times: StageSeconds) -> float:
    part = task.chunk * len(actual) + device
    if task.kind == "F":
        return times.forward_seconds[part]
    if task.kind == "W":
        return times.weight_seconds[part]
    alone = Task("W", task.microbatch, task.chunk) in actual[device]
    return times.backward_seconds[part] + (0 if alone else times.weight_seconds[part])


def earliest_ends(actual: Orders, times: StageSeconds, hops: list[float]) -> dict[tuple[int, Task], float]:
    """The least solution of all constraints, by repeating them until nothing moves: slow, and no event queue."""
    ends = {(device, task): 0.0 for device, order in enumerate(actual) for task in order}
    moved = True
    while moved:
        moved = False
        for device, order in enumerate(actual):
            now = 0.0
            for task in order:
                needed = needs(task, device, len(actual), times.num_parts)
                if needed is not None:
                    boundary = task.chunk * len(actual) + device - (task.kind == "F")
                    now = max(now, ends[needed] + (hops[boundary] if needed[0] != device else 0.0))
                now += seconds_of(task, device, actual, times)
                moved |= now > ends[device, task]
                ends[device, task] = max(now, ends[device, task])
    return ends


def random_case(schedule: str, p: int, m: int, v: int, seed: int) -> tuple[Orders, StageSeconds, list[float]]:
    draw = np.random.default_rng(seed)
    times = StageSeconds(*(tuple(draw.integers(0, 9, p * v).tolist()) for _ in range(3)))
    return orders(schedule, p, m, v), times, draw.integers(0, 4, p * v - 1).tolist()


@pytest.mark.parametrize("schedule, p, m, v", CASES)
@pytest.mark.parametrize("seed", range(4))
def test_random_times_give_the_earliest_timeline(schedule: str, p: int, m: int, v: int, seed: int) -> None:
    actual, times, hops = random_case(schedule, p, m, v, seed)
    timeline = simulate(actual, times, hops)
    earliest = earliest_ends(actual, times, hops)
    for device, order in enumerate(actual):
        assert list(timeline.end_seconds[device]) == [earliest[device, task] for task in order]


@pytest.mark.parametrize("schedule, p, m, v", CASES)
@pytest.mark.parametrize("seed", range(4))
def test_random_times_preserve_the_invariants(schedule: str, p: int, m: int, v: int, seed: int) -> None:
    actual, times, hops = random_case(schedule, p, m, v, seed)
    timeline = simulate(actual, times, hops)
    starts, ends = (
        {
            (device, task): index
            for device, order in enumerate(actual)
            for task, index in zip(order, all_[device], strict=True)
        }
        for all_ in (timeline.start_seconds, timeline.end_seconds)
    )
    for device, order in enumerate(actual):
        for task, following in zip(order, order[1:], strict=False):
            assert ends[device, task] <= starts[device, following], "a device does one thing at a time"
        for task in order:
            assert ends[device, task] - starts[device, task] == seconds_of(task, device, actual, times)
            needed = needs(task, device, p, p * v)
            assert needed is None or ends[needed] <= starts[device, task]
    parts = [sum(t) for t in zip(times.forward_seconds, times.backward_seconds, times.weight_seconds, strict=True)]
    assert timeline.busy_seconds == tuple(m * sum(parts[device::p]) for device in range(p))
    through = sum(times.forward_seconds) + sum(times.backward_seconds) + (2 * sum(hops) if p > 1 else 0)
    assert timeline.seconds >= max(*timeline.busy_seconds, through)
    idle = timeline.seconds * p - sum(timeline.busy_seconds)
    assert timeline.bubble_fraction * timeline.seconds * p == pytest.approx(idle)
    assert timeline.bubble_over_ideal * sum(timeline.busy_seconds) == pytest.approx(idle)


def test_a_small_timeline_by_hand() -> None:
    """F takes 1, the full backward pass 2: two stages, two microbatches, and half a second to send."""
    timeline = simulate(orders("1f1b", 2, 2), StageSeconds.equal(2), hop_seconds=0.5)
    assert timeline.start_seconds == ((0.0, 1.0, 5.0, 8.0), (1.5, 2.5, 4.5, 5.5))
    assert timeline.seconds == 10.0
    assert timeline.busy_seconds == (6.0, 6.0)
    assert timeline.bubble_fraction == pytest.approx(8 / 20)
    assert timeline.bubble_over_ideal == pytest.approx(8 / 12)


def test_a_split_backward_frees_the_stage_before_it_sooner() -> None:
    together = simulate(orders("1f1b", 2, 2), StageSeconds.equal(2))
    split = simulate(orders("zero-bubble", 2, 2), StageSeconds.equal(2))
    assert (together.seconds, split.seconds) == (9.0, 7.0)


def test_a_slow_stage_decides() -> None:
    times = StageSeconds((1, 1, 3, 1), (1, 1, 3, 1), (1, 1, 3, 1))
    timeline = simulate(orders("1f1b", 4, 64), times)
    assert timeline.busy_seconds[2] == 64 * 9
    assert timeline.seconds == (1 + 1) + 64 * 9 + (2 + 2), "it waits for two forwards, and two backwards follow it"
    assert timeline.bubble_fraction > 0.4


def test_one_device_neither_hops_nor_idles() -> None:
    timeline = simulate(orders("interleaved", 1, 3, 2), StageSeconds.equal(2), hop_seconds=100.0)
    assert timeline.seconds == 18.0 and timeline.bubble_over_ideal == 0.0


def test_custom_orders_may_split_some_backward_passes() -> None:
    mixed = (tuple(Task(*t) for t in (("F", 0), ("F", 1), ("B", 0), ("B", 1), ("W", 1))),)
    timeline = simulate(mixed, StageSeconds((1,), (2,), (4,)))
    assert timeline.end_seconds == ((1, 2, 8, 10, 14),) and timeline.peak_in_flight == (2,)
    forward = tuple((Task("F", 0), Task("F", 1)) for _ in range(2))
    assert simulate(forward, StageSeconds.equal(2)).seconds == 3.0


def test_nothing_to_do_takes_no_time() -> None:
    timeline = simulate(((), ()), StageSeconds.equal(2))
    assert (timeline.seconds, timeline.bubble_fraction, timeline.bubble_over_ideal) == (0.0, 0.0, 0.0)


def num_calls(num_microbatches: int) -> int:
    """How many functions a simulation of 16 stages calls."""
    actual, times, calls = orders("zero-bubble", 16, num_microbatches), StageSeconds.equal(16), itertools.count()
    sys.setprofile(lambda frame, event, arg: event in ("call", "c_call") and next(calls))
    try:
        simulate(actual, times, 0.1)
    finally:
        sys.setprofile(None)
    return next(calls)


def test_twice_the_microbatches_are_twice_the_work() -> None:
    assert 1.8 < num_calls(128) / num_calls(64) < 2.2


F0, F1, B0, B1 = Task("F", 0), Task("F", 1), Task("B", 0), Task("B", 1)

REFUSED: dict[str, tuple[Callable[[], Timeline | StageSeconds], str]] = {
    "a backward before its forward": (
        lambda: simulate(((B0, F0), (F0, B0)), StageSeconds.equal(2)),
        "the orders block each other: 2 of 2 devices wait forever.\n"
        "  where: device 0 at B of microbatch 0, chunk 0 waits for B of microbatch 0, chunk 0 of device 1; "
        "device 1 at F of microbatch 0, chunk 0 waits for F of microbatch 0, chunk 0 of device 0\n"
        "  fix: put each awaited task before the one that waits for it",
    ),
    "a last stage that waits for a second forward too early": (
        lambda: simulate(((F0, B0, F1, B1), (F0, F1, B0, B1)), StageSeconds.equal(2)),
        "device 1 at F of microbatch 1, chunk 0 waits for F of microbatch 1, chunk 0 of device 0",
    ),
    "a task nobody has": (
        lambda: simulate(((F0, B0), (F0,)), StageSeconds.equal(2)),
        "device 0 at B of microbatch 0, chunk 0 waits for B of microbatch 0, chunk 0 of device 1, which has no such",
    ),
    "many devices": (
        lambda: simulate(((B0, F0), *((F0, B0),) * 7), StageSeconds.equal(8)),
        "; and 5 more",
    ),
    "a task twice": (
        lambda: simulate(((F0, F0), (F0, B0)), StageSeconds.equal(2)),
        "device 0 has F of microbatch 0, chunk 0 twice.",
    ),
    "no task": (
        lambda: simulate(((Task("X", 0),),), StageSeconds.equal(1)),  # type: ignore[arg-type]
        "device 0 has X of microbatch 0, chunk 0, which is not a task.",
    ),
    "no device": (lambda: simulate((), StageSeconds.equal(1)), "the orders are empty."),
    "too few times": (
        lambda: simulate(orders("interleaved", 2, 2, 2), StageSeconds.equal(2)),
        "there are times for 2 parts, and the orders have 4.\n  where: 2 devices x 2 chunks",
    ),
    "too many hops": (
        lambda: simulate(orders("1f1b", 2, 2), StageSeconds.equal(2), [1, 2]),
        "there are 2 hop times for the 1 boundaries of 2 parts.",
    ),
    "a negative hop": (
        lambda: simulate(orders("1f1b", 2, 2), StageSeconds.equal(2), -1.0),
        "hop_seconds[0] is -1.0; it must be finite and >= 0.",
    ),
    "a negative time": (
        lambda: StageSeconds((1.0, -2.0), (1.0, 1.0), (1.0, 1.0)),
        "forward_seconds[1] is -2.0; it must be finite and >= 0.",
    ),
    "a time that is no number": (
        lambda: StageSeconds((1.0,), (float("nan"),), (1.0,)),
        "backward_seconds[0] is nan;",
    ),
    "times of two lengths": (
        lambda: StageSeconds((1.0,), (1.0,), ()),
        "every part of the model needs its three times.\n"
        "  where: forward_seconds 1, backward_seconds 1, weight_seconds 0",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_invalid_orders_raise(name: str) -> None:
    call, error = REFUSED[name]
    with pytest.raises(SpanaxError) as caught:
        call()
    assert error in caught.value.args[0] and len(caught.value.args[0].splitlines()) <= 4


def test_every_schedule_tolerates_delays() -> None:
    """Orders that only fit equal times would block when a stage is slow: none of them does."""
    for schedule, p, m, v in CASES:
        actual: Any = orders(schedule, p, m, v)
        for slow in range(p * v):
            times = [1.0] * (p * v)
            times[slow] = 50.0
            assert simulate(actual, StageSeconds(*(tuple(times),) * 3)).seconds >= m * 150
