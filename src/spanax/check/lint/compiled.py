"""Lint rules on the compiled program: redundant computation, and collectives that the plan does not have."""

from collections.abc import Iterator

from spanax.check.hlo.collectives import Collective
from spanax.check.hlo.replicated_tensors import ReplicatedTensor
from spanax.check.lint.subject import LintSubject, Message
from spanax.check.report import Report
from spanax.units import bytes_text

MAX_FLOPS_RATIO = 1.05
"""The largest ratio of compiled to planned FLOPs."""

REWRITTEN = {"conv_general_dilated": 1.6, "fft": 4.0, "triangular_solve": 4.0}
"""The same in programs with operations that TPU compilers compute by other matmuls than the plan counts."""

MIN_EXCESS = 0.25
MIN_EXCESS_BYTES = 1 << 20
"""Collectives are reported if they exceed the plan by this share and by this number of bytes."""

RESHARDING_KINDS = ("all-gather", "all-to-all")
"""The collectives that change the sharding of activations."""

MIN_LOGGED_EXCESS = 0.05
"""The share that replaces `MIN_EXCESS` where XLA logs a replication itself: the error of a plan's predicted bytes."""


def redundant_computation(subject: LintSubject) -> Iterator[Message]:
    """The compiled program runs more FLOPs on each device than planned."""
    report = subject.report
    if report is None or not report.compiled.flops or not report.predicted.flops:
        return
    ratio = report.compiled.flops / report.predicted.flops
    rewritten = [limit for name, limit in REWRITTEN.items() if name in subject.program.step.first_ops]
    if ratio > max([MAX_FLOPS_RATIO, *rewritten]):
        yield Message(
            "",
            f"each device runs {ratio:.2f} times its share of the FLOPs.",
            "a layout whose mesh axes shard the computation; see axes that shard nothing",
        )


def replicated_by_xla(subject: LintSubject) -> Iterator[Message]:
    """XLA all-gathers a parameter that the plan keeps sharded, or logs that it replicates a tensor to reshard it."""
    report = subject.report
    if report is None or report.compiled.collectives is None or report.predicted.collectives is None:
        return
    for gathers, num_bytes, planned in _unplanned_gathers(subject, report):
        yield Message(
            gathers[0].tensors[0],
            f"`{gathers[0].tensors[0]}` is all-gathered over {gathers[0].axes}: {bytes_text(num_bytes)} per step, "
            f"{bytes_text(planned)} planned; as {gathers[0].shapes}{_location(gathers[0].source)}.",
            f"a sharding constraint on the operands of {gathers[0].op_name or gathers[0].name}, or the Spanax step",
            num_bytes - planned,
        )
    by_line: dict[str, ReplicatedTensor] = {}
    for tensor in report.replicated:
        by_line.setdefault(tensor.source or tensor.op_name or tensor.name, tensor)
    for tensor in by_line.values():
        axes = [move.axes for move in report.collectives if tensor.op_name and move.op_name == tensor.op_name]
        exceeding = [over for over in axes or report.compiled.collectives if _exceeds(report, over, MIN_LOGGED_EXCESS)]
        if exceeding:
            yield Message(
                tensor.op_name or tensor.name,
                f"the partitioner replicates {tensor.shape}{_location(tensor.source)}: it cannot reshard from "
                f"{tensor.before} to {tensor.after} directly.",
                f"an intermediate sharding constraint where {tensor.op_name or tensor.name} is computed, or the "
                "Spanax step",
                tensor.num_bytes,
            )


def unplanned_activation_transfers(subject: LintSubject) -> Iterator[Message]:
    """XLA all-gathers or exchanges activations that the plan does not move."""
    report = subject.report
    if report is None or report.compiled.collectives is None or report.predicted.collectives is None:
        return
    weight_excess: dict[str, int] = {}
    for gathers, num_bytes, planned in _unplanned_gathers(subject, report):
        weight_excess[gathers[0].axes] = weight_excess.get(gathers[0].axes, 0) + num_bytes - planned
    for axes, kinds in report.compiled.collectives.items():
        planned_kinds = report.predicted.collectives.get(axes, {})
        total = sum(kinds.values())
        planned_total = sum(planned_kinds.values())
        excess = total - planned_total - weight_excess.get(axes, 0)
        if excess <= max(MIN_EXCESS_BYTES, MIN_EXCESS * planned_total):
            continue
        above = [
            kind for kind in RESHARDING_KINDS if kinds.get(kind, 0) > (1 + MIN_EXCESS) * planned_kinds.get(kind, 0)
        ]
        moves = [move for move in report.collectives if move.kind in above and move.axes == axes and not move.tensors]
        if moves:
            largest = max(moves, key=lambda move: move.num_bytes)
            constraint = f"; a sharding constraint{_location(largest.source)}" if largest.source else ""
            yield Message(
                axes,
                f"collectives over {axes} move {bytes_text(total)} per step, {bytes_text(planned_total)} planned; the "
                f"largest of the excess is an {largest.kind} of {largest.shapes}{_location(largest.source)}.",
                f"spanax check --collectives{constraint}",
                excess,
            )


def _unplanned_gathers(subject: LintSubject, report: Report) -> Iterator[tuple[list[Collective], int, int]]:
    """Yields the all-gathers of the same parameters over the same axes that exceed the plan.

    Each comes with its bytes per step and the planned bytes.
    """
    groups: dict[tuple[str, tuple[str, ...]], list[Collective]] = {}
    for move in report.collectives:
        if move.kind == "all-gather" and move.tensors and _exceeds(report, move.axes, MIN_EXCESS, "all-gather"):
            groups.setdefault((move.axes, move.tensors), []).append(move)
    for (axes, paths), gathers in groups.items():
        num_bytes = sum(gather.num_bytes for gather in gathers)
        if num_bytes > MIN_EXCESS_BYTES:
            planned = sum(subject.gathered_bytes(path, axes) for path in paths)
            if num_bytes - planned > max(MIN_EXCESS_BYTES, MIN_EXCESS * planned):
                yield gathers, num_bytes, planned


def _exceeds(report: Report, axes: str, share: float, kind: str | None = None) -> bool:
    """Returns whether the collectives over mesh axes exceed the plan, of one kind or of all kinds together."""
    compiled, planned = (
        sum(num_bytes for name, num_bytes in (side.collectives or {}).get(axes, {}).items() if kind in (None, name))
        for side in (report.compiled, report.predicted)
    )
    return compiled - planned > max(MIN_EXCESS_BYTES, share * planned)


def _location(source: str) -> str:
    return f" at {source}" if source else ""
