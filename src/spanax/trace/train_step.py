"""The train step that Spanax writes around a loss."""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import optax
from flax import nnx

from spanax.errors import SpanaxError
from spanax.trace.jaxpr.marks import marked_gradients
from spanax.trace.pure_loss import check_unmoved, numbers_of, pure_loss
from spanax.trace.rewrites.attention.fuse import FusedAttention, fuse_attention
from spanax.trace.rewrites.chunked_loss.chunked import chunked_loss
from spanax.trace.rewrites.microbatches.exact import accumulated
from spanax.trace.rewrites.microbatches.mean import mean_of_microbatches
from spanax.trace.rewrites.microbatches.support import examples
from spanax.trace.rewrites.remat import rematerialized
from spanax.trace.rewrites.remat_policies import EXACT, GATHERED, KERNELS, MEAN, known_accumulation, known_policy

TrainStep = Callable[[nnx.Module, nnx.Optimizer, Any], dict[str, Any]]


def chosen_step(
    loss: Any,
    train_step: Any,
    compute_dtype: Any,
    clip_norm: float | None,
    remat: str | None,
    microbatches: int,
    context: str,
    loss_chunks: int,
    accumulate: str = EXACT,
    attentions: list[FusedAttention] | None = None,
) -> Any:
    """Returns the requested train step: written around `loss`, or the user's `train_step`.

    Raises:
      SpanaxError: neither or both are passed, or an option that requires `loss`.
    """
    if (loss is None) == (train_step is None):
        raise SpanaxError(
            "give either `loss` or `train_step`" + (", not both." if loss is not None else "."),
            fix="loss=lambda model, batch: ..., and Spanax writes the step",
        )
    if loss is not None:
        if microbatches < 1:
            raise SpanaxError(f"microbatches={microbatches}; it takes a whole number from 1.", fix="microbatches=1")
        return train_step_of(
            loss,
            microbatches=microbatches,
            compute_dtype=compute_dtype,
            clip_norm=clip_norm,
            remat=known_policy(remat),
            context=context,
            attentions=attentions,
            loss_chunks=loss_chunks,
            accumulate=known_accumulation(accumulate),
        )
    options = {
        "microbatches": microbatches != 1,
        "compute_dtype": compute_dtype is not None,
        "clip_norm": clip_norm,
        "remat": remat is not None,
        "attention" if context in KERNELS else "layout='ring'": context != GATHERED,
        "loss_chunks": loss_chunks != 1,
        "accumulate": accumulate != EXACT,
    }
    for name, is_set in options.items():
        if is_set:
            raise SpanaxError(
                f"`{name}` goes with `loss`: a `train_step` of your own decides that itself.",
                fix=f"leave {name} out, or pass loss= instead of train_step=",
            )
    return train_step


def train_step_of(
    loss: Callable[[nnx.Module, Any], Any],
    *,
    microbatches: int,
    compute_dtype: Any,
    clip_norm: float | None,
    remat: str | None,
    context: str = GATHERED,
    loss_chunks: int = 1,
    accumulate: str = EXACT,
    attentions: list[FusedAttention] | None = None,
) -> TrainStep:
    """Returns an NNX train step: gradients over microbatches, clipping, one optimizer update.

    Parameters keep their dtype; the loss is computed on parameters and batch cast to `compute_dtype`, with residuals
    stored according to `remat`. If `context` is not `gathered`, attention is fused, and each fused attention is
    appended to `attentions`; logits are computed in `loss_chunks`. The step returns `loss`, `grad_norm` (before
    clipping) and the metrics of the loss.
    """

    def transform(pure: Callable[..., Any]) -> Callable[..., Any]:
        attending = pure if context == GATHERED else fuse_attention(pure, context, attentions)
        return rematerialized(chunked_loss(attending, loss_chunks), remat)

    def train_step(model: nnx.Module, optimizer: nnx.Optimizer, batch: Any) -> dict[str, Any]:
        value, params, rest = pure_loss(loss, compute_dtype, model, optimizer)
        gradient = jax.value_and_grad(transform(value), has_aux=True)
        if microbatches == 1:
            (scalar, (extra, rest, moved)), grads = gradient(params, rest, batch)
            leaves = [old if new is None else new for old, new in zip(jax.tree.leaves(params), moved, strict=True)]
            nnx.update(model, jax.tree.unflatten(jax.tree.structure(params), leaves))
        else:
            is_example = examples(batch, microbatches)
            if accumulate == MEAN:
                scalar, extra, rest, grads = mean_of_microbatches(
                    gradient, params, rest, batch, is_example, microbatches
                )
            else:
                args = params, rest, batch
                (scalar, (extra, rest, moved)), grads = accumulated(value, transform, args, is_example, microbatches)
                check_unmoved(params, moved, microbatches)
        nnx.update(model, rest)
        grads = marked_gradients(grads)
        grad_norm = optax.tree.norm(grads)
        if clip_norm is not None:
            grads, _ = optax.clip_by_global_norm(clip_norm).update(grads, optax.EmptyState())
        optimizer.update(model, grads)
        return {"loss": scalar, "grad_norm": grad_norm} | extra

    return train_step


def as_metrics(returned: Any) -> dict[str, Any]:
    """Returns the result of a train step (dict, loss, `(loss, dict)` or None) as a dict."""
    if returned is None:
        return {}
    if isinstance(returned, tuple) and len(returned) == 2 and isinstance(returned[1], Mapping):
        returned = {"loss": returned[0]} | dict(returned[1])
    return numbers_of("train_step", returned if isinstance(returned, Mapping) else {"loss": returned})
