"""Evaluates operations on interleaved dims (`plan/sharding/pieces`): each device has its shard of every piece."""

import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax.numpy as jnp

from spanax.plan.sharding.pieces import Form, Interleaved
from spanax.trace.jaxpr.dim_maps.relations import Dim, Family, Kind, Relation
from spanax.trace.jaxpr.graph import Graph, Op

ROWWISE = (Kind.SAME, Kind.CONTRACTED)
"""Relations of dims whose rows may be in any common order."""


def interleaved(array: Any, dim: Interleaved) -> Any:
    """Returns an array with its shards of the pieces of one dim in the order of the devices."""
    ends = [*itertools.accumulate(dim.sizes)]
    pieces = jnp.split(array, ends[:-1], dim.dim)
    shape = array.shape
    parts = [piece.reshape(*shape[: dim.dim], dim.ways, -1, *shape[dim.dim + 1 :]) for piece in pieces]
    return jnp.concatenate(parts, dim.dim + 1).reshape(shape)


def in_order(array: Any, dim: Interleaved) -> Any:
    """Returns an array with an interleaved dim in its own order."""
    return jnp.concatenate(_pieces(array, dim, dim.sizes), dim.dim)


def _pieces(array: Any, dim: Interleaved, sizes: Sequence[int]) -> list[Any]:
    """Returns consecutive ranges of an interleaved dim, in its own order or interleaved if they have several pieces."""
    shape = array.shape
    rows = array.reshape(*shape[: dim.dim], dim.ways, -1, *shape[dim.dim + 1 :])
    ends = itertools.accumulate(size // dim.ways for size in sizes)
    pieces = jnp.split(rows, [*ends][:-1], dim.dim + 1)
    return [
        piece.reshape(*shape[: dim.dim], size, *shape[dim.dim + 1 :]) for piece, size in zip(pieces, sizes, strict=True)
    ]


def shifted(form: Form, count: int) -> Form:
    """Returns the form of a value with `count` more leading dims; with a negative number, of one with fewer."""
    return tuple(replace(each, dim=each.dim + count) for each in form)


def rowwise(graph: Graph, op: Op, forms: Sequence[Form]) -> list[Form]:
    """Returns the forms in which an operation computes: common to all dims whose rows correspond.

    Other dims are in their own order.

    Args:
      graph: the program.
      op: an operation without bodies.
      forms: those of its operands, then those that its results will have.
    """
    known = {(array, each.dim): each for array, form in enumerate(forms) for each in form}
    values = (*op.inputs, *op.outputs)
    ordered = {dim for each in op.dim_map.relations if each.kind not in ROWWISE for dim in (*each.dims, *each.other)}
    result = dict[Dim, Interleaved]()
    for relation in op.dim_map.relations:
        if not _is_rowwise(graph, op, relation):
            continue
        found = next((known[dim] for dim in relation.dims if dim in known), None)
        dims = [(array, dim) for array, dim in relation.dims if graph.shape(values[array])[dim] > 1]
        if found is not None and (relation.kind is Kind.GROUPS or ordered.isdisjoint(dims)):
            result |= {(array, dim): replace(found, dim=dim) for array, dim in dims}
    return [
        tuple(result[array, dim] for dim in range(len(graph.shape(value))) if (array, dim) in result)
        for array, value in enumerate(values)
    ]


def _is_rowwise(graph: Graph, op: Op, relation: Relation) -> bool:
    """Returns whether the rows of a relation's dims may be in any order; groups are rows if each has one element."""
    if relation.kind is Kind.GROUPS:
        values = (*op.inputs, *op.outputs)
        return all(graph.shape(values[array])[dim] == relation.factor for array, dim in relation.dims)
    return relation.kind in ROWWISE


def in_pieces(graph: Graph, op: Op, forms: Sequence[Form]) -> list[Form] | None:
    """Returns the forms in which an operation takes or joins pieces of an interleaved dim; None if it does not.

    Args:
      graph: the program.
      op: an operation without bodies.
      forms: those of its operands, then those that its results will have.
    """
    relations = [*op.dim_map.of_kind(Kind.PARTS)]
    if op.family is not Family.RESIZE or len(relations) != 1:
        return list(forms) if _split_reshape(graph, op, forms) else None
    (whole, dim), *parts = relations[0].dims
    own = next((each for each in forms[whole] if each.dim == dim), None)
    if own is None or any(each.dim != dim for form in forms for each in form):
        return None
    ends = {0, *itertools.accumulate(own.sizes)}
    ranges = _ranges(graph, op)
    if not {end for pair in ranges for end in pair} <= ends:
        return None
    needed: list[Form] = [(own,) if array == whole else () for array in range(len(forms))]
    for (part, _), (start, stop) in zip(parts, ranges, strict=True):
        needed[part] = _within(own, start, stop)
    return needed


def computed_in_pieces(graph: Graph, op: Op, ins: Sequence[Any], forms: Sequence[Form]) -> list[Any]:
    """Computes an operation on each device's shards of pieces, in the forms that `in_pieces` returns."""
    if op.name == "reshape":
        return _reshaped(graph, op, ins, forms)
    (relation,) = op.dim_map.of_kind(Kind.PARTS)
    (whole, dim), *parts = relation.dims
    (own,) = forms[whole]
    ranges = _ranges(graph, op)
    shape = graph.shape((*op.inputs, *op.outputs)[whole])
    cuts = sorted({0, shape[dim], *(end for pair in ranges for end in pair)})
    if whole < len(op.inputs):
        pieces = _pieces(ins[whole], own, [stop - start for start, stop in itertools.pairwise(cuts)])
        found = dict(zip(cuts, pieces, strict=False))
        return [found[start] for start, _ in ranges]
    arrays = {start: ins[part] for (start, _), (part, _) in zip(ranges, parts, strict=True)}
    rows = list[Any]()
    for start, stop in itertools.pairwise(cuts):
        rows_shape = (*shape[:dim], own.ways, (stop - start) // own.ways, *shape[dim + 1 :])
        rows.append(arrays[start].reshape(rows_shape) if start in arrays else jnp.full(rows_shape, ins[1]))
    return [jnp.concatenate(rows, dim + 1).reshape(shape)]


def _ranges(graph: Graph, op: Op) -> list[tuple[int, int]]:
    """Returns where each part of the whole starts and stops."""
    (relation,) = op.dim_map.of_kind(Kind.PARTS)
    values = (*op.inputs, *op.outputs)
    sizes = [graph.shape(values[array])[dim] for array, dim in relation.dims[1:]]
    return [(start, start + size) for start, size in zip(relation.starts, sizes, strict=True)]


def _within(whole: Interleaved, start: int, stop: int) -> Form:
    """Returns the form of a range of an interleaved dim; empty for a single piece."""
    ends = [*itertools.accumulate(whole.sizes)]
    sizes = [size for size, end in zip(whole.sizes, ends, strict=True) if start < end <= stop]
    return (replace(whole, sizes=tuple(sizes)),) if len(sizes) > 1 else ()


def _split_reshape(graph: Graph, op: Op, forms: Sequence[Form]) -> tuple[int, Interleaved, Interleaved | None] | None:
    """Returns the array with a merged dim that is interleaved, that dim, and the rows that a reshape splits it into.

    None for other operations. Without interleaved rows, it is split into equal pieces, or merges them.
    """
    if op.name != "reshape" or len(forms) != 2 or max(map(len, forms)) != 1:
        return None
    shapes = [graph.shape(op.inputs[0]), graph.shape(op.outputs[0])]
    for relation in op.dim_map.of_kind(Kind.FACTORS):
        for run, other in (relation.runs, relation.runs[::-1]):
            (array, dim), *rest = run
            own = next((each for each in forms[array] if each.dim == dim), None)
            if rest or own is None:
                continue
            far = shapes[1 - array]
            dims = [position for _, position in other]
            if forms[1 - array]:
                (rows,) = forms[1 - array]
                scale = own.sizes[0] // rows.sizes[0]
                is_scaled = own.sizes == tuple(scale * size for size in rows.sizes)
                return (array, own, rows) if rows.dim == dims[0] and is_scaled and rows.ways == own.ways else None
            is_equal = {*own.sizes} == {own.sizes[0]} and len(own.sizes) == far[dims[0]]
            return (array, own, None) if is_equal and far[dims[1]] % own.ways == 0 else None
    return None


def _reshaped(graph: Graph, op: Op, ins: Sequence[Any], forms: Sequence[Form]) -> list[Any]:
    """Reshapes an interleaved dim to its pieces and what each has, or the reverse; or to rows that are interleaved."""
    found = _split_reshape(graph, op, forms)
    assert found is not None
    array, own, rows = found
    if rows is not None:
        return op.bind(ins)
    merged = graph.shape((op.inputs[0], op.outputs[0])[array])
    factors = (own.ways, len(own.sizes)) if array == 0 else (len(own.sizes), own.ways)
    parts = ins[0].reshape(*merged[: own.dim], *factors, -1, *merged[own.dim + 1 :])
    return [jnp.swapaxes(parts, own.dim, own.dim + 1).reshape(graph.shape(op.outputs[0]))]
