"""Padding: what an array takes in a TPU's memory, where rows and columns fill whole tiles.

The compiler orders the dims of an argument so that least is lost. Source: the entry layouts of programs compiled by
libtpu 0.0.51 for v5e, v5p and v6e (tests/check/test_compiler.py holds every one against this).
"""

import itertools
import math
from collections.abc import Sequence

LANES, ROWS = 128, 8
"""Columns and rows of a tile of 32-bit numbers."""

GRANULE_BYTES = 512
"""An array takes a multiple of this."""


def padded_bytes(shape: Sequence[int], itemsize: int, platform: str) -> int:
    """Bytes of an array of this shape on one device of a platform; only TPUs pad.

    Example:
      >>> padded_bytes((50257, 48), 4, "tpu"), padded_bytes((12, 48), 4, "tpu"), padded_bytes((12, 48), 4, "cuda")
      (9658368, 8192, 2304)
      >>> padded_bytes((), 4, "tpu"), padded_bytes((12, 3, 12, 4), 4, "tpu")
      (512, 73728)
    """
    plain = math.prod(shape) * itemsize
    if platform != "tpu" or not plain:
        return plain
    if len(shape) < 2:
        count = math.prod(shape)
        tile = min(LANES * ROWS, max(LANES, 1 << (count - 1).bit_length()))
        return _granules(-(-count // tile) * tile * itemsize)
    least = min(
        _up(shape[minor], LANES) * _rows(shape[second], itemsize) * (math.prod(shape) // (shape[minor] * shape[second]))
        for minor, second in itertools.permutations(range(len(shape)), 2)
    )
    return _granules(least * itemsize)


def _rows(size: int, itemsize: int) -> int:
    """Rows, as tiles of so many as are needed: a narrow array has tiles of 1, 2 or 4 rows."""
    packed = max(1, 4 // itemsize)
    tile = min(ROWS * max(1, packed // 2), max(packed, 1 << (size - 1).bit_length()))
    return _up(size, tile)


def _up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


def _granules(num_bytes: int) -> int:
    return _up(num_bytes, GRANULE_BYTES)
