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
from spanax.trace.policies import RING
from spanax.trace.remat import rematerialized
from spanax.trace.variables import changed_variables

NUMBERS = (jax.Array, np.ndarray, np.generic, bool, int, float, complex)

TrainStep = Callable[[nnx.Module, nnx.Optimizer, Any], dict[str, Any]]


def train_step_of(
    loss: Callable[[nnx.Module, Any], Any],
    *,
    microbatches: int,
    compute_dtype: Any,
    clip_norm: float | None,
    remat: str | None,
    context: str = "gathered",
) -> TrainStep:
    """An ordinary NNX train step: gradients over microbatches, clipping, one optimizer update.

    Parameters stay as the model made them; `compute_dtype` is what the loss sees of them and of the batch, and
    `remat` is what its gradient keeps; where `context` is `ring` each attention is one operation. The step returns
    `loss`, `grad_norm` (before clipping) and whatever the loss returned beside its value.
    """

    def train_step(model: nnx.Module, optimizer: nnx.Optimizer, batch: Any) -> dict[str, Any]:
        graphdef, params, rest = nnx.split(model, optimizer.wrt, ...)

        def value(params: Any, rest: Any, batch: Any) -> tuple[Any, tuple[dict[str, Any], Any]]:
            part = nnx.merge(graphdef, _cast(params, compute_dtype), rest, copy=True)
            scalar, extra = with_extra(loss(part, _cast(batch, compute_dtype)))
            nnx.pop(part, nnx.Intermediate)
            return scalar.astype(jnp.float32), (extra, _like(nnx.state(part, nnx.Not(optimizer.wrt)), rest))

        pure = attended(value) if context == RING else value
        gradient = jax.value_and_grad(rematerialized(pure, remat), has_aux=True)
        if microbatches == 1:
            (scalar, (extra, rest)), grads = gradient(params, rest, batch)
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
        (scalar, (extra, rest)), grads = gradient(params, rest, microbatch)
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


def _like(state: Any, before: Any) -> Any:
    """State in the dtypes it had before: a running mean must not drift into the compute dtype.

    Raises:
      SpanaxError: there are other variables than before.
    """
    if odd := sorted(_paths(state) ^ _paths(before)):
        raise changed_variables("`loss`", odd)
    return jax.tree.map(lambda new, old: new.astype(old.dtype) if new.dtype != old.dtype else new, state, before)


def _paths(state: Any) -> set[str]:
    flat = jax.tree_util.tree_flatten_with_path(state)[0]
    return {jax.tree_util.keystr(path, simple=True, separator=".") for path, _ in flat}
