"""Pads and cuts the dims of arrays, and replaces what padding must not contribute."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from spanax.trace.jaxpr.dim_maps.relations import Dim, Family, Kind, Relation, Shape
from spanax.trace.jaxpr.graph import Op
from spanax.trace.jaxpr.marks import PADDING

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
