"""The value and the gradient of a loss, computed in the form that a variant requires."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax

from spanax.batch_dims import ExampleDims
from spanax.trace.jaxpr.remat_policies import GATHERED, MEAN
from spanax.trace.rewrites.attention.fuse import FusedAttention, fuse_attention
from spanax.trace.rewrites.chunked_loss.chunked import chunked_loss
from spanax.trace.rewrites.microbatches.exact import accumulated
from spanax.trace.rewrites.microbatches.mean import mean_of_microbatches
from spanax.trace.rewrites.pure_loss import check_unmoved
from spanax.trace.rewrites.remat import rematerialized
from spanax.trace.variant import Variant


class LossGradient(NamedTuple):
    """The results of a loss and its gradient.

    Attributes:
      scalar: the loss.
      extra: its other results.
      rest: the state other than parameters, after the loss.
      params: the parameters; those that the loss writes to have their new values.
      grads: the gradient in the parameters.
    """

    scalar: Any
    extra: Any
    rest: Any
    params: Any
    grads: Any


def loss_gradient(
    value: Callable[..., Any],
    operands: tuple[Any, Any, Any],
    dims: ExampleDims,
    variant: Variant,
    accumulate: str,
    attentions: list[FusedAttention] | None = None,
) -> LossGradient:
    """Returns the loss and its gradient, with the remat, microbatches, chunks and attention of a variant.

    Args:
      value: the loss as `pure_loss` returns it.
      operands: trained parameters, other state, and batch.
      dims: the dim with the examples of each array of the batch, for microbatches.
      variant: the form of the loss.
      accumulate: how microbatches are combined, one of `ACCUMULATIONS`.
      attentions: each fused attention is appended to this list.

    Raises:
      SpanaxError: the loss does not support the variant.
    """
    count = variant.microbatches
    params, rest, batch = operands

    def transform(pure: Callable[..., Any]) -> Callable[..., Any]:
        attending = pure if variant.context == GATHERED else fuse_attention(pure, variant.context, attentions, 2)
        return rematerialized(chunked_loss(attending, variant.loss_chunks), variant.remat)

    gradient = jax.value_and_grad(transform(value), has_aux=True)
    if count == 1:
        (scalar, (extra, rest, moved)), grads = gradient(params, rest, batch)
        leaves = [old if new is None else new for old, new in zip(jax.tree.leaves(params), moved, strict=True)]
        return LossGradient(scalar, extra, rest, jax.tree.unflatten(jax.tree.structure(params), leaves), grads)
    if accumulate == MEAN:
        means = mean_of_microbatches(gradient, params, rest, batch, dims, count)
        scalar, extra, rest, grads = means
    else:
        (scalar, (extra, rest, moved)), grads = accumulated(value, transform, operands, dims, count)
        check_unmoved(params, moved, count)
    return LossGradient(scalar, extra, rest, params, grads)
