"""Batch: what a batch consists of, as leaves of a program."""

from typing import Any

import jax
import numpy as np

from spanax.errors import SpanaxError
from spanax.trace.variables import Leaf


def no_arrays(batch: Any) -> list[str]:
    """What in a batch JAX has no numbers for, by path."""
    found = []
    for path, leaf in jax.tree_util.tree_flatten_with_path(batch)[0]:
        try:
            jax.eval_shape(lambda array: array, leaf)
        except TypeError:
            kind = f" of {leaf.dtype}" if isinstance(leaf, np.ndarray) else ""
            found.append(f"{jax.tree_util.keystr(path)} is a {type(leaf).__name__}{kind}")
    return found


def batch_leaves_of(batch: Any) -> tuple[tuple[Leaf, ...], Any]:
    """The arrays of a batch, and how they make it up."""
    found, treedef = jax.tree_util.tree_flatten_with_path(batch)
    if not found:
        raise SpanaxError("the batch has no arrays.", fix="a dict of arrays, examples along dim 0 of each")
    name = lambda path: jax.tree_util.keystr(path, simple=True, separator=".") or "batch"  # noqa: E731
    return tuple(Leaf(name(path), leaf.shape, leaf.dtype, "batch") for path, leaf in found), treedef
