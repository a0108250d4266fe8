"""Validates a user's batch against the traced one and places its arrays."""

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from spanax.errors import BatchError
from spanax.trace.program import Program
from spanax.trace.user_mesh import is_typed


def validate_batch(program: Program, shardings: Sequence[jax.sharding.NamedSharding], batch: Any) -> list[Any]:
    """Returns the arrays of a batch in the program's order, with the given shardings.

    Raises:
      SpanaxError: the structure, a shape or a dtype differs from the batch that the program was traced with.
    """
    leaves, treedef = jax.tree.flatten(batch)
    leaves = [array if hasattr(array, "shape") else np.asarray(array) for array in leaves]
    if treedef != program.batch_treedef:
        raise BatchError(
            "the structure of the batch differs from the traced batch.",
            where=f"expected {program.batch_treedef}, got {treedef}",
        )
    for leaf, array in zip(program.batch, leaves, strict=True):
        if tuple(array.shape) != leaf.shape:
            raise BatchError(
                f"batch leaf '{leaf.path}' has shape {tuple(array.shape)}, but was traced with {leaf.shape}.",
                fix="trace the program with a batch of this shape, or drop the incomplete batch",
            )
        if array.dtype != leaf.dtype and jax.dtypes.canonicalize_dtype(array.dtype) != leaf.dtype:
            raise BatchError(
                f"batch leaf '{leaf.path}' is {array.dtype}, but was traced as {leaf.dtype}.",
                fix=f"batch['{leaf.path}'].astype('{leaf.dtype}')",
            )
    return [place_argument(array, sharding) for array, sharding in zip(leaves, shardings, strict=True)]


def place_argument(array: Any, sharding: jax.sharding.NamedSharding) -> Any:
    """Returns the array with the planned sharding; an array on the host is transferred with the step."""
    if not isinstance(array, jax.Array) or array.sharding == sharding:
        return array
    is_placed = array.sharding.is_equivalent_to(sharding, array.ndim) and not is_typed(array)
    return array if is_placed else jax.device_put(array, sharding)
