"""Trackers: TensorBoard, Weights & Biases or one's own, told of a run beside its metrics.jsonl.

A tracker that fails is left out from there on and told of once; it never ends a run.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

from spanax.entries.names import TENSORBOARD, WANDB
from spanax.errors import SpanaxError, first_line, nearest

NEEDS = {TENSORBOARD: "tensorboardX", WANDB: "wandb"}
"""The trackers that have a name, and the package of each."""

Event = Mapping[str, Any]


@dataclass(frozen=True)
class RunInfo:
    """What a tracker is told once.

    Attributes:
      folder: the run folder.
      settings: of the run, as JSON values.
      summary: what was planned: layout, mesh, devices, parameters, bytes, data.
      step: the step that the run goes on from; 0 for a new one.
      reached: the last step that an attempt before this one has told of.
    """

    folder: Path
    settings: Mapping[str, Any]
    summary: Mapping[str, Any]
    step: int = 0
    reached: int = 0


class Tracker(Protocol):
    """What can be told of a run. Whatever it raises costs itself only."""

    def begin(self, about: RunInfo) -> None:
        """A run begins, or goes on."""

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Numbers of one step."""

    def back(self, step: int) -> None:
        """What came behind a step will come again, and otherwise."""

    def end(self) -> None:
        """The run is over, however it ended."""


@dataclass(eq=False)
class Trackers:
    """Several trackers as one that takes the events of a run.

    Attributes:
      trackers: by name.
      about: what they are told at first.
      warn: takes a line for each tracker that fails.

    Example:
      >>> trackers = Trackers({"broken": None}, About(Path("runs/a"), {}, {}), print)
      >>> trackers.begin(); trackers.take({"event": "step", "step": 1, "loss": 2.5})
      tracker 'broken' failed and is left out from here: 'NoneType' object has no attribute 'begin'
    """

    trackers: dict[str, Any]
    about: RunInfo
    warn: Callable[[str], None]

    def begin(self) -> None:
        """Tell all what the run is."""
        self._each(lambda tracker: tracker.begin(self.about))

    def take(self, event: Event) -> None:
        """Tell all of one event: of `step` and `eval` the numbers, of `rolled_back` that the run went back."""
        if event["event"] == "start":
            self.begin()
        elif event["event"] in ("step", "eval"):
            values = numbers(event)
            self._each(lambda tracker: tracker.log(event["step"], values))
        elif event["event"] == "rolled_back":
            self._each(lambda tracker: tracker.back(event["step"]))

    def end(self) -> None:
        """Tell all that it is over."""
        self._each(lambda tracker: tracker.end())

    def _each(self, tell: Callable[[Any], None]) -> None:
        for name, tracker in list(self.trackers.items()):
            try:
                tell(tracker)
            except Exception as error:
                del self.trackers[name]
                self.warn(f"tracker '{name}' failed and is left out from here: {first_line(error)}")


def numbers(event: Event) -> dict[str, float]:
    """The numbers of an event that can be drawn over the steps; lists of them are in metrics.jsonl only.

    Example:
      >>> numbers({"event": "step", "step": 3, "loss": 2.5, "counts": [1, 2]})
      {'loss': 2.5}
    """
    kept = {name: value for name, value in event.items() if name != "step" and not isinstance(value, bool)}
    return {name: float(value) for name, value in kept.items() if isinstance(value, int | float)}


def check_trackers(names: str | None) -> list[str]:
    """The trackers in a text such as `tensorboard,wandb`, each of which is installed.

    Raises:
      SpanaxError: one is unknown or not installed.

    Example:
      >>> check_trackers(None), check_trackers("")
      ([], [])
    """
    found = [name.strip() for name in (names or "").split(",") if name.strip()]
    for name in found:
        if name not in NEEDS:
            raise SpanaxError(f"unknown tracker '{name}'.", fix=nearest(name, NEEDS))
        if find_spec(NEEDS[name]) is None:
            raise SpanaxError(f"tracker '{name}' needs {NEEDS[name]}.", fix=f'pip install "spanax[{name}]"')
    return list(dict.fromkeys(found))
