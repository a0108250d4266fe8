"""Given: the batch of a user as a step takes it, its arrays held against the traced ones."""

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from spanax.errors import SpanaxError
from spanax.trace.program import Program
from spanax.trace.user_mesh import is_typed


def validate_batch(program: Program, shardings: Sequence[jax.sharding.NamedSharding], batch: Any) -> list[Any]:
    """The arrays of a batch in the program's order, each where it is to lie.

    Raises:
      SpanaxError: the batch is not the one that the program was traced with.
    """
    leaves, treedef = jax.tree.flatten(batch)
    leaves = [array if hasattr(array, "shape") else np.asarray(array) for array in leaves]
    if treedef != program.batch_treedef:
        raise SpanaxError(
            "the batch is built differently from the one that was traced.",
            where=f"wanted {program.batch_treedef}, got {treedef}",
        )
    for leaf, array in zip(program.batch, leaves, strict=True):
        if tuple(array.shape) != leaf.shape:
            raise SpanaxError(
                f"batch leaf '{leaf.path}' has shape {tuple(array.shape)}, and was traced with {leaf.shape}.",
                fix="trace the program with a batch of this shape, or drop the incomplete batch",
            )
        if array.dtype != leaf.dtype and jax.dtypes.canonicalize_dtype(array.dtype) != leaf.dtype:
            raise SpanaxError(
                f"batch leaf '{leaf.path}' is {array.dtype}, and was traced as {leaf.dtype}.",
                fix=f"batch['{leaf.path}'].astype('{leaf.dtype}')",
            )
    return [_placed(array, wanted) for array, wanted in zip(leaves, shardings, strict=True)]


def _placed(array: Any, wanted: jax.sharding.NamedSharding) -> Any:
    """A batch array where the plan wants it; one that is on the host goes there with the step itself."""
    if not isinstance(array, jax.Array) or array.sharding == wanted:
        return array
    is_there = array.sharding.is_equivalent_to(wanted, array.ndim) and not is_typed(array)
    return array if is_there else jax.device_put(array, wanted)
