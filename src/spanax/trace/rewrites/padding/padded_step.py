"""Pads uneven axes where they are computed, so that a mesh axis that does not divide them can shard them.

State and batch have their true shapes. Activations, and the operands of their contractions, have padded dims: from the
first operation that can compute with padding to the first that cannot. The elements of padding, at the end of a dim,
are arbitrary. Where they would count, in contractions and reductions, the neutral element replaces them, so that
infinities and NaNs in padding reach no other element. Gradients of weights are cut to their true shapes.
"""

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np

from spanax.trace.analysis.step_analysis import StepAnalysis
from spanax.trace.axes.axes import discover
from spanax.trace.jaxpr.dim_maps.registry import TABLE
from spanax.trace.jaxpr.dim_maps.relations import Dim, Equation, Family, Kind, Shape
from spanax.trace.jaxpr.graph import Body, Graph, Op, from_jaxpr
from spanax.trace.jaxpr.interpret import as_traced, read
from spanax.trace.jaxpr.marks import marked
from spanax.trace.rewrites.padding.bodies import with_padded_bodies
from spanax.trace.rewrites.padding.dims import LOOKED_UP, carried, filled, fitted, index_dims, inside
from spanax.trace.traced import Traced
from spanax.trace.variables import Leaf

Multiples = tuple[tuple[str, int], ...]
"""Axes, by name, each with the number of which its padded size is a multiple."""

EXAMPLES = "examples:"
"""The prefix of the marks of fresh values with a dim of examples, which no operation relates to the batch."""


def padded_step(traced: Traced, leaves: Sequence[Leaf], batch: Sequence[Leaf], multiples: Multiples) -> Traced:
    """Returns a traced function in which axes are padded to multiples of numbers.

    Args:
      traced: the function.
      leaves: the leaves of the state.
      batch: the leaves of the batch.
      multiples: the axes to pad.
    """
    new = padded_graph(traced, multiples)
    if new is traced.graph:
        return traced
    fresh = [(value, mark) for mark, value in new.marks.items() if mark.startswith(EXAMPLES)]
    new = replace(new, marks={mark: v for mark, v in new.marks.items() if not mark.startswith(EXAMPLES)})
    grown = [(value, int(mark.rpartition(":")[2])) for value, mark in fresh]
    return replace(traced, graph=new, axes=discover(new, leaves, batch, grown, traced.axes.examples))


def padded_graph(traced: Traced, multiples: Multiples) -> Graph:
    """Returns the graph of `padded_step`, with marks on fresh values that have examples."""
    step = StepAnalysis(traced)
    sizes = padded_sizes(step, multiples)
    if not sizes:
        return traced.graph
    graph = traced.graph
    padding = _Padding(step, sizes)

    def function(*args: Any) -> list[Any]:
        outs = padding.body(graph.body, args)
        return [fitted(out, graph.shape(value))[0] for value, out in zip(graph.body.outputs, outs, strict=True)]

    return from_jaxpr(jax.make_jaxpr(function)(*(graph.avals[value] for value in graph.body.inputs)))


def padded_sizes(step: StepAnalysis, multiples: Multiples) -> dict[int, tuple[int, int]]:
    """Returns the true and the padded size of each class of these axes that does not divide."""
    ways = step.axes.ways
    names = step.labels_by_name
    pairs = [(label, number) for name, number in multiples for label in names.get(name, ())]
    return {label: (ways[label], -(-ways[label] // number) * number) for label, number in pairs if ways[label] % number}


@dataclass(frozen=True, eq=False)
class _Padding:
    """Evaluates a function with padded dims; `sizes` has the true and the padded size of each padded class."""

    step: StepAnalysis
    sizes: Mapping[int, tuple[int, int]]

    def body(self, body: Body, args: Sequence[Any]) -> list[Any]:
        """Returns the outputs of a body, given its inputs; dims of either may be padded."""
        graph = self.step.graph
        values = dict(zip(body.inputs, map(self._marked, body.inputs, args), strict=True))
        for op in body.ops:
            ins = read(graph, values, op.inputs)
            with as_traced(op):
                outs = with_padded_bodies(graph, op, ins, self.body) if op.bodies else self._computed(op, ins)
                values.update(zip(op.outputs, map(self._marked, op.outputs, outs), strict=True))
        return read(graph, values, body.outputs)

    @functools.cached_property
    def _marks(self) -> dict[int, list[str]]:
        step = self.step
        marks = dict[int, list[str]]()
        for mark, value in step.graph.marks.items():
            marks.setdefault(value, []).append(mark)
        for op in step.graph.ops():
            for array, dim in sorted(op.dim_map.dims(Kind.NEW)) if not op.bodies else ():
                value = op.outputs[array - len(op.inputs)]
                if step.axes.classes[value][dim] in step.batch_labels:
                    marks.setdefault(value, []).append(f"{EXAMPLES}{value}:{dim}")
        return marks

    def _marked(self, value: int, array: Any) -> Any:
        for mark in self._marks.get(value, ()):
            array = marked(array, mark)
        return array

    def _computed(self, op: Op, ins: Sequence[Any]) -> list[Any]:
        """Returns the results of an operation; activations may be padded."""
        graph = self.step.graph
        row = TABLE.get(op.name)
        true = [graph.shape(value) for value in (*op.inputs, *op.outputs)]
        padded = {} if row is None or row.padding is None else self._padded_dims(op, ins, true)
        if row is None or row.padding is None or not padded:
            return op.bind([fitted(array, shape)[0] for array, shape in zip(ins, true, strict=False)])
        equation = Equation(op.eqn)
        shapes = [tuple(padded.get((a, dim), size) for dim, size in enumerate(shape)) for a, shape in enumerate(true)]
        pairs = [fitted(array, shape) for array, shape in zip(ins, shapes, strict=False)]
        operands = [array for array, _ in pairs]
        summed = op.dim_map.dims(Kind.CONTRACTED).intersection(padded)
        fill = 0 if row.padding.fill is None else row.padding.fill(equation)
        for array, dim in sorted(summed):
            if dim not in pairs[array][1] or np.any(fill):
                operands[array] = filled(operands[array], dim, true[array][dim], fill)
        if op.family in LOOKED_UP:
            operands[1] = inside(op, operands[1], true[0], shapes[0])
        outs = op.bind(operands, op.params | dict(row.padding.resized(equation, shapes)))
        keys = self.step.sharding_keys
        return [
            out if keys[value].is_computed else fitted(out, graph.shape(value))[0]
            for value, out in zip(op.outputs, outs, strict=True)
        ]

    def _padded_dims(self, op: Op, ins: Sequence[Any], true: Sequence[Shape]) -> dict[Dim, int]:
        """Returns the dims that are padded during an operation, with their padded sizes.

        An operand is padded where another one is, and where a result is an activation.
        """
        along = op.dim_map.dims(Kind.ALONG)
        padding = TABLE[op.name].padding
        assert padding is not None
        allowed = None if padding.dims is None else {*padding.dims(Equation(op.eqn))}
        have = {(a, dim) for a, array in enumerate(ins) for dim, n in enumerate(np.shape(array)) if n != true[a][dim]}
        for index, value in enumerate(op.outputs):
            key = self.step.sharding_keys[value]
            dims = enumerate(key.labels) if key.is_computed else ()
            have |= {(len(ins) + index, dim) for dim, label in dims if label in self.sizes}
        padded = dict[Dim, int]()
        for relation in op.dim_map.relations:
            related = carried(op, relation, has_fill=padding.fill is not None)
            if along.intersection(relation.dims) or (allowed is not None and not allowed.issuperset(related)):
                continue
            sizes = {dim: self._padded_size(op, dim, true) for dim in related}
            if have.intersection(related) and all(sizes.values()):
                padded |= sizes
        looked_up = [(0, dim) for dim in index_dims(op)] if op.family is Family.GATHER else []
        return padded | {dim: self._padded_size(op, dim, true) for dim in looked_up if dim in have}

    def _padded_size(self, op: Op, dim: Dim, true: Sequence[Shape]) -> int:
        """Returns the padded size of a dim; 0 if its class is not padded."""
        label = self.step.axes.classes[(*op.inputs, *op.outputs)[dim[0]]][dim[1]]
        old, new = (1, 0) if label is None else self.sizes.get(label, (1, 0))
        return true[dim[0]][dim[1]] // old * new
