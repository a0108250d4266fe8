"""The constants of the cost model: each with its values' range, what it is near for physical reasons, and its data.

One line adds a constant. `CONSTANTS` is all that is fitted, the same for every chip, model and source but where `chips`
or `compiler` name what it belongs to.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from published.runtime import Runtime
from spanax.hardware.chips import catalogue
from spanax.plan.cost.calibration import Assumptions


@dataclass(frozen=True)
class Constant:
    """One fitted number.

    Attributes:
      name: of the constant, unique.
      field: of `Assumptions`, or of `Chip` where `chips` are named, that it replaces.
      scale: `log` for a positive number, `logit` for a share between 0 and 1.
      lower: the least value.
      upper: the greatest value.
      prior: the value that physics or a measurement elsewhere suggests; NaN: the value that Spanax has.
      width: one standard deviation of the prior on the scale: 0.5 of a logarithm is a factor of 1.6.
      fitted_on: the runs that determine it.
      source: where the prior is from.
      chips: chips of the catalogue whose field it is.
      compiler: the compiler of the runs that it applies to; empty for all.
      start: where Spanax's field has another meaning, the value before a fit.
    """

    name: str
    field: str
    scale: str
    lower: float
    upper: float
    prior: float
    width: float
    fitted_on: str
    source: str
    chips: tuple[str, ...] = ()
    compiler: str = ""
    start: float = math.nan

    def applies_to(self, runtime: Runtime) -> bool:
        """Returns whether it is an assumption about runs with that software."""
        return not self.chips and self.compiler in ("", runtime.compiler)

    def concerns(self, chip: str, runtime: Runtime) -> bool:
        """Returns whether prices on a chip, with that software, depend on it."""
        return chip in self.chips if self.chips else self.applies_to(runtime)

    @property
    def default(self) -> float:
        """Returns the value that Spanax has."""
        if not math.isnan(self.start):
            return self.start
        return float(getattr(catalogue()[self.chips[0]] if self.chips else Assumptions(), self.field))

    def free(self, value: float) -> float:
        """Returns a value on the constant's scale."""
        value = min(max(value, self.lower), self.upper)
        return math.log(value) if self.scale == "log" else math.log(value / (1 - value))

    def bound(self, point: float) -> float:
        """Returns the value of a point on the constant's scale."""
        value = math.exp(point) if self.scale == "log" else 1 / (1 + math.exp(-point))
        return min(max(value, self.lower), self.upper)


SPEC = "as an engineer would guess before a fit"
TPUS = ("v3", "v4", "v5e", "v5p", "v6e", "v7")
CONSTANTS = (
    Constant("idle_rounds", "idle_rounds", "log", 0.05, 2, 0.5, 0.5, "all", "half of the last wave idles on average"),
    Constant("score_products", "score_products", "log", 20, 5000, 200, 1, "unfused attention", "first_products"),
    Constant("touched", "touched", "logit", 0.05, 0.98, 0.8, 0.7, "all", "a fused kernel reads each input once"),
    Constant("start", "start", "logit", 0.02, 0.98, 0.5, 0.7, "all", SPEC),
    Constant(
        "dispatch_seconds", "dispatch_seconds", "log", 1e-6, 1e-3, 44.5e-6, 0.3, "eager",
        "benchmarks/eager_dispatch.py: 43 to 46 us; hosts differ", compiler="eager", start=44.5e-6,
    ),
    Constant(
        "loss_passes", "touched_around", "log", 1, 10, 3, 0.5, "eager", "PyTorch's loss in float32: cast, log-softmax, "
        "its gradient", compiler="eager", start=2.8,
    ),
    Constant(
        "sustained a100", "sustained_share", "logit", 0.5, 0.999, 0.95, 0.7, "A100", "little throttling at 400 W",
        chips=("a100-80gb", "a100-40gb"),
    ),
    Constant(
        "sustained h100", "sustained_share", "logit", 0.4, 0.999, 0.85, 0.7, "H100 and GB200", "700 W limit the clock",
        chips=("h100", "h200", "gb200"),
    ),
    Constant(
        "sustained tpu", "sustained_share", "logit", 0.5, 0.999, 0.9, 0.7, "TPUs", "MXU at full clock", chips=TPUS,
    ),
)  # fmt: skip
"""All constants that are fitted."""


def defaults() -> dict[str, float]:
    """Returns the values that Spanax has."""
    return {constant.name: constant.default for constant in CONSTANTS}


def point_of(values: Mapping[str, float]) -> np.ndarray:
    """Returns the values as a point of the fit."""
    return np.asarray([constant.free(values[constant.name]) for constant in CONSTANTS])


def values_of(point: np.ndarray) -> dict[str, float]:
    """Returns the values of a point."""
    return {constant.name: constant.bound(float(x)) for constant, x in zip(CONSTANTS, point, strict=True)}


def prior() -> tuple[np.ndarray, np.ndarray]:
    """Returns the point of the priors and their widths."""
    center = [c.free(c.default if math.isnan(c.prior) else c.prior) for c in CONSTANTS]
    return np.asarray(center), np.asarray([constant.width for constant in CONSTANTS])
