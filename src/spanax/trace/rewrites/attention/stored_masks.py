"""Masks that are stored as constant arrays, as NumPy computes them: replaced by the positions that they are made of."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from spanax.trace.rewrites.attention.patterns import Pattern, pattern_of

MOST_ELEMENTS = 1 << 26
"""Most elements of an array that is compared with patterns; the comparison takes eight bytes for each."""


def of_positions(array: np.ndarray, queries: int, keys: int) -> Any:
    """Returns the jaxpr of an array of two values whose dims `queries` and `keys` are a mask; None if it is none.

    Example:
      >>> str(of_positions(np.tril(np.ones((1, 8, 8), bool)), 1, 2)).count("iota")
      2
    """
    if array.size > MOST_ELEMENTS or array.size != array.shape[queries] * array.shape[keys]:
        return None
    flat = np.squeeze(np.moveaxis(array, (queries, keys), (-2, -1)))
    found = _pattern(np.ascontiguousarray(flat).tobytes(), flat.shape, str(array.dtype))
    if found is None:
        return None
    pattern, hidden, seen = found

    def written() -> Any:
        shape = [[size if dim == one else 1 for dim, size in enumerate(array.shape)] for one in (queries, keys)]
        at = [lax.broadcasted_iota(jnp.int32, each, dim) for each, dim in zip(shape, (queries, keys), strict=True)]
        sees = jnp.broadcast_to(pattern.sees(*at), array.shape)
        return sees if array.dtype == bool else jnp.where(sees, seen, hidden).astype(array.dtype)

    return jax.make_jaxpr(written)()


@functools.lru_cache(maxsize=8)
def _pattern(data: bytes, shape: tuple[int, int], dtype: str) -> tuple[Pattern, Any, Any] | None:
    """Returns the pattern of an array of two values, the lower and the higher value; None if it has no pattern."""
    array = np.frombuffer(data, dtype).reshape(shape)
    hidden = array.min()
    seen = array.max()
    is_seen = array == seen
    if hidden == seen or not (is_seen | (array == hidden)).all():
        return None
    counts = np.zeros((shape[0] + 1, shape[1] + 1), np.int64)  # of the elements before a place, along both dims
    counts[1:, 1:] = is_seen.cumsum(0, dtype=np.int64).cumsum(1)

    def known(blocks: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        q_first, q_last, k_first, k_last = blocks
        rows = q_last + 1
        columns = k_last + 1
        number = counts[rows, columns] - counts[q_first, columns] - counts[rows, k_first] + counts[q_first, k_first]
        return number == 0, number == (rows - q_first) * (columns - k_first)

    pattern = pattern_of(*shape, known)
    return (pattern, hidden.item(), seen.item()) if isinstance(pattern, Pattern) else None
