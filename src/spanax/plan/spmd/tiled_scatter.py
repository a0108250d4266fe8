"""Which partial sums a TPU's compiler reduce-scatters: those whose shards are tiles. It all-reduces the others.

A reduce-scatter is an all-reduce fused with a slice, and a slice of a tile cannot be fused. Source: gradients of 60
shapes in programs for v5e:2x4, libtpu 0.0.52 (`spanax check --level 3`).
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from spanax.plan.sharding.partition import Reshard, union
from spanax.plan.spmd.sharded_program import ShardedProgram
from spanax.trace.jaxpr.graph import Graph, Op

Count = float | np.ndarray

LANES, ROWS = 128, 8
"""Columns and rows of a tile of 32-bit elements."""

WORD_BYTES = 4
"""Bytes of an element of a tile."""

FEWEST_ROWS = 2 * ROWS
"""The fewest rows of a shard that is scattered."""

WINDOWED_BYTES = 1 << 20
"""Larger results of matmuls are reduce-scattered by permutes between parts of the matmul, however they are tiled."""

SMALL_BYTES = 1 << 10
"""Smaller partial sums of matmuls on each device are, too. Source: 70 matmuls for v5e:1x2 to v5e:4x4."""

RING, WINDOWED_PRODUCTS = 8, 2112
"""So are the sums of at least so many products, per byte of an element, over a ring of so many devices: the matmul
takes longer than the permutes. Source: the same matmuls; on v5e, 4,208 products in bfloat16 are not, 4,264 are."""

MAX_PADDING = 1.5
"""The factor up to which the compiler pads rows to tiles: 12 of 16 rows are padded, 10 of 16 are not."""


def as_tiles(sharded: ShardedProgram, shift: Reshard) -> tuple[Reshard, float]:
    """Returns a reduce-scatter as the compiler runs it, and the factor by which padding increases its bytes.

    It is an all-reduce where a shard of the result is not a number of tiles.

    Args:
      sharded: the program's step under the layout, on a mesh with the sizes that it runs on.
      shift: a reduce-scatter.
    """
    graph, mesh = sharded.traced.graph, sharded.resolver.mesh
    shape, masks = graph.shape(shift.value), sharded.masks(shift.value)
    if union(masks) & ~(shift.over | shift.unchanged):
        return replace(shift, kind="all-reduce"), 1.0  # the slice is along other axes, too
    scattered = [dim for dim, mask in enumerate(masks) if mask & shift.over]
    ways = [mesh.ways([axis for bit, axis in enumerate(mesh.names) if mask >> bit & 1]) for mask in masks]
    local = [-(-size // count) for size, count in zip(shape, ways, strict=True)]
    producer = graph.producers.get(shift.value)
    is_matmul = producer is not None and producer.name == "dot_general"
    if (
        producer is not None
        and is_matmul
        and not is_vector_product(graph, producer)
        and _is_windowed(sharded, shift, producer)
    ):
        return shift, 1.0
    padding = scatter_padding(local, scattered, graph.avals[shift.value].dtype.itemsize, is_padded=is_matmul)
    return (replace(shift, kind="all-reduce"), 1.0) if padding is None else (shift, padding)


def halo_shards(sharded: ShardedProgram, shift: Reshard) -> float:
    """Returns the shards that each device receives by permutes after a reduce-scatter with padded rows; mostly 0.

    The last of n devices has its rows n - 1 times the padding away: of 96 rows over 8 devices, padded to 16 each, 28.
    Source: the gradients of tests/byo/graph_net.py, libtpu 0.0.52 for v5e:2x4.
    """
    (tiled, padding), mesh = as_tiles(sharded, shift), sharded.resolver.mesh
    count = mesh.ways([axis for bit, axis in enumerate(mesh.names) if shift.over >> bit & 1])
    return (count - 1) * (padding - 1) if tiled.kind == "reduce-scatter" else 0.0


def _is_windowed(sharded: ShardedProgram, shift: Reshard, op: Op) -> bool:
    """Returns whether the sum of a matmul is scattered by permutes between parts of the matmul."""
    graph, mesh = sharded.traced.graph, sharded.resolver.mesh
    over, unchanged, others = (
        mesh.ways([axis for bit, axis in enumerate(mesh.names) if mask >> bit & 1])
        for mask in (shift.over, shift.unchanged, ~(shift.over | shift.unchanged))
    )
    return bool(is_windowed(PartialSum.of(graph, op, shift.over, shift.unchanged), over, unchanged, others))


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
        (result,), lhs = op.outputs, graph.shape(op.inputs[0])
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
    """Returns whether a sum is scattered by permutes between parts of its matmul; no device may repeat that of another.

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


def scatter_padding(local: Sequence[int], scattered: Sequence[int], itemsize: int, *, is_padded: bool) -> float | None:
    """Returns the factor by which the shards of a reduce-scatter are padded; None if it is an all-reduce instead.

    The larger of the last two dims of a shard is its minor dim, which lies along the lanes of a tile. A shard along it
    has full lanes of 32-bit words; along any other dim it has at least two tiles of rows.

    Args:
      local: the sizes of a shard.
      scattered: the dims that are scattered.
      itemsize: bytes per element.
      is_padded: whether rows are padded to tiles, as those of a matmul's result are.

    Example:
      >>> scatter_padding((16, 64), [0], 2, is_padded=True), scatter_padding((8, 64), [0], 2, is_padded=True)
      (1.0, None)
      >>> scatter_padding((128, 64), [0], 4, is_padded=True), scatter_padding((128, 64), [0], 2, is_padded=True)
      (1.0, None)
    """
    dims = [dim for dim, size in enumerate(local) if size > 1 or dim in scattered]
    if len(dims) < 2:
        return None
    first, last = dims[-2:]
    minor = first if local[first] > local[last] else last
    padding = 1.0
    for dim in scattered:
        size = local[dim]
        if dim == minor:
            is_tiled = size % (LANES * max(1, WORD_BYTES // itemsize)) == 0
        else:
            is_leading = is_padded and dim not in (first, last) and itemsize == WORD_BYTES
            tile = ROWS if is_leading or local[minor] > LANES else FEWEST_ROWS
            rows = max(ROWS if is_leading else FEWEST_ROWS, math.ceil(size / tile) * tile)
            padding *= rows / size
            is_tiled = rows == size or (is_padded and padding <= MAX_PADDING)
        if not is_tiled:
            return None
    return padding
