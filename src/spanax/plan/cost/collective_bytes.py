"""Bytes that one device receives from collectives per step under a plan."""

from spanax.plan.cost.stage_transfers import stage_transfer_bytes
from spanax.plan.cost.terms import Terms
from spanax.plan.pipeline.layer_partition import shares
from spanax.plan.pipeline.stages import AXIS, inside_stage
from spanax.plan.pipeline.ticks import ticks_of
from spanax.plan.plan import Plan
from spanax.plan.sharding.place import as_planned, resolver_of
from spanax.plan.spmd.count_terms import count_terms
from spanax.plan.spmd.deferred_reductions import unreduced
from spanax.plan.spmd.sharded_program import ShardedProgram
from spanax.trace.pipeline.partition import pipeline_partition
from spanax.trace.program import Program

Moved = dict[str, dict[str, int]]
"""Bytes of results by mesh axes and kind of collective."""


def laid_as_planned(program: Program, plan: Plan) -> ShardedProgram:
    """Returns the step as it would run, sharded inside one stage.

    Raises:
      SpanaxError: the plan was made for another program, or cannot run.
    """
    planned = as_planned(program, plan)
    return ShardedProgram(resolver_of(program, inside_stage(plan)).of(planned), planned.step)


def moved_bytes(laid: ShardedProgram, plan: Plan, terms: Terms) -> Moved:
    """Returns the bytes of all collectives, including transfers between stages."""
    result = _by_axes(laid, plan, terms)
    if plan.schedule.num_stages > 1:
        pieces = pipeline_partition(laid.traced, plan.schedule.microbatches)
        result[AXIS] = {"collective-permute": stage_transfer_bytes(laid.resolver, pieces, ticks_of(plan.schedule))}
    return result


def moved_of(laid: ShardedProgram, plan: Plan, path: str) -> Moved:
    """Returns the bytes of the collectives of one leaf of the state, its gradient and its update."""
    only = laid.traced.leaf_aliases([leaf.path for leaf in laid.resolver.program.leaves].index(path))
    return _by_axes(laid, plan, count_terms(laid, only, late=unreduced(laid, plan.schedule)))


def num_shares(laid: ShardedProgram, plan: Plan) -> float:
    """Returns the number of parts that the layers are divided into, padding included."""
    schedule = plan.schedule
    return float(shares(laid.traced.layer_carry[1], schedule.num_stages, schedule.num_chunks))


def _by_axes(laid: ShardedProgram, plan: Plan, terms: Terms) -> Moved:
    result: Moved = {}
    moved = terms.moved_bytes(inside_stage(plan).mesh, num_stages=num_shares(laid, plan))
    for (kind, axes), num_bytes in sorted(moved.items()):
        result.setdefault(axes, {})[kind] = round(num_bytes)
    return result
