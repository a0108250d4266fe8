"""Attention to the latest positions alone, as by sliding windows: its caches are rings of as many rows.

Row `position % size` of a ring is that of the position. The operations between the caches and the sums over their rows
are those of a forward pass of `size` tokens, in which the rows have the positions of the ring.
"""

from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np

from spanax.decoding.derive.forward import Forward
from spanax.decoding.derive.incremental import Rings
from spanax.trace.jaxpr.graph import Graph, Op
from spanax.trace.jaxpr.interpret import Values, read, run
from spanax.trace.jaxpr.provenance import propagated

HIDDEN = -9000.0
"""This or less is added to the scores of hidden positions."""


def ring_positions(size: int, latest: Any, length: int) -> Any:
    """Returns the positions of the rows of a ring; for those that were not written, positions after the latest.

    Example:
      >>> [ring_positions(4, latest, length=16).tolist() for latest in (5, 1)]
      [[4, 5, 2, 3], [0, 1, 14, 15]]
    """
    rows = jnp.arange(size, dtype=jnp.int32)
    return (latest - (latest - rows) % size) % length


def bands(forward: Forward) -> dict[Op, int]:
    """Returns the operations that apply a mask that hides early positions, and how many of the latest ones it shows."""
    graph = forward.graph
    widths: dict[tuple[int, bool], int] = {}
    found = {}
    for op in graph.ops():
        if op.name not in ("select_n", "add") or not any(map(forward.follows_tokens, op.inputs)):
            continue
        for mask in op.inputs[:1] if op.name == "select_n" else op.inputs:
            is_constant = not forward.follows_tokens(mask) and not forward.follows_context(mask)
            if not is_constant or len(forward.positions(mask)) != 2:
                continue
            key = mask, op.name == "select_n" and forward.follows_tokens(op.inputs[1])
            if key not in widths:
                widths[key] = _width(forward, *key)
            if 1 < widths[key] < forward.length:
                found[op] = widths[key]
    return found


def _width(forward: Forward, mask: int, hides: bool) -> int:
    """Returns how many of the latest positions a mask shows; the length if it shows others, or is not known.

    Args:
      forward: the forward pass.
      mask: booleans, or what is added to scores.
      hides: whether the booleans are those of hidden positions.
    """
    graph = forward.graph
    pairs = (pair for op in graph.ops() if op.bodies for pair in graph.wires(op).inputs)
    array = _evaluated(
        graph, mask, {inner: outer for outer, inner in pairs if graph.shape(inner) == graph.shape(outer)}
    )
    if array is None:
        return forward.length
    shown = np.logical_xor(array, hides) if array.dtype == bool else array.astype(np.float32) > HIDDEN
    shown = np.any(shown, axis=tuple(dim for dim in range(array.ndim) if dim not in forward.positions(mask)))
    places = np.arange(forward.length)
    for each in (shown, shown.T):  # by the position of the query
        newest = forward.length - 1 - each[:, ::-1].argmax(1)
        if (newest <= places).all():
            return int((places - each.argmax(1)).max()) + 1
    return forward.length


def _evaluated(graph: Graph, value: int, outer: Mapping[int, int]) -> np.ndarray | None:
    """Returns a value that follows from no input, given the outer values of those inside bodies; None for others."""
    ops = graph.slice([value])
    computed = {each for op in ops for each in op.outputs}
    values: Values = {}
    for each in {value, *(each for op in ops for each in op.inputs)} - computed - {*graph.constants}:
        values[each] = _evaluated(graph, outer[each], outer) if each in outer else None
        if values[each] is None:
            return None
    run(graph, ops, values)
    return np.asarray(read(graph, values, [value])[0])


def rings_of(forward: Forward, short: Forward, masked: Mapping[Op, int]) -> Rings | None:
    """Returns the rings of a forward pass, given one of as many tokens as these have rows.

    Returns None if the passes differ in more than sizes.
    """
    pairs = list(zip(forward.graph.ops(), short.graph.ops(), strict=False))
    if len(forward.graph.avals) != len(short.graph.avals) or any(
        (op.name, op.inputs, op.outputs) != (other.name, other.inputs, other.outputs) for op, other in pairs
    ):
        return None

    def transfer(op: Op, operands: list[int]) -> int:
        sizes = (each.graph.shape(op.outputs[0]) for each in (forward, short))
        num_differ = sum(long != other for long, other in zip(*sizes, strict=True))
        return int(num_differ > 1 and (op in masked or any(operands)))  # both queries and keys are positions

    banded = frozenset(value for value, bit in enumerate(propagated(forward.graph, {}, transfer)) if bit)
    return Rings(short.length, banded, short.graph, dict(pairs))
