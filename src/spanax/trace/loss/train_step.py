"""The train step that Spanax writes around a loss."""

from collections.abc import Callable, Mapping
from typing import Any

import optax
from flax import nnx

from spanax.batch_dims import ExampleDims
from spanax.errors import ConflictError, RangeError
from spanax.trace.jaxpr.marks import marked_gradients
from spanax.trace.jaxpr.remat_policies import (
    EXACT,
    GATHERED,
    KERNELS,
    known_accumulation,
    known_context,
    known_policy,
)
from spanax.trace.loss.loss_gradient import loss_gradient
from spanax.trace.rewrites.attention.fuse import FusedAttention
from spanax.trace.rewrites.microbatches.support import examples
from spanax.trace.rewrites.pure_loss import numbers_of, pure_loss
from spanax.trace.variant import Variant

TrainStep = Callable[[nnx.Module, nnx.Optimizer, Any], dict[str, Any]]


def chosen_step(
    loss: Callable[[nnx.Module, Any], Any] | None,
    train_step: TrainStep | None,
    clip_norm: float | None,
    accumulate: str,
    variant: Variant,
    attentions: list[FusedAttention] | None = None,
    batch_axes: ExampleDims | None = None,
) -> TrainStep:
    """Returns the requested train step: written around `loss`, or the user's `train_step`.

    With microbatches, `batch_axes` are the dims with the examples; by default, as the loss uses them.

    Raises:
      SpanaxError: neither or both are passed, or an option that requires `loss`.
    """
    known_context(variant.context)
    if loss is not None and train_step is None:
        if variant.microbatches < 1:
            raise RangeError(f"microbatches={variant.microbatches}; expected an integer >= 1.", fix="microbatches=1")
        known_policy(variant.remat)
        return _step_around(loss, clip_norm, known_accumulation(accumulate), variant, attentions, batch_axes)
    if loss is not None or train_step is None:
        raise ConflictError(
            "pass either `loss` or `train_step`" + (", not both." if loss is not None else "."),
            fix="loss=lambda model, batch: ..., and Spanax writes the step",
        )
    options = {
        "microbatches": variant.microbatches != 1,
        "compute_dtype": variant.compute_dtype is not None,
        "clip_norm": clip_norm,
        "remat": variant.remat is not None,
        "attention" if variant.context in KERNELS else "layout='ring'": variant.context != GATHERED,
        "loss_chunks": variant.loss_chunks != 1,
        "accumulate": accumulate != EXACT,
    }
    for name, is_set in options.items():
        if is_set:
            raise ConflictError(
                f"`{name}` requires `loss`: a user-defined `train_step` decides that itself.",
                fix=f"leave {name} out, or pass loss= instead of train_step=",
            )
    return train_step


def _step_around(
    loss: Callable[[nnx.Module, Any], Any],
    clip_norm: float | None,
    accumulate: str,
    variant: Variant,
    attentions: list[FusedAttention] | None,
    batch_axes: ExampleDims | None,
) -> TrainStep:
    """Returns an NNX train step: gradients over microbatches, clipping, one optimizer update.

    Parameters keep their dtype; the loss is computed on parameters and batch cast to the compute dtype, with residuals
    stored according to the remat policy. If the context is not `gathered`, attention is fused, and each fused attention
    is appended to `attentions`; logits are computed in chunks. The step returns `loss`, `grad_norm` (before clipping)
    and the metrics of the loss.
    """

    def train_step(model: nnx.Module, optimizer: nnx.Optimizer, batch: Any) -> dict[str, Any]:
        value, params, rest = pure_loss(loss, variant.compute_dtype, model, optimizer)
        count = variant.microbatches
        operands = params, rest, batch
        dims = examples(value, operands, count, batch_axes) if count > 1 else ()
        result = loss_gradient(value, operands, dims, variant, accumulate, attentions)
        nnx.update(model, result.params)
        nnx.update(model, result.rest)
        grads = marked_gradients(result.grads)
        grad_norm = optax.tree.norm(grads)
        if clip_norm is not None:
            grads, _ = optax.clip_by_global_norm(clip_norm).update(grads, optax.EmptyState())
        optimizer.update(model, grads)
        return {"loss": result.scalar, "grad_norm": grad_norm} | result.extra

    return train_step


def as_metrics(returned: Any) -> dict[str, Any]:
    """Returns the result of a train step (dict, loss, `(loss, dict)` or None) as a dict."""
    if returned is None:
        return {}
    if isinstance(returned, tuple) and len(returned) == 2 and isinstance(returned[1], Mapping):
        returned = {"loss": returned[0]} | dict(returned[1])
    return numbers_of("train_step", returned if isinstance(returned, Mapping) else {"loss": returned})
