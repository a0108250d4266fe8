"""Runs the loop over microbatches of a step as a pipeline, by the tick table of its schedule.

At each tick every stage runs its own task; then activations are sent to the next stage and their gradients to the
previous one. `pipe` is a manual mesh axis; XLA's partitioner shards each stage over all other axes.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from spanax.plan.pipeline.stages import AXIS
from spanax.plan.pipeline.ticks import Ticks, ticks_of
from spanax.plan.plan import Schedule
from spanax.step.pipeline.layer_order import LayerOrder
from spanax.step.pipeline.layer_padding import PaddedStep
from spanax.step.pipeline.stage import Stage, Values, converted
from spanax.step.placement import platform_of
from spanax.step.replay.replay import Replay
from spanax.trace.analysis.step_analysis import StepAnalysis
from spanax.trace.jaxpr.graph import Op
from spanax.trace.jaxpr.loops import SplitBackward, split_backward
from spanax.trace.pipeline.partition import PipelinePartition, check_order_invariant, pipeline_partition


@dataclass(frozen=True, eq=False)
class OuterStep:
    """The step around a pipeline, which stores stacked arrays in row order; the pipeline itself uses layer order.

    Attributes:
      replay: the replay of the step.
      loop: its loop over microbatches.
      prepared_ops: operations before the loop that read the rows of all layers.
      rows: the row order of stacked arrays, if it differs from the order of the layers.
      dim: returns the layer dim of a value, or None.
    """

    replay: Replay
    loop: Op
    prepared_ops: Sequence[Op]
    rows: LayerOrder | None
    dim: Callable[[int], int | None]

    def to_layers(self, value: int, array: Any) -> Any:
        """Reorders an operand of the loop from row order to layer order."""
        return array if self.rows is None else self.rows.to_layers_along(array, self.dim(value))

    def to_rows(self, value: int, array: Any) -> Any:
        """Reorders a result of the loop from layer order to row order."""
        return array if self.rows is None else self.rows.to_rows_along(array, self.dim(value))


def pipelined_replay(
    replay: Replay,
    traced: StepAnalysis,
    schedule: Schedule,
    rows: LayerOrder | None = None,
    padded: tuple[Replay, PaddedStep] | None = None,
) -> Replay:
    """Returns a replay that runs the loop over microbatches as a pipeline, if the schedule has stages.

    Args:
      replay: the replay of the step.
      traced: the step.
      schedule: the schedule.
      rows: the row order of stacked arrays, if it differs from the order of the layers.
      padded: the replay of the step with padded rows and that step, if there are padded rows.

    Raises:
      SpanaxError: the step cannot be partitioned into stages.
    """
    if schedule.num_stages == 1:
        return replay
    partition = pipeline_partition(traced, schedule.microbatches)
    table = ticks_of(schedule)
    instead: dict[Op, Any] = {}
    if padded is None:
        dim = partial(rows.dim, traced) if rows else lambda value: None
        if rows is not None:
            check_order_invariant(traced, partition)
        outer = OuterStep(replay, partition.loop.op, partition.prepared_ops, rows, dim)
    else:
        padded_replay, step = padded
        outer_partition = pipeline_partition(step.step, schedule.microbatches)
        instead |= step.masked(padded_replay, partition, outer_partition)
        padded_replay = replace(padded_replay, instead=instead)
        outer = OuterStep(padded_replay, outer_partition.loop.op, outer_partition.prepared_ops, rows, step.dim)
    # On simulated devices, a collective inside of a task waits for all devices, including those of other stages.
    lockstep = platform_of(replay.mesh) == "cpu" and replay.mesh.size > schedule.num_stages
    run = pipelined_loop(replay, partition, table, outer, lockstep=lockstep)
    return replace(outer.replay, instead={**instead, outer.loop: run})


def pipelined_loop(
    replay: Replay, partition: PipelinePartition, ticks: Ticks, outer: OuterStep, *, lockstep: bool
) -> Callable[[Sequence[Any]], list[Any]]:
    """Returns the replacement of the loop over microbatches: a function of its operands that returns its results.

    Args:
      replay: the replay of the program outside of the pipeline.
      partition: the partition of the loop.
      ticks: the tick table.
      outer: the step around the loop.
      lockstep: run each task of a tick on all stages, and discard its results on stages that do not have it.
    """
    loop = partition.loop
    split = split_backward(partition.backward) if ticks.is_split else None
    inner = _stage_replay(replay, split)
    layer_carries = [item.index for item in partition.sums if item.is_rows]
    layer_carries += [state.index for state in partition.layer_states]
    other_carries = {*layer_carries, *partition.unchanged}
    stage_carries = [index for index in range(loop.num_carried) if index not in other_carries]

    def run_stage(
        rows: list[Any], by_layer: Values, by_stage: Values, invariants: Values, microbatches: list[Any], table: Any
    ) -> tuple[Values, Values, list[Any]]:
        local_rows = dict(zip(partition.rows, rows, strict=True))
        stage = Stage(
            inner, partition, ticks, lockstep, split, local_rows, invariants, microbatches, lax.axis_index(AXIS)
        )
        return stage.run(by_layer, by_stage, table)

    sharded = PartitionSpec(AXIS)
    replicated = PartitionSpec()
    run_stages = jax.shard_map(
        run_stage,
        mesh=replay.mesh,
        in_specs=(sharded, sharded, replicated, replicated, replicated, replicated),
        out_specs=(sharded, replicated, replicated),
        axis_names={AXIS},
        check_vma=False,
    )
    reads = _reads(partition)
    outputs = loop.body.outputs
    constants = replay.graph.constants
    pairs = list(zip(loop.body.inputs, loop.op.inputs, strict=True))[: loop.num_consts]

    def run(ins: Sequence[Any]) -> list[Any]:
        values: Values = dict(zip(loop.body.inputs, ins, strict=True))
        values |= {value: outer.to_rows(value, constants[operand]) for value, operand in pairs if operand in constants}
        outer.replay.ops(outer.prepared_ops, values)
        _, carried, microbatches = loop.by_role(ins)
        body_carries = loop.body.inputs[loop.num_consts :]
        consts = [*loop.body.inputs[: loop.num_consts], *partition.prepared, *partition.unchanged.values()]
        invariants = {value: outer.to_layers(value, values[value]) for value in consts if value in reads}
        by_layer, by_stage, results = run_stages(
            outer.replay.read(values, partition.rows),
            {index: carried[index] for index in layer_carries},
            {index: outer.to_layers(body_carries[index], carried[index]) for index in stage_carries},
            invariants,
            microbatches,
            jnp.asarray(ticks.table),
        )
        by_stage = {index: outer.to_rows(outputs[index], array) for index, array in by_stage.items()}
        carries = by_layer | by_stage | {index: carried[index] for index in partition.unchanged}
        for item in partition.sums:
            for part in item.parts.get("always", ()):
                (summand,) = outer.replay.read(values, [part.value])
                carries[item.index] = carries[item.index] + converted(part, summand) * ticks.num_microbatches
        stacked = [outer.to_rows(*pair) for pair in zip(loop.op.outputs[loop.num_carried :], results, strict=True)]
        return [*(carries[index] for index in range(loop.num_carried)), *stacked]

    return run


def _stage_replay(replay: Replay, split: SplitBackward | None) -> Replay:
    """Returns the replay inside of a stage; operations of a split backward pass inherit their original shardings."""
    uses = dict(replay.uses)
    sums = dict(replay.unreduced.sums)
    for op, written in split.as_written.items() if split else ():
        uses |= {op: uses[written]} if written in uses else {}
        sums |= {op: sums[written]} if written in sums else {}
    deferred = replace(replay.unreduced, sums=sums)
    return replace(replay, uses=uses, unreduced=deferred, instead={}, manual=frozenset([AXIS]))


def _reads(partition: PipelinePartition) -> set[int]:
    """Returns the values that the pieces read, except the rows of each stage."""
    pieces = (partition.front_ops, partition.head_ops, partition.end_ops, partition.forward_ops, partition.backward_ops)
    reads = {value for ops in pieces for op in ops for value in op.inputs}
    for loop in (partition.forward, partition.backward):
        reads |= {*loop.carried, *loop.consts, *loop.scanned}
    reads |= {*partition.payload_forward, *partition.payload_backward}
    reads |= {part.value for item in partition.sums for parts in item.parts.values() for part in parts}
    reads |= {state.after for state in partition.states} | {value for value, _ in partition.results}
    return reads - {*partition.rows}
