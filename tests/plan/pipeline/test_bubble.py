"""Closed forms of pipelines: each equals the simulation under its conditions, and is a lower bound elsewhere."""

import itertools

import numpy as np
import pytest

from spanax.errors import SpanaxError
from spanax.plan.pipeline.bubble import bubble_over_ideal, bubble_seconds, num_in_flight, step_seconds
from spanax.plan.pipeline.schedules import SCHEDULES, orders
from timeline import StageSeconds, Timeline, simulate

SIZES = [(p, m) for p in (1, 2, 3, 4, 7) for m in (1, 2, 3, 4, 7, 12, 14)]
PLAIN = [("gpipe", p, m, 1) for p, m in SIZES] + [("1f1b", p, m, 1) for p, m in SIZES]
INTERLEAVED = [("interleaved", p, m, v) for p, m in SIZES for v in (2, 3) if m % p == 0]
ZERO_BUBBLE = [("zero-bubble", p, m, 1) for p, m in SIZES]
EVERY = PLAIN + INTERLEAVED + ZERO_BUBBLE

# Forward, input gradient and weight gradient, in binary fractions, so that sums are exact.
TIMES = [
    (1, 1, 1),
    (2, 3, 1),
    (4, 1, 1),
    (1, 4, 1),
    (1, 1, 2),
    (1, 2, 3),
    (2, 1, 3),
    (3, 1, 4),
    (2, 4, 0),
    (0.5, 1, 0.25),
]
HOPS = [0.125, 0.5, 2.0, 8.0]


def simulated(schedule: str, p: int, m: int, v: int, times: tuple[float, ...], hop: float = 0.0) -> Timeline:
    return simulate(orders(schedule, p, m, v), StageSeconds.equal(p * v, *times), hop)


def predicted(schedule: str, p: int, m: int, v: int, times: tuple[float, ...], hop: float = 0.0) -> float:
    forward, backward, weight = times
    return step_seconds(
        schedule,
        p,
        m,
        v,
        forward_seconds=forward,
        backward_seconds=backward,
        weight_seconds=weight,
        hop_seconds=hop,
    )


def test_small_timelines_by_hand() -> None:
    """F takes 1, the full backward pass 2; also with half a second to send, a split backward, and a slow stage."""
    times = StageSeconds.equal(2)
    sent = simulate(orders("1f1b", 2, 2), times, hop_seconds=0.5)
    assert (sent.seconds, sent.busy_seconds, sent.peak_in_flight) == (10.0, (6.0, 6.0), (2, 1))
    assert sent.bubble_fraction == pytest.approx(8 / 20) and sent.bubble_over_ideal == pytest.approx(8 / 12)
    assert simulate(orders("1f1b", 2, 2), times).seconds == 9.0
    assert simulate(orders("zero-bubble", 2, 2), times).seconds == 7.0
    assert simulate(orders("interleaved", 1, 3, 2), times, hop_seconds=100.0).seconds == 18.0
    slow = simulate(orders("1f1b", 4, 64), StageSeconds(*((1, 1, 3, 1),) * 3))
    assert slow.seconds == (1 + 1) + 64 * 9 + (2 + 2), "it waits for two forwards, and two backwards follow it"


@pytest.mark.parametrize("schedule, p, m, v", PLAIN + INTERLEAVED)
def test_the_published_bubble_equals_the_simulation(schedule: str, p: int, m: int, v: int) -> None:
    for times in TIMES:
        timeline = simulated(schedule, p, m, v, times)
        assert timeline.seconds * v * m == (v * m + p - 1) * timeline.busy_seconds[0]
        assert timeline.bubble_over_ideal == pytest.approx((p - 1) / (v * m), abs=1e-12)


@pytest.mark.parametrize("schedule, p, m, v", ZERO_BUBBLE)
def test_the_published_zero_bubble_equals_the_simulation(schedule: str, p: int, m: int, v: int) -> None:
    """ZB-H1 idles (p - 1)(F + B - W) where W is the shortest and there is one microbatch per stage."""
    for forward, backward, weight in TIMES:
        if weight <= min(forward, backward) and m >= p:
            timeline = simulated(schedule, p, m, v, (forward, backward, weight))
            assert timeline.seconds - timeline.busy_seconds[0] == (p - 1) * (forward + backward - weight)


def test_zero_bubble_has_a_third_of_the_bubble_of_1f1b() -> None:
    assert bubble_over_ideal("zero-bubble", 8, 64) * 3 == pytest.approx(bubble_over_ideal("1f1b", 8, 64))


@pytest.mark.parametrize("schedule, p, m, v", EVERY)
def test_without_hops_the_closed_form_is_exact(schedule: str, p: int, m: int, v: int) -> None:
    for times in TIMES:
        timeline = simulated(schedule, p, m, v, times)
        forward, backward, weight = times
        options = {"forward_seconds": forward, "backward_seconds": backward, "weight_seconds": weight}
        assert predicted(schedule, p, m, v, times) == timeline.seconds
        assert bubble_seconds(schedule, p, m, **options) == timeline.seconds - timeline.busy_seconds[0]
        if times == (1, 1, 1):
            assert bubble_over_ideal(schedule, p, m, v) == pytest.approx(timeline.bubble_over_ideal, abs=1e-12)


@pytest.mark.parametrize("schedule, p, m, v", EVERY)
def test_with_hops_the_closed_form_is_a_lower_bound_and_exact_where_stated(
    schedule: str, p: int, m: int, v: int
) -> None:
    for times, hop in itertools.product(TIMES, HOPS):
        forward, backward, weight = times
        exact = {
            "gpipe": True,
            "1f1b": True,
            "interleaved": hop <= min(forward, backward + weight),
            "zero-bubble": weight <= min(forward, backward),
        }[schedule]
        seconds, bound = simulated(schedule, p, m, v, times, hop).seconds, predicted(schedule, p, m, v, times, hop)
        assert bound == seconds if exact else bound <= seconds


def test_closed_forms_are_not_exact_outside_of_their_conditions() -> None:
    """Beyond what is exact the simulation is longer somewhere: the conditions are not written out of caution."""
    assert predicted("interleaved", 2, 8, 2, (1, 1, 1), 2.0) < simulated("interleaved", 2, 8, 2, (1, 1, 1), 2.0).seconds
    assert predicted("zero-bubble", 4, 8, 1, (1, 1, 2), 2.0) < simulated("zero-bubble", 4, 8, 1, (1, 1, 2), 2.0).seconds


@pytest.mark.parametrize("schedule, p, m, v", EVERY)
def test_short_hops_are_counted(schedule: str, p: int, m: int, v: int) -> None:
    short = 1 / 1024
    longer = simulated(schedule, p, m, v, (1, 1, 1), short).seconds - simulated(schedule, p, m, v, (1, 1, 1)).seconds
    times = (1, 1, 1)
    assert predicted(schedule, p, m, v, times, short) - predicted(schedule, p, m, v, times) == longer


@pytest.mark.parametrize("schedule, p, m, v", EVERY)
def test_the_slowest_stage_gives_an_upper_bound(schedule: str, p: int, m: int, v: int) -> None:
    draw = np.random.default_rng(p * m * v)
    forward, backward = draw.integers(4, 9, (2, p * v)).tolist()
    weight = draw.integers(0, 5, p * v).tolist()
    uneven = simulate(orders(schedule, p, m, v), StageSeconds(tuple(forward), tuple(backward), tuple(weight)), 0.5)
    assert uneven.seconds <= predicted(schedule, p, m, v, (max(forward), max(backward), max(weight)), 0.5)


@pytest.mark.parametrize("schedule, p, m, v", EVERY)
def test_in_flight_is_what_the_orders_hold(schedule: str, p: int, m: int, v: int) -> None:
    timeline = simulated(schedule, p, m, v, (1, 1, 1))
    assert num_in_flight(schedule, p, m, v) == timeline.peak_in_flight[0] == max(timeline.peak_in_flight)


def test_in_flight_is_the_published_table() -> None:
    """Worst stage over 1F1B's, for p = 8 and m = 32: m / p, 1, 1 + (p - 1) / (p v), 1."""
    worst = {name: num_in_flight(name, 8, 32, 4 if name == "interleaved" else 1) for name in SCHEDULES}
    assert worst["gpipe"] / worst["1f1b"] == 32 / 8
    assert worst["interleaved"] / 4 / worst["1f1b"] == 1 + 7 / (8 * 4)
    assert worst["zero-bubble"] / worst["1f1b"] == 1


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_arrays_of_counts_equal_single_counts(schedule: str) -> None:
    v = 2 if schedule == "interleaved" else 1
    stages, microbatches, forward = np.array([1, 2, 4]), np.array([[4], [8]]), np.array([1.0, 2.0, 3.0])
    seconds = step_seconds(schedule, stages, microbatches, v, forward_seconds=forward, hop_seconds=0.25)
    assert seconds.shape == (2, 3)
    for i, j in np.ndindex(2, 3):
        each = step_seconds(
            schedule, int(stages[j]), int(microbatches[i, 0]), v, forward_seconds=forward[j], hop_seconds=0.25
        )
        assert seconds[i, j] == each
    for counted in (bubble_over_ideal, num_in_flight):
        result = counted(schedule, stages, microbatches, v)
        assert result.shape == (2, 3) and result[1, 2] == counted(schedule, 4, 8, v)


@pytest.mark.parametrize("closed_form", [step_seconds, bubble_over_ideal, num_in_flight])
def test_closed_forms_and_schedules_raise_the_same_errors(closed_form: object) -> None:
    assert callable(closed_form)
    with pytest.raises(SpanaxError, match="unknown schedule 'zerobubble'.*\n  fix: did you mean 'zero-bubble'?"):
        closed_form("zerobubble", 4, 8)
    with pytest.raises(SpanaxError, match="num_stages is 0; it must be an integer >= 1."):
        closed_form("1f1b", np.array([4, 0]), 8)
    with pytest.raises(SpanaxError, match="6 microbatches are not a multiple of 4 stages"):
        closed_form("interleaved", 4, np.array([4, 6]), 2)
