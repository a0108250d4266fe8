"""The time of copies between devices and host, and the bytes sent between the stages of a pipeline."""

from collections import Counter
from collections.abc import Mapping
from typing import Any

import numpy as np

from spanax.hardware.chip import Chip
from spanax.plan.pipeline.schedules import Kind
from spanax.plan.pipeline.ticks import Ticks
from spanax.plan.sharding.resolve import Resolver, axes_of
from spanax.plan.spmd.terms import Terms
from spanax.trace.analysis.op_groups import Phase
from spanax.trace.pipeline.partition import PipelinePartition

Array = np.ndarray

HOST_TRANSFERS = "host transfers"
"""The term of the step time: copies of offloaded state and activations that nothing hides."""


def exposed_copies(
    terms: Terms, num_shards: Array, scale: Array, computing: Mapping[tuple[int, bool], Array], chip: Chip
) -> dict[str, Array]:
    """Returns the seconds of one microbatch, in all layers, in which copies of activations exceed the computation.

    The forward pass hides copies to the host, the backward pass those from it: a layer copies while the next of the
    same loop computes. The result is empty without copies, and on simulated devices, whose memory is that of the host.
    """
    copies = terms.host_copies
    if chip.shared or not copies.num_bytes.size:
        return {}
    num_bytes = copies.num_bytes[:, None] * np.where(copies.batched[:, None], scale, 1.0) / num_shards[copies.axes]
    seconds = np.zeros(scale.shape)
    for phase, in_phase in ((Phase.FORWARD, copies.to_host), (Phase.BACKWARD, ~copies.to_host)):
        loops = [in_phase & (copies.loop == loop) for loop in np.unique(copies.loop[in_phase])]
        runs = [copies.runs[rows].max() for rows in loops]
        num_layers = max(terms.num_layers, sum(runs))
        for rows, count in zip(loops, runs, strict=True):
            hidden = computing[phase, True] * count / num_layers
            seconds += np.maximum(chip.host_seconds(num_bytes[rows].sum(0)) - hidden, 0.0)
    return {HOST_TRANSFERS: seconds}


def exchange_rounds(num_stages: Any) -> Any:
    """Returns the permutes that send a value of one stage to all, for a number of stages or an array of them."""
    return np.ceil(np.log2(num_stages))


def stage_transfers(resolver: Resolver, cut: PipelinePartition, ticks: Ticks) -> Counter[tuple[int, Phase]]:
    """Returns the bytes that one device receives from permutations between stages in one step, by value and phase.

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

    sent = Counter[tuple[int, Phase]]()
    payloads: tuple[tuple[Kind, Phase, tuple[int, ...]], ...] = (
        ("F", Phase.FORWARD, cut.payload_forward),
        ("B", Phase.BACKWARD, cut.payload_backward),
    )
    for kind, phase, values in payloads:
        for value in values:
            sent[value, phase] += ticks.num_taken(kind) * size(value)
    rounds = int(exchange_rounds(ticks.num_stages))
    ends = [(cut.loop.body.outputs[s.index], rounds + ("head" in s.parts)) for s in cut.sums if not s.is_rows]
    ends += [(state.after, rounds) for state in cut.states]
    ends += [(value, rounds * ticks.num_microbatches) for value, _ in cut.results]
    for value, times in ends:
        sent[value, Phase.BACKWARD] += times * size(value)
    return sent
