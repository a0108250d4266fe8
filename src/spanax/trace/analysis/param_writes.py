"""Finds parameters that a loss overwrites, as `nnx.WeightNorm` does.

NNX returns every value that a loop receives, modified or not; the traced program shows which are passed through.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax

from spanax.trace.jaxpr.graph import REMAT, Body, Graph, from_jaxpr, scan_counts

PASSING = frozenset({"copy", "copy_p", "optimization_barrier", "sharding_constraint", "name"})
"""Operations whose results are their operands."""


def param_writes(after: Callable[..., Sequence[Any]], before: Any, *others: Any) -> list[bool]:
    """Returns, for each leaf of `before`, whether `after(before, *others)` replaces it with another value.

    Example:
      >>> import jax.numpy as jnp
      >>> def after(leaves):
      ...     stacked = jax.lax.scan(lambda carry, row: (carry, row), 0.0, leaves[1])[1]
      ...     return [leaves[0] * 2, stacked]
      >>> param_writes(after, [jnp.ones(3), jnp.ones((2, 3))])
      [True, False]
    """
    graph = from_jaxpr(jax.make_jaxpr(after)(before, *others))
    return [_source(graph, graph.body, value) != index for index, value in enumerate(graph.body.outputs)]


def _source(graph: Graph, body: Body, value: int) -> int | None:
    """Returns the index of the body input that a value is passed through from, or None if it is computed."""
    while value not in body.inputs:
        op = graph.producers.get(value)
        if op is None:
            return None
        index = op.outputs.index(value)
        if op.name in PASSING:
            value = op.inputs[index]
            continue
        if op.name not in REMAT | {"scan"}:
            return None
        inner = _source(graph, op.bodies[0], op.bodies[0].outputs[index])
        if inner is None or (op.name == "scan" and not _stays(graph, op, index, inner)):
            return None
        value = op.inputs[inner]
    return body.inputs.index(value)


def _stays(graph: Graph, op: Any, index: int, inner: int) -> bool:
    """Returns whether a scan's result is its operand: an unchanged carry, or a scanned operand stacked again."""
    num_consts, num_carried = scan_counts(graph, op)
    return inner == num_consts + index if index < num_carried else inner >= num_consts + num_carried
