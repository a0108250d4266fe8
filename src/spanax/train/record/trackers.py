"""Trackers: TensorBoard, Weights & Biases or a custom object that logs the metrics of a run.

A tracker that raises is disabled with one warning; it never ends a run.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

from spanax.entries.names import TENSORBOARD, WANDB
from spanax.errors import NotInstalledError, UnknownNameError, first_line, nearest

NEEDS = {TENSORBOARD: "tensorboardX", WANDB: "wandb"}
"""The package of each named tracker."""

Event = Mapping[str, Any]


@dataclass(frozen=True)
class RunInfo:
    """What a tracker logs once, at the start of a run.

    Attributes:
      folder: the run folder.
      settings: the settings of the run, as JSON values.
      summary: the plan: layout, mesh, devices, parameters, bytes per device.
      step: the step that the run resumes from; 0 for a new run.
      reached: the last step that an earlier attempt has logged.
    """

    folder: Path
    settings: Mapping[str, Any]
    summary: Mapping[str, Any]
    step: int = 0
    reached: int = 0


class Tracker(Protocol):
    """The methods of a tracker. An exception in one of them disables the tracker."""

    def begin(self, about: RunInfo) -> None:
        """Starts or resumes logging."""

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Logs the values of one step."""

    def back(self, step: int) -> None:
        """Discards the steps after `step`, which will be repeated with other values."""

    def end(self) -> None:
        """Ends logging, whether or not the run succeeded."""


@dataclass(eq=False)
class Trackers:
    """Passes the events of a run to several trackers.

    Attributes:
      trackers: the trackers by name.
      about: what they log at the start.
      warn: called with a message for each tracker that fails.

    Example:
      >>> trackers = Trackers({"broken": None}, RunInfo(Path("runs/a"), {}, {}), print)
      >>> trackers.begin(); trackers.take({"event": "step", "step": 1, "loss": 2.5})
      tracker 'broken' failed and is disabled: 'NoneType' object has no attribute 'begin'
    """

    trackers: dict[str, Any]
    about: RunInfo
    warn: Callable[[str], None]

    def begin(self) -> None:
        """Calls `begin` of all trackers."""
        self._call(lambda tracker: tracker.begin(self.about))

    def take(self, event: Event) -> None:
        """Passes on one event: calls `begin` at `start`, `log` at `step` and `eval`, and `back` at `rolled_back`."""
        if event["event"] == "start":
            self.begin()
        elif event["event"] in ("step", "eval"):
            values = numbers(event)
            self._call(lambda tracker: tracker.log(event["step"], values))
        elif event["event"] == "rolled_back":
            self._call(lambda tracker: tracker.back(event["step"]))

    def end(self) -> None:
        """Calls `end` of all trackers."""
        self._call(lambda tracker: tracker.end())

    def _call(self, method: Callable[[Any], None]) -> None:
        for name, tracker in list(self.trackers.items()):
            try:
                method(tracker)
            except Exception as error:
                del self.trackers[name]
                self.warn(f"tracker '{name}' failed and is disabled: {first_line(error)}")


def numbers(event: Event) -> dict[str, float]:
    """Returns the scalars of an event; lists are in metrics.jsonl only.

    Example:
      >>> numbers({"event": "step", "step": 3, "loss": 2.5, "counts": [1, 2]})
      {'loss': 2.5}
    """
    values = {name: value for name, value in event.items() if name != "step" and not isinstance(value, bool)}
    return {name: float(value) for name, value in values.items() if isinstance(value, int | float)}


def check_trackers(names: str | None) -> list[str]:
    """Returns the names of the trackers in a text such as `tensorboard,wandb`.

    Raises:
      SpanaxError: a tracker is unknown or not installed.

    Example:
      >>> check_trackers(None), check_trackers("")
      ([], [])
    """
    listed = [name.strip() for name in (names or "").split(",") if name.strip()]
    for name in listed:
        if name not in NEEDS:
            raise UnknownNameError(f"unknown tracker '{name}'.", fix=nearest(name, NEEDS))
        if find_spec(NEEDS[name]) is None:
            raise NotInstalledError(f"tracker '{name}' requires {NEEDS[name]}.", fix=f'pip install "spanax[{name}]"')
    return list(dict.fromkeys(listed))
