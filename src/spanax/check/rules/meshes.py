"""Rules on mesh axes: what splits nothing, what repeats work, what is too slow for what it carries."""

from collections.abc import Iterator

from spanax.check.checked import Checked
from spanax.check.rules.said import Said
from spanax.plan.bubble import bubble_over_ideal
from spanax.plan.layout import LAST_RESORT_AXES, TENSOR_AXES

MOST_BUBBLE = 0.10
"""The share of a step that a pipeline may wait."""


def idle_axis(checked: Checked) -> Iterator[Said]:
    """A mesh axis splits no array and no part of the batch: all along it do the same."""
    everything = (*checked.plan.leaves, *checked.plan.batch)
    split = {axis for leaf in everything for by in leaf.spec for axis in by}
    for axis, size in checked.plan.mesh.axes:
        if size > 1 and axis not in split and axis != checked.plan.layout.sequence_axis:
            yield Said(axis, f"mesh axis '{axis}' ({size}) splits nothing: {size} devices do the same work.",
                       f"{axis}=1 and a larger other axis, or a layout that uses '{axis}'")  # fmt: skip


def batch_and_weights(checked: Checked) -> Iterator[Said]:
    """One mesh axis is to split the batch and the weights while computing: one of them is always gathered."""
    for axis, names in checked.plan.layout.computed:
        both = [name for name in names if name in TENSOR_AXES + LAST_RESORT_AXES]
        if "batch" in names and both and checked.ways((axis,)) > 1:
            yield Said(
                axis,
                f"mesh axis '{axis}' splits the batch and {', '.join(both)}: no value can have both.",
                f"a mesh axis of its own for {both[0]}, or '{axis}' as a stored axis (fsdp)",
            )


def few_microbatches(checked: Checked) -> Iterator[Said]:
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
        yield Said(
            "pipe",
            f"{count} microbatches on {stages} stages: {100 * share:.0f} % of the step is waiting.",
            f"{enough} microbatches, or fewer stages",
        )


def slow_links(checked: Checked) -> Iterator[Said]:
    """An axis that moves weights or activations reaches across nodes, and takes longer than the computation."""
    seconds = checked.own.seconds
    computing = seconds["matmuls"] + seconds["memory"]
    for axis, name in (("fsdp", "weights between devices"), ("model", "activations between devices")):
        names = [one for one in checked.plan.mesh.names if _plays(checked, one) == axis]
        for one in names:
            if checked.ways((one,)) > 1 and checked.spans_nodes(one) and seconds[name] > computing:
                yield Said(
                    one,
                    f"'{one}' ({checked.ways((one,))}) spans nodes of {checked.cluster.devices_per_node}: "
                    f"{name} take {seconds[name]:.3g} s, and the computation {computing:.3g} s.",
                    f"'{one}' of at most {checked.cluster.devices_per_node}, and 'data' across the nodes",
                )


def _plays(checked: Checked, axis: str) -> str:
    layout = checked.plan.layout
    if axis in layout.stored_params:
        return "fsdp"
    return "model" if axis in layout.exclusive or axis == layout.sequence_axis else ""
