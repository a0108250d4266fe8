"""Computes the bytes of an array in TPU memory, where the two minor dims are padded to tiles.

The compiler orders the dims of an array to minimize padding. Source: the layouts of programs compiled by libtpu 0.0.51
and 0.0.52 for v5e, v5p and v6e: of arguments in tests/check/test_compiler.py, and of temporaries in
tests/data/memory_cells.json.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from spanax.plan.spmd.tiled_scatter import LANES, ROWS, WORD_BYTES

FEW_EXAMPLES = 7
COPIES = 2
WINDOW_COPIES = 3
"""Convolutions of at most so many examples on a device fold parts of an image into the batch: so many copies of each
activation are live, and so many of all columns of the windows of one convolution. Source: convolutions compiled by
libtpu 0.0.52 for v5e:2x4, notes/planner.md."""

MOST_PADDING = 4
MANY_LOOKUPS = 2048
"""The largest factor by which rows of a table are padded to lanes; any factor where a device looks up so many of them.
Source: tables of 16 to 200 columns in such programs."""

GRANULE_BYTES = 512
"""The allocation granularity of arrays."""

Array = np.ndarray


class Tiled(NamedTuple):
    """What the padding of an array depends on: its global shape, and per dim the mesh axes and how it scales.

    Attributes:
      shape: the global size of each dim.
      axes: the mesh axes that shard each dim, as masks.
      is_batch: whether each dim grows with the batch.
      is_layers: whether each dim is divided into pipeline stages; such a dim of a temporary is never minor.
      itemsize: bytes per element.
      is_argument: whether any dim may be minor, as in an argument.
      indexed: dims that a gather or scatter indexes, which are not minor: each row of a table is contiguous.
      spatial: dims over which the windows of convolutions slide, which are not minor in their operands.
      window: the columns of the kernel, if the array stands for the windows of a convolution's operand; otherwise 0.
      lookups: the rows of a table that are looked up, of all devices; 0 where the array is no table.
      lookup_axes: the mesh axes that shard the lookups, as a mask.
    """

    shape: tuple[int, ...]
    axes: tuple[int, ...]
    is_batch: tuple[bool, ...]
    is_layers: tuple[bool, ...]
    itemsize: int
    is_argument: bool = False
    indexed: tuple[int, ...] = ()
    spatial: tuple[int, ...] = ()
    window: int = 0
    lookups: int = 0
    lookup_axes: int = 0

    def local_dims(self, num_shards: Array, scale: Array, num_stages: Array) -> Array:
        """Returns the size of each dim on one device: an array (dim, candidate)."""
        rows = [np.broadcast_to(1.0, scale.shape)]
        for size, axes, is_batch, is_layers in zip(self.shape, self.axes, self.is_batch, self.is_layers, strict=True):
            local = size / num_shards[axes] * (scale if is_batch else 1.0) / (num_stages if is_layers else 1.0)
            rows.append(np.maximum(np.ceil(np.round(local, 6)), 1.0))
        return np.stack(rows[1:]) if len(rows) > 1 else np.zeros((0, *scale.shape))

    def padded(self, num_shards: Array, scale: Array, num_stages: Array) -> tuple[Array, Array]:
        """Returns the bytes of the array on one device, with and without padding: one entry per candidate."""
        dims = self.local_dims(num_shards, scale, num_stages)
        result = padded(dims, self.itemsize, self._barred, (*self.indexed, *self.spatial))
        if self.spatial:
            examples = np.prod([dim for dim, is_batch in zip(dims, self.is_batch, strict=True) if is_batch], axis=0)
            copies = WINDOW_COPIES * self.window or COPIES
            result = result * np.where(examples <= FEW_EXAMPLES, copies, 0.0 if self.window else 1.0)
        return result, dims.prod(0) * self.itemsize

    def most_bytes(self, num_shards: Array, scale: Array, num_stages: Array) -> Array:
        """Returns the most bytes of the array on one device: with rows padded to lanes if they are looked up."""
        if not self.lookups:
            return self.padded(num_shards, scale, num_stages)[0]
        rows, columns = self.local_dims(num_shards, scale, num_stages)
        lanes = _round_up(columns, LANES)
        is_padded = (lanes <= MOST_PADDING * columns) | (
            self.lookups / num_shards[self.lookup_axes] * scale >= MANY_LOOKUPS
        )
        return rows * np.where(is_padded, lanes, columns) * WORD_BYTES

    def copied_bytes(self, num_shards: Array, scale: Array, num_stages: Array) -> Array:
        """Returns the bytes of a copy of a table with padded rows, in which it is updated if rows are not doubled."""
        rows, columns = self.local_dims(num_shards, scale, num_stages)
        lanes = _round_up(columns, LANES)
        return np.where((lanes > columns) & (lanes < 2 * columns), rows * lanes * WORD_BYTES, 0.0)

    @property
    def _barred(self) -> Sequence[int]:
        layers = [index for index, is_layers in enumerate(self.is_layers) if is_layers and not self.is_argument]
        return layers if len(self.shape) - len(layers) > 1 else ()


def padded(dims: Array, itemsize: int, barred: Sequence[int] = (), indexed: Sequence[int] = ()) -> Array:
    """Returns the padded bytes of arrays with one dtype and rank.

    Args:
      dims: the size of each dim: an array (dim, array).
      itemsize: bytes per element.
      barred: dims that are never one of the two minor dims.
      indexed: dims that are never the minor dim.
    """
    count = dims.prod(0)
    if len(dims) < 2:
        tile = np.clip(2.0 ** np.ceil(np.log2(np.maximum(count, 1.0))), LANES, LANES * ROWS)
        return _granules(_round_up(count, tile) * itemsize)
    packed = max(1, WORD_BYTES // itemsize)
    highest = 2.0 ** np.ceil(np.log2(dims))
    rows = np.minimum(ROWS * max(1, packed // 2), np.maximum(packed, highest))
    by_lanes = _round_up(dims, LANES) / dims
    by_rows = _round_up(dims, rows) / dims
    minor = [index for index in range(len(dims)) if index not in barred]
    last = [index for index in minor if index not in indexed] or minor
    smallest = np.min([by_lanes[i] * by_rows[j] for i in last for j in minor if i != j], axis=0)
    return _granules(np.round(count * smallest) * itemsize)


def padded_bytes(shape: Sequence[int], itemsize: int, platform: str) -> int:
    """Returns the bytes of an array with a per-device shape; only TPUs pad.

    Example:
      >>> padded_bytes((50257, 48), 4, "tpu"), padded_bytes((12, 48), 4, "tpu"), padded_bytes((12, 48), 4, "cuda")
      (9658368, 8192, 2304)
      >>> padded_bytes((), 4, "tpu"), padded_bytes((12, 3, 12, 4), 4, "tpu")
      (512, 73728)
    """
    unpadded = math.prod(shape) * itemsize
    if platform != "tpu" or not unpadded:
        return unpadded
    return int(padded(np.asarray(shape, float).reshape(-1, 1), itemsize)[0])


def _round_up(size: Array, multiple: Array | float) -> Array:
    return np.ceil(size / multiple) * multiple


def _granules(num_bytes: Array) -> Array:
    return _round_up(num_bytes, GRANULE_BYTES)
