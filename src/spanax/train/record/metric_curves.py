"""Curves of a run's logged metrics, thinned to the number of points that a chart can show, and its steady steps."""

import math
import statistics
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
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


@dataclass(frozen=True, eq=False)
class MetricCurves:
    """Logged metrics over steps.

    `seconds` and `rates` are the time and the speed of the last steps, without the first step of each attempt.
    `held_out` is the held-out loss, `evaluated` are the other held-out metrics by name. `counted` is the unit of
    `speed`: tokens or examples per second.
    """

    loss: Points = field(default_factory=Points)
    held_out: Points = field(default_factory=Points)
    evaluated: dict[str, Points] = field(default_factory=dict)
    speed: Points = field(default_factory=Points)
    counted: str = "tokens"
    seconds: deque[float] = field(default_factory=partial(deque, maxlen=NUM_LAST_STEPS))

    rates: deque[float] = field(default_factory=partial(deque, maxlen=NUM_LAST_STEPS))

    @property
    def median_speed(self) -> float | None:
        """Median tokens or examples per second of the steps of `median_step_seconds`; None without a speed."""
        return statistics.median(self.rates) if self.rates else None

    @property
    def median_step_seconds(self) -> float | None:
        """Median time of the last steps; None without steps."""
        return statistics.median(self.seconds) if self.seconds else None


def metric_curves(folder: Path) -> MetricCurves:
    """Returns the curves in the metrics file of a run folder; damaged lines are skipped."""
    curves = MetricCurves()
    is_first = False
    is_tokens = True
    for event in Folder.of(folder).lines(METRICS):
        if event is None:
            continue  # counted in `RunReport.notes`
        step = _number(event, "step")
        kind = event.get("event")
        if kind == "start":
            is_first = True  # the first step of an attempt includes compilation
        elif kind == "eval" and step is not None:
            _add(curves.held_out, step, event, "val_loss")
            for key in event:
                name = key.removeprefix("val_")
                is_shown = name in curves.evaluated or len(curves.evaluated) < MAX_EVALUATED
                if key not in (name, "val_loss") and is_shown and _number(event, key) is not None:
                    _add(curves.evaluated.setdefault(name, Points()), step, event, key)
        elif kind == "step" and step is not None:
            _add(curves.loss, step, event, "loss")
            _add(curves.speed, step, event, "tokens_per_second")
            is_tokens = event.get("tokens_per_second") != event.get("examples_per_second")
            seconds = _number(event, "step_seconds")
            if seconds is not None and not is_first:
                curves.seconds.append(seconds)
                if (speed := _number(event, "tokens_per_second")) is not None:
                    curves.rates.append(speed)
            is_first = False
    return curves if is_tokens else replace(curves, counted="examples")


@dataclass(frozen=True)
class SteadySteps:
    """Steady steps of the last attempt at a run, in order.

    Attributes:
      seconds: of each logged step.
      wait_seconds: the time per step in which the loop waited for data.
    """

    seconds: tuple[float, ...]
    wait_seconds: float = 0.0


def steady_steps(folder: Path) -> SteadySteps:
    """Returns the steady steps in the metrics of a run folder; damaged lines are skipped, and so are earlier attempts.

    Raises:
      EntryError: the file of metrics is not a regular file.
    """
    first = FIRST_STEPS
    steps = list[tuple[int, float, float]]()
    for event in Folder.of(folder).lines(METRICS):
        if event is None:
            continue  # a damaged line, such as the last one of a killed run
        if event.get("event") == "start":  # another attempt, maybe on other devices
            first = int(_number(event, "step") or 0) + FIRST_STEPS
            steps = []
        elif event.get("event") == "step":
            step = _number(event, "step")
            seconds = _number(event, "step_seconds")
            if step is not None and step > first and seconds is not None and seconds > 0:
                steps.append((int(step), seconds, _number(event, "data_wait_seconds") or 0.0))
    steps = steps[-NUM_LAST_STEPS:]
    waits = (steps[-1][2] - steps[0][2]) / max(1, steps[-1][0] - steps[0][0]) if steps else 0.0
    return SteadySteps(tuple(seconds for _, seconds, _ in steps), max(0.0, waits))


def _add(points: Points, step: float, event: Mapping[str, Any], key: str) -> None:
    value = event.get(key)
    if isinstance(value, int | float):
        points.add(step, float(value) if abs(value) < 1e300 else math.nan)
    elif value in ("nan", "inf", "-inf"):  # as documents.json_line writes them
        points.add(step, math.nan)


def _number(event: Mapping[str, Any], key: str) -> float | None:
    value = event.get(key)
    return float(value) if isinstance(value, int | float) and abs(value) < 1e15 else None
