"""Gradient accumulation as a mean over microbatches, each evaluated as an independent batch."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from spanax.trace.pure_loss import check_unmoved
from spanax.trace.rewrites.chunked_loss.chunked import apart


def mean_of_microbatches(
    gradient: Callable[..., Any], params: Any, rest: Any, batch: Any, is_example: tuple[bool, ...], count: int
) -> tuple[Any, Any, Any, Any]:
    """Returns mean loss, mean metrics, the other state after the last microbatch, and mean gradients.

    Args:
      gradient: maps parameters, other state and batch to `((loss, (metrics, other state, moved)), gradients)`.
      params, rest, batch: its operands.
      is_example: for each array of the batch, whether its first dim is the example dim.
      count: the number of microbatches.

    Raises:
      SpanaxError: the loss writes to a trained parameter.
    """
    leaves, treedef = jax.tree.flatten(batch)

    def body(carry: Any, examples: Any) -> tuple[Any, Any]:
        (rest, total), rows = carry, iter(examples)
        merged = [next(rows) if has_rows else leaf for leaf, has_rows in zip(leaves, is_example, strict=True)]
        (loss, (metrics, rest, moved)), grads = gradient(params, rest, jax.tree.unflatten(treedef, merged))
        check_unmoved(params, moved, count)
        return (rest, jax.tree.map(jnp.add, total, grads)), (loss, metrics)

    examples = [apart(leaf, 0, count) for leaf, has_rows in zip(leaves, is_example, strict=True) if has_rows]
    (rest, grads), (losses, metrics) = jax.lax.scan(body, (rest, jax.tree.map(jnp.zeros_like, params)), examples)
    mean = lambda tree: jax.tree.map(lambda leaf: leaf.mean(0), tree)  # noqa: E731
    return losses.mean(), mean(metrics), rest, jax.tree.map(lambda leaf: leaf / count, grads)
