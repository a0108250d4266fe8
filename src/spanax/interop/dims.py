"""Conversion between Spanax arrays and Hugging Face tensors by einops-like patterns; see `families`."""

import math
import re
from collections.abc import Sequence
from itertools import chain

import numpy as np

ALONG = "*"
"""The dim of an array along which several tensors are stacked."""


def tensor_shape(dims: str, shape: Sequence[int]) -> tuple[int, ...]:
    """Returns the shape of the Hugging Face tensors of an array with this shape.

    Example:
      >>> tensor_shape("(H K) D -> D * H K", (64, 3, 8, 8))
      (64, 64)
    """
    if not dims:
        return tuple(shape)
    tensor_dims, array_dims = _parsed(dims)
    sizes = dict(zip(array_dims, shape, strict=True))
    return tuple(math.prod(sizes[name] for name in group) for group in tensor_dims)


def write_array(dims: str, tensor: np.ndarray, into: np.ndarray, index: int) -> None:
    """Writes a Hugging Face tensor into an array in place: into all of it, or into one index along `*`.

    Example:
      >>> array = np.zeros((2, 3, 2))
      >>> write_array("(H K) D -> D H K", np.arange(12.0).reshape(6, 2), array, 0)
      >>> array[0].tolist()
      [[0.0, 2.0], [4.0, 6.0], [8.0, 10.0]]
    """
    if not dims:
        into[...] = tensor
        return
    tensor_dims, array_dims = _parsed(dims)
    sizes = dict(zip(array_dims, into.shape, strict=True))
    flat, axes = list(chain(*tensor_dims)), [name for name in array_dims if name != ALONG]
    unflattened = tensor.reshape([sizes[name] for name in flat])
    _part(array_dims, into, index)[...] = unflattened.transpose([flat.index(name) for name in axes])


def tensor_of(dims: str, array: np.ndarray, index: int) -> np.ndarray:
    """Returns the Hugging Face tensor of an array, or of one index along its dim `*`.

    Example:
      >>> tensor_of("(H K) D -> D H K", np.arange(12.0).reshape(2, 3, 2), 0).shape
      (6, 2)
    """
    if not dims:
        return array
    tensor_dims, array_dims = _parsed(dims)
    flat, axes = list(chain(*tensor_dims)), [name for name in array_dims if name != ALONG]
    part = _part(array_dims, array, index).transpose([axes.index(name) for name in flat])
    return part.reshape(tensor_shape(dims, array.shape))


def _part(array_dims: Sequence[str], array: np.ndarray, index: int) -> np.ndarray:
    if ALONG not in array_dims:
        return array
    return array[(slice(None),) * array_dims.index(ALONG) + (index,)]


def _parsed(dims: str) -> tuple[list[list[str]], list[str]]:
    """Parses a pattern into the groups of dims that form each dim of a tensor, and the dims of the array."""
    left, _, right = dims.partition(" -> ")
    groups = re.findall(r"\(([^)]*)\)|(\S+)", left)
    return [(group or single).split() for group, single in groups], right.split()
