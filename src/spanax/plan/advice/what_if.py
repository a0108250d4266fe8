"""Solves inverse problems: the largest batch that fits, the fewest devices, the cost of a training run."""

import math
from collections.abc import Callable
from dataclasses import dataclass

from spanax.errors import CapacityError, NoLayoutError, SpanaxError
from spanax.hardware.cluster import Cluster, cluster
from spanax.plan.candidate import Search

DEVICE_HOURS_A_FAILURE = 50_700.0
"""Device-hours between failures that interrupt training.

Source: "The Llama 3 Herd of Models" (arXiv 2407.21783), table 5: 419 interruptions in 54 days on 16,384 H100s.
"""


@dataclass(frozen=True)
class Budget:
    """A training run: its hours, and the interval of checkpoints that minimizes lost time."""

    tokens: float
    hours: float
    device_hours: float
    checkpoint_seconds: float
    within: bool | None


def largest(size_up: Callable[[int], Search | None], start: int, step: int = 1) -> tuple[int, Search] | None:
    """Returns the largest size, a multiple of `step`, for which some layout fits, with its search.

    Doubles until nothing fits, then bisects. Assumes that all sizes below one that fits also fit.

    Args:
      size_up: returns the search at a size, or None for an invalid size.
      start: the first size.
      step: sizes are multiples of it.
    """
    fits: tuple[int, Search] | None = None
    low = 0
    high = max(step, start // step * step)
    while True:
        result = size_up(high)
        if result is None or result.best is None:
            break
        fits, low, high = (high, result), high, 2 * high
    while high - low > max(step, low // 64 // step * step):
        middle = (low + high) // 2 // step * step
        result = size_up(middle)
        if result is not None and result.best is not None:
            fits = (middle, result)
            low = middle
        else:
            high = middle
    return fits


def fewest_devices(
    search_on: Callable[[Cluster], Search | None], machine: Cluster, least: int = 1, most: int = 65536
) -> Search | None:
    """Returns the search on the fewest devices, of `least` doubled, on which some layout fits; None without any."""
    count = least
    while count <= most:
        candidate = cluster_of_size(machine, count)
        try:
            result = None if candidate is None else search_on(candidate)
        except NoLayoutError:
            result = None  # nothing fits on a number of devices that does not divide the batch
        if result is not None and result.best is not None:
            return result
        count *= 2
    return None


def cluster_of_size(machine: Cluster, count: int) -> Cluster | None:
    """Returns a cluster of `count` devices of the same chip, or None where that number is not available."""
    try:
        return cluster(machine.file or machine.chip.name, count)
    except SpanaxError:
        return None  # the chip exists, so that only the number can be invalid


def budget(
    search: Search, tokens_per_step: float, tokens: float, *, hours: float | None, save_seconds: float
) -> Budget:
    """Returns the hours of a training run over `tokens`, and the interval of checkpoints.

    interval = sqrt(2 x seconds to save x mean seconds between failures)

    Source: Young (1974), "A first order approximation to the optimum checkpoint interval"; Daly (2006).

    Raises:
      SpanaxError: nothing fits.
    """
    if search.best is None:
        raise CapacityError("no layout fits, so a run has no duration.")
    devices = search.cluster.num_devices
    total = tokens / tokens_per_step * search.best.step_seconds / 3600
    failures = DEVICE_HOURS_A_FAILURE / devices * 3600
    return Budget(
        tokens,
        total,
        total * devices,
        math.sqrt(2 * save_seconds * failures),
        None if hours is None else total <= hours,
    )
