"""Formats the result of a check: predicted and compiled figures, collectives, and parity, as text and JSON."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from spanax.check.hlo.collectives import Collective
from spanax.check.parity.parity import GROUPS, Parity
from spanax.check.report import Figures, Report, plain_fields
from spanax.errors import UnknownNameError
from spanax.show.tables import table_text
from spanax.units import bytes_text


def report_json(report: Report) -> dict[str, Any]:
    """Returns the report part of `spanax check --json`; bytes and FLOPs per device and step."""
    data = plain_fields(report) | {"errors": report.errors, "by": report.by}
    for fields, collective in zip(data["collectives"], report.collectives, strict=True):
        fields["bytes"] = collective.num_bytes
    return data


def report_text(report: Report) -> str:
    """Returns the verdict, and predicted next to compiled figures, each with its source."""
    suffix = ", inputs only" if report.inputs_only else ""
    subject = f"{report.layout}{suffix} on {report.target} ({report.mesh}), level {report.level} ({report.by}): "
    lines = [subject + verdict(report), "", _figures(report)]
    if report.memory:
        parts = ", ".join(f"{name} {bytes_text(size)}" for name, size in report.memory.items() if size)
        lines.append(f"memory as the compiler counts it: {parts}")
    if report.buffers:
        lines += ["", "the largest arrays:"]
        for buffer, count in Counter(report.buffers).items():
            paths = f"  shaped like {', '.join(buffer.paths[:3])}" if buffer.paths else ""
            times = f"{count} x " if count > 1 else ""
            lines.append(f"  {times + bytes_text(buffer.num_bytes):>12}  {buffer.shapes}{paths}")
    uncounted = sum(not collective.is_counted for collective in report.collectives)
    if uncounted:
        lines.append(f"{uncounted} collectives are in loops of unknown trip count; each loop counts once")
    cached = " (cached)" if report.is_kept else ""
    lines.append(f"checked in {report.seconds:.1f} s{cached}; nothing has run on these devices")
    return "\n".join(lines)


def certificate_text(report: Report) -> str:
    """Returns a report and its findings."""
    return "\n".join([report_text(report), "", *map(str, report.findings)])


def verdict(report: Report) -> str:
    """Returns whether the step fits in memory, and whether XLA or the plan says so."""
    limit = f" of {bytes_text(report.limit_bytes)}" if report.limit_bytes else ""
    peak = report.compiled.peak_bytes or report.predicted.peak_bytes or 0
    need = f"{bytes_text(peak)} per device{limit}"
    if report.fits is None:
        return f"needs {need}; the memory of the device is unknown"
    if report.level == 3:
        if report.fits:
            return f"the compiler accepts it and predicts {need}"
        return f"does NOT fit: {report.fits_by} needs {need}"
    upper = "" if report.upper_bytes is None else f", at most {bytes_text(report.upper_bytes)}"
    return f"{'fits' if report.fits else 'does NOT fit'} by the plan's own count, {need}{upper}"


def _figures(report: Report) -> str:
    heads = ("per device, per step", "predicted (plan)", f"compiled ({report.by})", "error")
    return table_text(heads, _figure_rows(report), width=160)


def _figure_rows(report: Report) -> list[tuple[str, str, str, str]]:
    """Returns the name, predicted value, compiled value and error of each figure that either side has."""
    predicted = report.predicted
    compiled = report.compiled
    rows = []
    figures = [("state", "state_bytes"), ("peak memory", "peak_bytes"), ("FLOPs", "flops")]
    if predicted.host_bytes or compiled.host_bytes:
        figures.insert(1, ("state in host memory", "host_bytes"))
    for label, name in figures:
        as_text = (lambda value: f"{value:.4g}") if name == "flops" else bytes_text
        before = getattr(predicted, name)
        after = getattr(compiled, name)
        error = report.errors.get(name)
        rows.append(
            (
                label,
                "" if before is None else as_text(before),
                "" if after is None else as_text(after),
                "" if error is None else f"{100 * error:+.1f} %",
            )
        )
    return rows + [_traffic_row(predicted, compiled, axes, kind) for axes, kind in _moved(predicted, compiled)]


def _traffic_row(predicted: Figures, compiled: Figures, axes: str, kind: str) -> tuple[str, str, str, str]:
    before, after = ((figures.collectives or {}).get(axes, {}).get(kind) for figures in (predicted, compiled))
    error = ""
    if after and before:
        error = f"{100 * (before / after - 1):+.1f} %"
    elif before and compiled.collectives is not None:
        error = "only predicted"
    return f"{kind} over {axes}", bytes_text(before) if before else "", bytes_text(after) if after else "", error


def _moved(predicted: Figures, compiled: Figures) -> list[tuple[str, str]]:
    """Returns the mesh axes and kinds of collectives of either side."""
    sides = [figures.collectives or {} for figures in (predicted, compiled)]
    return sorted({(axes, kind) for side in sides for axes, kinds in side.items() for kind in kinds})


def collectives_text(collectives: Sequence[Collective]) -> str:
    """Returns a table of collectives: kind, mesh axes, bytes, tensors, and source line; equal ones share a row."""
    if not collectives:
        return "no collectives, or a level that does not list them: --level 2 or 3"
    equal: dict[Collective, list[int]] = {}
    for number, collective in enumerate(collectives, 1):
        equal.setdefault(replace(collective, name="", op_name="", runs=0), []).append(number)
    rows = []
    for each, numbers in equal.items():
        runs = sum(collectives[number - 1].runs for number in numbers)
        names = "".join(each.tensors[:1])
        if len(each.tensors) > 1:
            names += f" +{len(each.tensors) - 1}"
        shape = each.shapes if len(each.shapes) < 32 else f"{each.shapes[:28]} ..."
        size = bytes_text(replace(each, runs=runs).num_bytes)
        rows.append((f"{numbers[0]}", each.kind, each.axes, shape, f"{runs}", size, names, _short_line(each.source)))
    return table_text(("", "kind", "over", "result", "runs", "bytes", "for", "line"), rows, width=160)


def collective_text(collectives: Sequence[Collective], number: int) -> str:
    """Returns the details of one collective, by its number in the table.

    Raises:
      SpanaxError: no collective has that number.
    """
    if not 1 <= number <= len(collectives):
        raise UnknownNameError(
            f"there is no collective {number}.",
            where=f"the program has {len(collectives)}",
            fix="--collectives lists them",
        )
    collective = collectives[number - 1]
    once = bytes_text(collective.bytes_once)
    total = bytes_text(collective.num_bytes)
    lines = [
        f"{number}. {collective.kind} over {collective.axes}: {collective.group_size} devices in each group",
        f"  result  {collective.shapes}: {once}, {collective.runs} times per step: {total}",
        f"  written {collective.written or 'as such'}, `{collective.name}`",
        f"  because {collective.op_name or 'the program does not name the operation'}",
    ]
    if collective.source:
        lines.append(f"  line    {collective.source}{_code(collective.source)}")
    if collective.tensors:
        action = "gathers" if collective.kind == "all-gather" else "reduces the gradient of"
        lines.append(f"  tensors {action} arrays shaped like {', '.join(collective.tensors)}")
    return "\n".join(lines)


def _code(source: str) -> str:
    file, _, line = source.rpartition(":")
    try:
        return ": " + Path(file).read_text().splitlines()[int(line) - 1].strip()
    except (OSError, ValueError, IndexError, UnicodeDecodeError):
        return ""  # the file has moved since; the line number is shown without its code


def _short_line(source: str) -> str:
    path, _, line = source.rpartition(":")
    return f"{'/'.join(Path(path).parts[-2:])}:{line}" if path else ""


def parity_text(parity: Parity) -> str:
    """Returns the largest difference of each group with its tolerance, and every array that exceeds it."""
    mesh = ",".join(f"{axis}={size}" for axis, size in parity.mesh.items())
    lines = [
        f"parity of {parity.layout} on {mesh} with one device: {parity.steps} steps, {parity.dtype}: "
        + ("the same numbers" if parity.passes else "OTHER NUMBERS")
    ]
    if parity.shrunk:
        sizes = ", ".join(f"{name} {before} -> {after}" for name, (before, after) in parity.shrunk.items())
        lines.append(f"  reduced to fit this machine: {sizes}; the sharding of every array is unchanged")
    rows = [
        (group, worst.path, f"{worst.value:.2g}", f"{worst.noise:.2g}", f"{worst.bound:.2g}")
        for group, worst in ((group, parity.worst(group)) for group in GROUPS)
    ]
    lines.append(table_text(("worst of", "array", "difference", "one device's noise", "tolerance"), rows))
    for difference in parity.differences:
        if not difference.passes:
            values = f"differ by {difference.value:.2g}, tolerance {difference.bound:.2g}"
            lines.append(f"  {difference.group} of {difference.path} {values}")
    return "\n".join(lines)
