"""Sums of which devices may keep their own terms until the loops that accumulate them have ended.

A gradient is a sum over the batch, of which every device has a partial sum. Where a loop only accumulates such sums,
each device can accumulate its own, with one reduction after the loop. The same applies to any value that is linear in
a sum and used only by a carry. Sets of mesh axes are bit masks.
"""

import functools
import operator
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

import jax.numpy as jnp

from spanax.trace.analysis.labels import Labels
from spanax.trace.jaxpr.dim_maps.relations import Family
from spanax.trace.jaxpr.graph import REMAT, Graph, Op, Wires
from spanax.trace.jaxpr.linear import linear_operands
from spanax.trace.jaxpr.loops import LOOPS, const_pairs
from spanax.trace.jaxpr.provenance import propagated

REDUCED_BEFORE = frozenset({"broadcast_in_dim", "cumsum", "dot_general", "select_n"})
"""Linear operations whose operands are reduced before: their results may be larger, or sums of their own."""

SUMS = frozenset({"dot_general", "conv_general_dilated", "reduce_sum", "scatter-add", "scatter_add"})
"""Operations whose reductions can be deferred."""


def deferred(graph: Graph, sums: Mapping[Op, int], limits: Mapping[int, int], everything: int) -> dict[int, int]:
    """Returns the values that contain a deferred reduction, each with the mesh axes of the reduction.

    Args:
      graph: the program.
      sums: operations whose results are partial sums, each with the mesh axes.
      limits: the mesh axes that the reduction of a value may be deferred over; all of them for other values.
      everything: all mesh axes.
    """
    limits = {**limits, **dict.fromkeys(graph.body.outputs, 0)}
    while True:
        may = _may_be(graph, limits, everything)
        reached = _reached(graph, {op: mask & may[op.outputs[0]] for op, mask in sums.items()}, may)
        products = (op for op in graph.ops() if op.name == "mul")
        clashes = {value for op in products if all(map(reached.get, op.inputs)) for value in op.inputs}
        if not clashes:
            return reached
        limits |= dict.fromkeys(clashes, 0)


def results_of(wires: Wires) -> Iterator[tuple[int, int]]:
    """Yields the carried results of a loop: the value outside, and the carry at the start of an iteration."""
    return ((outer, first) for (outer, _), (first, _) in zip(wires.outputs, wires.carried, strict=False))


def is_sum(graph: Graph, op: Op) -> bool:
    """Returns whether the reduction of an operation can be deferred."""
    return op.name in SUMS and bool(jnp.issubdtype(graph.avals[op.outputs[0]].dtype, jnp.inexact))


def _may_be(graph: Graph, limits: Mapping[int, int], everything: int) -> defaultdict[int, int]:
    """Returns, per value, the mesh axes over which its reduction may be deferred: it is needed only after loops."""
    may = defaultdict(lambda: everything, limits)
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
        is_inexact = all(jnp.issubdtype(graph.avals[value].dtype, jnp.inexact) for value in op.outputs)
        for index, value in enumerate(op.inputs):
            yield value, may[op.outputs[0]] if index in linear_in and is_inexact else 0
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
            mask = _union(reached.get(value, 0) for value in op.inputs)
            pairs = [(out, sums.get(op, 0) | mask) for out in op.outputs]
            if op.bodies:
                wires = graph.wires(op)
                pairs = [(inner, reached.get(outer, 0)) for outer, inner in wires.inputs]
                pairs += [(first, reached.get(last, 0)) for first, last in wires.carried]
                pairs += [(outer, reached.get(first, 0)) for outer, first in results_of(wires)]
                pairs += [(outer, reached.get(inner, 0)) for outer, inner in wires.outputs[len(wires.carried) :]]
            for value, mask in pairs:
                if mask and add(value, mask & may[value]):
                    is_stable = False
    return reached


def _union(masks: Iterable[int]) -> int:
    return functools.reduce(operator.or_, masks, 0)


def recurrences(graph: Graph, batch: frozenset[int | None], classes: Sequence[Labels]) -> list[Op]:
    """Returns the loops in which every iteration needs all weights: over time, over tied layers, of a solver.

    They carry an activation. A loop over microbatches carries none, and has the weights of all layers.
    """
    loops = [op for op in graph.ops() if op.name in LOOPS]
    return [op for op in loops if any(not batch.isdisjoint(classes[first]) for first, _ in graph.wires(op).carried)]


def accumulated(graph: Graph, loops: Collection[Op]) -> frozenset[int]:
    """Returns the values inside of loops that contain sums which the loops only accumulate."""
    inside = (op for loop in loops for op in graph.within(loop.bodies[-1]).ops())
    sums = {op: 1 for op in inside if not op.bodies and is_sum(graph, op)}
    if not sums:
        return frozenset()
    others = (op for op in graph.ops() if op.bodies and op not in loops)
    limits = {value: 0 for op in others for pair in graph.wires(op).carried for value in pair}
    return frozenset(value for value, mask in deferred(graph, sums, limits, everything=1).items() if mask)


def invariant(graph: Graph, loops: Iterable[Op]) -> frozenset[int]:
    """Returns the values inside of loops that are equal in all iterations.

    A table is not among them: its rows are looked up where it is stored.
    """
    values = set[int]()
    for loop in loops:
        inside = graph.within(loop.bodies[-1])
        varying = {*inside.body.inputs}.difference(inner for _, inner in const_pairs(graph, loop))
        varying.update(op.inputs[0] for op in inside.ops() if op.family is Family.GATHER)
        bits = propagated(inside, dict.fromkeys(varying, 1), lambda op, operands: _union(operands))
        bodies = (inside.body, *(body for op in inside.ops() for body in op.bodies))
        inputs = (value for body in bodies for value in body.inputs)
        values.update(value for value in (*inputs, *inside.producers) if not bits[value])
    return frozenset(values)
