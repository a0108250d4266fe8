"""Values that a TPU's compiler moves between devices in fewer bits than they are computed with.

Source: programs of tests/byo for v5e:2x4, libtpu 0.0.52 (`spanax check --level 3`).
"""

import jax
import numpy as np

from spanax.plan.spmd.tiled_scatter import WORD_BYTES, is_vector_product
from spanax.trace.jaxpr.graph import Graph, Op

DEFAULT_PRECISION = (None, jax.lax.Precision.DEFAULT, (jax.lax.Precision.DEFAULT, jax.lax.Precision.DEFAULT))
"""Precisions of a matmul in float32 for which a TPU rounds its operands to bfloat16."""

VIEWS = frozenset({"copy", "reshape", "squeeze", "transpose"})
"""Operations whose result has the elements of their operand."""

RENAMED = VIEWS | {"convert_element_type"}
"""Operations on each element of a sum, which commute with its reduction over devices up to rounding."""


def narrowest_copy_bytes(graph: Graph, value: int) -> int:
    """Returns the bytes of a sum, or of a narrower copy where only that is used."""
    num_bytes = graph.num_bytes(value)
    while len(readers := graph.readers[value]) == 1 and readers[0].name in RENAMED:
        value = readers[0].outputs[0]
        if not np.issubdtype(graph.avals[value].dtype, np.integer) and graph.avals[value].dtype != bool:
            num_bytes = min(num_bytes, graph.num_bytes(value))
    return num_bytes


def is_rounded(graph: Graph, value: int) -> bool:
    """Returns whether a float32 value is gathered in 16 bits: all readers round it, or read their shard of it."""
    readers = [op for op in graph.readers[value] if _rounds(graph, op) or not op.is_elementwise]
    if graph.avals[value].dtype != np.float32 or not readers:
        return False
    return all(is_rounded(graph, op.outputs[0]) if op.name in VIEWS else _rounds(graph, op) for op in readers)


def _rounds(graph: Graph, op: Op) -> bool:
    """Returns whether an operation rounds its float32 operand to 16 bits: a conversion, or a matmul."""
    if op.name == "convert_element_type":
        dtype = graph.avals[op.outputs[0]].dtype
        return bool(jax.numpy.issubdtype(dtype, jax.numpy.floating)) and dtype.itemsize < WORD_BYTES
    return op.name == "dot_general" and op.params["precision"] in DEFAULT_PRECISION and not is_vector_product(graph, op)
