"""The gradient of a variant of a loss: in the train step of Spanax, and by `spanax.value_and_grad`."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from functools import wraps
from pathlib import Path
from types import CellType, FunctionType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from spanax.batch_dims import ExampleDims
from spanax.errors import ConflictError, RangeError, SpanaxError, VariantError, first_line
from spanax.frames import user_frames
from spanax.trace.jaxpr.graph import marked_gradients
from spanax.trace.jaxpr.remat_policies import (
    EXACT,
    GATHERED,
    KERNELS,
    MEAN,
    NAMED,
    known_accumulation,
    known_context,
    known_policy,
    known_quantization,
)
from spanax.trace.rewrites.attention.fuse import FusedAttention, fuse_attention
from spanax.trace.rewrites.chunked_loss import chunked_loss
from spanax.trace.rewrites.microbatches.accumulation import accumulated, examples, mean_of_microbatches
from spanax.trace.rewrites.outline import outlined
from spanax.trace.rewrites.pure_loss import check_unmoved, numbers_of, pure_function, pure_loss
from spanax.trace.rewrites.remat import rematerialized
from spanax.trace.rewrites.traced_once import TracedLoss, TracedOnce, jaxpr_of
from spanax.trace.variables import Leaf
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
    traced: TracedLoss,
) -> LossGradient:
    """Returns the loss and its gradient, with the remat, microbatches, chunks and attention of a variant.

    Args:
      value: the loss as `pure_loss` returns it.
      operands: trained parameters, other state, and batch.
      dims: the dim with the examples of each array of the batch, for microbatches.
      variant: the options of the loss.
      accumulate: how microbatches are combined, one of `ACCUMULATIONS`.
      traced: what was traced of the loss.

    Raises:
      SpanaxError: the loss does not support the variant.
    """
    count = variant.microbatches
    params, rest, batch = operands

    def transform(pure: Callable[..., Any]) -> Callable[..., Any]:
        attending = pure if variant.context == GATHERED else _fused(pure, variant.context, traced)
        return rematerialized(outlined(chunked_loss(attending, variant.loss_chunks)), variant.remat)

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


def _fused(pure: Callable[..., Any], context: str, traced: TracedLoss) -> Callable[..., Any]:
    """Returns the loss, or a part of it, with fused attention; only that of the whole loss is traced once."""
    attending = fuse_attention(pure, context, traced.attentions[context], 2)
    return TracedOnce(attending, traced.known[context]) if isinstance(pure, TracedOnce) else attending


TrainStep = Callable[[nnx.Module, nnx.Optimizer, Any], dict[str, Any]]


def fusing_step(loss: Callable[..., Any] | None, variant: Variant, traced: TracedLoss) -> TrainStep:
    """Returns a train step that fuses the attentions of a loss, and does nothing else."""

    def step(model: nnx.Module, optimizer: nnx.Optimizer, batch: Any) -> dict[str, Any]:
        assert loss is not None
        value, params, rest = pure_loss(loss, variant.dtypes, model, optimizer)
        value = TracedOnce(value, traced.known[GATHERED])
        jaxpr_of(_fused(value, variant.context, traced), params, rest, batch)
        return {}

    return step


def chosen_step(
    loss: Callable[[nnx.Module, Any], Any] | None,
    train_step: TrainStep | None,
    clip_norm: float | None,
    accumulate: str,
    variant: Variant,
    attentions: list[FusedAttention] | None = None,
    batch_axes: ExampleDims | None = None,
    traced: TracedLoss | None = None,
) -> TrainStep:
    """Returns the requested train step: written around `loss`, or the user's `train_step`.

    With microbatches, `batch_axes` are the dims with the examples; by default, as the loss uses them. `traced`
    has what was traced of the loss in the same dtype.

    Raises:
      SpanaxError: neither or both are passed, or an option that requires `loss`.
    """
    known_context(variant.context)
    known_quantization(variant.quantize)
    if loss is not None and train_step is None:
        if variant.microbatches < 1:
            raise RangeError(f"microbatches={variant.microbatches}; expected an integer >= 1.", fix="microbatches=1")
        known_policy(None if variant.remat == NAMED else variant.remat)
        accumulate = known_accumulation(accumulate)
        return _step_around(loss, clip_norm, accumulate, variant, attentions, batch_axes, traced or TracedLoss())
    if loss is not None or train_step is None:
        raise ConflictError(
            "pass either `loss` or `train_step`" + (", not both." if loss is not None else "."),
            fix="loss=lambda model, batch: ..., and Spanax writes the step",
        )
    options = {
        "microbatches": variant.microbatches != 1,
        "compute_dtype": variant.compute_dtype is not None,
        "quantize": variant.quantize is not None,
        "clip_norm": clip_norm,
        "remat": variant.remat is not None,
        "attention" if variant.context in KERNELS else f"layout='{variant.context}'": variant.context != GATHERED,
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
    traced: TracedLoss,
) -> TrainStep:
    """Returns an NNX train step: gradients over microbatches, clipping, one optimizer update.

    Parameters keep their dtype; the loss is computed on parameters and batch cast to the compute dtype, with residuals
    stored according to the remat policy. If the context is not `gathered`, attention is fused, and each fused attention
    is appended to `attentions`; logits are computed in chunks. The step returns `loss`, `grad_norm` (before clipping)
    and the metrics of the loss.
    """

    def train_step(model: nnx.Module, optimizer: nnx.Optimizer, batch: Any) -> dict[str, Any]:
        value, params, rest = pure_loss(loss, variant.dtypes, model, optimizer)
        value = TracedOnce(value, traced.known[GATHERED])
        count = variant.microbatches
        operands = params, rest, batch
        dims = examples(value, operands, count, batch_axes) if count > 1 else ()
        result = loss_gradient(value, operands, dims, variant, accumulate, traced)
        if attentions is not None:
            attentions.extend(traced.attentions[variant.context])
        nnx.update(model, result.params)
        nnx.update(model, result.rest)
        # As arrays: NNX looks for aliases among all Variables that are arguments, once for each of those in a pytree.
        grads, structure = jax.tree.flatten(result.grads)
        update = traced.update or _updated
        grad_norm = update(model, optimizer, structure, clip_norm, *grads)
        return {"loss": result.scalar, "grad_norm": grad_norm} | result.extra

    return train_step


def _updated(model: nnx.Module, optimizer: nnx.Optimizer, structure: Any, clip_norm: float | None, *arrays: Any) -> Any:
    """Updates model and optimizer by gradients of a structure; returns their norm before clipping."""
    grads = marked_gradients(jax.tree.unflatten(structure, arrays))
    grad_norm = optax.tree.norm(grads)
    if clip_norm is not None:
        grads, _ = optax.clip_by_global_norm(clip_norm).update(grads, optax.EmptyState())
    optimizer.update(model, grads)
    return grad_norm


def traced_update() -> Callable[..., Any]:
    """Returns the update of model and optimizer by gradients, which JAX traces once for all variants of a step."""
    return nnx.jit(_updated, static_argnums=(2, 3))


def as_metrics(returned: Any) -> dict[str, Any]:
    """Returns the result of a train step (dict, loss, `(loss, dict)` or None) as a dict."""
    if returned is None:
        return {}
    if isinstance(returned, tuple) and len(returned) == 2 and isinstance(returned[1], Mapping):
        returned = {"loss": returned[0]} | dict(returned[1])
    return numbers_of("train_step", returned if isinstance(returned, Mapping) else {"loss": returned})


MOST = 3
"""The largest number of variables that an error lists."""


def dtype_error(error: Exception, dtype: str, leaves: Sequence[Leaf]) -> SpanaxError:
    """Returns the error of a loss that can be traced in its own dtypes only.

    Floating parameters and the batch are cast to the compute dtype. Other state keeps its dtype: a running mean in
    bfloat16 would drift. So an operation raises that requires operands of equal dtypes, such as a convolution or the
    gradient of a `jax.custom_vjp`, where the model combines both; others, such as an FFT, have no bfloat16.

    Args:
      error: what tracing raised.
      dtype: the compute dtype.
      leaves: the state.
    """
    lines = [f"{Path(frame.filename).name}:{frame.lineno}" for frame in user_frames(error)[-1:]]
    cast = [leaf for leaf in leaves if leaf.kind == "other" and jnp.issubdtype(leaf.dtype, jnp.floating)]
    uncast = [f"{leaf.path} {leaf.dtype}" for leaf in cast if leaf.dtype != dtype]
    if uncast:
        more = f" and {len(uncast) - MOST} more" if len(uncast) > MOST else ""
        lines.append(f"state that is not trained keeps its dtype: {', '.join(uncast[:MOST])}{more}")
    return VariantError(
        f"the loss cannot be computed in {dtype}: {type(error).__name__}: {first_line(error)}",
        where="; ".join(lines),
        fix="cast the operands of this operation in the model, or compute_dtype='float32' (--dtype float32)",
    )


@dataclass
class Losses:
    """The losses that a function computes while it is traced.

    Attributes:
      variant: the options under which it computes them.
      attentions: their fused attentions.
      num_losses: how many `value_and_grad` computed so far.
    """

    variant: Variant
    attentions: list[FusedAttention] = field(default_factory=list)
    num_losses: int = 0


_LOSSES: ContextVar[Losses | None] = ContextVar("losses", default=None)


@contextmanager
def losses_of(variant: Variant) -> Iterator[Losses]:
    """Computes the losses of functions traced in this context under the options of a variant."""
    known_context(variant.context)
    known_policy(None if variant.remat == NAMED else variant.remat)
    losses = Losses(variant)
    token = _LOSSES.set(losses)
    try:
        yield losses
    finally:
        _LOSSES.reset(token)


def value_and_grad(
    function: Callable[..., Any], argnums: int | nnx.DiffState = 0, *, has_aux: bool = False
) -> Callable[..., Any]:
    """Returns a function that computes a loss and its gradient, as `nnx.value_and_grad` does.

    Under `spanax.jit`, the options `remat`, `microbatches`, `attention` and `loss_chunks` apply to this loss. Elsewhere
    it is `nnx.value_and_grad`.

    Args:
      function: the loss, a function of NNX objects and arrays, which may close over its batch.
      argnums: the position of the object whose parameters are differentiated, or an `nnx.DiffState`.
      has_aux: whether the function returns `(loss, other results)`.

    Example:
      >>> import jax.numpy as jnp, spanax
      >>> model = nnx.Linear(4, 2, rngs=nnx.Rngs(0))
      >>> loss, gradients = value_and_grad(lambda model, x: (model(x) ** 2).mean())(model, jnp.ones((8, 4)))
      >>> gradients["kernel"].shape
      (4, 2)
    """

    @wraps(function)
    def gradient(*args: Any, **kwargs: Any) -> Any:
        losses = _LOSSES.get()
        if losses is None:
            return nnx.value_and_grad(function, argnums=argnums, has_aux=has_aux)(*args, **kwargs)
        losses.num_losses += 1
        if replace(losses.variant, seed=0) == Variant():
            return nnx.value_and_grad(function, argnums=argnums, has_aux=has_aux)(*args, **kwargs)
        state = argnums if isinstance(argnums, nnx.DiffState) else nnx.DiffState(argnums, nnx.Param)
        return _gradient(function, args, kwargs, state, has_aux, losses)

    return gradient


def _gradient(
    function: Callable[..., Any], args: Any, kwargs: Any, state: nnx.DiffState, has_aux: bool, losses: Losses
) -> Any:
    """Returns `(loss, gradient)` or `((loss, other results), gradient)`, and updates the objects."""
    model = args[state.argnum]
    leaves, treedef = jax.tree.flatten((args, kwargs, _captured(function)), is_leaf=_is_object)
    nodes = [model, *(leaf for leaf in leaves if _is_object(leaf) and leaf is not model)]
    arrays = [leaf for leaf in leaves if not _is_object(leaf) and hasattr(leaf, "shape")]
    places = {id(node): index for index, node in enumerate((*nodes, *arrays))}
    is_trained = nnx.filterlib.to_predicate(state.filter)

    def call(nodes: Any, arrays: list[Any]) -> tuple[Any, Any]:
        values = *nodes, *arrays
        merged = [values[places[id(leaf)]] if id(leaf) in places else leaf for leaf in leaves]
        args, kwargs, captured = jax.tree.unflatten(treedef, merged)
        returned = _with_captured(function, captured)(*args, **kwargs)
        return returned if has_aux else (returned, None)

    wrt = lambda path, value: path[0] == 0 and is_trained(path[1:], value)  # noqa: E731
    value, params, rest = pure_function(call, losses.variant.dtypes, nodes, wrt)
    count = losses.variant.microbatches
    if count > 1 and not arrays:
        raise VariantError(
            "the loss has no arrays to divide into microbatches.",
            where=getattr(function, "__name__", ""),
            fix="spanax.value_and_grad(loss)(model, batch), with the batch as an argument of the loss",
        )
    operands = params, rest, arrays
    dims = examples(value, operands, count) if count > 1 else ()
    traced = TracedLoss()
    result = loss_gradient(value, operands, dims, losses.variant, EXACT, traced)
    losses.attentions += traced.attentions[losses.variant.context]
    nnx.update(nodes, result.params)
    nnx.update(nodes, result.rest)
    return ((result.scalar, result.extra) if has_aux else result.scalar), result.grads[0]


def _captured(function: Any) -> dict[int, Any]:
    """Returns the contents of a function's cells, by index, that have traced arrays of an enclosing function."""
    if not isinstance(function, FunctionType):
        return {}
    contents = {}
    for index, cell in enumerate(function.__closure__ or ()):
        with suppress(ValueError):  # a variable that is not assigned yet
            leaves = jax.tree.leaves(cell.cell_contents, is_leaf=_is_object)
            if any(isinstance(leaf, jax.core.Tracer) for leaf in leaves):
                contents[index] = cell.cell_contents
    return contents


def _with_captured(function: Any, contents: Mapping[int, Any]) -> Any:
    """Returns a function with other contents of some of its cells: what it captures becomes an argument."""
    if not contents:
        return function
    cells = tuple(
        CellType(contents[index]) if index in contents else cell for index, cell in enumerate(function.__closure__)
    )
    result = FunctionType(function.__code__, function.__globals__, function.__name__, function.__defaults__, cells)
    result.__kwdefaults__ = function.__kwdefaults__
    return result


def _is_object(value: Any) -> bool:
    return isinstance(value, nnx.Pytree | nnx.Variable)
