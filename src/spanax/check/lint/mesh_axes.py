"""Lint rules on mesh axes: idle axes, axes with two conflicting roles, pipeline bubbles, and slow interconnects."""

from collections.abc import Iterator

from spanax.check.lint.subject import LintSubject, Message
from spanax.plan.pipeline.bubble import bubble_over_ideal

MAX_BUBBLE = 0.10
"""The largest share of a step that pipeline stages may be idle."""

COMPATIBLE_WITH_BATCH = ("batch", "seq", "experts")
"""Dims that a mesh axis may shard along with the batch: their arrays have no batch dim, or are resharded at once."""

MAX_ACTIVATION_SHARE = 0.5
"""The largest ratio of activation transfers, which computation waits for, to compute time. Weight transfers overlap."""


def idle_mesh_axis(subject: LintSubject) -> Iterator[Message]:
    """A mesh axis shards no array and no batch dim, so all devices along it repeat the same work."""
    arrays = (*subject.plan.leaves, *subject.plan.batch)
    sharded = {axis for leaf in arrays for by in leaf.spec for axis in by}
    for axis, size in subject.plan.mesh.axes:
        if size > 1 and axis not in sharded and axis != subject.plan.layout.sequence_axis:
            yield Message(
                axis,
                f"mesh axis '{axis}' ({size}) shards nothing: {size} devices repeat the same work.",
                f"{axis}=1 and a larger other axis, or a layout that uses '{axis}'",
            )


def batch_and_weights_on_one_axis(subject: LintSubject) -> Iterator[Message]:
    """The layout shards both the batch and the weights over one mesh axis during computation."""
    for axis in subject.plan.mesh.names:
        names = subject.dims_of(axis)
        weights = [name for name in names if name not in COMPATIBLE_WITH_BATCH]
        if "batch" in names and weights and subject.num_shards((axis,)) > 1:
            yield Message(
                axis,
                f"mesh axis '{axis}' shards the batch and {', '.join(weights)}: no array can be sharded twice over it.",
                f"a separate mesh axis for {weights[0]}, or '{axis}' as a storage axis (fsdp)",
            )


def few_microbatches(subject: LintSubject) -> Iterator[Message]:
    """A pipeline has too few microbatches for its number of stages."""
    schedule = subject.plan.schedule
    if schedule.num_stages == 1:
        return
    stages = schedule.num_stages
    count = schedule.microbatches
    chunks = schedule.num_chunks
    bubble = bubble_over_ideal(schedule.pipeline, stages, count, chunks)
    share = bubble / (1 + bubble)
    if share > MAX_BUBBLE:
        sufficient = count
        while bubble_over_ideal(schedule.pipeline, stages, sufficient, chunks) > MAX_BUBBLE / (1 - MAX_BUBBLE):
            sufficient += stages
        yield Message(
            "pipe",
            f"with {count} microbatches on {stages} stages, {100 * share:.0f} % of the step is pipeline bubble.",
            f"{sufficient} microbatches, or fewer stages",
        )


def slow_links(subject: LintSubject) -> Iterator[Message]:
    """A mesh axis spans nodes, and its collectives take too long to overlap with computation."""
    seconds = subject.candidate.seconds
    compute = seconds["matmuls"] + seconds["memory"]
    for role, name, share in (
        ("fsdp", "weights between devices", 1.0),
        ("model", "activations between devices", MAX_ACTIVATION_SHARE),
    ):
        axes = [axis for axis in subject.plan.mesh.names if _role(subject, axis) == role]
        for axis in axes:
            if subject.num_shards((axis,)) > 1 and subject.spans_nodes(axis) and seconds[name] > share * compute:
                yield Message(
                    axis,
                    f"'{axis}' ({subject.num_shards((axis,))}) spans nodes of {subject.cluster.devices_per_node} "
                    f"devices: {name} take {seconds[name]:.3g} s, and computation takes {compute:.3g} s.",
                    f"'{axis}' of at most {subject.cluster.devices_per_node}, and 'data' across nodes",
                )


def _role(subject: LintSubject, axis: str) -> str:
    layout = subject.plan.layout
    if axis in layout.stored_params:
        return "fsdp"
    return "model" if axis in layout.exclusive or axis == layout.sequence_axis else ""
