"""Finds the matmuls of weights that are quantized, in the traced loss."""

from collections.abc import Mapping, Sequence
from functools import reduce
from operator import or_

import jax.numpy as jnp

from spanax.trace.jaxpr.graph import Graph, Op
from spanax.trace.jaxpr.provenance import propagated

PASSED = frozenset(
    "convert_element_type reduce_precision reshape transpose slice dynamic_slice squeeze expand_dims broadcast_in_dim "
    "rev split copy copy_p name optimization_barrier sharding_constraint".split()
)
"""Operations whose results have the elements of their first operand: a weight stays one."""

CHOOSING = frozenset({"top_k", "approx_top_k", "sort", "argmax", "argmin"})
"""Operations whose results change abruptly with their operands, such as the choice of a token's experts."""


def weight_matmuls(graph: Graph, weights: Mapping[int, str], tile: int) -> dict[Op, str]:
    """Returns the matmuls of a loss that are quantized, each with the path of its weight.

    One operand comes from a weight, or several joined, through casts, reshapes, transposes, slices and broadcasts only,
    and the other does not. The last matmuls, whose results no other matmul of a weight depends on, are not quantized:
    they compute the logits. Neither are routers, whose results choose.

    Source: DeepSeek-V3 (arXiv 2412.19437, section 3.3.1) keeps embeddings, output head, gates of experts, norms and
    attention in their dtype.

    Args:
      graph: the loss, with calls inlined.
      weights: the paths of the inputs that are weights.
      tile: the number of elements along the last contracted dim that share a scale; it must divide it. 0 for all.

    Example:
      >>> import jax
      >>> from spanax.trace.jaxpr.graph import CALLS, from_jaxpr
      >>> def loss(weights, x):
      ...     return (jnp.tanh(x @ weights["up"]) @ weights["down"]).sum()
      >>> weights = {name: jax.ShapeDtypeStruct((8, 8), "float32") for name in ("down", "up")}
      >>> graph = from_jaxpr(jax.make_jaxpr(loss)(weights, jax.ShapeDtypeStruct((4, 8), "float32")), CALLS)
      >>> weight_matmuls(graph, dict(zip(graph.body.inputs, weights)), 0).values()
      dict_values(['up'])
    """
    paths = list(weights.values())
    made_of = propagated(graph, {value: 1 << index for index, value in enumerate(weights)}, _still_weight)
    found = dict[Op, str]()
    for op in graph.ops():
        if op.name == "dot_general" and (side := _weight_side(graph, op, made_of)) is not None:
            found[op] = paths[made_of[op.inputs[side]].bit_length() - 1]
    bits = {op: 1 << index for index, op in enumerate(found)}
    # Which of these matmuls a value depends on, without another of them in between.
    depends = propagated(graph, {}, lambda op, operands: bits.get(op) or reduce(or_, operands, 0))
    read = reduce(or_, (depends[value] for op in found for value in op.inputs), 0)
    chosen_by = reduce(or_, (depends[value] for op in graph.ops() if op.name in CHOOSING for value in op.inputs), 0)
    return {
        op: path
        for op, path in found.items()
        if bits[op] & read & ~chosen_by and (not tile or _divides(graph, op, tile))
    }


def _still_weight(op: Op, operands: Sequence[int]) -> int:
    if op.name in ("concatenate", "stack"):
        return reduce(or_, operands) if all(operands) else 0
    return operands[0] if op.name in PASSED else 0


def _weight_side(graph: Graph, op: Op, made_of: Sequence[int]) -> int | None:
    """Returns which operand of a matmul of floats is a weight, with a dim that is not contracted; None for none."""
    are_weights = [made_of[value] > 0 for value in op.inputs]
    if sum(are_weights) != 1 or not all(jnp.issubdtype(graph.avals[value].dtype, jnp.floating) for value in op.inputs):
        return None
    side = are_weights.index(True)
    contracted, batch = op.params["dimension_numbers"]
    num_free = len(graph.shape(op.inputs[side])) - len(contracted[side]) - len(batch[side])
    return side if num_free and contracted[side] else None


def _divides(graph: Graph, op: Op, tile: int) -> bool:
    (of_lhs, _), _ = op.params["dimension_numbers"]
    return graph.shape(op.inputs[0])[of_lhs[-1]] % tile == 0
