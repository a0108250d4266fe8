"""Pipeline: the loop over microbatches of a step, run by stages after the table of a schedule.

All stages take one tick together: each its own task, then activations go one stage on and their gradients one stage
back. Inside of a stage the mesh's other axes split what the layout says; only `pipe` is by hand.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, PartitionSpec

from spanax.plan.plan import Schedule
from spanax.plan.stages import AXIS
from spanax.plan.ticks import Ticks, ticks_of
from spanax.run.replay import Replay
from spanax.run.rows import check_alike, stage_by_stage
from spanax.run.stage import Stage, Values, converted
from spanax.trace.cut import Cut, cut
from spanax.trace.halves import halves
from spanax.trace.traced import Traced


def in_stages(replay: Replay, traced: Traced, schedule: Schedule) -> Replay:
    """A replay whose loop over microbatches is a pipeline, where the schedule has one.

    Raises:
      SpanaxError: the step cannot be divided so.
    """
    if schedule.num_stages == 1:
        return replay
    pieces = cut(traced, schedule.microbatches)
    table = ticks_of(schedule)
    if schedule.num_chunks > 1:
        check_alike(traced, pieces)
    # Each permutation inside of a task waits for all simulated devices, those of other stages too.
    device = next(iter(replay.mesh.devices.flat), None) if isinstance(replay.mesh, Mesh) else None
    meets = device is not None and device.platform == "cpu" and replay.mesh.size > schedule.num_stages
    labels = {traced.axes.classes[value][0] for value in pieces.rows}
    of_layers = {v: at for v in pieces.prepared for at, label in enumerate(traced.axes.classes[v]) if label in labels}
    run = pipelined(replay, pieces, table, of_layers, meets=meets)
    return replace(replay, instead={pieces.loop.op: run})


def pipelined(
    replay: Replay, pieces: Cut, ticks: Ticks, of_layers: Mapping[int, int], *, meets: bool
) -> Callable[[Sequence[Any]], list[Any]]:
    """What runs in place of the loop over microbatches: a function of its operands that returns its results.

    Args:
      replay: the program, as it runs outside of the pipeline.
      pieces: the loop, cut.
      ticks: who does what when.
      of_layers: prepared values with a dim of layers, each with that dim; pieces take them in the layers' order.
      meets: whether all stages take every task that one of them has at a tick, and all but that one forget it.
    """
    loop = pieces.loop
    two = halves(pieces.backward) if ticks.is_split else None
    uses, sums = dict(replay.uses), dict(replay.unreduced.sums)
    for op, written in two.as_written.items() if two else ():
        uses |= {op: uses[written]} if written in uses else {}
        sums |= {op: sums[written]} if written in sums else {}
    late = replace(replay.unreduced, sums=sums)
    inner = replace(replay, uses=uses, unreduced=late, instead={}, manual=frozenset([AXIS]))
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

    def run(ins: Sequence[Any]) -> list[Any]:
        values: Values = dict(zip(loop.body.inputs, ins, strict=True))
        replay.ops(pieces.prepared_ops, values)
        carried = ins[loop.num_consts : loop.num_consts + loop.num_carried]
        microbatches = list(ins[loop.num_consts + loop.num_carried :])
        consts = [*loop.body.inputs[: loop.num_consts], *pieces.prepared, *pieces.unchanged.values()]
        whole = {value: values[value] for value in consts if value not in pieces.rows}
        if ticks.num_chunks > 1:
            order = np.argsort(stage_by_stage(pieces.num_layers, ticks.num_stages, ticks.num_chunks))
            whole |= {value: jnp.take(whole[value], order, axis=dim) for value, dim in of_layers.items()}
        by_rows, by_stage, results = staged(
            replay.read(values, pieces.rows),
            {at: carried[at] for at in divided},
            {at: array for at, array in enumerate(carried) if at not in divided and at not in pieces.unchanged},
            whole,
            microbatches,
            jnp.asarray(ticks.table),
        )
        found = by_rows | by_stage | {at: carried[at] for at in pieces.unchanged}
        for one in pieces.sums:
            for part in one.parts.get("always", ()):
                (extra,) = replay.read(values, [part.value])
                found[one.index] = found[one.index] + converted(part, extra) * ticks.num_microbatches
        return [*(found[at] for at in range(loop.num_carried)), *results]

    return run
