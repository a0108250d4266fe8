"""Rules on the compiled program: work done twice, and what moves without having been planned."""

from collections.abc import Iterator

from spanax.check.hlo.collectives import Collective
from spanax.check.hlo.replicated_tensors import Replicated
from spanax.check.lint.message import Said
from spanax.check.lint.subject import Checked
from spanax.check.predictions import gathered_bytes
from spanax.check.report import Report
from spanax.units import bytes_text

REPEATED = 1.05
"""How many times the plan's FLOPs a device may do."""

UNPLANNED, SMALL_BYTES = 0.25, 1 << 20
"""By how much of what is planned, and by how many bytes, what moves must exceed it."""

EXCHANGES = ("all-gather", "all-to-all")
"""What activations go through that are split otherwise than they are needed."""

ADMITTED = 0.05
"""The same where the compiler says itself that it did badly: what a plan's own bytes may be off by."""


def repeated_work(checked: Checked) -> Iterator[Said]:
    """The compiled program does more arithmetic on each device than its share."""
    report = checked.report
    if report is None or not report.compiled.flops or not report.predicted.flops:
        return
    ratio = report.compiled.flops / report.predicted.flops
    if ratio > REPEATED:
        yield Said("", f"each device does {ratio:.2f} times its share of the arithmetic.",
                   "a layout whose axes split what is computed; see the axes that split nothing")  # fmt: skip


def made_whole(checked: Checked) -> Iterator[Said]:
    """The compiler gathers a parameter that is to stay split, or says that it replicates a tensor to split it anew."""
    report = checked.report
    if report is None or report.compiled.collectives is None or report.predicted.collectives is None:
        return
    for found, moved, meant in _weights(checked, report):
        yield Said(
            found[0].tensors[0],
            f"`{found[0].tensors[0]}` is gathered over {found[0].axes}: {bytes_text(moved)} a step, "
            f"{bytes_text(meant)} planned; as {found[0].shapes}{_at(found[0].source)}.",
            f"a constraint on what {found[0].op_name or found[0].name} takes, or the plan's own step",
            moved - meant,
        )
    by_line: dict[str, Replicated] = {}
    for one in report.replicated:
        by_line.setdefault(one.source or one.op_name or one.name, one)
    for one in by_line.values():
        over = [found.axes for found in report.collectives if one.op_name and found.op_name == one.op_name]
        beyond = [axes for axes in over or report.compiled.collectives if _exceeds(report, axes, ADMITTED)]
        if beyond:
            yield Said(
                one.op_name or one.name,
                f"the partitioner replicates {one.shape}{_at(one.source)}: it cannot go from {one.before} to "
                f"{one.after}.",
                f"a constraint in between where {one.op_name or one.name} is made, or the plan's own step",
                one.num_bytes,
            )


def unplanned_activations(checked: Checked) -> Iterator[Said]:
    """Activations are gathered or exchanged that the plan does not move."""
    report = checked.report
    if report is None or report.compiled.collectives is None or report.predicted.collectives is None:
        return
    of_weights: dict[str, int] = {}
    for weights, moved, meant in _weights(checked, report):
        of_weights[weights[0].axes] = of_weights.get(weights[0].axes, 0) + moved - meant
    for axes, kinds in report.compiled.collectives.items():
        planned = report.predicted.collectives.get(axes, {})
        moved, meant = sum(kinds.values()), sum(planned.values())
        beyond = moved - meant - of_weights.get(axes, 0)
        if beyond <= max(SMALL_BYTES, UNPLANNED * meant):
            continue
        more = [kind for kind in EXCHANGES if kinds.get(kind, 0) > (1 + UNPLANNED) * planned.get(kind, 0)]
        found = [one for one in report.collectives if one.kind in more and one.axes == axes and not one.tensors]
        if found:
            largest = max(found, key=lambda one: one.num_bytes)
            yield Said(
                axes,
                f"collectives over {axes} move {bytes_text(moved)} a step, {bytes_text(meant)} planned; the largest "
                f"beyond is {largest.kind} of {largest.shapes}{_at(largest.source)}.",
                f"spanax check --collectives; a constraint where {largest.op_name or largest.name} is made",
                beyond,
            )


def _weights(checked: Checked, report: Report) -> Iterator[tuple[list[Collective], int, int]]:
    """Gathers of the same parameters over the same axes that exceed the plan: they, their bytes and the plan's."""
    groups: dict[tuple[str, tuple[str, ...]], list[Collective]] = {}
    for one in report.collectives:
        if one.kind == "all-gather" and one.tensors and _exceeds(report, one.axes, UNPLANNED, "all-gather"):
            groups.setdefault((one.axes, one.tensors), []).append(one)
    for (axes, paths), found in groups.items():
        moved = sum(one.num_bytes for one in found)
        if moved > SMALL_BYTES:
            meant = sum(
                gathered_bytes(checked.program, checked.plan, checked.cluster, path).get(axes, 0) for path in paths
            )
            if moved - meant > max(SMALL_BYTES, UNPLANNED * meant):
                yield found, moved, meant


def _exceeds(report: Report, axes: str, share: float, kind: str | None = None) -> bool:
    """Whether more moves over mesh axes than planned, of one kind or of all together."""
    moved, meant = (
        sum(num_bytes for one, num_bytes in (side.collectives or {}).get(axes, {}).items() if kind in (None, one))
        for side in (report.compiled, report.predicted)
    )
    return moved - meant > max(SMALL_BYTES, share * meant)


def _at(source: str) -> str:
    return f" at {source}" if source else ""
