"""Retraces a step with another number of layers or examples, and finds the dims that differ.

The two graphs must match value by value. A dim that is longer in one of them scales with that number.
"""

from collections.abc import Callable
from typing import Any

import jax

from spanax.errors import ResizeError, first_line
from spanax.trace.jaxpr.graph import Body, Graph, from_jaxpr
from spanax.trace.optimizers.learning_rates import with_logged

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
        graph, _ = with_logged(from_jaxpr(jaxpr), len(state), jax.tree.structure(result))
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
    _check_same(written.body, graph.body, num_layers)
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


def _check_same(first: Body, second: Body, num_layers: int) -> None:
    same = (first.inputs, first.outputs, len(first.ops)) == (second.inputs, second.outputs, len(second.ops))
    for old, new in zip(first.ops, second.ops, strict=False) if same else ():
        same = (old.name, old.inputs, old.outputs) == (new.name, new.inputs, new.outputs)
        if not same or len(old.bodies) != len(new.bodies):
            raise _refused(f"its `{old.name}` becomes `{new.name}`", num_layers)
        for first_body, second_body in zip(old.bodies, new.bodies, strict=True):
            _check_same(first_body, second_body, num_layers)
    if not same:
        raise _refused("it traces to other operations", num_layers)


def _refused(why: str, num_layers: int) -> ResizeError:
    what = f"the step cannot be traced with arrays of other sizes: {why.rstrip('.')}."
    return ResizeError(what, fix=dividing(num_layers))
