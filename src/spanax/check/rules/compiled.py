"""Rules on the compiled program: work done twice, and what moves without having been planned."""

from collections.abc import Iterator

from spanax.check.checked import Checked
from spanax.check.rules.said import Said
from spanax.units import bytes_text

REPEATED = 1.05
"""How many times the plan's FLOPs a device may do."""

UNPLANNED, SMALL_BYTES = 0.25, 1 << 20
"""By how much of what is planned, and by how many bytes, what moves must exceed it."""


def repeated_work(checked: Checked) -> Iterator[Said]:
    """The compiled program does more arithmetic on each device than its share."""
    report = checked.report
    if report is None or not report.compiled.flops or not report.predicted.flops:
        return
    ratio = report.compiled.flops / report.predicted.flops
    if ratio > REPEATED:
        yield Said("", f"each device does {ratio:.2f} times its share of the arithmetic.",
                   "a layout whose axes split what is computed; see the axes that split nothing")  # fmt: skip


def unplanned_activations(checked: Checked) -> Iterator[Said]:
    """Activations are gathered or exchanged that the plan does not move."""
    report = checked.report
    if report is None or report.compiled.collectives is None or report.predicted.collectives is None:
        return
    for axes, kinds in report.compiled.collectives.items():
        planned = report.predicted.collectives.get(axes, {})
        for kind in ("all-gather", "all-to-all"):
            moved, meant = kinds.get(kind, 0), planned.get(kind, 0)
            if moved - meant > max(SMALL_BYTES, UNPLANNED * meant):
                largest = max(
                    (one for one in report.collectives if one.kind == kind and one.axes == axes and not one.tensors),
                    key=lambda one: one.num_bytes, default=None,
                )  # fmt: skip
                if largest is not None:
                    at = f" at {largest.source}" if largest.source else ""
                    yield Said(
                        axes,
                        f"{kind} over {axes}: {bytes_text(moved)} a step, {bytes_text(meant)} planned; the largest is "
                        f"{largest.shapes}{at}.",
                        f"spanax check --collectives; a constraint where {largest.op_name or largest.name} is made",
                        moved - meant,
                    )
