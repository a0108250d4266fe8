"""Recorded: what a run folder holds for a page: its account, its curves, its plan and its profile."""

import math
import statistics
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from spanax.check.measure.profile import StepProfile, read_profile
from spanax.commands.report import Report
from spanax.entries.folder import Folder
from spanax.entries.names import METRICS, PROFILE
from spanax.errors import DataError, EntryError, first_line
from spanax.plan.plan import Plan
from spanax.show.page.parts.curves import Points

LAST = 4096
"""The median step is that of so many steps, the last ones."""


@dataclass(frozen=True, eq=False)
class Metrics:
    """What the metrics of a run say, in as much memory as a picture of it takes; `counted` is what speed is of."""

    loss: Points = field(default_factory=Points)
    held_out: Points = field(default_factory=Points)
    speed: Points = field(default_factory=Points)
    counted: str = "tokens"
    seconds: deque[float] = field(default_factory=partial(deque, maxlen=LAST))

    @property
    def median_step_seconds(self) -> float | None:
        """Of the last steps; None before there are any."""
        return statistics.median(self.seconds) if self.seconds else None


@dataclass(frozen=True, eq=False)
class RunRecord:
    """A run as its folder tells of it; `notes` say what could not be read."""

    report: Report
    metrics: Metrics
    plan: Plan | None
    profile: StepProfile | None
    notes: tuple[str, ...]


def run_record(report: Report) -> RunRecord:
    """Read what a page shows of a run; a file that is missing or damaged becomes a note."""
    folder, notes = report.folder, list(report.notes)
    plan, profile = None, None
    try:
        plan = Plan.of_run(folder)
    except EntryError:
        raise
    except DataError as error:
        notes.append(first_line(error))
    if Folder.of(folder).kind(PROFILE) is not None:
        try:
            profile = read_profile(folder)
        except EntryError:
            raise
        except DataError as error:
            notes.append(first_line(error))
    found = metrics(folder)
    for name, points in (("loss", found.loss), ("held-out loss", found.held_out)):
        if points.num_odd:
            notes.append(f"{points.num_odd:,} of {points.num_taken:,} values of the {name} are no numbers")
    return RunRecord(report, found, plan, profile, tuple(notes))


def metrics(folder: Path) -> Metrics:
    """The curves of a run, from the lines that it wrote into its folder."""
    found, is_first, is_tokens = Metrics(), False, True
    for event in Folder.of(folder).lines(METRICS):
        if event is None:
            continue  # the report counts them
        step, kind = _number(event, "step"), event.get("event")
        if kind == "start":
            is_first = True  # the first step of an attempt has the compiler's time in it
        elif kind == "eval" and step is not None:
            _add(found.held_out, step, event, "val_loss")
        elif kind == "step" and step is not None:
            _add(found.loss, step, event, "loss")
            _add(found.speed, step, event, "tokens_per_second")
            is_tokens = event.get("tokens_per_second") != event.get("examples_per_second")
            seconds = _number(event, "step_seconds")
            if seconds is not None and not is_first:
                found.seconds.append(seconds)
            is_first = False
    return found if is_tokens else replace(found, counted="examples")


def _add(points: Points, step: float, event: Mapping[str, Any], key: str) -> None:
    value = event.get(key)
    if isinstance(value, int | float):
        points.add(step, float(value) if abs(value) < 1e300 else math.nan)
    elif value in ("nan", "inf", "-inf"):  # as documents.json_line writes them
        points.add(step, math.nan)


def _number(event: Mapping[str, Any], key: str) -> float | None:
    value = event.get(key)
    return float(value) if isinstance(value, int | float) and abs(value) < 1e15 else None
