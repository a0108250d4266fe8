"""Retraces a step with another number of layers or examples, and finds the dims that differ.

The two graphs must match value by value. A dim that is longer in one of them scales with that number.
"""

import warnings
from collections.abc import Callable
from typing import Any

import jax

from spanax.batch_dims import num_examples
from spanax.errors import ResizeError, first_line
from spanax.trace.axes.axes import Axes
from spanax.trace.jaxpr.dim_maps.relations import Kind
from spanax.trace.jaxpr.graph import CONTRACTIONS, Graph, Op, difference
from spanax.trace.jaxpr.permutations import step_graph
from spanax.trace.optimizers.wrapped import with_logged

Shapes = tuple[tuple[int, ...], ...]
"""The shape of every leaf of the state."""


def retraced_graph(written: Graph, function: Callable[..., Any], state: list[Any], batch: Any) -> Graph:
    """Returns the graph of a step with more layers in its state, or more examples in its batch.

    Args:
      written: the graph of the original step.
      function: the step.
      state: shape and dtype of every leaf.
      batch: the batch, or its shapes and dtypes.

    Raises:
      ResizeError: the step depends on its original shapes, or traces to other operations.
    """
    pairs = zip(map(written.shape, written.body.inputs), (leaf.shape for leaf in state), strict=False)
    sizes = (size for before, after in pairs for size, new_size in zip(before, after, strict=True) if size != new_size)
    num_layers = next(sizes, 0)
    try:
        jaxpr, (_, result) = jax.make_jaxpr(function, return_shape=True)(state, batch)
        graph = step_graph(jaxpr)
        if len(graph.body.outputs) < len(written.body.outputs):  # the original has the values of logged schedules
            graph, _ = with_logged(graph, len(state), jax.tree.structure(result))
    except Exception as error:
        raise _refused(f"{type(error).__name__}: {first_line(error)}"[:160], num_layers) from error
    return matching(written, graph, num_layers)


def matching(written: Graph, graph: Graph, num_layers: int = 0) -> Graph:
    """Returns a graph that has the values and operations of another one.

    Args:
      written: the other graph.
      graph: the graph, with longer dims.
      num_layers: the number of layers in `written`, for the error.

    Raises:
      ResizeError: the operations differ.
    """
    if len(written.avals) != len(graph.avals) or written.constants.keys() != graph.constants.keys():
        raise _refused("it traces to other operations", num_layers)
    if different := difference(written.body, graph.body):
        raise _refused(different, num_layers)
    return graph


def longer_dim(first: Graph, second: Graph, value: int) -> int | None:
    """Returns the dim that is longer in the second graph; None if the shapes are equal.

    Raises:
      ResizeError: several dims differ, or the rank does.
    """
    before = first.shape(value)
    after = second.shape(value)
    differ = [dim for dim, pair in enumerate(zip(before, after, strict=False)) if pair[0] != pair[1]]
    if len(before) != len(after) or len(differ) > 1:
        reason = f"an array of {list(before)} becomes one of {list(after)}"
        raise _refused(reason, before[differ[0]] if differ else 0)
    return differ[0] if differ else None


def dividing(num_layers: int) -> str:
    """Returns a text that lists the numbers of parts that divide the layers evenly."""
    counts = [str(count) for count in range(2, num_layers + 1) if num_layers % count == 0]
    return f"stages (times chunks) that divide {num_layers} layers: {', '.join(counts)}"


def _refused(why: str, num_layers: int) -> ResizeError:
    what = f"the step cannot be traced with arrays of other sizes: {why.rstrip('.')}."
    return ResizeError(what, fix=dividing(num_layers))


def batch_sized_dims(
    graph: Graph, axes: Axes, function: Callable[..., Any], state: list[Any], batch: Any, microbatches: int
) -> list[tuple[int, int]]:
    """Returns the dims of freshly created values that scale with the batch, as (value, dim).

    Only dims that could shard operations without a batch dim are checked.

    Args:
      graph: the traced function.
      axes: the axes of the graph.
      function: a function of the state and the batch.
      state: shape and dtype of every leaf of the state.
      batch: shapes and dtypes.
      microbatches: the number of parts in which the function computes the batch.
    """
    arrays, treedef = jax.tree.flatten(batch)
    size = num_examples([array.shape for array in arrays], axes.examples)
    if axes.coverage == 1 or size == microbatches:
        return []  # no mesh axis shards one example
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
