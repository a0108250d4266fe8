"""Runs the step of a program, or its evaluation, on the mesh of a plan."""

from collections.abc import Mapping, Sequence

from jax.sharding import Mesh

from spanax.plan.pipeline.stages import inside_stage
from spanax.plan.place import resolver_of
from spanax.plan.plan import Plan
from spanax.plan.sharding.operands import OperandSharding, operand_shardings
from spanax.plan.sharding.resolve import Constraint
from spanax.plan.spmd.deferred_reductions import DeferredReductions, unreduced
from spanax.plan.spmd.sharded_program import ShardedProgram
from spanax.step.pipeline.layer_order import LayerOrder
from spanax.step.pipeline.layer_padding import PaddedStep
from spanax.step.pipeline.pipeline import pipelined_replay
from spanax.step.replay.replay import Replay
from spanax.trace.analysis.step_analysis import StepAnalysis
from spanax.trace.jaxpr.graph import Op
from spanax.trace.program import Program


def sharded_function(
    program: Program,
    plan: Plan,
    mesh: Mesh,
    rows: LayerOrder | None,
    traced: StepAnalysis,
    padded: PaddedStep | None,
    *,
    is_step: bool,
    inputs_only: bool,
) -> Replay:
    """Returns the replay of a step, or of an evaluation, under the sharding constraints of a plan.

    Args:
      program: the program that the plan was made for.
      plan: the plan.
      mesh: the devices.
      rows: the row order of stacked arrays, if it differs from the order of the layers.
      traced: the step or the evaluation.
      padded: the step around a pipeline with padded rows.
      is_step: whether `traced` is the step.
      inputs_only: constrain only inputs and outputs, no intermediate values.
    """
    # An evaluation takes the layers without padding, whose number is not a multiple of the stages.
    is_unpadded = not is_step and rows is not None and rows.is_padded
    resolver = resolver_of(program, inside_stage(plan) if is_unpadded else plan)

    def replay(traced: StepAnalysis) -> Replay:
        constraints = resolver.constraints(traced)
        if inputs_only:
            return Replay(traced.graph, [None] * len(constraints), {}, mesh)
        deferred = unreduced(ShardedProgram(resolver, traced), plan.schedule) if is_step else DeferredReductions()
        op_shardings = operand_shardings(resolver, traced, constraints)
        unconstrained = _unconstrained(traced, op_shardings, constraints)
        pinned = [None if value in unconstrained else constraint for value, constraint in enumerate(constraints)]
        return Replay(traced.graph, pinned, op_shardings, mesh, deferred)

    if inputs_only or not is_step:
        return replay(traced if padded is None else padded.step)
    padded_replay = None if padded is None else (replay(padded.step), padded)
    return pipelined_replay(replay(traced), traced, plan.schedule, rows, padded_replay)


def _unconstrained(
    traced: StepAnalysis, op_shardings: Mapping[Op, OperandSharding], constraints: Sequence[Constraint | None]
) -> set[int]:
    """Returns uniform values that an operation reshards for itself, and those that only such values depend on.

    They are computed where they are used: a constraint to another sharding would gather them.
    """
    resharded = {
        value
        for op, use in op_shardings.items()
        for value, constraint in zip(op.inputs, use.inputs, strict=True)
        if constraint
    }
    loops = (op for op in traced.graph.ops() if op.name == "scan")
    carried = (pair for op in loops for pair in traced.graph.wires(op).inputs)
    resharded |= {outer for outer, inner in carried if constraints[outer] != constraints[inner]}
    unconstrained = resharded & traced.uniform
    pinned = {*traced.graph.body.outputs} - resharded
    for op in reversed([*traced.graph.ops()]) if unconstrained else ():
        if op.outputs and unconstrained.issuperset(op.outputs) and pinned.isdisjoint(op.outputs):
            unconstrained |= traced.uniform.intersection(op.inputs)
            continue
        pairs = traced.graph.wires(op).inputs if op.bodies else ()
        used = {outer for outer, inner in pairs if inner not in unconstrained - pinned}
        passed = {outer for outer, _ in pairs} - used
        unconstrained |= traced.uniform & passed
        pinned.update({*op.inputs, *(value for body in op.bodies for value in body.outputs)} - resharded - passed)
    return unconstrained - pinned
