"""Rules on mesh axes: what splits nothing, what repeats work, what is too slow for what it carries."""

from collections.abc import Iterator

from spanax.check.lint.message import Message
from spanax.check.lint.subject import LintSubject
from spanax.plan.pipeline.bubble import bubble_over_ideal

MOST_BUBBLE = 0.10
"""The share of a step that a pipeline may wait."""

BESIDE_BATCH = ("batch", "seq", "experts")
"""What a mesh axis may split besides the batch: what has no batch, or trades it for another split at once."""

WAITED = 0.5
"""How long activations may travel, over the computation: it waits for them. Weights travel beside it."""


def idle_axis(checked: LintSubject) -> Iterator[Message]:
    """A mesh axis splits no array and no part of the batch: all along it do the same."""
    everything = (*checked.plan.leaves, *checked.plan.batch)
    split = {axis for leaf in everything for by in leaf.spec for axis in by}
    for axis, size in checked.plan.mesh.axes:
        if size > 1 and axis not in split and axis != checked.plan.layout.sequence_axis:
            yield Message(axis, f"mesh axis '{axis}' ({size}) splits nothing: {size} devices do the same work.",
                       f"{axis}=1 and a larger other axis, or a layout that uses '{axis}'")  # fmt: skip


def batch_and_weights(checked: LintSubject) -> Iterator[Message]:
    """One mesh axis is to split the batch and the weights while computing: one of them is always gathered."""
    for axis in checked.plan.mesh.names:
        names = checked.names_for(axis)
        both = [name for name in names if name not in BESIDE_BATCH]
        if "batch" in names and both and checked.ways((axis,)) > 1:
            yield Message(
                axis,
                f"mesh axis '{axis}' splits the batch and {', '.join(both)}: no value can have both.",
                f"a mesh axis of its own for {both[0]}, or '{axis}' as a stored axis (fsdp)",
            )


def few_microbatches(checked: LintSubject) -> Iterator[Message]:
    """A pipeline of many stages and few microbatches waits."""
    schedule = checked.plan.schedule
    if schedule.num_stages == 1:
        return
    stages, count, chunks = schedule.num_stages, schedule.microbatches, schedule.num_chunks
    over = bubble_over_ideal(schedule.pipeline, stages, count, chunks)
    share = over / (1 + over)
    if share > MOST_BUBBLE:
        enough = count
        while bubble_over_ideal(schedule.pipeline, stages, enough, chunks) > MOST_BUBBLE / (1 - MOST_BUBBLE):
            enough += stages
        yield Message(
            "pipe",
            f"{count} microbatches on {stages} stages: {100 * share:.0f} % of the step is waiting.",
            f"{enough} microbatches, or fewer stages",
        )


def slow_links(checked: LintSubject) -> Iterator[Message]:
    """An axis reaches across nodes, and its weights take longer than the computation, or its activations half of it."""
    seconds = checked.own.seconds
    computing = seconds["matmuls"] + seconds["memory"]
    for axis, name, share in (
        ("fsdp", "weights between devices", 1.0),
        ("model", "activations between devices", WAITED),
    ):
        names = [one for one in checked.plan.mesh.names if _plays(checked, one) == axis]
        for one in names:
            if checked.ways((one,)) > 1 and checked.spans_nodes(one) and seconds[name] > share * computing:
                yield Message(
                    one,
                    f"'{one}' ({checked.ways((one,))}) spans nodes of {checked.cluster.devices_per_node}: "
                    f"{name} take {seconds[name]:.3g} s, and the computation {computing:.3g} s.",
                    f"'{one}' of at most {checked.cluster.devices_per_node}, and 'data' across the nodes",
                )


def _plays(checked: LintSubject, axis: str) -> str:
    layout = checked.plan.layout
    if axis in layout.stored_params:
        return "fsdp"
    return "model" if axis in layout.exclusive or axis == layout.sequence_axis else ""
