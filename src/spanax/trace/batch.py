"""Describes the arrays of a batch as leaves of a program."""

from typing import Any

import jax
import numpy as np

from spanax.errors import BatchError
from spanax.trace.variables import Leaf


def abstract_batch(batch: Any) -> tuple[Any, tuple[Leaf, ...], Any]:
    """Returns a batch as shapes, its leaves, and its treedef.

    Raises:
      SpanaxError: the batch contains something other than arrays, or nothing.
    """
    try:
        batch = jax.eval_shape(lambda tree: tree, batch)
    except TypeError:
        raise BatchError(
            "the batch contains something that is not an array.",
            where=", ".join(_no_arrays(batch)[:3]),
            fix="a dict of numpy arrays or jax.ShapeDtypeStructs, examples along dim 0",
        ) from None
    pairs, treedef = jax.tree_util.tree_flatten_with_path(batch)
    if not pairs:
        raise BatchError("the batch has no arrays.", fix="a dict of arrays, examples along dim 0 of each")
    name = lambda path: jax.tree_util.keystr(path, simple=True, separator=".") or "batch"  # noqa: E731
    return batch, tuple(Leaf(name(path), leaf.shape, leaf.dtype, "batch") for path, leaf in pairs), treedef


def _no_arrays(batch: Any) -> list[str]:
    """Returns descriptions of the leaves of a batch that JAX cannot represent, by path."""
    descriptions = []
    for path, leaf in jax.tree_util.tree_flatten_with_path(batch)[0]:
        try:
            jax.eval_shape(lambda array: array, leaf)
        except TypeError:
            kind = f" of {leaf.dtype}" if isinstance(leaf, np.ndarray) else ""
            descriptions.append(f"{jax.tree_util.keystr(path)} is a {type(leaf).__name__}{kind}")
    return descriptions
