"""Measured steps, with what the cost model needs to price them."""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from spanax.errors import CalibrationError
from spanax.hardware.cluster import Cluster
from spanax.plan.cost.step_time import Grid, price
from spanax.plan.evaluate import Evaluation
from spanax.plan.spmd.terms import Terms

FEWEST_STEPS = 5
"""The number of steady steps below which a median of them says too little."""

MEDIAN_ERROR = 1.2533
"""Standard error of a median over that of a mean. Source: sqrt(pi / 2), for normal noise."""

DEVIATION = 1.4826
"""Standard deviation over the median absolute deviation. Source: normal noise."""


@dataclass(frozen=True)
class StepSeconds:
    """Seconds of steady steps: without compilation and the steps after it.

    Attributes:
      seconds: one per step, in order.
      wait_share: the share of the time in which the devices may have waited for data.

    Example:
      >>> steps = StepSeconds((1.0, 1.02, 0.98, 1.0, 1.01, 0.99))
      >>> steps.median, round(steps.noise, 3)
      (1.0, 0.008)
    """

    seconds: tuple[float, ...]
    wait_share: float = 0.0

    @property
    def median(self) -> float:
        """The median."""
        return statistics.median(self.seconds)

    @property
    def noise(self) -> float:
        """The relative standard error of the median, with the drift between both halves and the wait for data.

        Source: the median absolute deviation; half of the difference between the medians of both halves.
        """
        median = self.median
        count = len(self.seconds)
        deviation = DEVIATION * statistics.median(abs(seconds - median) for seconds in self.seconds)
        halves = self.seconds[: count // 2] or self.seconds, self.seconds[count // 2 :]
        drift = abs(statistics.median(halves[0]) - statistics.median(halves[1])) / 2
        return math.hypot(MEDIAN_ERROR * deviation / math.sqrt(count) / median, drift / median, self.wait_share)


@dataclass(frozen=True, eq=False)
class MeasuredStep:
    """The measured time of the step of one plan, and the terms of its cost.

    Attributes:
      source: the run folder or file.
      layout: the layout and mesh, for answers.
      steps: the measured seconds.
      cluster: the devices on which it was measured, with the constants to calibrate.
      terms: the cost terms of one microbatch.
      grid: the mesh and the schedule, one entry.
      transfers: why the measurement says less of the requested program or cluster; empty if it was measured on both.
    """

    source: str
    layout: str
    steps: StepSeconds
    cluster: Cluster
    terms: Terms
    grid: Grid
    transfers: tuple[str, ...] = ()

    @staticmethod
    def of(evaluation: Evaluation, steps: StepSeconds, *, source: str, transfers: Sequence[str] = ()) -> "MeasuredStep":
        """Returns the measured step of an evaluated plan.

        Raises:
          SpanaxError: there are too few steps, or their times are not positive numbers.
        """
        if len(steps.seconds) < FEWEST_STEPS:
            raise CalibrationError(
                f"'{source}' has {len(steps.seconds)} steady steps; calibration needs at least {FEWEST_STEPS}.",
                where="without the steps of compilation and the first after it",
                fix="a run of 12 steps or more: spanax train --steps 12, spanax compare --steps 10",
            )
        if not all(0 < seconds < math.inf for seconds in steps.seconds):
            raise CalibrationError(f"'{source}' has step times that are not positive numbers.")
        layout = evaluation.plan.title
        costs = evaluation.layout
        return MeasuredStep(source, layout, steps, evaluation.cluster, costs.terms, evaluation.grid, tuple(transfers))

    def predicted(self, cluster: Cluster) -> float:
        """Returns the predicted seconds of the step, with the constants of `cluster`."""
        return float(price(self.terms, cluster, self.grid).step_seconds[0])
