"""The train step that Spanax writes for those who bring only a loss."""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from spanax.errors import SpanaxError
from spanax.trace.attended import attended
from spanax.trace.chunked import chunked
from spanax.trace.policies import GATHERED, KERNELS, known_policy
from spanax.trace.remat import rematerialized
from spanax.trace.variables import changed_variables
from spanax.trace.written import written

NUMBERS = (jax.Array, np.ndarray, np.generic, bool, int, float, complex)

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
    told: list[str] | None = None,
) -> Any:
    """The train step that is asked for: one made around a loss, or one's own.

    Raises:
      SpanaxError: neither or both are given, or something that a step of one's own decides itself.
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
            told=told,
            loss_chunks=loss_chunks,
        )
    given = {
        "microbatches": microbatches != 1,
        "compute_dtype": compute_dtype is not None,
        "clip_norm": clip_norm,
        "remat": remat is not None,
        "attention" if context in KERNELS else "layout='ring'": context != GATHERED,
        "loss_chunks": loss_chunks != 1,
    }
    for name, is_given in given.items():
        if is_given:
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
    told: list[str] | None = None,
) -> TrainStep:
    """An ordinary NNX train step: gradients over microbatches, clipping, one optimizer update.

    Parameters stay as the model made them; `compute_dtype` is what the loss sees of them and of the batch, and
    `remat` is what its gradient keeps; where `context` is not `gathered` attentions are operations, and `told` is added
    what became of each; the logits come in `loss_chunks`. The step returns `loss`, `grad_norm` (before clipping) and
    whatever the loss returned beside its value.
    """

    def train_step(model: nnx.Module, optimizer: nnx.Optimizer, batch: Any) -> dict[str, Any]:
        graphdef, params, rest = nnx.split(model, optimizer.wrt, ...)

        def forward(params: Any, rest: Any, batch: Any) -> tuple[Any, Any, tuple[Any, dict[str, Any]]]:
            part = nnx.merge(graphdef, params, rest, copy=True)
            returned = with_extra(loss(part, batch))
            nnx.pop(part, nnx.Intermediate)
            return *nnx.state(part, optimizer.wrt, ...), returned

        def value(params: Any, rest: Any, batch: Any) -> tuple[Any, tuple[dict[str, Any], Any, list[Any]]]:
            args = _cast(params, compute_dtype), rest, _cast(batch, compute_dtype)
            after, rest_after, (scalar, extra) = forward(*args)
            moved = _moved(forward, after, args, params)
            return scalar.astype(jnp.float32), (extra, _like(rest_after, rest), moved)

        pure = chunked(value if context == GATHERED else attended(value, context, told), loss_chunks)
        gradient = jax.value_and_grad(rematerialized(pure, remat), has_aux=True)
        if microbatches == 1:
            (scalar, (extra, rest, moved)), grads = gradient(params, rest, batch)
            leaves = [old if new is None else new for old, new in zip(jax.tree.leaves(params), moved, strict=True)]
            nnx.update(model, jax.tree.unflatten(jax.tree.structure(params), leaves))
        else:
            scalar, extra, rest, grads = _accumulate(gradient, params, rest, batch, microbatches)
        nnx.update(model, rest)
        grad_norm = optax.tree.norm(grads)
        if clip_norm is not None:
            grads, _ = optax.clip_by_global_norm(clip_norm).update(grads, optax.EmptyState())
        optimizer.update(model, grads)
        return {"loss": scalar, "grad_norm": grad_norm} | extra

    return train_step


def with_extra(returned: Any) -> tuple[Any, dict[str, Any]]:
    """A loss as `(scalar, dict)`, whether it came alone or with metrics."""
    scalar, extra = returned if isinstance(returned, tuple) and len(returned) == 2 else (returned, {})
    if getattr(scalar, "shape", None) != ():
        raise SpanaxError(
            f"`loss` returned {type(scalar).__name__} of shape {getattr(scalar, 'shape', None)}, not a scalar.",
            fix="return loss.mean(), or (loss.mean(), {'name': metric})",
        )
    if not isinstance(extra, Mapping):
        raise SpanaxError(
            f"`loss` returned {type(extra).__name__} beside its value, not a dict of metrics.",
            fix="return loss, {'name': metric}",
        )
    return scalar, _numbers("loss", extra)


def as_metrics(returned: Any) -> dict[str, Any]:
    """What a train step returned as a dict: one, a loss alone or with a dict behind it, or nothing."""
    if returned is None:
        return {}
    if isinstance(returned, tuple) and len(returned) == 2 and isinstance(returned[1], Mapping):
        returned = {"loss": returned[0]} | dict(returned[1])
    return _numbers("train_step", returned if isinstance(returned, Mapping) else {"loss": returned})


def _numbers(function: str, metrics: Mapping[str, Any]) -> dict[str, Any]:
    """Metrics as they are, if they are numbers and arrays."""
    is_module = lambda node: isinstance(node, nnx.Module)  # noqa: E731
    for path, value in jax.tree_util.tree_flatten_with_path(dict(metrics), is_leaf=is_module)[0]:
        if not isinstance(value, NUMBERS):
            name = jax.tree_util.keystr(path, simple=True, separator=".")
            raise SpanaxError(
                f"`{function}` returned a {type(value).__name__} as its metric '{name}'.",
                fix="a dict of numbers and arrays; a step changes model and optimizer where they are",
            )
    return dict(metrics)


def _accumulate(gradient: Any, params: Any, rest: Any, batch: Any, count: int) -> tuple[Any, Any, Any, Any]:
    """Mean loss, metrics and gradients over `count` microbatches, the other state carried from one to the next."""

    def part(leaf: Any) -> Any:
        if leaf.shape[0] % count:
            raise SpanaxError(
                f"{count} microbatches do not divide the batch of {leaf.shape[0]}.",
                fix=f"microbatches={max(k for k in range(1, count) if leaf.shape[0] % k == 0)}",
            )
        # Every k-th example, so that each device's rows stay its own: a plain reshape would move them all.
        return jnp.swapaxes(leaf.reshape(leaf.shape[0] // count, count, *leaf.shape[1:]), 0, 1)

    def one(carry: Any, microbatch: Any) -> tuple[Any, Any]:
        rest, total = carry
        (scalar, (extra, rest, moved)), grads = gradient(params, rest, microbatch)
        _check_unmoved(params, moved, count)
        return (rest, jax.tree.map(jnp.add, total, grads)), (scalar, extra)

    zeros = jax.tree.map(jnp.zeros_like, params)
    (rest, grads), (scalars, extras) = jax.lax.scan(one, (rest, zeros), jax.tree.map(part, batch))
    mean = lambda tree: jax.tree.map(lambda leaf: leaf.mean(0), tree)  # noqa: E731
    return scalars.mean(), mean(extras), rest, jax.tree.map(lambda leaf: leaf / count, grads)


def _cast(tree: Any, dtype: Any) -> Any:
    if dtype is None:
        return tree
    is_float = lambda leaf: jnp.issubdtype(leaf.dtype, jnp.floating)  # noqa: E731
    return jax.tree.map(lambda leaf: leaf.astype(dtype) if is_float(leaf) else leaf, tree)


def _moved(forward: Callable[..., Any], after: Any, args: tuple[Any, ...], params: Any) -> list[Any]:
    """What a loss put in the place of parameters (`nnx.WeightNorm` does), one a leaf; None where it left them alone."""
    num_before, num_after = (len(jax.tree.leaves(tree)) for tree in (params, after))
    if num_before != num_after:
        raise SpanaxError(
            f"the loss changed how many parameters there are: {num_before} arrays before, {num_after} after.",
            fix="create every variable in the model's __init__",
        )
    groups = list(zip(*map(jax.tree.leaves, (after, args[0], params)), strict=True))
    is_written = [new is not old for new, old, _ in groups]
    if any(is_written):
        is_written = written(lambda *args: jax.tree.leaves(forward(*args)[0]), *args)
    return [new.astype(kept.dtype) if moves else None for moves, (new, _, kept) in zip(is_written, groups, strict=True)]


def _check_unmoved(params: Any, moved: list[Any], count: int) -> None:
    for (path, _), new in zip(jax.tree_util.tree_leaves_with_path(params), moved, strict=True):
        if new is not None:
            name = jax.tree_util.keystr(path, simple=True, separator=".").removesuffix(".value")
            raise SpanaxError(
                f"the loss writes to the parameter `{name}`; {count} microbatches would each write to it.",
                fix="microbatches=1, or parameters that only the optimizer writes to",
            )


def _like(state: Any, before: Any) -> Any:
    """State in the dtypes it had before: a running mean must not drift into the compute dtype.

    Raises:
      SpanaxError: there are other variables than before.
    """
    if odd := sorted(_paths(state) ^ _paths(before)):
        raise changed_variables("`loss`", odd)
    leaves, structure = jax.tree.flatten(state)
    pairs = zip(leaves, jax.tree.leaves(before), strict=True)
    return jax.tree.unflatten(
        structure, [new.astype(old.dtype) if new.dtype != old.dtype else new for new, old in pairs]
    )


def _paths(state: Any) -> set[str]:
    flat = jax.tree_util.tree_flatten_with_path(state)[0]
    return {jax.tree_util.keystr(path, simple=True, separator=".") for path, _ in flat}
