"""Answers inverse questions: the largest batch that fits, the fewest devices, the cost of a full training run."""

import math
from collections.abc import Callable
from dataclasses import dataclass

from spanax.errors import NoLayoutError, SpanaxError
from spanax.hardware.cluster import Cluster, cluster
from spanax.plan.candidate import Search

DEVICE_HOURS_A_FAILURE = 50_700.0
"""Device-hours between failures that stop a training.

Source: "The Llama 3 Herd of Models" (arXiv 2407.21783), table 5: 419 interruptions in 54 days on 16,384 H100s.
"""


@dataclass(frozen=True)
class Budget:
    """A whole training: its hours, and how often to save so that the least is lost."""

    tokens: float
    hours: float
    device_hours: float
    checkpoint_seconds: float
    within: bool | None


def largest(size_up: Callable[[int], Search | None], start: int, step: int = 1) -> tuple[int, Search] | None:
    """The largest size, a multiple of `step`, for which a search finds something that fits.

    Doubles until nothing fits, then halves the gap. Sizes are taken to fit up to one size and not beyond.

    Args:
      size_up: a search at a size; None where the size is not possible.
      start: where to begin.
      step: sizes are multiples of it.
    """
    fits: tuple[int, Search] | None = None
    low, high = 0, max(step, start // step * step)
    while True:
        found = size_up(high)
        if found is None or found.best is None:
            break
        fits, low, high = (high, found), high, 2 * high
    while high - low > max(step, low // 64 // step * step):
        middle = (low + high) // 2 // step * step
        found = size_up(middle)
        if found is not None and found.best is not None:
            fits, low = (middle, found), middle
        else:
            high = middle
    return fits


def fewest_devices(search_on: Callable[[Cluster], Search], given: Cluster, most: int = 65536) -> Search | None:
    """The search on the fewest devices of a kind on which something fits, in powers of two; None if none does."""
    count = 1
    while count <= most:
        there = cluster_of_size(given, count)
        try:
            found = None if there is None else search_on(there)
        except NoLayoutError:
            found = None  # nothing fits on a number of devices that the batch does not divide
        if found is not None and found.best is not None:
            return found
        count *= 2
    return None


def cluster_of_size(given: Cluster, count: int) -> Cluster | None:
    """Returns a cluster of `count` devices of the same kind, or None where they do not come in that number."""
    try:
        return cluster(given.file or given.chip.name, count)
    except SpanaxError:
        return None  # the kind is known to exist, so that only its number can be wrong


def budget(found: Search, tokens_per_step: float, tokens: float, *, hours: float | None, save_seconds: float) -> Budget:
    """The hours of a training over so many tokens, and the interval of checkpoints.

    interval = sqrt(2 x seconds to save x mean seconds between failures)

    Source: Young (1974), "A first order approximation to the optimum checkpoint interval"; Daly (2006).

    Raises:
      SpanaxError: nothing fits.
    """
    if found.best is None:
        raise SpanaxError("nothing fits, so there is nothing to take time.")
    devices = found.cluster.num_devices
    total = tokens / tokens_per_step * found.best.step_seconds / 3600
    failures = DEVICE_HOURS_A_FAILURE / devices * 3600
    return Budget(
        tokens,
        total,
        total * devices,
        math.sqrt(2 * save_seconds * failures),
        None if hours is None else total <= hours,
    )
