"""Detects bad steps, such as a loss that is NaN or spikes, and defines how training responds to them.

Whether a step is good depends only on its metrics and on those of earlier good steps. All processes have the same
metrics, so they reach the same decision without communicating, and a resumed run repeats the decisions of the first.
"""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from spanax.errors import (
    ArgumentError,
    ConflictError,
    DataError,
    NumbersError,
    RangeError,
    StepError,
    UnknownNameError,
    nearest,
)

HALT = "halt"
SKIP = "skip"
ROLLBACK = "rollback"
POLICIES = (HALT, SKIP, ROLLBACK)

WATCHED = ("loss", "grad_norm")
"""Metrics that a guard checks by default, if a step returns them as floating-point scalars."""

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
        the batch; `spanax train` implements both, and in the library `run.judge` returns the decision. In a loop
        without a Run, `watch` does.
      spike: factor greater than 1; None accepts every finite value.
      patience: number of consecutive bad steps, or of rollbacks to one checkpoint, that are tolerated; one more ends
        the run.
      window: number of good steps that the limit is computed from.
      metrics: the names of the metrics to check.

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
    metrics: tuple[str, ...] = WATCHED

    def __post_init__(self) -> None:
        if isinstance(self.metrics, str) or not self.metrics:
            raise ArgumentError(f"metrics={self.metrics!r} must be a tuple of names.", fix='metrics=("loss",)')
        if self.policy not in POLICIES:
            raise UnknownNameError(f"unknown policy '{self.policy}'.", fix=nearest(self.policy, POLICIES))
        if self.spike is not None and not self.spike > 1:
            raise RangeError(f"spike={self.spike} must be greater than 1.", fix="spike=3")

    def limit(self, history: History, step: int, name: str) -> float:
        """Returns the largest good value of a metric, rounded to float32; infinity if the history is too short."""
        if self.spike is None:
            return math.inf
        known = [values[name] for number, values in history.good if number <= step - LATE and name in values]
        known = known[-self.window :]
        return math.inf if len(known) < max(1, self.window // 4) else _limit(self.spike, tuple(known))

    def reason(self, history: History, step: int, values: Mapping[str, Any]) -> str | None:
        """Returns why a step is bad; None if it is good."""
        for name in self.metrics:
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
        metrics = {name: values[name] for name in self.metrics if isinstance(values.get(name), float)}
        return History((*history.good, (step, metrics))[-(self.window + LATE) :])

    def watch(self) -> "Watch":
        """Returns the decisions of this guard over the steps of a custom training loop.

        Example:
          >>> watch = Guard("skip", metrics=("d_loss",)).watch()
          >>> watch.judge(1, {"d_loss": 2.5}), watch.judge(2, {"d_loss": float("inf")})
          (None, 'd_loss is inf')
        """
        return Watch(self)


@dataclass(eq=False)
class Watch:
    """The decisions of a guard over the steps of a custom training loop, created by `Guard.watch`.

    It has a state, so that `spanax.Checkpoints` saves and restores it: a resumed loop repeats the decisions.

    Attributes:
      guard: the guard.
      history: the metrics of recent good steps.
      num_bad: the number of bad steps since the furthest good step. A restored state leaves it unchanged, so that it
        counts the rollbacks of a loop that makes no progress.
    """

    guard: Guard
    history: History = field(default_factory=History)
    num_bad: int = 0
    _furthest: int = 0

    def judge(self, step: int, metrics: Mapping[str, Any]) -> str | None:
        """Returns why a step is bad; None if it is good. Call it once for every step, in their order.

        Args:
          step: the number of the step.
          metrics: the metrics of the step as numbers or arrays; waits until those that are checked are computed.

        Raises:
          NumbersError: the step is bad, and the policy is `halt` or `num_bad` exceeds `patience`.
          SpanaxError: the metrics have no scalar that the guard checks.
        """
        values = {name: value for name in self.guard.metrics if (value := _scalar(metrics.get(name))) is not None}
        if not values:
            raise StepError(
                f"step {step} has no metric that the guard checks.",
                where=f"metrics: {', '.join(map(str, metrics)) or 'none'}; checked: {', '.join(self.guard.metrics)}",
                fix="a scalar metric 'loss', or Guard(metrics=(...))",
            )
        reason = self.guard.reason(self.history, step, values)
        self.history = self.guard.seen(self.history, step, values)
        if reason is None:
            if step > self._furthest:
                self._furthest = step
                self.num_bad = 0
            return None
        self.num_bad += 1
        if self.guard.policy == HALT or self.num_bad > self.guard.patience:
            where = f"policy {self.guard.policy}; bad steps after step {self._furthest}: {self.num_bad}"
            raise NumbersError(f"step {step} is bad: {reason}.", where=where, fix="a lower learning rate")
        return reason

    def state(self) -> list[Any]:
        """Returns the history as JSON values."""
        return self.history.record()

    def restore(self, state: Sequence[Any]) -> None:
        """Continues from a `state()`.

        Raises:
          DataError: the state is malformed.
        """
        self.history = History.of(state, 0)


def _scalar(value: Any) -> float | None:
    """Returns a floating-point scalar as a Python number; None for other values."""
    import numpy as np

    array = np.asarray(value)
    return float(array) if array.shape == () and array.dtype.kind in "fV" else None  # V: bfloat16


def check_steps_per_call(guard: Guard | None, num_steps: int) -> None:
    """Validates the number of steps per call.

    Raises:
      SpanaxError: it is below 1, or every step would need a limit that depends on the step before it.
    """
    if num_steps < 1:
        raise RangeError("a call requires at least one batch.")
    if num_steps > 1 and guard is not None and guard.policy == SKIP and guard.spike is not None:
        raise ConflictError(
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
