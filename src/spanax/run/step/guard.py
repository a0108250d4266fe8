"""Guard: numbers that go wrong in training, and what is to be done about them.

Whether a step is good follows from its metrics and from those of good steps before it, and from nothing else. All
processes have the same metrics, so all decide the same without talking; a run that is resumed decides as before.
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
"""The metrics that are watched, where a step returns them as single floating numbers."""

STEP_OK = "step_ok"
"""The metric that a guarded step returns beside its own: whether its numbers were good."""

LATE = 2
"""The limits of a step come from steps at least so far back: what the last one returned may still be under way."""

MEDIAN_DISTANCES = 5
"""About 3.4 standard deviations, where numbers are spread as a normal distribution has them."""


@dataclass(frozen=True)
class History:
    """The good steps of late, oldest first: the number of each, and its watched values."""

    good: tuple[tuple[int, Mapping[str, float]], ...] = ()

    @property
    def last_good_step(self) -> int:
        """The newest of them; 0 where there is none."""
        return self.good[-1][0] if self.good else 0

    def record(self) -> list[Any]:
        """The same as JSON values."""
        return [[step, dict(values)] for step, values in self.good]

    @staticmethod
    def of(record: Sequence[Any] | None, step: int) -> "History":
        """What `record` gave; of a run that nobody watched so far, that it came to a step.

        Raises:
          DataError: it is no such record.
        """
        if record is None:
            return History(((step, {}),))
        try:
            pairs = [(int(number), {str(name): float(value) for name, value in of.items()}) for number, of in record]
        except (TypeError, ValueError, AttributeError):
            raise DataError("this is no history of good steps.", where=repr(record)[:120]) from None
        return History(tuple(pairs))


@dataclass(frozen=True)
class Guard:
    """What counts as a bad step, and what follows.

    A loss or gradient norm that is not finite is bad; so are parameters that are not, in a step that returns no
    `grad_norm`. With `spike` a value is bad, too, when it is over

        median + (spike - 1) * max(|median|, 5 * the median distance from it)

    of the last `window` good steps: `spike` times the median, as long as that is well above zero. The second term keeps
    losses near zero, or below it, from being taken for spikes because they waver. There is no limit before a quarter of
    the window is filled (a loss falls fastest, and a gradient is largest, in the first steps), nor where all of its
    values were zero. Only steps before the last one count, whose values may still be under way.

    Attributes:
      policy: `skip` is the compiled step's: it leaves the state as it was, bit for bit, and the next batch comes.
        `halt` and `rollback` (to the newest checkpoint, and the batch is left out) are done by `spanax train`; in the
        library, `run.judge` says when.
      spike: more than 1; None lets every finite number pass.
      patience: so many bad steps in a row, or rollbacks to one checkpoint, are borne; one more ends the run.
      window: how many good steps are looked back on.

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
            raise SpanaxError(f"spike={self.spike}; it takes a number over 1.", fix="spike=3")

    def limit(self, history: History, step: int, name: str) -> float:
        """What a value of a step may be at most, as a number of 32 bits; infinity where nothing is known yet."""
        if self.spike is None:
            return math.inf
        known = [values[name] for number, values in history.good if number <= step - LATE and name in values]
        known = known[-self.window :]
        return math.inf if len(known) < max(1, self.window // 4) else _limit(self.spike, tuple(known))

    def reason(self, history: History, step: int, values: Mapping[str, Any]) -> str | None:
        """Why the numbers of a step are bad; None where they are good."""
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
        """The history with one step more, if its numbers were good."""
        if self.reason(history, step, values) is not None:
            return history
        kept = {name: values[name] for name in WATCHED if isinstance(values.get(name), float)}
        return History((*history.good, (step, kept))[-(self.window + LATE) :])


def check_several(guard: Guard | None, num_steps: int) -> None:
    """Whether so many steps can go in one call.

    Raises:
      SpanaxError: there are none, or each would need a limit that follows from the step before it.
    """
    if num_steps < 1:
        raise SpanaxError("there is no batch to take a step on.")
    if num_steps > 1 and guard is not None and guard.policy == SKIP and guard.spike is not None:
        raise SpanaxError(
            f"{num_steps} steps in one call cannot skip spikes: what counts as one follows from the steps before.",
            where=f"policy {SKIP}, spike {guard.spike:g}",
            fix=f"no spike (what is not finite is skipped all the same), policy {ROLLBACK}, or a step a call",
        )


@lru_cache(maxsize=16)
def _limit(spike: float, known: tuple[float, ...]) -> float:
    """The limit after these values; each is asked for three times, before its step and behind it."""
    median = statistics.median(known)
    scale = max(abs(median), MEDIAN_DISTANCES * statistics.median(abs(value - median) for value in known))
    return _float32(median + (spike - 1) * scale) if scale else math.inf


def _float32(value: float) -> float:
    """As the compiled step compares it: there and here must come to the same."""
    import numpy as np  # the command line reads this file before it knows whether anything is trained

    with np.errstate(over="ignore"):
        return float(np.float32(value))
