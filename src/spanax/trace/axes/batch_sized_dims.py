"""Finds batch-sized dims of freshly created arrays (noise) by retracing at twice the batch.

No operation joins these dims to the data, and their size alone proves nothing. The function is traced once more with
twice the batch; a dim that doubles is batch-sized.
"""

import warnings
from collections.abc import Callable
from typing import Any

import jax

from spanax.batch_dims import num_examples
from spanax.errors import ResizeError, first_line
from spanax.trace.axes.axes import Axes
from spanax.trace.axes.retrace import retraced_graph
from spanax.trace.jaxpr.dim_maps.relations import Kind
from spanax.trace.jaxpr.graph import CONTRACTIONS, Graph, Op


def batch_sized_dims(
    graph: Graph, axes: Axes, function: Callable[..., Any], state: list[Any], batch: Any
) -> list[tuple[int, int]]:
    """Returns the dims of freshly created values that scale with the batch, as (value, dim).

    Only dims that could shard operations without a batch dim are checked.

    Args:
      graph: the traced function.
      axes: the axes of the graph.
      function: a function of the state and the batch.
      state: shape and dtype of every leaf of the state.
      batch: shapes and dtypes.
    """
    arrays, treedef = jax.tree.flatten(batch)
    size = num_examples([array.shape for array in arrays], axes.examples)
    if axes.coverage == 1 or size == 1:
        return []  # no mesh axis shards a batch of one example
    unsharded = set[int | None]()
    for op in graph.ops():
        if op.name in CONTRACTIONS:
            labels = {label for value in (*op.inputs, *op.outputs) for label in axes.classes[value]} - {None}
            unsharded |= (
                labels if all(axes.names.get(label) != "batch" for label in labels if label is not None) else set()
            )
    dims = [
        (value, dim)
        for op in graph.ops()
        for value, dim in _new_dims(op)
        if axes.classes[value][dim] in unsharded and graph.shape(value)[dim] % size == 0
    ]
    if not dims:
        return []
    twice = [_twice(array, dim) for array, dim in zip(arrays, axes.examples, strict=True)]
    try:
        longer = retraced_graph(graph, function, state, jax.tree.unflatten(treedef, twice))
    except ResizeError as error:
        reason = first_line(error.__cause__ or error)
        warnings.warn(
            f"{len(dims)} dims of values that the step creates independently of the batch are replicated: it cannot be "
            f"traced with {2 * size} examples instead of {size} to find whether they scale with it: {reason}",
            stacklevel=6,
        )
        return []
    return [(value, dim) for value, dim in dims if longer.shape(value)[dim] == 2 * graph.shape(value)[dim]]


def _twice(array: Any, dim: int | None) -> jax.ShapeDtypeStruct:
    sizes = [size * (2 if index == dim else 1) for index, size in enumerate(array.shape)]
    return jax.ShapeDtypeStruct(sizes, array.dtype)


def _new_dims(op: Op) -> list[tuple[int, int]]:
    """Returns the dims of an operation's results that none of its operands has."""
    dims = op.dim_map.dims(Kind.NEW, Kind.REPEATED)
    return sorted((op.outputs[array - len(op.inputs)], dim) for array, dim in dims)
