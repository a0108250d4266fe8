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
from spanax.plan.spmd.partition import union
from spanax.plan.spmd.sharded_program import ShardedProgram
from spanax.trace.analysis.op_groups import contraction_dims
from spanax.trace.jaxpr.graph import CONTRACTIONS, REMAT, Graph, Op, Wires
from spanax.trace.pipeline.partition import pipeline_partition
from spanax.trace.pipeline.split_backward import split_backward

LINEAR = frozenset(
    "add add_any sub neg transpose reshape squeeze expand_dims copy copy_p reduce_sum slice rev concatenate".split()
)
"""Operations that are linear in all their operands together, and give no more than they take."""

LINEAR_IN = {
    "mul": (0, 1),
    "div": (0,),
    "dynamic_slice": (0,),
    "dynamic_update_slice": (0, 1),
    "pad": (0, 1),
    "convert_element_type": (0,),
    "sharding_constraint": (0,),
}
"""Operations that are linear in some of their operands; in `mul` in one of both."""

SUMS = frozenset({"dot_general", "conv_general_dilated", "reduce_sum", "scatter-add", "scatter_add"})
"""Operations whose sums can be put off."""

Dims = tuple[tuple[int, tuple[str, ...]], ...]
"""Dims of one operand that are summed over, each with the mesh axes that split it, outermost first."""


@dataclass(frozen=True, eq=False)
class DeferredReductions:
    """What is put off in one traced function under one layout.

    Attributes:
      axes: values of which every device has a part, each with the mesh axes over which the parts are to be summed.
      sums: operations whose sums are put off: for each operand the dims that are summed over. None: added to.
      ends: results of loops that are summed over devices right behind it, each with the mesh axes.
    """

    axes: Mapping[int, tuple[str, ...]] = field(default_factory=dict)
    sums: Mapping[Op, tuple[Dims | None, ...]] = field(default_factory=dict)
    ends: Mapping[int, tuple[str, ...]] = field(default_factory=dict)

    def of(self, value: int) -> tuple[str, ...]:
        """The mesh axes over which a value is still to be summed."""
        return self.axes.get(value, ())


def unreduced(laid: ShardedProgram, schedule: Schedule) -> DeferredReductions:
    """Find the sums over devices that the loops of a step can put off.

    What a pipeline keeps or hands from stage to stage is summed before.
    """
    return _found(laid, _handed(laid, schedule) if schedule.num_stages > 1 else ())


def deferred_reductions(laid: ShardedProgram) -> DeferredReductions | None:
    """What is put off in one microbatch of a step: only a loop over chunks of the loss has such sums."""
    return _found(laid, ()) if laid.resolver.program.loss_chunks > 1 else None


def _handed(laid: ShardedProgram, schedule: Schedule) -> set[int]:
    pieces = pipeline_partition(laid.traced, schedule.microbatches)
    loops = (pieces.forward, pieces.backward)
    states = [value for state in (*pieces.states, *pieces.layer_states) for value in (state.before, state.after)]
    between = split_backward(pieces.backward).between if ticks_of(schedule).is_split else ()
    handed = {*pieces.payload_forward, *pieces.payload_backward, *pieces.prepared, *pieces.rows, *states, *between}
    # From layer to layer is from stage to stage as well.
    loops_hand_on = ((*loop.scanned, *loop.results, *loop.body_carried) for loop in loops)
    return handed.union(*loops_hand_on, pieces.forward.stacked)


def _found(laid: ShardedProgram, reduced: Collection[int]) -> DeferredReductions:
    graph = laid.traced.graph
    sums = {op: axes for op in _in_loops(graph) if (axes := _summed_over(laid, op))}
    if not sums:
        return DeferredReductions()
    refused = set(reduced)
    while True:
        may = _may_be(laid, refused)
        found = _reached(graph, {op: mask & may[op.outputs[0]] for op, mask in sums.items()}, may)
        clashes = {
            value
            for op in graph.ops()
            if op.name == "mul" and all(found.get(one) for one in op.inputs)
            for value in op.inputs
        }
        if not clashes:
            return _described(laid, sums, found)
        refused |= clashes


def _described(laid: ShardedProgram, sums: Mapping[Op, int], found: Mapping[int, int]) -> DeferredReductions:
    graph, names = laid.traced.graph, laid.resolver.mesh.names

    def named(mask: int) -> tuple[str, ...]:
        return tuple(name for at, name in enumerate(names) if mask >> at & 1)

    ends = {}
    for op in graph.ops():
        if op.name == "scan":
            for outer, first in _results(graph.wires(op)):
                if left := found.get(first, 0) & ~found.get(outer, 0):
                    ends[outer] = named(left)
    put_off = {op: mask & found.get(op.outputs[0], 0) for op, mask in sums.items()}
    dims = {op: _dims(laid, op, mask) for op, mask in put_off.items() if mask}
    return DeferredReductions({value: named(mask) for value, mask in found.items() if mask}, dims, ends)


def _in_loops(graph: Graph) -> Iterator[Op]:
    for op in graph.body.ops:
        if op.name == "scan":
            for body in op.bodies:
                yield from Graph(body, graph.avals, graph.constants).ops()


def _summed_over(laid: ShardedProgram, op: Op) -> int:
    """The mesh axes over which the compiler would sum the result of an operation at once."""
    if op.name not in SUMS or not jnp.issubdtype(laid.traced.graph.avals[op.outputs[0]].dtype, jnp.inexact):
        return 0
    division = laid.division(op)
    if division.split is None or (division.use is not None and division.use.is_local):
        return 0
    results = laid.traced.alike[op].outputs
    mask = union(
        [shift.over for shift in division.split.shifts if shift.value in results and shift.kind == "all-reduce"]
    )
    masks = [union([by for _, by in dims]) for dims in _split_sums(laid, op) if dims is not None]
    for each in masks:  # every operand must have its part
        mask &= each
    return mask


def _split_sums(laid: ShardedProgram, op: Op) -> list[list[tuple[int, int]] | None]:
    """For every operand, its dims that are summed over, each with what splits it; None for what is added to."""
    split = laid.division(op).split
    assert split is not None
    masks = split.operands
    if op.name in CONTRACTIONS:
        summed, _ = contraction_dims(op)
        return [[(pair[side], masks[side][pair[side]]) for pair in summed] for side in (0, 1)]
    if op.name == "reduce_sum":
        return [[(dim, masks[0][dim]) for dim in op.params["axes"]]]
    numbers = op.params["dimension_numbers"]
    rank = len(laid.traced.graph.shape(op.inputs[2]))
    asking = [dim for dim in range(rank) if dim not in numbers.update_window_dims]
    asked = [at for at in range(len(asking)) if at not in numbers.scatter_indices_batching_dims]
    return [None, [(at, masks[1][at]) for at in asked], [(asking[at], masks[2][asking[at]]) for at in asked]]


def _dims(laid: ShardedProgram, op: Op, mask: int) -> tuple[Dims | None, ...]:
    """The dims to be divided: dims that meet are divided alike, in the order in which one of them lies."""
    by_operand = _split_sums(laid, op)
    use, names = laid.division(op).use, laid.resolver.mesh.names
    known: list[list[tuple[str, ...]]] = []
    for at, value in enumerate(op.inputs):
        constraint = (use.inputs[at] if use else None) or laid.constraints[value]
        known.append([*constraint.spec] if constraint else [()] * len(laid.traced.graph.shape(value)))
    found: list[list[tuple[int, tuple[str, ...]]] | None] = [None if dims is None else [] for dims in by_operand]
    sides = [at for at, dims in enumerate(by_operand) if dims is not None]
    for meeting in zip(*(by_operand[at] or () for at in sides), strict=True):
        split = union([by for _, by in meeting])
        if not split & mask:
            continue
        wanted = tuple(name for at, name in enumerate(names) if split >> at & 1)
        orders = [known[at][dim] for at, (dim, _) in zip(sides, meeting, strict=True)]
        order = next((by for by in orders if set(by) == set(wanted)), wanted)
        for at, (dim, _) in zip(sides, meeting, strict=True):
            found[at].append((dim, order))  # type: ignore[union-attr]
    return tuple(None if dims is None else tuple(dims) for dims in found)


def _may_be(laid: ShardedProgram, refused: Collection[int]) -> defaultdict[int, int]:
    """For every value, the mesh axes over which its sum may be put off: nothing but loops' ends asks for it whole."""
    graph, everything = laid.traced.graph, (1 << len(laid.resolver.mesh.names)) - 1
    may = defaultdict(lambda: everything)
    for value in range(len(graph.avals)):
        if taken := union(laid.masks(value)):
            may[value] = everything & ~taken
    for value in (*refused, *graph.body.outputs):
        may[value] = 0
    ops, is_stable = list(graph.ops())[::-1], False
    while not is_stable:
        is_stable = True
        for op in ops:
            for value, allowed in _allowed(graph, op, may):
                if may[value] & ~allowed:
                    may[value] &= allowed
                    is_stable = False
    return may


def _allowed(graph: Graph, op: Op, may: Mapping[int, int]) -> Iterator[tuple[int, int]]:
    """What an operation allows of the values that it reads, and a loop of those inside of it."""
    if not op.bodies:
        linear_in = range(len(op.inputs)) if op.name in LINEAR else LINEAR_IN.get(op.name, ())
        is_sum = all(jnp.issubdtype(graph.avals[value].dtype, jnp.inexact) for value in op.outputs)
        for at, value in enumerate(op.inputs):
            yield value, may[op.outputs[0]] if at in linear_in and is_sum else 0
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
    """The values that a sum is put off in, each with the mesh axes."""
    found = dict[int, int]()

    def add(value: int, mask: int) -> bool:
        old = found.get(value, 0)
        found[value] = old | mask
        return found[value] != old

    is_stable = False
    while not is_stable:
        is_stable = True
        for op in graph.ops():
            pairs = [(out, sums.get(op, 0) | union([found.get(value, 0) for value in op.inputs])) for out in op.outputs]
            if op.bodies:
                wires = graph.wires(op)
                pairs = [(inner, found.get(outer, 0)) for outer, inner in wires.inputs]
                pairs += [(first, found.get(last, 0)) for first, last in wires.carried]
                pairs += [(outer, found.get(first, 0)) for outer, first in _results(wires)]
                pairs += [(outer, found.get(inner, 0)) for outer, inner in wires.outputs[len(wires.carried) :]]
            for value, mask in pairs:
                if mask and add(value, mask & may[value]):
                    is_stable = False
    return found


def _results(wires: Wires) -> Iterator[tuple[int, int]]:
    """What the last turn of a loop hands on: outside, and as it comes into a turn."""
    return ((outer, first) for (outer, _), (first, _) in zip(wires.outputs, wires.carried, strict=False))
