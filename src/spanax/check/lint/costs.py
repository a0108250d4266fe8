"""Rules on what a plan costs beside others: faster ones on the same devices, and memory that is short."""

from collections.abc import Iterator

from spanax.check.lint.message import Message
from spanax.check.lint.subject import LintSubject
from spanax.plan.candidate import RESERVE, Candidate
from spanax.units import bytes_text

WORTH = 1.05
"""How many times as long a plan must take before another is named: the median error of step times is as large."""


def data_parallel_faster(checked: LintSubject) -> Iterator[Message]:
    """All of it fits on one device, and data parallel is faster."""
    axes = {axis for axis, size in checked.plan.mesh.axes if size > 1}
    if axes == {"data"} and not checked.plan.layout.stored_params:
        return
    yield from _faster(checked, [one for one in checked.others if one.layout == "data"])


def hsdp_missed(checked: LintSubject) -> Iterator[Message]:
    """Weights are gathered across nodes where copies of them, each inside a node, fit."""
    stored = checked.plan.layout.stored_params
    if not stored or not any(checked.spans_nodes(axis) for axis in stored if axis in checked.plan.mesh.names):
        return
    inside = checked.cluster.devices_per_node
    others = [one for one in checked.others if one.storing == "fsdp" and one.mesh.ways(["data"]) > 1]
    others = [one for one in others if one.microbatches == checked.own.microbatches]
    yield from _faster(checked, [one for one in others if 1 < one.mesh.ways(["fsdp"]) <= inside])


def pipeline_not_needed(checked: LintSubject) -> Iterator[Message]:
    """The layers are in stages, and the same devices are faster without."""
    if checked.plan.schedule.num_stages > 1:
        yield from _faster(checked, list(checked.others))


def short_of_memory(checked: LintSubject) -> Iterator[Message]:
    """It does not fit, or leaves less than what compilers and fragments take."""
    limit = checked.cluster.memory_bytes
    if limit is None:
        return
    compiled = checked.report.compiled.peak_bytes if checked.report is not None else None
    peak, by = (compiled, "the compiler") if compiled else (checked.own.peak_bytes, "the plan")
    if peak <= limit * (1 - RESERVE):
        return
    verdict = "does not fit" if peak > limit else f"leaves less than {100 * RESERVE:.0f} %"
    best = next(iter(checked.others), None)
    fix = f"{best.layout} on {best.mesh} needs {bytes_text(best.peak_bytes)}" if best is not None else "more devices"
    yield Message("", f"{bytes_text(peak)} of {bytes_text(limit)} ({by}): it {verdict}.", fix, int(peak), peak > limit)


def state_forgotten(checked: LintSubject) -> Iterator[Message]:
    """The parameters fit on a device with room to spare, and the whole state does not."""
    limit, params = checked.cluster.memory_bytes, checked.plan.state_bytes("param")
    state = checked.plan.state_bytes()
    if limit is not None and params <= limit / 2 and state > limit and state > 2 * params:
        yield Message(
            "", f"the parameters take {bytes_text(params)} a device, and with the optimizer {bytes_text(state)} of "
            f"{bytes_text(limit)}.", "an optimizer state stored split (zero1), or a smaller optimizer", state,
        )  # fmt: skip


def _faster(checked: LintSubject, others: list[Candidate]) -> Iterator[Message]:
    own = checked.own_among_others
    best = min(others, key=lambda one: one.step_seconds, default=None)
    if best is not None and own.step_seconds > WORTH * best.step_seconds:
        more = 100 * (own.step_seconds / best.step_seconds - 1)
        yield Message(
            "",
            f"{own.layout} on {own.mesh} takes {own.step_seconds:.3g} s, {more:.0f} % longer than {best.layout}.",
            f"{best.layout} on {best.mesh}: {best.step_seconds:.3g} s, {bytes_text(best.peak_bytes)} a device",
        )
