"""Reads measured steps for calibration, from run folders and from the output of `spanax compare --json`."""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from spanax.check.compilers.annotated_step import program_of
from spanax.check.measure.compare import layouts
from spanax.documents import read_json
from spanax.errors import CalibrationError, EntryError, FileError, FileErrors, MissingFileError, SpanaxError, first_line
from spanax.hardware.cluster import Cluster, is_of_kind, resized
from spanax.plan.calibration.measured import MeasuredStep, StepSeconds
from spanax.plan.candidate import plan_of
from spanax.plan.evaluate import evaluate
from spanax.plan.plan import Plan
from spanax.schema import Count, parsed
from spanax.trace.program import Program
from spanax.trace.workload import Workload
from spanax.train.record.folder import read_environment, recorded
from spanax.train.record.metric_curves import metric_curves

EXPECTED = "a run folder, or a file with the output of spanax compare --json"

Load = Callable[..., Workload]
"""Returns a workload, given its name and sizes; raises if its code should not run."""


@dataclass(frozen=True)
class Requested:
    """What is planned: the program, its cluster, and how to load the workload of another run."""

    program: Program
    cluster: Cluster
    load: Load


@dataclass(frozen=True)
class Timed:
    """The part of a compared layout's measurements that calibration reads."""

    seconds: tuple[float, ...]


@dataclass(frozen=True)
class ComparedRow:
    """The part of one row of `spanax compare --json` that calibration reads."""

    layout: str
    mesh: dict[str, Count]
    remat: str
    measured: Timed


@dataclass(frozen=True)
class ComparedFile:
    """The part of `spanax compare --json` that calibration reads."""

    workload: str
    batch: Count
    sequence_lengths: tuple[Count, ...]
    dtypes: tuple[str, ...]
    device_kind: str
    size: str
    fingerprint: str
    rows: tuple[ComparedRow, ...]


def measured_steps(paths: Sequence[Path], requested: Requested) -> list[MeasuredStep]:
    """Returns the measured steps in run folders and in files of `spanax compare --json`.

    Measurements of another program, or of another number of devices, are marked as such (`transfers`).

    Raises:
      SpanaxError: a run was on another chip, has too few steps, or trained a program that cannot be traced here.
      DataError: a path is neither a run nor a comparison, or is damaged; also its subclass EntryError.
    """
    steps = list[MeasuredStep]()
    for path in paths:
        if path.suffix == ".toml":
            raise CalibrationError(
                f"'{path}' is a cluster file, not a measured run.", fix=f"--on {path}, as spanax probe wrote it"
            )
        steps += _of_comparison(path, requested) if path.is_file() else [_of_run(path, requested)]
    return steps


def _of_run(folder: Path, requested: Requested) -> MeasuredStep:
    """Returns the measured step of a run of `spanax train`."""
    if not folder.is_dir():
        raise MissingFileError(f"'{folder}' does not exist.", fix=EXPECTED)
    settings = recorded(folder)
    plan = Plan.of_run(folder)
    environment = read_environment(folder)
    if not settings:
        raise MissingFileError(f"'{folder}' is not a run folder.", where="it has no config.toml", fix=EXPECTED)
    machine = _machine(str(folder), environment.device_kind, environment.size, requested.cluster)
    if machine.num_devices != plan.mesh.size:
        raise FileError(f"'{folder}' records {environment.size} devices and a plan for {plan.mesh.size}.")
    program = requested.program
    transfers = []
    if plan.fingerprint != program.fingerprint:
        program = _other_program(str(folder), plan, str(settings.get("workload")), requested.load)
        transfers.append("another program")
    if machine.size != requested.cluster.size:
        transfers.append(f"{machine.size} devices")
    metrics = metric_curves(folder)
    seconds = StepSeconds(tuple(step.seconds for step in metrics.steady))
    if seconds.seconds:
        seconds = replace(seconds, wait_share=min(1.0, metrics.wait_seconds / seconds.median))
    return MeasuredStep.of(evaluate(program, plan, machine), seconds, source=str(folder), transfers=transfers)


def _of_comparison(path: Path, requested: Requested) -> list[MeasuredStep]:
    """Returns the measured step of each layout of `spanax compare --json`."""
    with FileErrors(FileError, f"'{path}' is not a comparison.", fix=EXPECTED):
        file = parsed(ComparedFile, read_json(path), is_open=True)
    machine = _machine(str(path), file.device_kind, file.size, requested.cluster)
    program = requested.program
    transfers = []
    if file.fingerprint != program.fingerprint:
        program = _compared_program(path, file, requested.load)
        transfers.append("another program")
    if machine.size != requested.cluster.size:
        transfers.append(f"{machine.size} devices")
    search = functools.cache(lambda remat: layouts(program, machine, every=True, remat=remat))
    steps = []
    for row, taken in zip(file.rows, without_common_drift([row.measured.seconds for row in file.rows]), strict=True):
        priced = search(row.remat)
        if list(priced.setting.dtypes) != list(file.dtypes):
            raise CalibrationError(
                f"'{path}' was computed in {', '.join(file.dtypes)}, and the plan is for "
                f"{', '.join(priced.setting.dtypes)}.",
                fix=f"--dtype {file.dtypes[0] if file.dtypes else 'float32'}",
            )
        asked = row.layout, row.mesh
        matches = [item for item in priced.candidates if (item.layout, dict(item.whole_mesh.axes)) == asked]
        if not matches:
            raise CalibrationError(f"'{path}' has {row.layout} on {row.mesh}, which this program cannot run.")
        evaluation = evaluate(priced.programs[row.remat], plan_of(priced, matches[0]), machine)
        seconds = StepSeconds(taken)
        steps.append(MeasuredStep.of(evaluation, seconds, source=str(path), transfers=transfers))
    return steps


def without_common_drift(seconds: Sequence[tuple[float, ...]]) -> list[tuple[float, ...]]:
    """Returns the seconds of each layout without the slowdowns of single rounds, which all layouts share.

    A round is slower than the median round by the median ratio of its steps to the medians of their layouts.

    Args:
      seconds: one tuple per layout, one number per round. Fewer than three layouts are unchanged, as are different
        numbers of rounds.

    Example:
      >>> without_common_drift([(1.0, 1.0, 2.0), (2.0, 2.0, 4.0), (3.0, 3.0, 6.0)])[1]
      (2.0, 2.0, 2.0)
    """
    table = np.asarray(seconds) if len({len(row) for row in seconds}) == 1 else np.zeros((0, 0))
    if len(table) < 3 or not table.size or not (table > 0).all():
        return list(seconds)
    slowness = np.median(table / np.median(table, axis=1, keepdims=True), axis=0)
    return [tuple(row) for row in (table / (slowness / np.median(slowness))).tolist()]


def _machine(source: str, device_kind: str, size: str, requested: Cluster) -> Cluster:
    """Returns the cluster of a measurement, with the constants of the requested one.

    Raises:
      SpanaxError: it was measured on another chip.
      DataError: the record does not say on which devices.
    """
    if not device_kind or not size:
        raise FileError(f"'{source}' does not record its devices.", fix="measure it again")
    if not is_of_kind(requested, device_kind):
        raise CalibrationError(
            f"'{source}' was measured on '{device_kind}', which is not {requested.chip.name}.",
            fix=f"a run on {requested.chip.name}",
        )
    try:
        return resized(requested, size)
    except SpanaxError as error:
        raise FileError(f"'{source}' records impossible devices.", where=first_line(error)) from None


def _other_program(source: str, plan: Plan, workload: str, load: Load) -> Program:
    """Returns the program of a run that trained another one.

    Raises:
      SpanaxError: it cannot be traced from the name of its workload and the sizes of its plan.
    """
    try:
        program = program_of(plan, load, workload)
    except EntryError:
        raise
    except SpanaxError as error:
        raise _unknown(source, workload, first_line(error)) from None
    if program.fingerprint != plan.fingerprint:
        raise _unknown(source, workload, f"'{workload}' is another program now")
    return program


def _compared_program(path: Path, file: ComparedFile, load: Load) -> Program:
    sizes = {"batch_size": file.batch} | dict(zip(["seq_len"], file.sequence_lengths, strict=False))
    try:
        program = load(file.workload, **sizes).trace()
    except SpanaxError as error:
        raise _unknown(str(path), file.workload, first_line(error)) from None
    if program.fingerprint != file.fingerprint:
        raise _unknown(str(path), file.workload, f"'{file.workload}' has other sizes there")
    return program


def _unknown(source: str, workload: str, why: str) -> SpanaxError:
    return CalibrationError(
        f"'{source}' measured another program, and its steps cannot be priced.",
        where=why,
        fix=f"spanax plan {workload} with the sizes of that run, or a run of this program",
    )
