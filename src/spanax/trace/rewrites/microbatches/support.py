"""Checks whether a loss supports exact gradient accumulation over microbatches."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from flax import nnx

from spanax.batch_dims import ExampleDims, num_examples
from spanax.errors import SpanaxError, VariantError, first_line
from spanax.trace.axes.discover import joined
from spanax.trace.axes.example_dims import example_dims
from spanax.trace.axes.scanned_dims import scanned_dims
from spanax.trace.jaxpr.graph import from_jaxpr
from spanax.trace.jaxpr.remat_policies import MEAN
from spanax.trace.rewrites.chunked_loss.chunked import stack_chunks
from spanax.trace.rewrites.microbatches.decomposition import decomposed
from spanax.trace.rewrites.pure_loss import check_unmoved, pure_loss
from spanax.trace.variables import Leaf


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
    loss: Callable[..., Any] | None,
    compute_dtype: Any,
    accumulate: str,
    trace: Callable[..., Any],
    batch_axes: ExampleDims | None,
) -> Microbatches:
    """Returns whether a train step supports microbatches.

    Args:
      loss: the user's loss; None if the user wrote the train step.
      compute_dtype: dtype to which floating parameters and batch are cast for the loss.
      accumulate: how microbatches are combined, one of `ACCUMULATIONS`.
      trace: evaluates a train step abstractly.
      batch_axes: the dim with the examples of each array of the batch, if the user says it.
    """
    if loss is None:
        error = VariantError(
            "a user-defined `train_step` does not run in microbatches.", fix="loss= and no train_step="
        )
        return Microbatches(error=error)
    if accumulate == MEAN:
        return Microbatches()
    passes: list[int] = []

    def step(model: nnx.Module, optimizer: nnx.Optimizer, batch: Any) -> dict[str, Any]:
        value, params, rest = pure_loss(loss, compute_dtype, model, optimizer)
        operands = params, rest, batch
        dims = examples(value, operands, 1, batch_axes)
        size = num_examples([leaf.shape for leaf in jax.tree.leaves(batch)], dims)
        count = next((count for count in range(2, size + 1) if size % count == 0), 1)
        parts = decomposed(value, operands, dims, count)
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


def examples(
    value: Callable[..., Any], operands: tuple[Any, Any, Any], count: int, batch_axes: ExampleDims | None = None
) -> ExampleDims:
    """Returns the dim with the examples of each array of the batch.

    Args:
      value: the loss, as `pure_loss` returns it.
      operands: trained parameters, other state, and batch.
      count: the number of microbatches.
      batch_axes: the dims, if the user says them; by default, as the loss uses them.

    Raises:
      SpanaxError: `count` does not divide the number of examples.
    """
    dims = _used(value, operands) if batch_axes is None else batch_axes
    check_divides(num_examples([array.shape for array in jax.tree.leaves(operands[2])], dims), count)
    return dims


def _used(value: Callable[..., Any], operands: tuple[Any, Any, Any]) -> ExampleDims:
    graph = from_jaxpr(jax.make_jaxpr(value)(*operands))
    dims = joined(graph, scanned_dims(graph))
    params, rest, batch = (jax.tree.leaves(tree) for tree in operands)
    leaves = [Leaf("", array.shape, array.dtype, "param") for array in params]
    leaves += [Leaf("", jax.numpy.shape(array), None, "other") for array in rest]
    return example_dims(dims, leaves, [Leaf("", array.shape, array.dtype, "batch") for array in batch])


def partition_examples(batch: Any, dims: ExampleDims, count: int) -> tuple[list[Any], Callable[[Sequence[Any]], Any]]:
    """Returns the arrays of a batch that have examples, stacked in chunks, and a function from one chunk to a batch."""
    leaves, treedef = jax.tree.flatten(batch)
    pairs = list(zip(leaves, dims, strict=True))

    def merged(chunk: Sequence[Any]) -> Any:
        rows = iter(chunk)
        return jax.tree.unflatten(treedef, [leaf if dim is None else next(rows) for leaf, dim in pairs])

    return [stack_chunks(leaf, dim, count) for leaf, dim in pairs if dim is not None], merged


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
