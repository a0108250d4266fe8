"""Retraces a step with another number of layers, and finds the dims that differ.

The two graphs must match value by value. A dim that is longer in one of them is a layer dim, whatever its axis.
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
    """The graph of a step whose state has more layers than it was written with.

    Args:
      written: the step as it was written.
      function: the step.
      state: shape and dtype of every leaf.
      batch: as it was.

    Raises:
      SpanaxError: something in it counts on the shapes it was built with, or other operations come of it.
    """
    pairs = zip(map(written.shape, written.body.inputs), (leaf.shape for leaf in state), strict=False)
    sizes = (size for before, after in pairs for size, other in zip(before, after, strict=True) if size != other)
    num_layers = next(sizes, 0)
    try:
        jaxpr, (_, result) = jax.make_jaxpr(function, return_shape=True)(state, batch)
        graph, _ = with_logged(from_jaxpr(jaxpr), len(state), jax.tree.structure(result))
    except Exception as error:
        raise _refused(f"{type(error).__name__}: {first_line(error)}"[:160], num_layers) from error
    if len(written.avals) != len(graph.avals) or written.constants.keys() != graph.constants.keys():
        raise _refused("with more layers it comes out as other operations", num_layers)
    _check_same(written.body, graph.body, num_layers)
    return graph


def longer_dim(first: Graph, second: Graph, value: int) -> int | None:
    """The dim that is longer in the second graph, if one is.

    Raises:
      SpanaxError: several are, or the value has another rank.
    """
    before, after = first.shape(value), second.shape(value)
    differ = [dim for dim, pair in enumerate(zip(before, after, strict=False)) if pair[0] != pair[1]]
    if len(before) != len(after) or len(differ) > 1:
        told = f"with more layers an array of {list(before)} becomes one of {list(after)}"
        raise _refused(told, before[differ[0]] if differ else 0)
    return differ[0] if differ else None


def dividing(num_layers: int) -> str:
    """Into how many parts layers can be divided evenly, in words."""
    counts = [str(count) for count in range(2, num_layers + 1) if num_layers % count == 0]
    return f"stages (times chunks) that divide {num_layers} layers: {', '.join(counts)}"


def _check_same(first: Body, second: Body, num_layers: int) -> None:
    same = (first.inputs, first.outputs, len(first.ops)) == (second.inputs, second.outputs, len(second.ops))
    for one, other in zip(first.ops, second.ops, strict=False) if same else ():
        same = (one.name, one.inputs, one.outputs) == (other.name, other.inputs, other.outputs)
        if not same or len(one.bodies) != len(other.bodies):
            raise _refused(f"with more layers its `{one.name}` becomes `{other.name}`", num_layers)
        for inner, beside in zip(one.bodies, other.bodies, strict=True):
            _check_same(inner, beside, num_layers)
    if not same:
        raise _refused("with more layers it comes out as other operations", num_layers)


def _refused(why: str, num_layers: int) -> ResizeError:
    return ResizeError(
        "the step counts on how many layers there are, and cannot be divided unevenly.",
        where=why,
        fix=dividing(num_layers),
    )
