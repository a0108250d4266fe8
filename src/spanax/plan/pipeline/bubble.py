"""Closed-form pipeline bubbles with equal stages, vectorized over candidates.

Counts and times may be NumPy arrays; they broadcast. Tests compare each formula with a simulation. Where a source does
not cover a case, the docstring names the case.
"""

from typing import Any

import numpy as np

from spanax.plan.pipeline.schedules import check_counts


def step_seconds(
    schedule: str,
    num_stages: Any,
    num_microbatches: Any,
    num_chunks: Any = 1,
    *,
    forward_seconds: Any = 1.0,
    backward_seconds: Any = 1.0,
    weight_seconds: Any = 1.0,
    hop_seconds: Any = 0.0,
) -> Any:
    """Returns the seconds from the first forward to the last weight gradient, with equal parts on every device.

    The three times are those of one microbatch in one part: a chunk of a device, or a stage with one chunk.
    Without hops, exact for every schedule. With hops, exact for `gpipe` and `1f1b`; for `interleaved` if a hop takes
    no longer than the forward or the full backward of a chunk; for `zero-bubble` if the weight gradient takes no longer
    than the forward or the input gradient; otherwise a lower bound. For unequal parts, the times of the slowest part
    give an upper bound wherever the formula is exact.

    Source: `bubble_seconds` and `_num_hops`, plus the compute of `num_microbatches * num_chunks` parts per device.

    Raises:
      SpanaxError: an unknown schedule, or unsupported counts.

    Example:
      >>> step_seconds("1f1b", num_stages=4, num_microbatches=np.array([4, 8, 16]))
      array([21., 33., 57.])
      >>> float(step_seconds("gpipe", 4, 8, hop_seconds=0.5))
      36.0
    """
    check_counts(schedule, num_stages, num_microbatches, num_chunks)
    p, m, v = (np.asarray(count, float) for count in (num_stages, num_microbatches, num_chunks))
    hop, forward, backward = (np.asarray(t, float) for t in (hop_seconds, forward_seconds, backward_seconds))

    def without_hops(weight: Any) -> Any:
        work = m * v * (forward + backward + weight)
        return work + bubble_seconds(
            schedule, p, m, forward_seconds=forward, backward_seconds=backward, weight_seconds=weight
        )

    seconds = without_hops(np.asarray(weight_seconds, float))
    few = _num_hops(schedule, p, m, v)
    if schedule != "zero-bubble":
        return seconds + few * hop
    # A weight gradient longer than the gap it fills adds idle time, which can overlap with hops.
    hidden = np.minimum(np.minimum(forward, backward), weight_seconds)
    many = _num_hops("1f1b", p, m, v)
    exposed = few * hop + (many - few) * np.maximum(0.0, hop - hidden / 2)
    return np.maximum(seconds, without_hops(hidden) + exposed)


def bubble_seconds(
    schedule: str,
    num_stages: Any,
    num_microbatches: Any,
    *,
    forward_seconds: Any = 1.0,
    backward_seconds: Any = 1.0,
    weight_seconds: Any = 1.0,
) -> Any:
    """Returns the idle seconds per device and step, with equal parts and no hops; F, B and W are the times of one part.

    `gpipe`, `1f1b`, `interleaved`: (p - 1)(F + B + W). `zero-bubble`: (p - 1)(F + B) minus the weight gradients
    that fill it, min(p, m) - 1 times min(F, B, W); with W the shortest and m >= p this is (p - 1)(F + B - W).

    Source: Narayanan et al., arXiv 2104.04473, sections 2.2.1 and 2.2.2; Qi et al., arXiv 2401.10241, section 2,
    which covers ZB-H1 for m >= p and W no longer than F and B; the other cases follow from the order.

    Example:
      >>> float(bubble_seconds("1f1b", 4, 8)), float(bubble_seconds("zero-bubble", 4, 8))
      (9.0, 3.0)
    """
    p = np.asarray(num_stages, float)
    m = np.asarray(num_microbatches, float)
    forward = np.asarray(forward_seconds, float)
    backward = np.asarray(backward_seconds, float)
    if schedule == "zero-bubble":
        filled = np.minimum(np.minimum(forward, backward), weight_seconds)
        return (p - 1) * (forward + backward) - (np.minimum(p, m) - 1) * filled
    return (p - 1) * (forward + backward + weight_seconds)


def bubble_over_ideal(schedule: str, num_stages: Any, num_microbatches: Any, num_chunks: Any = 1) -> Any:
    """Returns bubble over compute time where F = B = W, without hops; for a ratio x, x / (1 + x) of the step is idle.

    `gpipe` and `1f1b`: (p - 1) / m. `interleaved`: (p - 1) / (v m). `zero-bubble`, for m >= p: a third of 1F1B's.

    Source: as `bubble_seconds`, over m v (F + B + W).

    Raises:
      SpanaxError: an unknown schedule, or unsupported counts.

    Example:
      >>> [float(bubble_over_ideal(name, 4, 8)) for name in ("gpipe", "1f1b", "zero-bubble")]
      [0.375, 0.375, 0.125]
      >>> float(bubble_over_ideal("interleaved", 4, 8, num_chunks=2))
      0.1875
    """
    check_counts(schedule, num_stages, num_microbatches, num_chunks)
    compute = 3 * np.asarray(num_microbatches, float) * num_chunks
    return bubble_seconds(schedule, num_stages, num_microbatches) / compute


def num_in_flight(schedule: str, num_stages: Any, num_microbatches: Any, num_chunks: Any = 1) -> Any:
    """Returns the peak number of chunks whose activations the first stage stores; no stage stores more.

    `gpipe`: m. `1f1b`: min(m, p). `interleaved`: min(m v, (v + 1) p - 1), each a chunk of 1/v of the stage's layers,
    1 + (p - 1) / (p v) times the activations of 1F1B. `zero-bubble`: min(m, p), counted up to the weight gradient.

    Source: Narayanan et al., arXiv 2104.04473, section 2.2; Korthikanti et al., arXiv 2205.05198, section 4.2.3 (the
    interleaved factor); Qi et al., arXiv 2401.10241, section 2.1.

    Raises:
      SpanaxError: an unknown schedule, or unsupported counts.

    Example:
      >>> int(num_in_flight("1f1b", 4, 8)), int(num_in_flight("interleaved", 4, 8, num_chunks=2))
      (4, 11)
    """
    check_counts(schedule, num_stages, num_microbatches, num_chunks)
    p, m, v = (np.asarray(count) for count in (num_stages, num_microbatches, num_chunks))
    most = {"gpipe": m + 0 * p, "1f1b": p, "interleaved": (v + 1) * p - 1, "zero-bubble": p}
    return np.minimum(m * v, most[schedule])


def num_pending(schedule: str, num_stages: Any, num_microbatches: Any) -> Any:
    """Returns the peak number of microbatches whose weight gradients wait, beyond the one that is computed next.

    `zero-bubble`: min(m, p) - 1, whose operands are stored on every stage; 0 for all others.

    Source: `Ticks.num_split`, with which tests compare it.

    Example:
      >>> int(num_pending("zero-bubble", 4, 8)), int(num_pending("1f1b", 4, 8))
      (3, 0)
    """
    waiting = np.minimum(num_stages, num_microbatches) - 1
    return waiting if schedule == "zero-bubble" else 0 * waiting


def _num_hops(schedule: str, p: Any, m: Any, v: Any) -> Any:
    """Returns the number of exposed hops in a step of p stages, m microbatches and v chunks, for short hops.

    `gpipe`: 2 (p - 1), one round trip. `interleaved`: 2 (p v - 1), the same with p v parts. `1f1b`: another round
    trip for each microbatch except one in p, since its stages hold only the microbatches of a round trip without
    hops: 2 (p - 1 + (m - 1) - ceil((m - 1) / p)). `zero-bubble`: as `1f1b`, up to 4 (p - 1), beyond which weight
    gradients fill the idle time.

    Source: the longest path through the orders of `schedules`; tests compare it with a simulation.
    """
    single_trip = 2 * (p * v - 1) * (p > 1)
    if schedule in ("gpipe", "interleaved"):
        return single_trip + 0 * m
    round_trips = 2 * (p - 1 + (m - 1) - np.ceil((m - 1) / p))
    return round_trips if schedule == "1f1b" else np.minimum(round_trips, 2 * single_trip)
