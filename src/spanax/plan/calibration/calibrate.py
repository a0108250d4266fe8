"""Calibrates a cluster on measured steps."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from spanax.errors import CalibrationError
from spanax.hardware.cluster import Cluster
from spanax.plan.calibration.constants import CONSTANTS, slowed
from spanax.plan.calibration.fit import Posterior, fitted, sensitivity
from spanax.plan.calibration.measured import MeasuredStep
from spanax.plan.evaluate import main_dtype

TRANSFER_ERROR = 0.15
"""Relative standard error of what one program or number of devices says of another on the same chip.

Source: the error of layouts predicted from one other measured layout, 16 %, with noise of 6 %, notes/planner.md.
"""


@dataclass(frozen=True)
class Calibrated:
    """A constant before and after calibration, per device.

    Attributes:
      name: its name.
      unit: `FLOP/s`, `B/s` or `s`.
      before: the number of the catalog or the cluster file.
      after: the calibrated number.
      uncertainty: its relative standard deviation; None if it was not fitted.
    """

    name: str
    unit: str
    before: float
    after: float
    uncertainty: float | None


@dataclass(frozen=True)
class CalibratedStep:
    """A measured step with its predictions before and after calibration; seconds.

    `noise` and `uncertainty` are relative standard deviations, of the measured median and of the prediction after.
    """

    source: str
    layout: str
    num_steps: int
    measured: float
    noise: float
    before: float
    after: float
    uncertainty: float
    transfers: tuple[str, ...]


@dataclass(frozen=True, eq=False)
class Calibration:
    """The result of `calibrate`.

    Attributes:
      cluster: the devices with calibrated constants, for `spanax.search` and `spanax.plan`; unchanged if not applied.
      constants: all constants of the chip.
      steps: the measured steps.
      is_applied: whether the constants changed: some correction is larger than its noise.
    """

    cluster: Cluster
    constants: tuple[Calibrated, ...]
    steps: tuple[CalibratedStep, ...]
    is_applied: bool
    posterior: Posterior

    @property
    def errors(self) -> tuple[float, float]:
        """The mean relative errors of the predictions of the measured steps, before and after."""
        before = [abs(step.before / step.measured - 1) for step in self.steps]
        after = [abs(step.after / step.measured - 1) for step in self.steps]
        return float(np.mean(before)), float(np.mean(after))


def calibrate(measured: Sequence[MeasuredStep], cluster: Cluster) -> Calibration:
    """Fits the constants of a cluster's chip to measured steps, and returns the cluster with them.

    The constants change by the least that explains the measurements: `fit`. Constants on which no measured step
    depends are unchanged. If no correction is larger than its noise, nothing changes.

    Args:
      measured: at least one measured step, on devices with the same chip.
      cluster: the devices.

    Raises:
      SpanaxError: nothing was measured.
    """
    if not measured:
        raise CalibrationError("calibration needs at least one measured step.", fix="a run folder: runs/a")
    names = [constant.name for constant in CONSTANTS if constant.value(cluster.chip, "fp32") is not None]

    def on(machine: Cluster, factors: np.ndarray, source: str = "") -> Cluster:
        return slowed(machine, dict(zip(names, np.exp(factors).tolist(), strict=True)), source)

    def predict(factors: np.ndarray) -> np.ndarray:
        return np.log([step.predicted(on(step.cluster, factors)) for step in measured])

    target = np.log([step.steps.median for step in measured])
    noises = np.asarray([step.steps.noise for step in measured])
    errors = np.hypot(noises, [TRANSFER_ERROR if step.transfers else 0.0 for step in measured])
    posterior = fitted(predict, target, errors, len(names))
    before = predict(np.zeros(len(names)))
    is_applied = bool((np.abs(target - before) > noises).any())
    factors = posterior.factors if is_applied else np.zeros(len(names))
    after = predict(factors)
    uncertainties = posterior.uncertainty(sensitivity(predict, factors))
    calibrated = on(cluster, np.where(posterior.is_fitted, factors, 0.0), _source(measured)) if is_applied else cluster
    dtype = main_dtype(measured[0].terms)
    return Calibration(
        cluster=calibrated,
        constants=_constants(cluster, calibrated, dtype, dict(zip(names, _deviations(posterior), strict=True))),
        steps=tuple(
            CalibratedStep(
                step.source,
                step.layout,
                len(step.steps.seconds),
                step.steps.median,
                step.steps.noise,
                math.exp(before[index]),
                math.exp(after[index]),
                float(uncertainties[index]),
                step.transfers,
            )
            for index, step in enumerate(measured)
        ),
        is_applied=is_applied,
        posterior=posterior,
    )


def _deviations(posterior: Posterior) -> list[float | None]:
    deviations = np.sqrt(np.diagonal(posterior.covariance).clip(0.0)).tolist()
    return [value if is_fitted else None for value, is_fitted in zip(deviations, posterior.is_fitted, strict=True)]


def _constants(
    before: Cluster, after: Cluster, dtype: str, deviations: dict[str, float | None]
) -> tuple[Calibrated, ...]:
    rows = []
    for constant in CONSTANTS:
        first = constant.value(before.chip, dtype)
        second = constant.value(after.chip, dtype)
        if first is not None and second is not None:
            name = f"{constant.name}, {dtype}" if constant.unit == "FLOP/s" else constant.name
            rows.append(Calibrated(name, constant.unit, first, second, deviations[constant.name]))
    return tuple(rows)


def _source(measured: Sequence[MeasuredStep]) -> str:
    """Returns the source of the calibrated numbers: `calibrated on runs/a, 10 steps`."""
    sources = dict.fromkeys(step.source for step in measured)
    counts = {source: [len(step.steps.seconds) for step in measured if step.source == source] for source in sources}
    parts = [
        f"{source}, {min(numbers)} steps" + (f" of {len(numbers)} layouts" if len(numbers) > 1 else "")
        for source, numbers in counts.items()
    ]
    return f"calibrated on {'; '.join(parts)}"
