"""Bytes sent between the stages of a pipeline per step."""

import math

from spanax.plan.pipeline.schedules import Kind
from spanax.plan.pipeline.ticks import Ticks
from spanax.plan.sharding.resolve import Resolver
from spanax.trace.pipeline.partition import PipelinePartition
from spanax.trace.variables import itemsize


def stage_transfer_bytes(resolver: Resolver, cut: PipelinePartition, ticks: Ticks) -> int:
    """Bytes that one device receives of permutations between stages in one step.

    At every tick that has a forward, activations; at every one that has a backward, their gradients; once a step what
    the ends have added up or noted, to one end (where both have a part) and then to all, twice as many at a time.

    Args:
      resolver: the layout inside of one stage.
      cut: the loop over microbatches in pieces.
      ticks: the table.
    """
    traced = resolver.program.step
    graph, constraints = traced.graph, resolver.constraints(traced)

    def size(value: int) -> int:
        lies = constraints[value]
        ways = 1 if lies is None else resolver.mesh.ways([axis for by in lies.spec for axis in by])
        return math.prod(graph.shape(value)) * itemsize(graph.avals[value].dtype) // ways

    sent: dict[Kind, tuple[int, ...]] = {"F": cut.payload_forward, "B": cut.payload_backward}
    total = sum(ticks.num_taken(kind) * sum(map(size, values)) for kind, values in sent.items())
    rounds = math.ceil(math.log2(ticks.num_stages))
    outputs = cut.loop.body.outputs
    for one in cut.sums:
        if not one.is_rows:
            total += (rounds + ("head" in one.parts)) * size(outputs[one.index])
    states = sum(size(state.after) for state in cut.states)
    results = ticks.num_microbatches * sum(size(value) for value, _ in cut.results)
    return total + rounds * (states + results)
