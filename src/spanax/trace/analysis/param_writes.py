"""Finds parameters that a loss overwrites, as `nnx.WeightNorm` does.

NNX returns every value that a loop receives, modified or not; the traced program shows which are only passed through.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax

from spanax.trace.jaxpr.graph import REMAT, Body, Graph, from_jaxpr, scan_counts

PASSING = frozenset({"copy", "copy_p", "optimization_barrier", "sharding_constraint", "name"})
"""Operations whose results are their operands."""


def param_writes(after: Callable[..., Sequence[Any]], before: Any, *others: Any) -> list[bool]:
    """For each leaf of `before`, whether `after(before, *others)` has something else in its place.

    Example:
      >>> import jax.numpy as jnp
      >>> def after(leaves):
      ...     turned = jax.lax.scan(lambda carry, row: (carry, row), 0.0, leaves[1])[1]
      ...     return [leaves[0] * 2, turned]
      >>> param_writes(after, [jnp.ones(3), jnp.ones((2, 3))])
      [True, False]
    """
    graph = from_jaxpr(jax.make_jaxpr(after)(before, *others))
    return [_source(graph, graph.body, value) != at for at, value in enumerate(graph.body.outputs)]


def _source(graph: Graph, body: Body, value: int) -> int | None:
    """Which input of a body a value is, handed on unchanged; None: something else."""
    makers = {out: op for op in body.ops for out in op.outputs}
    while value not in body.inputs:
        op = makers.get(value)
        if op is None:
            return None
        at = op.outputs.index(value)
        if op.name in PASSING:
            value = op.inputs[at]
            continue
        if op.name not in REMAT | {"scan"}:
            return None
        inner = _source(graph, op.bodies[0], op.bodies[0].outputs[at])
        if inner is None or (op.name == "scan" and not _stays(graph, op, at, inner)):
            return None
        value = op.inputs[inner]
    return body.inputs.index(value)


def _stays(graph: Graph, op: Any, at: int, inner: int) -> bool:
    """Whether a loop's result is one of its operands: carried around as it is, or taken by rows and stacked again."""
    num_consts, num_carried = scan_counts(graph, op)
    return inner == num_consts + at if at < num_carried else inner >= num_consts + num_carried
