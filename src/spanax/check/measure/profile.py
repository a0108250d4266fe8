"""Profile read offline: what a step's time goes to, device by device, from a trace of JAX's profiler."""

import json
import math
import re
import warnings
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from spanax.documents import parse_json
from spanax.entries.folder import Folder
from spanax.entries.names import PROFILE, PROFILE_SUMMARY, TRACE_FOLDER
from spanax.errors import DataError, EntryError, WriteError, nearest
from spanax.run.profile import INPUT, STEP, WINDOW
from spanax.schema import Count, SchemaError, Seconds, parsed

COLLECTIVE = re.compile(
    r"(?:async-)?(all-gather|all-reduce|reduce-scatter|all-to-all|collective-permute|collective-broadcast|send|recv)"
)
"""What the names of XLA's operations that move data between devices begin with; fusions of them on GPUs too."""

CONTAINERS = re.compile(r"(while|call|conditional)([.\d]|$)")
"""Operations that last as long as those inside them."""

DEVICE_PLANE = re.compile(r"/device:(?:GPU|TPU):(\d+)")
OPERATION_LINES = ("XLA Ops", "Async XLA Ops")

MOST = 12
"""How many operations are kept by name."""

Spans = np.ndarray
"""Starts and ends in nanoseconds, a row each, sorted and apart."""


@dataclass(frozen=True)
class StepProfile:
    """Seconds of one step of one device, the mean over devices and traced steps; the parts add up to `step_seconds`.

    Attributes:
      num_steps: how many were traced.
      num_devices: how many devices did something.
      step_seconds: from the start of the first step to the end of the last, by the number of steps.
      compute: while an operation runs that moves nothing between devices.
      communication: while one runs that does, and none computes; on simulated devices with the wait for the others.
      by_axis: communication by mesh axis, or by kind where the program's axes are not known; what runs at once
        counts in each.
      input_wait: while nothing runs, and the host waits for a batch.
      host: while no device runs anything, and the host is busy otherwise: starting steps, fetching metrics.
      idle: while this device runs nothing and another does.
      operations: the longest ones by name, seconds of one step.
    """

    num_steps: int
    num_devices: int
    step_seconds: float
    compute: float
    communication: float
    by_axis: Mapping[str, float]
    input_wait: float
    host: float
    idle: float
    operations: Mapping[str, float]

    def to_json(self) -> dict[str, Any]:
        """The summary as plain values."""
        return {
            "steps": self.num_steps,
            "devices": self.num_devices,
            "step_seconds": self.step_seconds,
            "seconds": {
                "compute": self.compute,
                "communication": self.communication,
                "idle": self.idle,
                "host": self.host,
                "input wait": self.input_wait,
            },
            "communication": dict(self.by_axis),
            "operations": dict(self.operations),
        }

    @staticmethod
    def from_json(data: Any) -> "StepProfile":
        """The summary that `to_json` gave.

        Raises:
          DataError: it is none, or a step in it takes no time.

        Example:
          >>> told = Profiled(10, 8, 1.0, 0.4, 0.1, {"fsdp": 0.1}, 0.5, 0.0, 0.0, {})
          >>> Profiled.from_json(told.to_json()) == told
          True
        """
        try:
            summary = parsed(_Summary, data)
            seconds = {name.replace(" ", "_"): value for name, value in summary.seconds.items()}
            found = StepProfile(
                summary.steps, summary.devices, summary.step_seconds, by_axis=summary.communication,
                operations=summary.operations, **seconds,
            )  # fmt: skip
        except (SchemaError, TypeError) as error:  # a TypeError where a part of the step has another name
            raise DataError("this is no summary of a profile.", where=str(error)) from None
        if not 0 < found.step_seconds < math.inf:
            raise DataError("this is no summary of a profile: a step takes no time.")
        return found


@dataclass(frozen=True)
class _Summary:
    """A profile as `Profiled.to_json` writes it."""

    steps: Count
    devices: Count
    step_seconds: Seconds
    seconds: Mapping[str, Seconds]
    communication: Mapping[str, Seconds]
    operations: Mapping[str, Seconds]


def read_profile(run: Path) -> StepProfile:
    """The summary that `spanax train --profile` left in a run folder.

    Raises:
      DataError: there is none, or it cannot be read.
    """
    path = run / PROFILE_SUMMARY
    try:
        return StepProfile.from_json(parse_json(Folder.of(run).read(PROFILE_SUMMARY)))
    except OSError:
        known = sorted(str(one.parents[1]) for one in run.parent.glob(f"*/{PROFILE_SUMMARY}"))
        fix = nearest(str(run), known) if known else f"spanax train ... --profile 10:20 --out {run}"
        raise DataError(f"there is no profile in '{run}'.", where=str(path), fix=fix) from None
    except EntryError:
        raise
    except ValueError as error:
        if isinstance(error, DataError):
            raise DataError(str(error).splitlines()[0], where=str(path), fix="profile the run again") from None
        raise DataError("this is no summary of a profile.", where=f"{path}: {error}", fix="profile it again") from None


def step_profile(run: Path, *, axes: Mapping[str, str] | None = None, module: str = "jit_step") -> StepProfile:
    """Summarise the profile of a run, and write the summary next to its trace, as summary.json.

    Args:
      run: the run folder.
      axes: the mesh axes of each collective by the name of its instruction, as the program beside the trace has them.
      module: the program whose operations count.

    Raises:
      DataError: there is no trace, or nothing of the program is in it.
      WriteError: the summary cannot be written.
    """
    place = Folder.of(run).inner(PROFILE, TRACE_FOLDER)
    trace = place.checked_path() if place.kind() is not None else place.path  # JAX opens files by path
    files = sorted(trace.rglob("*.xplane.pb"))
    if not files:
        raise DataError(f"there is no trace in '{run / PROFILE}'.", fix="spanax train ... --profile 10:20")
    found = _read(files, module)
    summary = _summary(found, axes or {})
    try:
        Folder.of(run).replace(PROFILE_SUMMARY, [json.dumps(summary.to_json(), indent=1) + "\n"], is_durable=False)
    except OSError as error:
        raise WriteError(f"cannot write into '{run / PROFILE}'.", where=str(error)) from None
    return summary


@dataclass(frozen=True)
class _Trace:
    """Operations by device, as (name, start, end), and marks of the host by name; nanoseconds."""

    operations: dict[int, list[tuple[str, float, float]]]
    marks: dict[str, list[tuple[float, float]]]


def _read(files: list[Path], module: str) -> _Trace:
    from jax.profiler import ProfileData

    operations: dict[int, list[tuple[str, float, float]]] = {}
    marks: dict[str, list[tuple[float, float]]] = {WINDOW: [], INPUT: [], STEP: []}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of how JAX's own types are made
        for file in files:
            for plane in ProfileData.from_file(str(file)).planes:
                on_device = DEVICE_PLANE.match(plane.name)
                for line in plane.lines:
                    for event in line.events:
                        start = event.start_ns
                        if event.name in marks:
                            marks[event.name].append((start, start + event.duration_ns))
                            continue
                        if (found := _operation(event, line.name, on_device, module)) is not None:
                            device, name = found
                            operations.setdefault(device, []).append((name, start, start + event.duration_ns))
    if not operations or not marks[WINDOW]:
        raise DataError(f"the trace has nothing of '{module}' in it.", where=", ".join(map(str, files)))
    return _Trace(operations, marks)


def _operation(event: Any, line: str, on_device: re.Match[str] | None, module: str) -> tuple[int, str] | None:
    """The device and the name of an event that is an operation of the program; None: it is something else."""
    if event.name.startswith("end: "):
        return None
    stats = dict(event.stats)
    if "hlo_op" not in stats and not (on_device is not None and line in OPERATION_LINES):
        return None
    if stats.get("hlo_module", module) != module:
        return None
    # A GPU's kernels have names of their own; a TPU's operations may be written out in full.
    name = str(stats.get("hlo_op", event.name)).lstrip("%").partition(" ")[0]
    return int(on_device[1] if on_device is not None else stats.get("device_ordinal", 0)), name


def _summary(trace: _Trace, axes: Mapping[str, str]) -> StepProfile:
    window = union(trace.marks[WINDOW][:1])
    num_steps = max(1, len(trace.marks[STEP]))
    leaves = {at: [op for op in ops if not CONTAINERS.match(op[0])] for at, ops in trace.operations.items()}
    everywhere = union(span for ops in leaves.values() for _, *span in ops)
    nowhere = without(window, everywhere)
    waited = overlap(nowhere, union(trace.marks[INPUT]))
    totals, by_axis, by_name = (defaultdict[str, float](float) for _ in range(3))
    for ops in leaves.values():
        moving: dict[str, list[Any]] = defaultdict(list)
        for name, *span in ops:
            by_name[name] += span[1] - span[0]
            if kind := COLLECTIVE.match(name):
                moving[axes.get(name, kind[1])].append(span)
        computing = union(span for name, *span in ops if not COLLECTIVE.match(name))
        busy = union(span for _, *span in ops)
        totals["compute"] += overlap(computing, window)
        totals["communication"] += overlap(without(busy, computing), window)
        totals["input_wait"] += waited
        totals["host"] += length(nowhere) - waited
        totals["idle"] += overlap(without(everywhere, busy), window)
        for axis, spans in moving.items():
            by_axis[axis] += overlap(union(spans), window)
    share = 1e-9 / len(trace.operations) / num_steps
    return StepProfile(
        num_steps=num_steps,
        num_devices=len(trace.operations),
        step_seconds=length(window) * 1e-9 / num_steps,
        **{name: totals[name] * share for name in ("compute", "communication", "input_wait", "host", "idle")},
        by_axis={axis: nanoseconds * share for axis, nanoseconds in _longest(by_axis)},
        operations={name: nanoseconds * share for name, nanoseconds in _longest(by_name)[:MOST]},
    )


def _longest(by_name: Mapping[str, float]) -> list[tuple[str, float]]:
    return sorted(by_name.items(), key=lambda item: (-item[1], item[0]))


def union(spans: Iterable[Any]) -> Spans:
    """Spans joined where they touch or overlap.

    Example:
      >>> union([(0, 2), (5, 6), (1, 3)]).tolist()
      [[0.0, 3.0], [5.0, 6.0]]
    """
    rows = np.array(sorted((float(start), float(end)) for start, end in spans)).reshape(-1, 2)
    if not len(rows):
        return rows
    reached = np.maximum.accumulate(rows[:, 1])
    starts = np.flatnonzero(np.concatenate([[True], rows[1:, 0] > reached[:-1]]))
    return np.stack([rows[starts, 0], reached[np.append(starts[1:] - 1, len(rows) - 1)]], axis=1)


def without(spans: Spans, others: Spans) -> Spans:
    """What is left of spans where the others are not; both as `union` returns them.

    Example:
      >>> without(union([(0, 10)]), union([(2, 3), (8, 12)])).tolist()
      [[0.0, 2.0], [3.0, 8.0]]
    """
    left = []
    for start, end in np.asarray(spans, float).reshape(-1, 2):
        first, last = np.searchsorted(others[:, 1], start, "right"), np.searchsorted(others[:, 0], end, "left")
        for begin, stop in others[first:last]:
            if begin > start:
                left.append((start, begin))
            start = max(start, stop)
        if start < end:
            left.append((start, end))
    return np.array(left, float).reshape(-1, 2)


def overlap(spans: Spans, others: Spans) -> float:
    """How long both last at once.

    Example:
      >>> overlap(union([(0, 4)]), union([(1, 2), (3, 9)]))
      2.0
    """
    return length(spans) - length(without(spans, others))


def length(spans: Spans) -> float:
    """How long spans last together."""
    rows = np.asarray(spans, float).reshape(-1, 2)
    return float((rows[:, 1] - rows[:, 0]).sum())
