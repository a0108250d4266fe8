"""The time of copies between devices and host, and the bytes sent between the stages of a pipeline."""

import math
from collections.abc import Mapping

import numpy as np

from spanax.hardware.chip import Chip
from spanax.plan.pipeline.schedules import Kind
from spanax.plan.pipeline.ticks import Ticks
from spanax.plan.sharding.resolve import Resolver, axes_of
from spanax.plan.spmd.terms import HostCopies
from spanax.trace.analysis.op_groups import Phase
from spanax.trace.pipeline.partition import PipelinePartition

Array = np.ndarray

HOST_TRANSFERS = "host transfers"
"""The term of the step time: copies of offloaded state and activations that nothing hides."""


def exposed_copies(
    copies: HostCopies, num_shards: Array, scale: Array, computing: Mapping[tuple[int, bool], Array], chip: Chip
) -> dict[str, Array]:
    """Returns the seconds of one microbatch, in all layers, in which copies of activations exceed the computation.

    The forward pass hides copies to the host, the backward pass those from it: layers copy while others compute.
    The result is empty without copies, and on simulated devices, whose memory is that of the host.
    """
    if chip.shared or not copies.num_bytes.size:
        return {}
    num_bytes = copies.num_bytes[:, None] * np.where(copies.batched[:, None], scale, 1.0) / num_shards[copies.axes]
    seconds = np.zeros(scale.shape)
    for phase, rows in ((Phase.FORWARD, copies.to_host), (Phase.BACKWARD, ~copies.to_host)):
        seconds += np.maximum(chip.host_seconds(num_bytes[rows].sum(0)) - computing[phase, True], 0.0)
    return {HOST_TRANSFERS: seconds}


def stage_transfer_bytes(resolver: Resolver, cut: PipelinePartition, ticks: Ticks) -> int:
    """Returns the bytes that one device receives from permutations between stages in one step.

    Activations at every tick with a forward pass; their gradients at every tick with a backward pass; once per step the
    sums and records of the first and last stages, to one of them (where both have a part) and then to all, doubling the
    number of stages each round.

    Args:
      resolver: the layout inside one stage.
      cut: the partitioned loop over microbatches.
      ticks: the schedule's table.
    """
    traced = resolver.program.step
    graph = traced.graph
    constraints = resolver.constraints(traced)

    def size(value: int) -> int:
        constraint = constraints[value]
        ways = 1 if constraint is None else resolver.mesh.ways([*axes_of(constraint.spec)])
        return graph.num_bytes(value) // ways

    sent: dict[Kind, tuple[int, ...]] = {"F": cut.payload_forward, "B": cut.payload_backward}
    total = sum(ticks.num_taken(kind) * sum(map(size, values)) for kind, values in sent.items())
    rounds = math.ceil(math.log2(ticks.num_stages))
    outputs = cut.loop.body.outputs
    for term in cut.sums:
        if not term.is_rows:
            total += (rounds + ("head" in term.parts)) * size(outputs[term.index])
    states = sum(size(state.after) for state in cut.states)
    results = ticks.num_microbatches * sum(size(value) for value, _ in cut.results)
    return total + rounds * (states + results)
