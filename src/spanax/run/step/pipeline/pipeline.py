"""Pipeline: the loop over microbatches of a step, run by stages after the table of a schedule.

All stages take one tick together: each its own task, then activations go one stage on and their gradients one stage
back. Inside of a stage the mesh's other axes split what the layout says; only `pipe` is by hand.
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
from spanax.run.step.pipeline.layer_order import Rows, check_alike
from spanax.run.step.pipeline.layer_padding import Padded
from spanax.run.step.pipeline.stage import Stage, Values, converted
from spanax.run.step.platform import platform_of
from spanax.run.step.replay.replay import Replay
from spanax.trace.analysis.step_analysis import StepAnalysis
from spanax.trace.jaxpr.graph import Op
from spanax.trace.pipeline.partition import PipelinePartition, pipeline_partition
from spanax.trace.pipeline.split_backward import SplitBackward, split_backward


@dataclass(frozen=True, eq=False)
class Outside:
    """The step around a pipeline, whose stacked arrays lie as they are kept; inside, layers come in their order.

    Attributes:
      replay: how it runs.
      loop: its loop over microbatches.
      prepared_ops: what is computed before the loop, of all layers' rows.
      rows: how rows are kept, where that is not the layers' order.
      dim: the dim of layers of a value, if it has one.
    """

    replay: Replay
    loop: Op
    prepared_ops: Sequence[Op]
    rows: Rows | None
    dim: Callable[[int], int | None]

    def in_order(self, value: int, array: Any) -> Any:
        """A value of the loop, its layers in their order."""
        return array if self.rows is None else self.rows.in_order_along(array, self.dim(value))

    def kept(self, value: int, array: Any) -> Any:
        """The other way round."""
        return array if self.rows is None else self.rows.kept_along(array, self.dim(value))


def in_stages(
    replay: Replay,
    traced: StepAnalysis,
    schedule: Schedule,
    rows: Rows | None = None,
    padded: tuple[Replay, Padded] | None = None,
) -> Replay:
    """A replay whose loop over microbatches is a pipeline, where the schedule has one.

    Args:
      replay: the step as it was written.
      traced: the same.
      schedule: how it is to run.
      rows: how the rows of stacked arrays are kept, where that is not the layers' order.
      padded: the step with rows of padding and how that runs, where there are such rows.

    Raises:
      SpanaxError: the step cannot be divided so.
    """
    if schedule.num_stages == 1:
        return replay
    pieces = pipeline_partition(traced, schedule.microbatches)
    table = ticks_of(schedule)
    instead: dict[Op, Any] = {}
    if padded is None:
        dim = partial(rows.dim, traced) if rows else lambda value: None
        if rows is not None:
            check_alike(traced, pieces)
        outside = Outside(replay, pieces.loop.op, pieces.prepared_ops, rows, dim)
    else:
        outer, both = padded
        other = pipeline_partition(both.step, schedule.microbatches)
        instead |= both.masked(outer, pieces, other)
        outside = Outside(replace(outer, instead=instead), other.loop.op, other.prepared_ops, rows, both.dim)
    # Each permutation inside of a task waits for all simulated devices, those of other stages too.
    meets = platform_of(replay.mesh) == "cpu" and replay.mesh.size > schedule.num_stages
    run = pipelined(replay, pieces, table, outside, meets=meets)
    return replace(outside.replay, instead={**instead, outside.loop: run})


def pipelined(
    replay: Replay, pieces: PipelinePartition, ticks: Ticks, outside: Outside, *, meets: bool
) -> Callable[[Sequence[Any]], list[Any]]:
    """What runs in place of the loop over microbatches: a function of its operands that returns its results.

    Args:
      replay: the program, as it runs outside of the pipeline.
      pieces: the loop, cut.
      ticks: who does what when.
      outside: what the loop stands in.
      meets: whether all stages take every task that one of them has at a tick, and all but that one forget it.
    """
    loop = pieces.loop
    two = split_backward(pieces.backward) if ticks.is_split else None
    inner = _inside(replay, two)
    divided = [one.index for one in pieces.sums if one.is_rows] + [state.index for state in pieces.layer_states]

    def inside(
        rows: list[Any], by_rows: Values, by_stage: Values, whole: Values, microbatches: list[Any], table: Any
    ) -> tuple[Values, Values, list[Any]]:
        known = dict(zip(pieces.rows, rows, strict=True))
        stage = Stage(inner, pieces, ticks, meets, two, known, whole, microbatches, lax.axis_index(AXIS))
        return stage.run(by_rows, by_stage, table)

    split, alike = PartitionSpec(AXIS), PartitionSpec()
    staged = jax.shard_map(
        inside,
        mesh=replay.mesh,
        in_specs=(split, split, alike, alike, alike, alike),
        out_specs=(split, alike, alike),
        axis_names={AXIS},
        check_vma=False,
    )

    reads = _read(pieces)
    outputs, constants = loop.body.outputs, replay.graph.constants
    pairs = list(zip(loop.body.inputs, loop.op.inputs, strict=True))[: loop.num_consts]

    def run(ins: Sequence[Any]) -> list[Any]:
        values: Values = dict(zip(loop.body.inputs, ins, strict=True))
        values |= {value: outside.kept(value, constants[outer]) for value, outer in pairs if outer in constants}
        outside.replay.ops(outside.prepared_ops, values)
        carried = ins[loop.num_consts : loop.num_consts + loop.num_carried]
        befores = loop.body.inputs[loop.num_consts :]
        microbatches = list(ins[loop.num_consts + loop.num_carried :])
        consts = [*loop.body.inputs[: loop.num_consts], *pieces.prepared, *pieces.unchanged.values()]
        whole = {value: outside.in_order(value, values[value]) for value in consts if value in reads}
        rest = {at: value for at, value in enumerate(carried) if at not in divided and at not in pieces.unchanged}
        by_rows, by_stage, results = staged(
            outside.replay.read(values, pieces.rows),
            {at: carried[at] for at in divided},
            {at: outside.in_order(befores[at], array) for at, array in rest.items()},
            whole,
            microbatches,
            jnp.asarray(ticks.table),
        )
        by_stage = {at: outside.kept(outputs[at], array) for at, array in by_stage.items()}
        found = by_rows | by_stage | {at: carried[at] for at in pieces.unchanged}
        for one in pieces.sums:
            for part in one.parts.get("always", ()):
                (extra,) = outside.replay.read(values, [part.value])
                found[one.index] = found[one.index] + converted(part, extra) * ticks.num_microbatches
        stacked = zip(loop.op.outputs[loop.num_carried :], results, strict=True)
        return [*(found[at] for at in range(loop.num_carried)), *(outside.kept(value, each) for value, each in stacked)]

    return run


def _inside(replay: Replay, two: SplitBackward | None) -> Replay:
    """How operations run inside of a stage, those of a layer's halves as they were written."""
    uses, sums = dict(replay.uses), dict(replay.unreduced.sums)
    for op, written in two.as_written.items() if two else ():
        uses |= {op: uses[written]} if written in uses else {}
        sums |= {op: sums[written]} if written in sums else {}
    late = replace(replay.unreduced, sums=sums)
    return replace(replay, uses=uses, unreduced=late, instead={}, manual=frozenset([AXIS]))


def _read(pieces: PipelinePartition) -> set[int]:
    """Values that some piece reads, beside the rows that each stage has of its own."""
    ops = (pieces.front_ops, pieces.head_ops, pieces.end_ops, pieces.forward_ops, pieces.backward_ops)
    found = {value for each in ops for op in each for value in op.inputs}
    for loop in (pieces.forward, pieces.backward):
        found |= {*loop.carried, *loop.consts, *loop.scanned}
    for one in (*pieces.payload_forward, *pieces.payload_backward):
        found.add(one)
    found |= {part.value for one in pieces.sums for parts in one.parts.values() for part in parts}
    found |= {state.after for state in pieces.states} | {value for value, _ in pieces.results}
    return found - {*pieces.rows}
