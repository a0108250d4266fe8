"""Gradient accumulation as a mean over microbatches, each evaluated as an independent batch."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from spanax.batch_dims import ExampleDims
from spanax.trace.rewrites.microbatches.support import partition_examples
from spanax.trace.rewrites.pure_loss import check_unmoved


def mean_of_microbatches(
    gradient: Callable[..., Any], params: Any, rest: Any, batch: Any, dims: ExampleDims, count: int
) -> tuple[Any, Any, Any, Any]:
    """Returns mean loss, mean metrics, the other state after the last microbatch, and mean gradients.

    Args:
      gradient: maps parameters, other state and batch to `((loss, (metrics, other state, moved)), gradients)`.
      params, rest, batch: its operands.
      dims: the dim with the examples of each array of the batch.
      count: the number of microbatches.

    Raises:
      SpanaxError: the loss writes to a trained parameter.
    """
    examples, merged = partition_examples(batch, dims, count)

    def body(carry: Any, rows: list[Any]) -> tuple[Any, Any]:
        rest, total = carry
        (loss, (metrics, rest, moved)), grads = gradient(params, rest, merged(rows))
        check_unmoved(params, moved, count)
        return (rest, jax.tree.map(jnp.add, total, grads)), (loss, metrics)

    (rest, grads), (losses, metrics) = jax.lax.scan(body, (rest, jax.tree.map(jnp.zeros_like, params)), examples)
    mean = lambda tree: jax.tree.map(lambda leaf: leaf.mean(0), tree)  # noqa: E731
    return losses.mean(), mean(metrics), rest, jax.tree.map(lambda leaf: leaf / count, grads)
