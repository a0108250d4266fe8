"""Detects bad steps, such as a loss that is NaN or spikes, and defines how training responds to them.

Whether a step is good depends only on its metrics and on those of earlier good steps. All processes have the same
metrics, so they reach the same decision without communicating, and a resumed run repeats the decisions of the first.
"""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from spanax.errors import DataError, SpanaxError, nearest

HALT, SKIP, ROLLBACK = "halt", "skip", "rollback"
POLICIES = (HALT, SKIP, ROLLBACK)

WATCHED = ("loss", "grad_norm")
"""Metrics that a guard checks, if a step returns them as floating-point scalars."""

STEP_OK = "step_ok"
"""Name of the metric that a guarded step appends to its own: whether the step was good."""

LATE = 2
"""Limits use steps at least this far back: JAX dispatches asynchronously, so later metrics may not be available yet."""

MEDIAN_DISTANCES = 5
"""Median absolute deviations that spread the limit: about 3.4 standard deviations of a normal distribution."""


@dataclass(frozen=True)
class History:
    """The most recent good steps, oldest first: pairs of a step number and its watched metrics."""

    good: tuple[tuple[int, Mapping[str, float]], ...] = ()

    @property
    def last_good_step(self) -> int:
        """The newest good step; 0 if there is none."""
        return self.good[-1][0] if self.good else 0

    def record(self) -> list[Any]:
        """Returns the history as JSON values."""
        return [[step, dict(values)] for step, values in self.good]

    @staticmethod
    def of(record: Sequence[Any] | None, step: int) -> "History":
        """Returns the history that `record` encoded; for a run without a guard so far, a history of its last step only.

        Raises:
          DataError: the record is not a valid history.
        """
        if record is None:
            return History(((step, {}),))
        try:
            pairs = [(int(number), {str(name): float(value) for name, value in of.items()}) for number, of in record]
        except (TypeError, ValueError, AttributeError):
            raise DataError("not a valid history of good steps.", where=repr(record)[:120]) from None
        return History(tuple(pairs))


@dataclass(frozen=True)
class Guard:
    """Defines which steps are bad and what training does about them.

    A step is bad if its loss or gradient norm is not finite, or, for a step that returns no `grad_norm`, if one of its
    parameters is not finite. With `spike`, a step is also bad if a watched metric exceeds

        median + (spike - 1) * max(|median|, 5 * the median absolute deviation)

    over the last `window` good steps: `spike` times the median, as long as the median is well above zero. The second
    term avoids false positives for losses that fluctuate near or below zero. There is no limit until a quarter of the
    window is filled (loss and gradients change fastest in the first steps), nor if all values in the window are zero.
    The most recent step is excluded because its metrics may not be available yet.

    Attributes:
      policy: `skip` runs inside of the compiled step: it leaves the state unchanged, bit for bit, and training
        continues with the next batch. `halt` stops training, and `rollback` restores the newest checkpoint and drops
        the batch; `spanax train` implements both, and in the library `run.judge` returns the decision.
      spike: factor greater than 1; None accepts every finite value.
      patience: number of consecutive bad steps, or of rollbacks to one checkpoint, that are tolerated; one more ends
        the run.
      window: number of good steps that the limit is computed from.

    Example:
      >>> guard = Guard("skip", spike=3, window=4)
      >>> history = History()
      >>> for step, loss in enumerate([2.0, 2.1, 2.0, 1.9], 1):
      ...     history = guard.seen(history, step, {"loss": loss})
      >>> guard.reason(history, 5, {"loss": 2.2}), guard.reason(history, 5, {"loss": float("nan")})
      (None, 'loss is nan')
      >>> guard.reason(history, 5, {"loss": 7.0})
      'loss is 7, over its limit of 6'
    """

    policy: str = HALT
    spike: float | None = None
    patience: int = 3
    window: int = 64

    def __post_init__(self) -> None:
        if self.policy not in POLICIES:
            raise SpanaxError(f"unknown policy '{self.policy}'.", fix=nearest(self.policy, POLICIES))
        if self.spike is not None and not self.spike > 1:
            raise SpanaxError(f"spike={self.spike} must be greater than 1.", fix="spike=3")

    def limit(self, history: History, step: int, name: str) -> float:
        """Returns the largest good value of a metric, rounded to float32; infinity if the history is too short."""
        if self.spike is None:
            return math.inf
        known = [values[name] for number, values in history.good if number <= step - LATE and name in values]
        known = known[-self.window :]
        return math.inf if len(known) < max(1, self.window // 4) else _limit(self.spike, tuple(known))

    def reason(self, history: History, step: int, values: Mapping[str, Any]) -> str | None:
        """Returns why a step is bad; None if it is good."""
        for name in WATCHED:
            value = values.get(name)
            if isinstance(value, float):
                limit = self.limit(history, step, name)
                if not math.isfinite(_float32(value)):
                    return f"{name} is {value}"
                if _float32(value) > limit:
                    return f"{name} is {value:.6g}, over its limit of {limit:.6g}"
        return None if values.get(STEP_OK, True) else "a parameter is not finite"

    def seen(self, history: History, step: int, values: Mapping[str, Any]) -> History:
        """Returns the history with the step appended if it was good."""
        if self.reason(history, step, values) is not None:
            return history
        metrics = {name: values[name] for name in WATCHED if isinstance(values.get(name), float)}
        return History((*history.good, (step, metrics))[-(self.window + LATE) :])


def check_steps_per_call(guard: Guard | None, num_steps: int) -> None:
    """Validates the number of steps per call.

    Raises:
      SpanaxError: it is below 1, or every step would need a limit that depends on the step before it.
    """
    if num_steps < 1:
        raise SpanaxError("a call requires at least one batch.")
    if num_steps > 1 and guard is not None and guard.policy == SKIP and guard.spike is not None:
        raise SpanaxError(
            f"{num_steps} steps per call cannot skip spikes: each limit depends on the previous steps.",
            where=f"policy {SKIP}, spike {guard.spike:g}",
            fix=f"drop spike (non-finite steps are still skipped), use policy {ROLLBACK}, or run one step per call",
        )


@lru_cache(maxsize=16)
def _limit(spike: float, known: tuple[float, ...]) -> float:
    """Returns the limit after these values; cached because each is requested three times, before and after its step."""
    median = statistics.median(known)
    scale = max(abs(median), MEDIAN_DISTANCES * statistics.median(abs(value - median) for value in known))
    return _float32(median + (spike - 1) * scale) if scale else math.inf


def _float32(value: float) -> float:
    """Rounds to float32, the precision in which the compiled step compares, so that host and device agree."""
    import numpy as np  # the command line imports this file even for commands that do not train

    with np.errstate(over="ignore"):
        return float(np.float32(value))
