"""Tiles of a TPU's memory, and the reduce-scatters that its compiler lowers to windowed einsums (collective matmuls).

Source: gradients of 60 shapes in programs for v5e:2x4, libtpu 0.0.52 (`spanax check --level 3`).
"""

import math
from typing import NamedTuple

import jax
import numpy as np

from spanax.plan.sharding.partition import Reshard
from spanax.plan.spmd.sharded_program import ShardedProgram
from spanax.trace.jaxpr.graph import CONTRACTIONS, Graph, Op

Count = float | np.ndarray

LANES = 128
ROWS = 8
"""Columns and rows of a tile of 32-bit elements."""

WORD_BYTES = 4
"""Bytes of an element of a tile."""

WINDOWED_BYTES = 1 << 20
"""XLA lowers reduce-scatters of larger results of matmuls to windowed einsums, however they are tiled."""

SMALL_BYTES = 1 << 10
"""Smaller partial sums of matmuls on each device are, too. Source: 70 matmuls for v5e:1x2 to v5e:4x4."""

RING = 8
WINDOWED_PRODUCTS = 2112
"""So are the sums of at least so many products, per byte of an element, over a ring of so many devices: the matmul
takes longer than the permutes. Source: the same matmuls; on v5e, 4,208 products in bfloat16 are not, 4,264 are."""


def is_windowed_sum(sharded: ShardedProgram, shift: Reshard) -> bool:
    """Returns whether XLA lowers this reduce-scatter to a windowed einsum (collective matmul).

    Args:
      sharded: the program's step under the layout, on a mesh with the sizes that it runs on.
      shift: a reduce-scatter.
    """
    graph = sharded.traced.graph
    op = graph.producers.get(shift.value)
    if op is None or op.name != "dot_general" or is_vector_product(graph, op):
        return False
    masks = shift.over, shift.unchanged, ~(shift.over | shift.unchanged)
    over, unchanged, others = (sharded.ways(mask) for mask in masks)
    return bool(is_windowed(PartialSum.of(graph, op, shift.over, shift.unchanged), over, unchanged, others))


def is_windowed_alone(sharded: ShardedProgram, shift: Reshard) -> bool:
    """Returns whether a sum of activations becomes a windowed einsum before XLA would add it to another sum.

    So does a matmul over one dim, along a dim of the result that no other axis shards. Source: the layer of Llama 3 8B
    under `tensor+seq` and `context+tensor+seq` for v5e:2x4 and v5p:2x2x2.

    Args:
      sharded: the program's step under the layout.
      shift: a reduce-scatter.
    """
    op = sharded.traced.graph.producers.get(shift.value)
    over_one_dim = op is not None and op.name in CONTRACTIONS and len(op.dim_map.contraction[0]) == 1
    scattered = [mask for mask in sharded.masks(shift.value) if mask & shift.over]
    return over_one_dim and scattered == [shift.over]


class PartialSum(NamedTuple):
    """The sum of a matmul that is stored sharded.

    Attributes:
      num_bytes: global bytes of the result.
      num_products: the products that each of its elements sums.
      itemsize: bytes per element.
      over: the mesh axes that it is summed over, as a mask.
      unchanged: the other axes that shard the result.
    """

    num_bytes: int
    num_products: int
    itemsize: int
    over: int
    unchanged: int

    @staticmethod
    def of(graph: Graph, op: Op, over: int, unchanged: int) -> "PartialSum":
        """Returns the sum of a matmul over mesh axes."""
        (result,) = op.outputs
        lhs = graph.shape(op.inputs[0])
        num_products = math.prod(lhs[dim] for dim, _ in op.dim_map.contraction[0])
        return PartialSum(graph.num_bytes(result), num_products, graph.avals[result].dtype.itemsize, over, unchanged)


def is_vector_product(graph: Graph, op: Op) -> bool:
    """Returns whether a matmul has one row, one column or one product, and is not partitioned as a matmul."""
    summed, passed = op.dim_map.contraction
    lhs, rhs = (graph.shape(value) for value in op.inputs[:2])
    rows = math.prod(lhs[dim] for dim, other, _ in passed if dim >= 0 and other < 0)
    columns = math.prod(rhs[dim] for other, dim, _ in passed if dim >= 0 and other < 0)
    return min(rows, columns, math.prod(lhs[dim] for dim, _ in summed)) == 1


def is_windowed(
    partial: PartialSum, over: Count, unchanged: Count, others: Count, scale: Count = 1.0
) -> np.ndarray | bool:
    """Returns whether XLA lowers a reduce-scatter to a windowed einsum; no device may repeat the matmul of another.

    Args:
      partial: the sum.
      over: the number of devices that it is summed over, on one mesh or as an array.
      unchanged: the number of shards of the result along other axes.
      others: the number of devices that repeat the matmul, and 1.
      scale: the factor of the number of products.
    """
    is_long = (partial.num_products * scale >= WINDOWED_PRODUCTS * partial.itemsize) & (over >= RING)
    is_small = partial.num_bytes / unchanged < SMALL_BYTES
    return (partial.num_bytes > WINDOWED_BYTES) | ((others <= 1) & (is_long | is_small))


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
