"""Dims: an array of ours from tensors of Hugging Face's and back, by one line of text; see `families`."""

import math
import re
from collections.abc import Sequence
from itertools import chain

import numpy as np

ALONG = "*"
"""The dim along which several tensors make up one array."""


def their_shape(dims: str, shape: Sequence[int]) -> tuple[int, ...]:
    """The shape of each tensor that an array of a shape is made of.

    Example:
      >>> their_shape("(H K) D -> D * H K", (64, 3, 8, 8))
      (64, 64)
    """
    if not dims:
        return tuple(shape)
    left, right = _parsed(dims)
    sizes = dict(zip(right, shape, strict=True))
    return tuple(math.prod(sizes[name] for name in group) for group in left)


def ours(dims: str, tensor: np.ndarray, into: np.ndarray, at: int) -> None:
    """Put one tensor into its place of an array of ours: the whole of it, or number `at` along `*`.

    Example:
      >>> array = np.zeros((2, 3, 2))
      >>> ours("(H K) D -> D H K", np.arange(12.0).reshape(6, 2), array, 0)
      >>> array[0].tolist()
      [[0.0, 2.0], [4.0, 6.0], [8.0, 10.0]]
    """
    if not dims:
        into[...] = tensor
        return
    left, right = _parsed(dims)
    sizes = dict(zip(right, into.shape, strict=True))
    flat, axes = list(chain(*left)), [name for name in right if name != ALONG]
    apart = tensor.reshape([sizes[name] for name in flat])
    _part(right, into, at)[...] = apart.transpose([flat.index(name) for name in axes])


def theirs(dims: str, array: np.ndarray, at: int) -> np.ndarray:
    """The tensor that is an array of ours, or number `at` along its `*`.

    Example:
      >>> theirs("(H K) D -> D H K", np.arange(12.0).reshape(2, 3, 2), 0).shape
      (6, 2)
    """
    if not dims:
        return array
    left, right = _parsed(dims)
    flat, axes = list(chain(*left)), [name for name in right if name != ALONG]
    part = _part(right, array, at).transpose([axes.index(name) for name in flat])
    return part.reshape(their_shape(dims, array.shape))


def _part(right: Sequence[str], array: np.ndarray, at: int) -> np.ndarray:
    if ALONG not in right:
        return array
    return array[(slice(None),) * right.index(ALONG) + (at,)]


def _parsed(dims: str) -> tuple[list[list[str]], list[str]]:
    """The dims of a tensor, each with those of ours that it holds, and the dims of ours."""
    left, _, right = dims.partition(" -> ")
    groups = re.findall(r"\(([^)]*)\)|(\S+)", left)
    return [(several or single).split() for several, single in groups], right.split()
