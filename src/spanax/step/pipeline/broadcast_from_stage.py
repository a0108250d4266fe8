"""Broadcasts values from one stage of a pipeline to all stages.

Broadcasts use `ppermute` only, like all other communication between stages, so all stages receive identical bits.
"""

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax

from spanax.plan.pipeline.stages import AXIS
from spanax.trace.pipeline.partition import PipelinePartition


def broadcast_carries(
    partition: PipelinePartition, by_stage: dict[int, Any], num_stages: int, index: Any
) -> dict[int, Any]:
    """Returns the carried sums and states, replicated over all stages, after the last tick.

    Args:
      partition: the partitioned loop over microbatches.
      by_stage: the local values; a sum starts from its initial value on the first stage, and from zero on the others.
      num_stages: number of stages.
      index: index of this stage.
    """
    carries = dict(by_stage)
    last = num_stages - 1
    for carried_sum in partition.sums:
        if not carried_sum.is_rows:
            array = carries[carried_sum.index]
            if "head" in carried_sum.parts:
                array = array + lax.ppermute(array, AXIS, [(last, 0)])
            carries[carried_sum.index] = broadcast_from_stage(array, 0, num_stages, index)
    for position, state in enumerate(partition.states):
        carries[state.index] = broadcast_from_stage(
            carries[state.index], 0 if position < partition.num_front_states else last, num_stages, index
        )
    return carries


def broadcast_results(partition: PipelinePartition, arrays: Sequence[Any], num_stages: int, index: Any) -> list[Any]:
    """Returns the outputs of all microbatches, replicated over all stages, after the last tick."""
    sources = [num_stages - 1 if piece == "head" else 0 for _, piece in partition.results]
    return [
        broadcast_from_stage(array, source, num_stages, index) for array, source in zip(arrays, sources, strict=True)
    ]


def broadcast_from_stage(array: Any, source: int, num_stages: int, index: Any) -> Any:
    """Returns the array of one stage on all stages; each round doubles the number of stages that have it."""
    reach = 1
    while reach < num_stages:
        pairs = [
            ((source + offset) % num_stages, (source + offset + reach) % num_stages)
            for offset in range(min(reach, num_stages - reach))
        ]
        received = lax.ppermute(array, AXIS, pairs)
        is_receiver = (index == jnp.asarray([pair[1] for pair in pairs])).any()
        array = jnp.where(is_receiver, received, array)
        reach *= 2
    return array
