"""Reductions over devices that a loop defers until after its last iteration.

A gradient is a sum over the batch, of which every device has a partial sum. Where a loop over microbatches only
accumulates such sums, each device can accumulate its own, with one reduction after the loop. The same applies to any
value that is linear in a sum and used only by a carry.
"""

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field

import jax.numpy as jnp

from spanax.plan.pipeline.ticks import ticks_of
from spanax.plan.plan import Schedule
from spanax.plan.sharding.partition import union
from spanax.plan.spmd.sharded_program import ShardedProgram
from spanax.trace.jaxpr.dim_maps.relations import Family, Kind
from spanax.trace.jaxpr.graph import REMAT, Graph, Op, Wires
from spanax.trace.jaxpr.linear import linear_operands
from spanax.trace.jaxpr.loops import split_backward
from spanax.trace.pipeline.partition import pipeline_partition

REDUCED_BEFORE = frozenset({"broadcast_in_dim", "cumsum", "dot_general", "select_n"})
"""Linear operations whose operands are reduced before: their results may be larger, or sums of their own."""

SUMS = frozenset({"dot_general", "conv_general_dilated", "reduce_sum", "scatter-add", "scatter_add"})
"""Operations whose reductions can be deferred."""

Dims = tuple[tuple[int, tuple[str, ...]], ...]
"""Contracted dims of one operand, each with the mesh axes that shard it, outermost first."""


@dataclass(frozen=True, eq=False)
class DeferredReductions:
    """The deferred reductions of one traced function under one layout.

    Attributes:
      axes: values of which every device has a partial sum, each with the mesh axes of the pending reduction.
      sums: operations with deferred reductions: the contracted dims of each operand. None: an accumulator.
      ends: results of loops that are reduced right after the loop, each with the mesh axes.
    """

    axes: Mapping[int, tuple[str, ...]] = field(default_factory=dict)
    sums: Mapping[Op, tuple[Dims | None, ...]] = field(default_factory=dict)
    ends: Mapping[int, tuple[str, ...]] = field(default_factory=dict)

    def of(self, value: int) -> tuple[str, ...]:
        """Returns the mesh axes over which a value has yet to be reduced."""
        return self.axes.get(value, ())


def unreduced(sharded: ShardedProgram, schedule: Schedule) -> DeferredReductions:
    """Returns the reductions that the loops of a step can defer.

    Values that a pipeline stores or sends between stages are reduced before.
    """
    return _deferrable(sharded, _sent_between_stages(sharded, schedule) if schedule.num_stages > 1 else ())


def deferred_reductions(sharded: ShardedProgram) -> DeferredReductions | None:
    """Returns the deferred reductions of one microbatch of a step: only a loop over loss chunks has any."""
    return _deferrable(sharded, ()) if sharded.resolver.program.loss_chunks > 1 else None


def _sent_between_stages(sharded: ShardedProgram, schedule: Schedule) -> set[int]:
    pieces = pipeline_partition(sharded.traced, schedule.microbatches)
    loops = (pieces.forward, pieces.backward)
    states = [value for state in (*pieces.states, *pieces.layer_states) for value in (state.before, state.after)]
    between = split_backward(pieces.backward).between if ticks_of(schedule).is_split else ()
    handed = {*pieces.payload_forward, *pieces.payload_backward, *pieces.prepared, *pieces.rows, *states, *between}
    # Values passed between layers are also sent between stages.
    loops_hand_on = ((*loop.scanned, *loop.results, *loop.body_carried) for loop in loops)
    return handed.union(*loops_hand_on, pieces.forward.stacked)


def _deferrable(sharded: ShardedProgram, reduced: Collection[int]) -> DeferredReductions:
    graph = sharded.traced.graph
    sums = {op: axes for op in _in_loops(graph) if (axes := _summed_over(sharded, op))}
    if not sums:
        return DeferredReductions()
    refused = set(reduced)
    while True:
        may = _may_be(sharded, refused)
        reached = _reached(graph, {op: mask & may[op.outputs[0]] for op, mask in sums.items()}, may)
        clashes = {
            value
            for op in graph.ops()
            if op.name == "mul" and all(reached.get(operand) for operand in op.inputs)
            for value in op.inputs
        }
        if not clashes:
            return _described(sharded, sums, reached)
        refused |= clashes


def _described(sharded: ShardedProgram, sums: Mapping[Op, int], reached: Mapping[int, int]) -> DeferredReductions:
    graph = sharded.traced.graph
    names = sharded.resolver.mesh.names

    def named(mask: int) -> tuple[str, ...]:
        return tuple(name for index, name in enumerate(names) if mask >> index & 1)

    ends = {}
    for op in graph.ops():
        if op.name == "scan":
            for outer, first in _results(graph.wires(op)):
                if pending := reached.get(first, 0) & ~reached.get(outer, 0):
                    ends[outer] = named(pending)
    deferred = {op: mask & reached.get(op.outputs[0], 0) for op, mask in sums.items()}
    dims = {op: _dims(sharded, op, mask) for op, mask in deferred.items() if mask}
    return DeferredReductions({value: named(mask) for value, mask in reached.items() if mask}, dims, ends)


def _in_loops(graph: Graph) -> Iterator[Op]:
    for op in graph.body.ops:
        if op.name == "scan":
            for body in op.bodies:
                yield from Graph(body, graph.avals, graph.constants).ops()


def _summed_over(sharded: ShardedProgram, op: Op) -> int:
    """Returns the mesh axes over which the compiler would all-reduce the result of an operation at once."""
    if op.name not in SUMS or not jnp.issubdtype(sharded.traced.graph.avals[op.outputs[0]].dtype, jnp.inexact):
        return 0
    division = sharded.division(op)
    if division.partition is None or (division.operands is not None and division.operands.is_local):
        return 0
    results = sharded.traced.alike[op].outputs
    mask = union(
        [shift.over for shift in division.partition.shifts if shift.value in results and shift.kind == "all-reduce"]
    )
    masks = [union([by for _, by in dims]) for dims in _sharded_sums(sharded, op) if dims is not None]
    for operand_mask in masks:  # every operand must be sharded
        mask &= operand_mask
    return mask


def _sharded_sums(sharded: ShardedProgram, op: Op) -> list[list[tuple[int, int]] | None]:
    """Returns the contracted dims of every operand, each with the axes that shard it; None for an accumulator."""
    partitioned = sharded.division(op).partition
    assert partitioned is not None
    masks = partitioned.operands
    relations = [dict(relation.dims) for relation in op.dim_map.of_kind(Kind.CONTRACTED, Kind.SAME)]
    summed = [dims for dims in relations if max(dims) < len(op.inputs)]
    return [
        None
        if op.family is Family.SCATTER_ADD and operand == 0
        else [(dims[operand], masks[operand][dims[operand]]) for dims in summed if operand in dims]
        for operand in range(len(op.inputs))
    ]


def _dims(sharded: ShardedProgram, op: Op, mask: int) -> tuple[Dims | None, ...]:
    """Returns the dims to shard: dims contracted together are sharded equally, in the axis order of one of them."""
    by_operand = _sharded_sums(sharded, op)
    use = sharded.division(op).operands
    names = sharded.resolver.mesh.names
    known: list[list[tuple[str, ...]]] = []
    for index, value in enumerate(op.inputs):
        constraint = (use.inputs[index] if use else None) or sharded.constraints[value]
        known.append([*constraint.spec] if constraint else [()] * len(sharded.traced.graph.shape(value)))
    result: list[list[tuple[int, tuple[str, ...]]] | None] = [None if dims is None else [] for dims in by_operand]
    sides = [index for index, dims in enumerate(by_operand) if dims is not None]
    for contracted in zip(*(by_operand[index] or () for index in sides), strict=True):
        mask_union = union([by for _, by in contracted])
        if not mask_union & mask:
            continue
        axes = tuple(name for index, name in enumerate(names) if mask_union >> index & 1)
        orders = [known[index][dim] for index, (dim, _) in zip(sides, contracted, strict=True)]
        order = next((by for by in orders if set(by) == set(axes)), axes)
        for index, (dim, _) in zip(sides, contracted, strict=True):
            result[index].append((dim, order))  # type: ignore[union-attr]
    return tuple(None if dims is None else tuple(dims) for dims in result)


def _may_be(sharded: ShardedProgram, refused: Collection[int]) -> defaultdict[int, int]:
    """Returns, per value, the mesh axes over which its reduction may be deferred: it is needed only after loops."""
    graph = sharded.traced.graph
    everything = (1 << len(sharded.resolver.mesh.names)) - 1
    may = defaultdict(lambda: everything)
    for value in range(len(graph.avals)):
        if taken := union(sharded.masks(value)):
            may[value] = everything & ~taken
    for value in (*refused, *graph.body.outputs):
        may[value] = 0
    ops = list(graph.ops())[::-1]
    is_stable = False
    while not is_stable:
        is_stable = True
        for op in ops:
            for value, allowed in _allowed(graph, op, may):
                if may[value] & ~allowed:
                    may[value] &= allowed
                    is_stable = False
    return may


def _allowed(graph: Graph, op: Op, may: Mapping[int, int]) -> Iterator[tuple[int, int]]:
    """Yields the mesh axes that an operation allows its operands to defer, and a loop the values inside it."""
    if not op.bodies:
        linear_in = () if op.name in REDUCED_BEFORE else linear_operands(op)
        is_sum = all(jnp.issubdtype(graph.avals[value].dtype, jnp.inexact) for value in op.outputs)
        for index, value in enumerate(op.inputs):
            yield value, may[op.outputs[0]] if index in linear_in and is_sum else 0
        return
    wires = graph.wires(op)
    if op.name != "scan" and op.name not in REMAT:
        yield from ((value, 0) for value in op.inputs)
        yield from ((inner, 0) for _, inner in wires.outputs)
        return
    yield from ((outer, may[inner]) for outer, inner in wires.inputs)
    yield from ((last, may[first]) for first, last in wires.carried)
    num_carried = len(wires.carried)
    yield from ((inner, may[outer]) for outer, inner in wires.outputs[num_carried:])


def _reached(graph: Graph, sums: Mapping[Op, int], may: Mapping[int, int]) -> dict[int, int]:
    """Returns the values that contain a deferred reduction, each with the mesh axes."""
    reached = dict[int, int]()

    def add(value: int, mask: int) -> bool:
        old = reached.get(value, 0)
        reached[value] = old | mask
        return reached[value] != old

    is_stable = False
    while not is_stable:
        is_stable = True
        for op in graph.ops():
            pairs = [
                (out, sums.get(op, 0) | union([reached.get(value, 0) for value in op.inputs])) for out in op.outputs
            ]
            if op.bodies:
                wires = graph.wires(op)
                pairs = [(inner, reached.get(outer, 0)) for outer, inner in wires.inputs]
                pairs += [(first, reached.get(last, 0)) for first, last in wires.carried]
                pairs += [(outer, reached.get(first, 0)) for outer, first in _results(wires)]
                pairs += [(outer, reached.get(inner, 0)) for outer, inner in wires.outputs[len(wires.carried) :]]
            for value, mask in pairs:
                if mask and add(value, mask & may[value]):
                    is_stable = False
    return reached


def _results(wires: Wires) -> Iterator[tuple[int, int]]:
    """Yields the carried results of a loop: the value outside, and the carry at the start of an iteration."""
    return ((outer, first) for (outer, _), (first, _) in zip(wires.outputs, wires.carried, strict=False))
