"""Checks whether a loss supports exact gradient accumulation over microbatches."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from flax import nnx

from spanax.errors import SpanaxError, VariantError, first_line
from spanax.trace.axes.naming import with_examples
from spanax.trace.loss.pure_loss import check_unmoved, pure_loss
from spanax.trace.rewrites.chunked_loss.chunked import stack_chunks
from spanax.trace.rewrites.microbatches.decomposition import decomposed
from spanax.trace.rewrites.remat_policies import MEAN


@dataclass(frozen=True)
class Microbatches:
    """The support of a train step for microbatches.

    Attributes:
      num_passes: evaluations of the loss per microbatch; 2 if the weights of its sums depend on the sums.
      error: why the results would differ from those of the full batch; None if they are equal or need not be.
    """

    num_passes: int = 1
    error: SpanaxError | None = None


def microbatches_of(
    loss: Callable[..., Any] | None, compute_dtype: Any, accumulate: str, batch: Any, trace: Callable[..., Any]
) -> Microbatches:
    """Returns whether a train step supports microbatches.

    Args:
      loss: the user's loss; None if the user wrote the train step.
      compute_dtype: dtype to which floating parameters and batch are cast for the loss.
      accumulate: how microbatches are combined, one of `ACCUMULATIONS`.
      batch: shapes of the batch.
      trace: evaluates a train step abstractly.
    """
    if loss is None:
        error = VariantError(
            "a user-defined `train_step` does not run in microbatches.", fix="loss= and no train_step="
        )
        return Microbatches(error=error)
    if accumulate == MEAN:
        return Microbatches()
    leaves = jax.tree.leaves(batch)
    size = max((leaves[number].shape[0] for number in with_examples(range(len(leaves)), leaves)), default=1)
    count = next((count for count in range(2, size + 1) if size % count == 0), 1)
    passes: list[int] = []

    def step(model: nnx.Module, optimizer: nnx.Optimizer, batch: Any) -> dict[str, Any]:
        value, params, rest = pure_loss(loss, compute_dtype, model, optimizer)
        parts = decomposed(value, (params, rest, batch), examples(batch, count), count)
        check_unmoved(params, parts.shapes[1][2], count)
        passes.append(1 if parts.is_linear else 2)
        return {}

    try:
        trace(step)
    except SpanaxError as error:
        return Microbatches(error=error)
    # An equation that the analysis does not support must not prevent a plan without microbatches.
    except Exception as error:
        what = f"the loss cannot be analyzed for microbatches: {type(error).__name__}: {first_line(error)}"
        return Microbatches(error=VariantError(what, fix='microbatches=1 and no pipeline, or accumulate="mean"'))
    return Microbatches(passes[-1])


def examples(batch: Any, count: int) -> tuple[bool, ...]:
    """Returns for each array of the batch whether its first dim is the example dim.

    Raises:
      SpanaxError: `count` does not divide the number of examples.
    """
    leaves = jax.tree.leaves(batch)
    sized = with_examples(range(len(leaves)), leaves)
    size = leaves[sized[0]].shape[0] if sized else 1
    check_divides(size, count)
    return tuple(number in sized for number in range(len(leaves)))


def partition_examples(
    batch: Any, is_example: Sequence[bool], count: int
) -> tuple[list[Any], Callable[[Sequence[Any]], Any]]:
    """Returns the arrays of a batch that have examples, stacked in chunks, and a function from one chunk to a batch."""
    leaves, treedef = jax.tree.flatten(batch)
    pairs = list(zip(leaves, is_example, strict=True))

    def merged(chunk: Sequence[Any]) -> Any:
        rows = iter(chunk)
        return jax.tree.unflatten(treedef, [next(rows) if has_rows else leaf for leaf, has_rows in pairs])

    return [stack_chunks(leaf, 0, count) for leaf, has_rows in pairs if has_rows], merged


def check_divides(size: int, count: int) -> None:
    """Checks that the number of microbatches divides the batch size.

    Raises:
      SpanaxError: `count` does not divide `size`.
    """
    if size % count:
        raise VariantError(
            f"{count} microbatches do not divide the batch of {size}.",
            fix=f"microbatches={max(divisor for divisor in range(1, count) if size % divisor == 0)}",
        )
