"""Sums of which devices may keep their own terms until the loops that accumulate them have ended.

A gradient is a sum over the batch, of which every device has a partial sum. Where a loop only accumulates such sums,
each device can accumulate its own, with one reduction after the loop. The same applies to any value that is linear in
a sum and used only by a carry. Sets of mesh axes are bit masks.
"""

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import jax.numpy as jnp

from spanax.trace.analysis.labels import Labels
from spanax.trace.jaxpr.dim_maps.relations import Family
from spanax.trace.jaxpr.graph import OWN_KERNEL, REMAT, Graph, Op, Wires
from spanax.trace.jaxpr.linear import linear_operands
from spanax.trace.jaxpr.loops import LOOPS, const_pairs
from spanax.trace.jaxpr.provenance import Origin, origins

REDUCED_BEFORE = frozenset({"broadcast_in_dim", "cumsum", "dot_general", "select_n"})
"""Linear operations whose operands are reduced before: their results may be larger, or sums of their own."""

SUMS = frozenset({"dot_general", "conv_general_dilated", "reduce_sum", "scatter-add", "scatter_add"})
"""Operations whose reductions can be deferred."""


@dataclass(frozen=True, eq=False)
class SumFlow:
    """How a program uses sums, under any sharding.

    Attributes:
      reduced: values that need all terms.
      uses: pairs of a value and a linear result of it: the value needs all terms where the result does. Last use first.
      flows: pairs of values: the terms of the first are part of the second.
      products: the operands of each product of two values.
    """

    reduced: frozenset[int]
    uses: Sequence[tuple[int, int]]
    flows: Sequence[tuple[int, int]]
    products: Sequence[Sequence[int]]

    @staticmethod
    def of(graph: Graph) -> "SumFlow":
        """Returns the flow of sums in a program."""
        reduced = {*graph.body.outputs}
        uses = list[tuple[int, int]]()
        flows = list[tuple[int, int]]()
        ops = list(graph.ops())
        for op in ops:
            if op.bodies:
                _follow_loop(op, graph.wires(op), reduced, uses, flows)
                continue
            is_inexact = all(jnp.issubdtype(graph.avals[value].dtype, jnp.inexact) for value in op.outputs)
            linear_in = linear_operands(op) if is_inexact and op.name not in REDUCED_BEFORE else ()
            for index, value in enumerate(op.inputs):
                if index in linear_in:
                    uses.append((value, op.outputs[0]))
                else:
                    reduced.add(value)
                flows += ((value, out) for out in op.outputs)
        return SumFlow(frozenset(reduced), uses[::-1], flows, [op.inputs for op in ops if op.name == "mul"])

    def deferred(self, sums: Mapping[int, int], limits: Mapping[int, int], everything: int) -> dict[int, int]:
        """Returns the values that contain a deferred reduction, each with the mesh axes of the reduction.

        Args:
          sums: results of operations that are partial sums, each with the mesh axes.
          limits: the mesh axes that the reduction of a value may be deferred over; all of them for other values.
          everything: all mesh axes.
        """
        limits = {**limits, **dict.fromkeys(self.reduced, 0)}
        while True:
            may = self._may_be(limits, everything)
            reached = self._reached(sums, may)
            clashes = {value for values in self.products if all(map(reached.get, values)) for value in values}
            if not clashes:
                return reached
            limits |= dict.fromkeys(clashes, 0)

    def _may_be(self, limits: Mapping[int, int], everything: int) -> defaultdict[int, int]:
        """Returns, per value, the mesh axes over which its reduction may be deferred: it is needed only after loops."""
        may = defaultdict(lambda: everything, limits)
        is_stable = False
        while not is_stable:
            is_stable = True
            for value, result in self.uses:
                if may[value] & ~may[result]:
                    may[value] &= may[result]
                    is_stable = False
        return may

    def _reached(self, sums: Mapping[int, int], may: Mapping[int, int]) -> dict[int, int]:
        """Returns the values that contain a deferred reduction, each with the mesh axes."""
        reached = {value: mask & may[value] for value, mask in sums.items()}
        is_stable = False
        while not is_stable:
            is_stable = True
            for value, result in self.flows:
                if mask := reached.get(value, 0) & may[result] & ~reached.get(result, 0):
                    reached[result] = reached.get(result, 0) | mask
                    is_stable = False
        return reached


def _follow_loop(
    op: Op, wires: Wires, reduced: set[int], uses: list[tuple[int, int]], flows: list[tuple[int, int]]
) -> None:
    """Adds the uses of sums by a loop, a branch or a rematerialized region, whose operations follow."""
    carried = [(last, first) for first, last in wires.carried]
    results = [(inner, outer) for outer, inner in wires.outputs[len(wires.carried) :]]
    flows += (*wires.inputs, *carried, *((first, outer) for outer, first in results_of(wires)), *results)
    if op.name != "scan" and op.name not in REMAT:
        reduced.update(op.inputs, (inner for _, inner in wires.outputs))
        return
    uses += (*wires.inputs, *carried, *results)


def results_of(wires: Wires) -> Iterator[tuple[int, int]]:
    """Yields the carried results of a loop: the value outside, and the carry at the start of an iteration."""
    return ((outer, first) for (outer, _), (first, _) in zip(wires.outputs, wires.carried, strict=False))


def sums_of(graph: Graph, op: Op) -> list[int]:
    """Returns the results of an operation whose reductions can be deferred."""
    sums = op.outputs[:1] if op.name in SUMS else ()
    if op.name == OWN_KERNEL:
        sums = tuple(out for out, labels in zip(op.outputs, op.params["classes"].sums, strict=True) if labels)
    return [value for value in sums if jnp.issubdtype(graph.avals[value].dtype, jnp.inexact)]


def recurrences(graph: Graph, batch: frozenset[int | None], classes: Sequence[Labels]) -> list[Op]:
    """Returns the loops in which every iteration needs all weights: over time, over tied layers, of a solver.

    They carry an activation. A loop over microbatches carries none, and has the weights of all layers.
    """
    loops = [op for op in graph.ops() if op.name in LOOPS]
    return [op for op in loops if any(not batch.isdisjoint(classes[first]) for first, _ in graph.wires(op).carried)]


def accumulated(graph: Graph, loops: Collection[Op]) -> frozenset[int]:
    """Returns the values inside of loops that contain sums which the loops only accumulate."""
    inside = (op for loop in loops for op in graph.within(loop.bodies[-1]).ops())
    sums = {value: 1 for op in inside if not op.bodies for value in sums_of(graph, op)}
    if not sums:
        return frozenset()
    others = (op for op in graph.ops() if op.bodies and op not in loops)
    limits = {value: 0 for op in others for pair in graph.wires(op).carried for value in pair}
    return frozenset(value for value, mask in SumFlow.of(graph).deferred(sums, limits, everything=1).items() if mask)


def invariant(graph: Graph, loops: Iterable[Op]) -> frozenset[int]:
    """Returns the values inside of loops that are equal in all iterations.

    A table is not among them: its rows are looked up where it is stored.
    """
    values = set[int]()
    for loop in loops:
        inside = graph.within(loop.bodies[-1])
        varying = {*inside.body.inputs}.difference(inner for _, inner in const_pairs(graph, loop))
        varying.update(op.inputs[0] for op in inside.ops() if op.family is Family.GATHER)
        is_varying = origins(inside, dict.fromkeys(varying, Origin.BATCH))
        bodies = (inside.body, *(body for op in inside.ops() for body in op.bodies))
        inputs = (value for body in bodies for value in body.inputs)
        values.update(value for value in (*inputs, *inside.producers) if not is_varying[value])
    return frozenset(values)
