"""Pads uneven axes where they are computed, so that a mesh axis that does not divide them can shard them.

State and batch have their true shapes. Activations, and the operands of their contractions, have padded dims: from the
first operation that can compute with padding to the first that cannot. The elements of padding, at the end of a dim,
are arbitrary. Where they would count, in contractions and reductions, the neutral element replaces them, so that
infinities and NaNs in padding reach no other element. Gradients of weights are cut to their true shapes.
"""

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from spanax.trace.analysis.step_analysis import StepAnalysis
from spanax.trace.axes.axes import Traced, discover
from spanax.trace.jaxpr.dim_maps.registry import TABLE
from spanax.trace.jaxpr.dim_maps.relations import Dim, Equation, Family, Kind, Relation, Shape
from spanax.trace.jaxpr.graph import PADDING, Body, Graph, Op, from_jaxpr, marked, scan_counts
from spanax.trace.jaxpr.interpret import as_traced, read, with_bodies
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


LOOKED_UP = (Family.GATHER, Family.SCATTER, Family.SCATTER_ADD)
"""Operations that read or write elements of their first operand at indices."""


def fitted(array: Any, shape: Shape) -> tuple[Any, frozenset[int]]:
    """Returns an array with a shape, its dims cut or padded with zeros, and the dims that were padded.

    Example:
      >>> fitted(jnp.ones((3, 2)), (2, 3))
      (Array([[1., 1., 0.],
             [1., 1., 0.]], dtype=float32), frozenset({1}))
    """
    old = np.shape(array)
    if old == tuple(shape):
        return array, frozenset()
    with jax.named_scope(PADDING):
        if any(new < size for new, size in zip(shape, old, strict=True)):
            array = lax.slice(array, [0] * len(old), [min(pair) for pair in zip(shape, old, strict=True)])
        added = [max(0, new - size) for new, size in zip(shape, old, strict=True)]
        if any(added):
            array = lax.pad(array, np.zeros((), array.dtype), [(0, count, 0) for count in added])
    return array, frozenset(dim for dim, count in enumerate(added) if count)


def filled(array: Any, dim: int, size: int, fill: Any) -> Any:
    """Returns an array with the elements of a dim after the first `size` replaced."""
    is_true = lax.lt(lax.iota(np.dtype("int32"), array.shape[dim]), np.int32(size))
    is_true = lax.broadcast_in_dim(is_true, array.shape, (dim,))
    return lax.select(is_true, array, lax.full(array.shape, fill, array.dtype))


def carried(op: Op, relation: Relation, *, has_fill: bool) -> tuple[Dim, ...]:
    """Returns the dims of a relation whose padding corresponds; none where padding is cut.

    Of a reshape, the first dim of each run: its other elements stay in front. Of contracted dims, those that a fill can
    replace. Of reordered dims, those at whose indices a scatter writes.
    """
    match relation.kind:
        case Kind.SAME | Kind.REPEATED | Kind.NEW:
            return relation.dims
        case Kind.FACTORS:
            return relation.dims[0], relation.other[0]
        case Kind.CONTRACTED if has_fill:
            return relation.dims
        case Kind.REORDERED if op.family in LOOKED_UP and relation.dims[0][1] in index_dims(op):
            return relation.dims
    return ()


def index_dims(op: Op) -> list[int]:
    """Returns the dims of the first operand of which a lookup reads, or writes, single elements at indices."""
    numbers: Any = op.params["dimension_numbers"]
    if op.family is Family.GATHER:
        return [dim for dim in numbers.start_index_map if op.params["slice_sizes"][dim] == 1]
    return [dim for dim in numbers.scatter_dims_to_operand_dims if dim in numbers.inserted_window_dims]


def inside(op: Op, indices: Any, true: Shape, padded: Shape) -> Any:
    """Returns the indices of a lookup in a padded operand that select the elements they select in the true operand.

    An index behind the true size is clipped, or moved behind the padding, as the operation's mode requires.
    """
    numbers: Any = op.params["dimension_numbers"]
    dims = numbers.start_index_map if op.family is Family.GATHER else numbers.scatter_dims_to_operand_dims
    mode = lax.GatherScatterMode.from_any(op.params["mode"])
    if mode == lax.GatherScatterMode.PROMISE_IN_BOUNDS or all(true[dim] == padded[dim] for dim in dims):
        return indices
    columns = []
    for column, dim in enumerate(dims):
        index = lax.index_in_dim(indices, column, indices.ndim - 1)
        if true[dim] != padded[dim] and mode == lax.GatherScatterMode.CLIP:
            index = lax.min(index, jnp.full_like(index, true[dim] - 1))
        elif true[dim] != padded[dim]:
            index = lax.select(lax.lt(index, jnp.full_like(index, true[dim])), index, jnp.full_like(index, padded[dim]))
        columns.append(index)
    return columns[0] if len(columns) == 1 else lax.concatenate(columns, indices.ndim - 1)


Evaluate = Callable[[Body, Sequence[Any]], list[Any]]
"""Returns the outputs of a body, given its inputs; dims of either may be padded."""


def with_padded_bodies(graph: Graph, op: Op, ins: Sequence[Any], evaluate: Evaluate) -> list[Any]:
    """Runs a loop, a branch or a remat on padded operands; results are padded where its bodies return them so.

    A carry is padded where its value before or after an iteration is, and a result of branches where any has it so.
    """
    ins, inner = _operands(graph, op, ins)
    outs = [_out_shapes(graph, body, shapes, evaluate) for body, shapes in zip(op.bodies, inner, strict=True)]
    if op.name == "cond":
        outs = [functools.reduce(_longest, outs)] * len(outs)
    elif op.name in ("scan", "while"):
        first, count = _carry(graph, op)
        carry = _longest(inner[-1][first : first + count], outs[-1])
        while carry != inner[-1][first : first + count]:
            inner[-1][first : first + count] = carry
            outs[-1] = _out_shapes(graph, op.bodies[-1], inner[-1], evaluate)
            carry = _longest(carry, outs[-1])
        outs[-1][:count] = carry
        outer = len(ins) - count if op.name == "while" else first
        ins = [*ins[:outer], *_all_fitted(ins[outer : outer + count], carry), *ins[outer + count :]]
        if op.name == "while":
            inner[0][len(inner[0]) - count :] = carry
    targets = dict(zip(op.bodies, outs, strict=True))
    pairs = [
        pair for body, shapes in zip(op.bodies, inner, strict=True) for pair in zip(body.inputs, shapes, strict=True)
    ]
    run = lambda body, args: _all_fitted(evaluate(body, args), targets[body])  # noqa: E731
    return [*with_bodies(op, ins, run, dict(pairs).__getitem__)]


def _operands(graph: Graph, op: Op, ins: Sequence[Any]) -> tuple[list[Any], list[list[Shape]]]:
    """Returns the operands, not padded along the iterations of a loop, and the shapes of the inputs of each body."""
    if op.name == "scan":
        first = sum(scan_counts(graph, op))
        scanned = [
            fitted(array, (graph.shape(value)[0], *np.shape(array)[1:]))[0]
            for value, array in zip(op.inputs[first:], ins[first:], strict=True)
        ]
        return [*ins[:first], *scanned], [[*map(np.shape, ins[:first]), *(np.shape(array)[1:] for array in scanned)]]
    shapes = [*map(np.shape, ins)]
    if op.name == "while":
        num_test = op.params["cond_nconsts"]
        num_body = op.params["body_nconsts"]
        return [*ins], [[*shapes[:num_test], *shapes[num_test + num_body :]], shapes[num_test:]]
    return [*ins], [shapes[op.name == "cond" :] for _ in op.bodies]


def _carry(graph: Graph, op: Op) -> tuple[int, int]:
    """Returns the first carried input of the body of a loop, and their number."""
    if op.name == "scan":
        return scan_counts(graph, op)
    return op.params["body_nconsts"], len(op.outputs)


def _out_shapes(graph: Graph, body: Body, shapes: Sequence[Shape], evaluate: Evaluate) -> list[Shape]:
    avals = [jax.ShapeDtypeStruct(shape, graph.avals[v].dtype) for v, shape in zip(body.inputs, shapes, strict=True)]
    return [tuple(out.shape) for out in jax.eval_shape(lambda *args: [*map(jnp.asarray, evaluate(body, args))], *avals)]


def _longest(first: Iterable[Shape], second: Iterable[Shape]) -> list[Shape]:
    """Returns the larger size of each dim."""
    return [tuple(map(max, *pair)) for pair in zip(first, second, strict=False)]


def _all_fitted(arrays: Iterable[Any], shapes: Iterable[Shape]) -> list[Any]:
    return [fitted(array, shape)[0] for array, shape in zip(arrays, shapes, strict=True)]
