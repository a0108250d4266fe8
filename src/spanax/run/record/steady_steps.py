"""The times of the steady steps of a run, from its metrics."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from spanax.entries.folder import Folder
from spanax.entries.names import METRICS

FIRST_STEPS = 2
"""The number of steps of an attempt that are not steady: that of compilation, and the next."""

MAX_STEPS = 4096
"""The number of steps, the last ones, that are read."""


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
    first, steps = FIRST_STEPS, list[tuple[int, float, float]]()
    for event in Folder.of(folder).lines(METRICS):
        if event is None:
            continue  # a damaged line, such as the last one of a killed run
        if event.get("event") == "start":  # another attempt, maybe on other devices
            first, steps = int(_number(event, "step") or 0) + FIRST_STEPS, []
        elif event.get("event") == "step":
            step, seconds = _number(event, "step"), _number(event, "step_seconds")
            if step is not None and seconds and step > first:
                steps.append((int(step), seconds, _number(event, "data_wait_seconds") or 0.0))
    steps = steps[-MAX_STEPS:]
    waits = (steps[-1][2] - steps[0][2]) / max(1, steps[-1][0] - steps[0][0]) if steps else 0.0
    return SteadySteps(tuple(seconds for _, seconds, _ in steps), max(0.0, waits))


def _number(event: Mapping[str, Any], key: str) -> float | None:
    value = event.get(key)
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if is_number and 0 <= value < 1e15 else None
