"""Describes the arrays of a batch as leaves of a program."""

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from spanax.batch_dims import ExampleDims
from spanax.errors import ArgumentError, BatchError, ConflictError, RangeError
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


AUTO = "auto"
"""The value of `batch_axes` by which the program decides which dims have the examples."""


def spread(prefix: Any, tree: Any, name: str) -> list[Any]:
    """Returns the entry of a prefix of a pytree for each of its leaves.

    Args:
      prefix: a prefix of `tree`; None is an entry.
      tree: the pytree.
      name: a name of the pytree for errors.

    Raises:
      SpanaxError: `prefix` is not a prefix of `tree`.

    Example:
      >>> spread({"x": 1, "y": None}, {"x": [2.0, 3.0], "y": 4.0}, "batch")
      [1, 1, None]
    """
    is_none = lambda entry: entry is None  # noqa: E731
    try:
        entries = jax.tree.leaves(jax.tree.broadcast(prefix, tree, is_leaf=is_none), is_leaf=is_none)
    except ValueError as error:
        raise ArgumentError.of("batch_axes", prefix, f"an int, None, or a pytree prefix of `{name}`") from error
    return [
        entry for entry, leaf in zip(entries, jax.tree.leaves(tree, is_leaf=is_none), strict=True) if leaf is not None
    ]


def checked_axes(entries: Sequence[Any], leaves: Sequence[Leaf]) -> ExampleDims:
    """Returns the dim with the examples of each array, as the user says.

    Args:
      entries: a dim for each array, from the end if it is negative; None for an array without examples.
      leaves: the arrays.

    Raises:
      SpanaxError: an entry is no dim of its array, or the arrays have different numbers of examples.
    """
    sizes: dict[str, int] = {}
    for entry, leaf in zip(entries, leaves, strict=True):
        if isinstance(entry, bool) or not isinstance(entry, int | None):
            raise ArgumentError.of("batch_axes", entry, "an int or None for each array")
        if entry is not None and not -len(leaf.shape) <= entry < len(leaf.shape):
            raise RangeError(
                f"batch_axes has {entry} for `{leaf.path}`, which has {len(leaf.shape)} dims.",
                where=f"{leaf.path} {leaf.dtype}{[*leaf.shape]}",
                fix=f"None for `{leaf.path}`, if it has no examples",
            )
        if entry is not None:
            sizes[leaf.path] = leaf.shape[entry]
    if len({*sizes.values()}) > 1:
        first, *others = sizes
        other = next(path for path in others if sizes[path] != sizes[first])
        raise ConflictError(
            f"batch_axes gives `{first}` {sizes[first]} examples and `{other}` {sizes[other]}.",
            fix=f"another dim, or None, for `{first}` or `{other}`",
        )
    pairs = zip(entries, leaves, strict=True)
    return tuple(None if entry is None else entry % len(leaf.shape) for entry, leaf in pairs)


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
