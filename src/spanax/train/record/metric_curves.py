"""Curves of a run's logged metrics, thinned to the number of points that a chart can show, and its steady steps."""

import math
import statistics
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from spanax.entries.folder import Folder
from spanax.entries.names import METRICS

MAX_POINTS = 600
"""Number of points of a line in a chart; a screen does not show many more."""

MAX_EVALUATED = 8
"""Number of held-out metrics besides the loss that have a line; all of them are in metrics.jsonl."""

NUM_LAST_STEPS = 4096
"""Number of steps, the last ones, that the median step time is of."""

FIRST_STEPS = 2
"""The number of steps of an attempt that are not steady: that of compilation, and the next."""

RATES = ("step_seconds", "tokens_per_second", "examples_per_second", "data_wait_seconds")
"""Metrics of a step that a report does not repeat."""

Point = tuple[float, float]


@dataclass(eq=False)
class Points:
    """Points of a line in bounded memory; each stretch retains its minimum and maximum.

    Example:
      >>> points = Points()
      >>> for step in range(100_000):
      ...     points.add(step, -1.0 if step == 70_001 else 1.0)
      >>> len(points.retained) < 4 * MAX_POINTS, min(points.retained, key=lambda point: point[1]), points.num_added
      (True, (70001, -1.0), 100000)
    """

    retained: list[Point] = field(default_factory=list)
    num_added: int = 0
    num_nonfinite: int = 0

    def add(self, x: float, y: float) -> None:
        """Adds a point; one that is not finite is only counted."""
        self.num_added += 1
        if not (math.isfinite(x) and math.isfinite(y)):
            self.num_nonfinite += 1
            return
        self.retained.append((x, y))
        if len(self.retained) >= 4 * MAX_POINTS:
            self.retained = thinned(self.retained, 2 * MAX_POINTS)


def thinned(points: Sequence[Point], most: int = MAX_POINTS) -> list[Point]:
    """Returns at most `most` points: the first, the last, and the minimum and maximum of each stretch, in order."""
    if len(points) <= most:
        return list(points)
    size = math.ceil(2 * (len(points) - 2) / (most - 2))
    selected = [points[0]]
    for start in range(1, len(points) - 1, size):
        stretch = points[start : min(start + size, len(points) - 1)]
        low, high = (choose(stretch, key=lambda point: point[1]) for choose in (min, max))
        selected += sorted({low, high})
    return [*selected, points[-1]]


@dataclass(frozen=True)
class SteadyStep:
    """A logged step after the first ones of an attempt; `wait_seconds` is the time of waiting for data until it."""

    step: int
    seconds: float
    wait_seconds: float
    rate: float | None


@dataclass(eq=False)
class MetricCurves:
    """Logged metrics over steps.

    Attributes:
      loss: the training loss.
      held_out: the held-out loss.
      evaluated: the other held-out metrics by name.
      speed: tokens or examples per second.
      counted: the unit of `speed`: `tokens` or `examples`.
      steady: the last steps of the last attempt, without its first ones.
      last: the metrics of the last `step` and of the last `eval`.
      num_damaged: the number of lines that could not be read, such as the last one of a killed run.
    """

    loss: Points = field(default_factory=Points)
    held_out: Points = field(default_factory=Points)
    evaluated: dict[str, Points] = field(default_factory=dict)
    speed: Points = field(default_factory=Points)
    counted: str = "tokens"
    steady: deque[SteadyStep] = field(default_factory=partial(deque, maxlen=NUM_LAST_STEPS))
    last: dict[str, dict[str, Any]] = field(default_factory=dict)
    num_damaged: int = 0

    @property
    def median_speed(self) -> float | None:
        """Median tokens or examples per second of the steady steps; None without a speed."""
        rates = [step.rate for step in self.steady if step.rate is not None]
        return statistics.median(rates) if rates else None

    @property
    def median_step_seconds(self) -> float | None:
        """Median time of the steady steps; None without steps."""
        return statistics.median(step.seconds for step in self.steady) if self.steady else None

    @property
    def wait_seconds(self) -> float:
        """The time per steady step in which the loop waited for data."""
        if not self.steady:
            return 0.0
        first = self.steady[0]
        last = self.steady[-1]
        return max(0.0, (last.wait_seconds - first.wait_seconds) / max(1, last.step - first.step))


def metric_curves(folder: Path) -> MetricCurves:
    """Returns the curves in the metrics file of a run folder; damaged lines are counted.

    Raises:
      EntryError: the file of metrics is not a regular file.
    """
    curves = MetricCurves()
    first = FIRST_STEPS
    for event in Folder.of(folder).lines(METRICS):
        if event is None:
            curves.num_damaged += 1
            continue
        kind = event.get("event")
        step = _number(event, "step")
        if isinstance(kind, str) and kind in ("step", "eval"):
            curves.last[kind] = {key: event[key] for key in event if key not in (*RATES, "event")}
        if kind == "start":  # another attempt, maybe on other devices
            first = int(step or 0) + FIRST_STEPS
            curves.steady.clear()
        elif kind == "eval" and step is not None:
            _add_evaluation(curves, step, event)
        elif kind == "step" and step is not None:
            rate = _number(event, "tokens_per_second")
            _add(curves.loss, step, event, "loss")
            _add(curves.speed, step, event, "tokens_per_second")
            curves.counted = "tokens" if rate != _number(event, "examples_per_second") else "examples"
            seconds = _number(event, "step_seconds")
            if seconds is not None and seconds > 0 and step > first:
                wait_seconds = _number(event, "data_wait_seconds") or 0.0
                curves.steady.append(SteadyStep(int(step), seconds, wait_seconds, rate))
    return curves


def _add_evaluation(curves: MetricCurves, step: float, event: Mapping[str, Any]) -> None:
    _add(curves.held_out, step, event, "val_loss")
    for key in event:
        name = key.removeprefix("val_")
        is_shown = name in curves.evaluated or len(curves.evaluated) < MAX_EVALUATED
        if key not in (name, "val_loss") and is_shown and _number(event, key) is not None:
            _add(curves.evaluated.setdefault(name, Points()), step, event, key)


def _add(points: Points, step: float, event: Mapping[str, Any], key: str) -> None:
    value = event.get(key)
    if isinstance(value, int | float):
        points.add(step, float(value) if abs(value) < 1e300 else math.nan)
    elif value in ("nan", "inf", "-inf"):  # as documents.json_line writes them
        points.add(step, math.nan)


def _number(event: Mapping[str, Any], key: str) -> float | None:
    value = event.get(key)
    return float(value) if isinstance(value, int | float) and abs(value) < 1e15 else None
