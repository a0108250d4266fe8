"""Summarizes a trace of JAX's profiler: the time per step for computation, communication, input and host."""

import functools
import itertools
import json
import re
import warnings
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from spanax.documents import parse_json
from spanax.entries.folder import Folder
from spanax.entries.names import PROFILE, PROFILE_SUMMARY, TRACE_FOLDER
from spanax.errors import (
    FileError,
    FileErrors,
    MissingFileError,
    WriteError,
    nearest,
)
from spanax.schema import Count, Seconds, parsed
from spanax.train.profile import INPUT, STEP, WINDOW

COLLECTIVE = re.compile(
    r"(?:async-|ragged-)?(all-gather|all-reduce|reduce-scatter|all-to-all|collective-permute|collective-broadcast|send|recv)"
)
"""The prefixes of XLA's communication operations, including their fusions on GPUs."""

CONTAINERS = re.compile(r"(while|call|conditional)([.\d]|$)")
"""Operations that contain other operations."""

DEVICE_PLANE = re.compile(r"/device:(?:GPU|TPU):(\d+)")
OPERATION_LINES = ("XLA Ops", "Async XLA Ops")

MODULE = "jit_step"
"""The HLO module of a train step."""

MAX_OPERATIONS = 12
"""The number of operations in a summary."""

Span = tuple[float, float]
"""Start and end in nanoseconds."""


PARTS = ("compute", "communication", "idle", "host", "input wait")


@dataclass(frozen=True)
class StepProfile:
    """Seconds per step, averaged over devices and traced steps.

    Attributes:
      steps: the number of traced steps.
      devices: the number of devices that ran operations.
      step_seconds: the time from the start of the first step to the end of the last, divided by the number of steps.
      seconds: its parts, which sum to it. `compute`: an operation other than communication runs. `communication`: only
        communication runs; on simulated devices, includes waiting for others. `idle`: a device runs no operation and
        another device does. `input wait`: no operation runs and the host waits for a batch. `host`: no operation runs
        and the host does other work, such as dispatch or fetching metrics.
      communication: it by mesh axis, or by kind if the axes are unknown; concurrent operations count in each.
      operations: the longest operations by name, in seconds per step.
    """

    steps: Count
    devices: Count
    step_seconds: Seconds
    seconds: Mapping[str, Seconds]
    communication: Mapping[str, Seconds]
    operations: Mapping[str, Seconds]


def read_profile(run: Path) -> StepProfile:
    """Returns the summary that `spanax train --profile` wrote to a run folder.

    Raises:
      DataError: it is missing or cannot be read.
    """
    path = run / PROFILE_SUMMARY
    try:
        text = Folder.of(run).read(PROFILE_SUMMARY)
    except OSError:
        known = sorted(str(summary_path.parents[1]) for summary_path in run.parent.glob(f"*/{PROFILE_SUMMARY}"))
        fix = nearest(str(run), known) if known else f"spanax train ... --profile 10:20 --output-dir {run}"
        raise MissingFileError(f"there is no profile in '{run}'.", where=str(path), fix=fix) from None
    with FileErrors(FileError, f"this is not a profile summary: '{path}'.", fix="profile the run again"):
        profile = parsed(StepProfile, parse_json(text))
        if {*profile.seconds} != {*PARTS}:
            raise ValueError(f"its parts are {', '.join(profile.seconds)}")
        if profile.step_seconds == 0:
            raise ValueError("its step time is not positive")
        return profile


def step_profile(run: Path, *, axes: Mapping[str, str] | None = None) -> StepProfile:
    """Summarizes the trace of a run, and writes the summary to `summary.json` next to the trace.

    Args:
      run: the run folder.
      axes: the mesh axes of each collective, by the name of its instruction in the compiled program.

    Raises:
      DataError: there is no trace, or it has no operations of a step.
      WriteError: the summary cannot be written.
    """
    folder = Folder.of(run).inner(PROFILE, TRACE_FOLDER)
    trace = folder.checked_path() if folder.kind() is not None else folder.path  # JAX opens files by path
    files = sorted(trace.rglob("*.xplane.pb"))
    if not files:
        raise MissingFileError(f"there is no trace in '{run / PROFILE}'.", fix="spanax train ... --profile 10:20")
    parsed_trace = _read_trace(files)
    summary = _summary(parsed_trace, axes or {})
    with FileErrors(WriteError, f"cannot write into '{run / PROFILE}'."):
        Folder.of(run).replace(PROFILE_SUMMARY, [json.dumps(asdict(summary), indent=1) + "\n"], is_durable=False)
    return summary


@dataclass(frozen=True)
class _Trace:
    """Operations by device, as (name, start, end), and host annotations by name, in nanoseconds."""

    operations: dict[int, list[tuple[str, float, float]]]
    marks: dict[str, list[Span]]


def _read_trace(files: list[Path]) -> _Trace:
    from jax.profiler import ProfileData

    operations: dict[int, list[tuple[str, float, float]]] = {}
    marks: dict[str, list[Span]] = {WINDOW: [], INPUT: [], STEP: []}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # from the types of JAX's own bindings
        for file in files:
            for plane in ProfileData.from_file(str(file)).planes:
                on_device = DEVICE_PLANE.match(plane.name)
                for line in plane.lines:
                    for event in line.events:
                        start = event.start_ns
                        if event.name in marks:
                            marks[event.name].append((start, start + event.duration_ns))
                            continue
                        if (operation := _operation(event, line.name, on_device)) is not None:
                            device, name = operation
                            operations.setdefault(device, []).append((name, start, start + event.duration_ns))
    if not operations or not marks[WINDOW]:
        raise FileError(f"the trace has no operations of '{MODULE}'.", where=", ".join(map(str, files)))
    return _Trace(operations, marks)


def _operation(event: Any, line: str, on_device: re.Match[str] | None) -> tuple[int, str] | None:
    """Returns the device and name of an event that is an operation of the program, or None for other events."""
    if event.name.startswith("end: "):
        return None
    stats = dict(event.stats)
    if "hlo_op" not in stats and not (on_device is not None and line in OPERATION_LINES):
        return None
    if stats.get("hlo_module", MODULE) != MODULE:
        return None
    # GPU kernels have other names than operations; TPU events may have the full text of an operation.
    name = str(stats.get("hlo_op", event.name)).lstrip("%").partition(" ")[0]
    return int(on_device[1] if on_device is not None else stats.get("device_ordinal", 0)), name


def _summary(trace: _Trace, axes: Mapping[str, str]) -> StepProfile:
    num_steps = max(1, len(trace.marks[STEP]))
    leaves = {device: [op for op in ops if not CONTAINERS.match(op[0])] for device, ops in trace.operations.items()}
    spans = {device: [(start, end) for _, start, end in ops] for device, ops in leaves.items()}
    timeline = Timeline.of([trace.marks[WINDOW][0], *trace.marks[INPUT], *itertools.chain(*spans.values())])
    window = timeline.mask(trace.marks[WINDOW][:1])
    busy_by_device = {device: timeline.mask(spans[device]) & window for device in leaves}
    busy_anywhere = functools.reduce(np.logical_or, busy_by_device.values())
    is_waiting = timeline.mask(trace.marks[INPUT]) & window
    totals, by_axis, by_name = (defaultdict[str, float](float) for _ in range(3))
    for device, ops in leaves.items():
        computing: list[Span] = []
        communicating: dict[str, list[Span]] = defaultdict(list)
        for name, start, end in ops:
            by_name[name] += end - start
            kind = COLLECTIVE.match(name)
            (communicating[axes.get(name, kind[1])] if kind else computing).append((start, end))
        is_computing = timeline.mask(computing) & window
        parts = {
            "compute": is_computing,
            "communication": busy_by_device[device] & ~is_computing,
            "idle": busy_anywhere & ~busy_by_device[device],
            "host": window & ~busy_anywhere & ~is_waiting,
            "input wait": is_waiting & ~busy_anywhere,
        }
        for part, mask in parts.items():
            totals[part] += timeline.duration(mask)
        for axis, axis_spans in communicating.items():
            by_axis[axis] += timeline.duration(timeline.mask(axis_spans) & window)
    share = 1e-9 / len(trace.operations) / num_steps
    seconds = {name: nanoseconds * share for name, nanoseconds in totals.items()}
    communication, operations = (
        {name: nanoseconds * share for name, nanoseconds in sorted(each.items(), key=lambda item: (-item[1], item[0]))}
        for each in (by_axis, by_name)
    )
    longest = dict(itertools.islice(operations.items(), MAX_OPERATIONS))
    step_seconds = timeline.duration(window) * 1e-9 / num_steps
    return StepProfile(num_steps, len(trace.operations), step_seconds, seconds, communication, longest)


@dataclass(frozen=True, eq=False)
class Timeline:
    """Time as intervals between consecutive `edges`; boolean masks over the intervals are sets of times.

    Example:
      >>> timeline = Timeline.of([(0, 4), (1, 2), (3, 9)])
      >>> timeline.duration(timeline.mask([(0, 4)]) & timeline.mask([(1, 2), (3, 9)]))
      2.0
    """

    edges: np.ndarray

    @staticmethod
    def of(spans: Iterable[Span]) -> "Timeline":
        """Returns the timeline with all starts and ends of spans as edges."""
        return Timeline(np.unique(np.array(list(spans), float)))

    def mask(self, spans: Sequence[Span]) -> np.ndarray:
        """Returns the intervals that spans cover, whose starts and ends must be edges."""
        starts, ends = np.searchsorted(self.edges, np.array(spans, float).reshape(-1, 2)).T
        num_started = np.bincount(starts, minlength=len(self.edges)) - np.bincount(ends, minlength=len(self.edges))
        return np.cumsum(num_started)[:-1] > 0

    def duration(self, mask: np.ndarray) -> float:
        """Returns the total length of the intervals in a mask."""
        return float(np.diff(self.edges) @ mask)
