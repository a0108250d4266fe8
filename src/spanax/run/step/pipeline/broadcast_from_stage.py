"""Ends: what the first and the last stage of a pipeline know after the last tick, told to all stages.

By permutations alone: nothing else ever goes from stage to stage, and all of them end with the same bits.
"""

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax

from spanax.plan.pipeline.stages import AXIS
from spanax.trace.pipeline.partition import PipelinePartition


def shared(cut: PipelinePartition, by_stage: dict[int, Any], num_stages: int, index: Any) -> dict[int, Any]:
    """Sums and states as all stages know them in the end.

    Args:
      cut: the loop over microbatches in pieces.
      by_stage: what each stage has of them; a sum began on the first stage, and from nothing on the others.
      num_stages: how many there are.
      index: which of them this one is.
    """
    found, last = dict(by_stage), num_stages - 1
    for one in cut.sums:
        if not one.is_rows:
            array = found[one.index]
            if "head" in one.parts:
                array = array + lax.ppermute(array, AXIS, [(last, 0)])
            found[one.index] = broadcast_from_stage(array, 0, num_stages, index)
    for at, state in enumerate(cut.states):
        found[state.index] = broadcast_from_stage(
            found[state.index], 0 if at < cut.num_front_states else last, num_stages, index
        )
    return found


def results(cut: PipelinePartition, arrays: Sequence[Any], num_stages: int, index: Any) -> list[Any]:
    """What is left of every microbatch, as all stages know it in the end."""
    places = [num_stages - 1 if where == "head" else 0 for _, where in cut.results]
    return [broadcast_from_stage(array, place, num_stages, index) for array, place in zip(arrays, places, strict=True)]


def broadcast_from_stage(array: Any, source: int, num_stages: int, index: Any) -> Any:
    """What one stage has, on all stages: those that know it tell as many others at a time."""
    reach = 1
    while reach < num_stages:
        pairs = [
            ((source + at) % num_stages, (source + at + reach) % num_stages)
            for at in range(min(reach, num_stages - reach))
        ]
        got = lax.ppermute(array, AXIS, pairs)
        hears = (index == jnp.asarray([pair[1] for pair in pairs])).any()
        array = jnp.where(hears, got, array)
        reach *= 2
    return array
