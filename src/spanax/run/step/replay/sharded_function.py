"""Replayed: how a function of a program runs on the mesh of a plan."""

from collections.abc import Mapping

from jax.sharding import Mesh

from spanax.plan.pipeline.stages import inside_stage
from spanax.plan.plan import Plan
from spanax.plan.sharding.operands import OperandSharding, operand_shardings
from spanax.plan.sharding.place import resolver_of
from spanax.plan.spmd.deferred_reductions import DeferredReductions, unreduced
from spanax.plan.spmd.sharded_program import ShardedProgram
from spanax.run.step.pipeline.layer_order import Rows
from spanax.run.step.pipeline.layer_padding import Padded
from spanax.run.step.pipeline.pipeline import in_stages
from spanax.run.step.replay.replay import Replay
from spanax.trace.jaxpr.graph import Op
from spanax.trace.program import Program
from spanax.trace.traced import Traced


def replayed(
    program: Program,
    plan: Plan,
    mesh: Mesh,
    rows: Rows | None,
    traced: Traced,
    padded: Padded | None,
    *,
    is_step: bool,
    inputs_only: bool,
) -> Replay:
    """The step of a program, or its evaluation, under the constraints of a plan.

    Args:
      program: what the plan was made for.
      plan: the plan.
      mesh: its devices.
      rows: how the rows of stacked arrays are kept, where that is not the layers' order.
      traced: the step or the evaluation.
      padded: the step around a pipeline with rows of padding.
      is_step: whether it is the step.
      inputs_only: nothing between inputs and outputs is pinned.
    """
    # Evaluated are the layers without padding, which the stages cannot divide.
    is_whole = not is_step and rows is not None and rows.is_padded
    resolver = resolver_of(program, inside_stage(plan) if is_whole else plan)

    def replay(traced: Traced) -> Replay:
        constraints = resolver.constraints(traced)
        if inputs_only:
            return Replay(traced.graph, [None] * len(constraints), {}, mesh)
        late = unreduced(ShardedProgram(resolver, traced), plan.schedule) if is_step else DeferredReductions()
        taken = operand_shardings(resolver, traced, constraints)
        free = _free(traced, taken)
        told = [None if value in free else constraint for value, constraint in enumerate(constraints)]
        return Replay(traced.graph, told, taken, mesh, late)

    if inputs_only or not is_step:
        return replay(traced if padded is None else padded.step)
    around = None if padded is None else (replay(padded.step), padded)
    return in_stages(replay(traced), traced, plan.schedule, rows, around)


def _free(traced: Traced, taken: Mapping[Op, OperandSharding]) -> set[int]:
    """One number all over that an operation asks for in its own way, and what nothing but that is made of.

    It is made as it is asked for: said to lie otherwise before, it would be gathered.
    """
    asked = {value for op, use in taken.items() for value, by in zip(op.inputs, use.inputs, strict=True) if by}
    free, pinned = asked & traced.uniform, {*traced.graph.body.outputs} - asked
    for op in reversed([*traced.graph.ops()]) if free else ():
        if op.outputs and free.issuperset(op.outputs) and pinned.isdisjoint(op.outputs):
            free |= traced.uniform.intersection(op.inputs)
        else:
            pinned.update({*op.inputs, *(value for body in op.bodies for value in body.outputs)} - asked)
    return free - pinned
