"""Computes the bytes of an array in TPU memory, where the two minor dims are padded to tiles.

The compiler orders the dims of an argument to minimize padding. Source: the entry layouts of programs compiled by
libtpu 0.0.51 for v5e, v5p and v6e (tests/check/test_compiler.py compares all of them with this function).
"""

import itertools
import math
from collections.abc import Sequence

LANES, ROWS = 128, 8
"""Columns and rows of a tile of 32-bit elements."""

GRANULE_BYTES = 512
"""The allocation granularity of arrays."""


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
    if len(shape) < 2:
        count = math.prod(shape)
        tile = min(LANES * ROWS, max(LANES, 1 << (count - 1).bit_length()))
        return _granules(-(-count // tile) * tile * itemsize)
    smallest = min(
        _round_up(shape[minor], LANES)
        * _rows(shape[second], itemsize)
        * (math.prod(shape) // (shape[minor] * shape[second]))
        for minor, second in itertools.permutations(range(len(shape)), 2)
    )
    return _granules(smallest * itemsize)


def _rows(size: int, itemsize: int) -> int:
    """Returns the number of rows padded to a tile; arrays with few rows have tiles of 1, 2 or 4 rows."""
    packed = max(1, 4 // itemsize)
    tile = min(ROWS * max(1, packed // 2), max(packed, 1 << (size - 1).bit_length()))
    return _round_up(size, tile)


def _round_up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


def _granules(num_bytes: int) -> int:
    return _round_up(num_bytes, GRANULE_BYTES)
