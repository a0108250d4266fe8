"""Checking: one request to `spanax check` answered, in text and as plain values."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

from rich.table import Table

from spanax.check.certificate import Certificate
from spanax.check.check import check
from spanax.check.finding import most_severe_first
from spanax.check.hlo.collectives import Collective
from spanax.check.lint.lint import lint, lint_profile, without_allowed
from spanax.check.measure.profile import read_profile
from spanax.check.parity.parity import Parity
from spanax.check.parity.shrink import parity_of
from spanax.check.report import Figures, Report
from spanax.commands.requests import CheckCommand
from spanax.commands.source_text import source_text
from spanax.errors import SpanaxError, first_line
from spanax.hardware.cluster import Cluster, cluster
from spanax.plan.choose import plan
from spanax.plan.evaluate import evaluate
from spanax.plan.pipeline.stages import check_requested_schedule, requested_schedule
from spanax.plan.plan import Plan
from spanax.run.config import OF_PLAN, check_alone
from spanax.run.distributed.devices import DEFAULT_SIMULATED, simulate
from spanax.show.parity import parity_text
from spanax.show.tables import table_text
from spanax.trace.program import Program
from spanax.trace.rewrites.remat_policies import known_attention, known_policy
from spanax.trace.workload import Workload
from spanax.units import bytes_text

Data = dict[str, Any]


def answer(load: Callable[..., Workload], asked: CheckCommand) -> tuple[str, Data]:
    """What `spanax check` prints: as text, and as the object of --json.

    Raises:
      SpanaxError: the request cannot be carried out.
      CompilerError: the compiler crashed, rejected the program or exceeded the time limit.
    """
    if not asked.workload:
        raise SpanaxError("spanax check needs a workload.", fix="spanax check gpt2 --on v5e:4x4 --layout fsdp")
    if not asked.on:
        raise SpanaxError("spanax check needs to know the devices.", fix=f"spanax check {asked.workload} --on v5e:4x4")
    machine = cluster(asked.on)
    known_attention(asked.attention)
    # A workload's own file may make arrays, and with them JAX's devices.
    devices = simulate(DEFAULT_SIMULATED) if asked.parity else []
    given = Plan.load(asked.plan) if asked.plan is not None else None
    if given is not None:
        check_alone({name: getattr(asked, name) for name in OF_PLAN})
    known_policy(asked.remat)
    program = _traced(load, asked, given)
    schedule = requested_schedule(microbatches=asked.microbatches, schedule=asked.schedule, chunks=asked.chunks)
    made = given or plan(
        program,
        machine,
        layout=asked.layout,
        mesh=asked.mesh,
        schedule=schedule,
        attention=asked.attention,
        loss_chunks=asked.loss_chunks,
    )
    check_requested_schedule(asked.schedule, made)
    text = source_text(asked.workload)
    without_allowed([], text, made.allow)  # a code that does not exist is told before anything is compiled
    watched = lint_profile(read_profile(asked.profiled)) if asked.profiled is not None else []
    report = check(
        program,
        made,
        machine,
        level=asked.level,
        timeout=asked.timeout,
        codegen=asked.codegen,
        inputs_only=asked.inputs_only,
        cache=asked.cache,
    )
    findings = without_allowed(most_severe_first([*lint(program, made, machine, report), *watched]), text, made.allow)
    notes: list[str] = []
    if asked.out is not None:
        certified, notes = _priced(program, made, machine)
        Certificate(report, tuple(findings), certified).save(asked.out)
    lines, data = [report_text(report)], report_json(report) | {"findings": [one.to_json() for one in findings]}
    lines += ["", *map(str, findings)] if findings else ["nothing is wrong with it, as far as the rules see"]
    if asked.collectives:
        lines += ["", collectives_text(report.collectives)]
    if asked.explain_collective is not None:
        lines += ["", explained(report.collectives, asked.explain_collective)]
    if asked.parity:
        found = _parity(load, asked, program, made, devices)
        lines, data = [*lines, "", parity_text(found)], data | {"parity": found.to_json()}
    if asked.out is not None:
        lines += ["", *notes, f"the certificate is in {asked.out}"]
    return "\n".join(lines), data


def _priced(program: Program, made: Plan, machine: Cluster) -> tuple[Plan, list[str]]:
    """Returns the plan with its price, or without one and a note that says why."""
    try:
        return replace(made, price=evaluate(program, made, machine).prediction), []
    except SpanaxError as error:
        return made, [f"note: the certificate has no price: {first_line(error)}"]


def _parity(
    load: Callable[..., Workload], asked: CheckCommand, program: Program, made: Plan, devices: list[Any]
) -> Parity:
    """The same steps as planned and on one device, on as many simulated devices as there are cores for."""
    trace = partial(_trace, asked=asked, dtype=made.schedule.compute_dtype)
    return parity_of(load, trace, program, made, steps=asked.steps, devices=devices[: made.mesh.size])


def _traced(load: Callable[..., Workload], asked: CheckCommand, given: Plan | None) -> Program:
    """Returns the program as it is requested; a plan file adds what it was made with."""
    sizes = {"batch_size": asked.batch, "seq_len": asked.seq, "num_layers": asked.layers, "embed_dim": asked.embed}
    workload = load(**{name: size for name, size in sizes.items() if size is not None})
    return _trace(workload, asked, asked.dtype if given is None else given.schedule.compute_dtype)


def _trace(workload: Workload, asked: CheckCommand, dtype: str | None) -> Program:
    return workload.trace(
        learning_rate=1e-3,
        num_steps=100,
        compute_dtype=dtype,
        remat=asked.remat,
        optimizer_state=asked.optimizer_state,
        accumulate=asked.accumulate,
    )


def report_json(report: Report) -> Data:
    """The contract of `spanax check --json`; bytes and FLOPs of one device and one step."""
    data = asdict(report) | {"errors": report.errors, "by": report.by}
    for one, found in zip(data["collectives"], report.collectives, strict=True):
        one["bytes"] = found.num_bytes
    return data


def report_text(report: Report) -> str:
    """The verdict, and predicted beside compiled, each with what produced it."""
    how = ", inputs only" if report.inputs_only else ""
    head = f"{report.layout}{how} on {report.target} ({report.mesh}), level {report.level} ({report.by}): "
    lines = [head + verdict(report), "", _figures(report)]
    if report.memory:
        said = ", ".join(f"{name} {bytes_text(size)}" for name, size in report.memory.items() if size)
        lines.append(f"the compiler's own count: {said}")
    if report.buffers:
        lines += ["", "the largest arrays:"]
        for one, count in Counter(report.buffers).items():
            paths = f"  shaped like {', '.join(one.paths[:3])}" if one.paths else ""
            times = f"{count} x " if count > 1 else ""
            lines.append(f"  {times + bytes_text(one.num_bytes):>12}  {one.shapes}{paths}")
    uncounted = sum(not one.is_counted for one in report.collectives)
    if uncounted:
        lines.append(f"{uncounted} collectives lie in loops whose length cannot be told; each loop counts once")
    kept = " (kept from an earlier check)" if report.is_kept else ""
    lines.append(f"checked in {report.seconds:.1f} s{kept}; nothing has run on these devices")
    return "\n".join(lines)


def verdict(report: Report) -> str:
    """Whether it fits, and who says so."""
    limit = f" of {bytes_text(report.limit_bytes)}" if report.limit_bytes else ""
    peak = report.compiled.peak_bytes or report.predicted.peak_bytes or 0
    need = f"{bytes_text(peak)} a device{limit}"
    if report.fits is None:
        return f"needs {need}, and nobody knows how much there is"
    if report.level == 3:
        if report.fits:
            return f"the compiler accepts it and predicts {need}"
        return f"does NOT fit: {report.fits_by} wants {need}"
    return f"{'fits' if report.fits else 'does NOT fit'} by the plan's own count, {need}"


def _figures(report: Report) -> str:
    table = Table("a device, a step", "predicted (plan)", f"compiled ({report.by})", "error", box=None, pad_edge=False)
    for row in figure_rows(report):
        table.add_row(*row)
    return table_text(table, width=160)


def figure_rows(report: Report) -> list[tuple[str, str, str, str]]:
    """Figure, predicted, compiled and error of each figure that either side has."""
    ours, theirs, rows = report.predicted, report.compiled, []
    for label, name in (("state", "state_bytes"), ("peak memory", "peak_bytes"), ("FLOPs", "flops")):
        as_text = (lambda value: f"{value:.4g}") if name == "flops" else bytes_text
        mine, found = getattr(ours, name), getattr(theirs, name)
        error = report.errors.get(name)
        rows.append(
            (
                label,
                "" if mine is None else as_text(mine),
                "" if found is None else as_text(found),
                "" if error is None else f"{100 * error:+.1f} %",
            )
        )
    for axes, kind in _moved(ours, theirs):
        mine, found = ((one.collectives or {}).get(axes, {}).get(kind) for one in (ours, theirs))
        told = theirs.collectives is not None
        error = f"{100 * ((mine or 0) / found - 1):+.1f} %" if found else ("only predicted" if told and mine else "")
        rows.append(
            (
                f"{kind} over {axes}",
                bytes_text(mine) if mine else "",
                bytes_text(found) if found else "",
                error,
            )
        )
    return rows


def _moved(ours: Figures, theirs: Figures) -> list[tuple[str, str]]:
    """Mesh axes and kinds of either side."""
    both = [one.collectives or {} for one in (ours, theirs)]
    return sorted({(axes, kind) for side in both for axes, kinds in side.items() for kind in kinds})


def collectives_text(found: Sequence[Collective]) -> str:
    """Who moves what, over which axis, because of which line."""
    if not found:
        return "no collectives, or a level that does not tell them: --level 2 or 3"
    table = Table("", "kind", "over", "result", "runs", "bytes", "for", "line", box=None, pad_edge=False)
    for at, one in enumerate(found, 1):
        serves = one.tensors[0] + (f" +{len(one.tensors) - 1}" if one.tensors[1:] else "") if one.tensors else ""
        shape = one.shapes if len(one.shapes) < 32 else f"{one.shapes[:28]} ..."
        place = _short(one.source)
        table.add_row(str(at), one.kind, one.axes, shape, str(one.runs), bytes_text(one.num_bytes), serves, place)
    return table_text(table, width=160)


def explained(found: Sequence[Collective], number: int) -> str:
    """All that is known of one collective, by its number in the table.

    Raises:
      SpanaxError: there is none of that number.
    """
    if not 1 <= number <= len(found):
        raise SpanaxError(
            f"there is no collective {number}.", where=f"the program has {len(found)}", fix="--collectives lists them"
        )
    one = found[number - 1]
    lines = [
        f"{number}. {one.kind} over {one.axes}: {one.group_size} devices in each group",
        f"  result  {one.shapes}: {bytes_text(one.bytes_once)}, {one.runs} times a step: {bytes_text(one.num_bytes)}",
        f"  written {one.written or 'as such'}, `{one.name}`",
        f"  because {one.op_name or 'the program does not say which operation'}",
    ]
    if one.source:
        lines.append(f"  line    {one.source}{_code(one.source)}")
    if one.tensors:
        what = "gathers" if one.kind == "all-gather" else "adds up the gradient of"
        lines.append(f"  tensors {what} what is shaped like {', '.join(one.tensors)}")
    return "\n".join(lines)


def _code(source: str) -> str:
    file, _, line = source.rpartition(":")
    try:
        return ": " + Path(file).read_text().splitlines()[int(line) - 1].strip()
    except (OSError, ValueError, IndexError, UnicodeDecodeError):
        return ""  # the line number stands there without its code: a file that has moved since says no more


def _short(source: str) -> str:
    path, _, line = source.rpartition(":")
    return f"{'/'.join(Path(path).parts[-2:])}:{line}" if path else ""
