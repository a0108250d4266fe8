"""`spanax.value_and_grad`: the gradient of a loss in a function that `spanax.jit` may compute in another form."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from functools import wraps
from typing import Any

import jax
from flax import nnx

from spanax.errors import VariantError
from spanax.trace.jaxpr.remat_policies import EXACT, known_context, known_policy
from spanax.trace.loss.loss_gradient import loss_gradient
from spanax.trace.rewrites.attention.fuse import FusedAttention
from spanax.trace.rewrites.microbatches.support import examples
from spanax.trace.rewrites.pure_loss import pure_function
from spanax.trace.variant import Variant


@dataclass
class LossForm:
    """The form in which a function that is traced computes its losses.

    Attributes:
      variant: the form.
      attentions: the fused attentions of the losses.
      num_losses: the number of losses computed by `value_and_grad` so far.
    """

    variant: Variant
    attentions: list[FusedAttention] = field(default_factory=list)
    num_losses: int = 0


_FORM: ContextVar[LossForm | None] = ContextVar("loss_form", default=None)


@contextmanager
def loss_form(variant: Variant) -> Iterator[LossForm]:
    """Computes the losses of functions traced in this context in the form of a variant."""
    known_context(variant.context)
    known_policy(variant.remat)
    form = LossForm(variant)
    token = _FORM.set(form)
    try:
        yield form
    finally:
        _FORM.reset(token)


def value_and_grad(
    function: Callable[..., Any], argnums: int | nnx.DiffState = 0, *, has_aux: bool = False
) -> Callable[..., Any]:
    """Returns a function that computes a loss and its gradient, as `nnx.value_and_grad` does.

    Under `spanax.jit`, the options `remat`, `microbatches`, `attention` and `loss_chunks` apply to this loss. Elsewhere
    it is `nnx.value_and_grad`.

    Args:
      function: the loss, a function of NNX objects and arrays; for microbatches, the batch must be an argument.
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
        form = _FORM.get()
        if form is None:
            return nnx.value_and_grad(function, argnums=argnums, has_aux=has_aux)(*args, **kwargs)
        form.num_losses += 1
        if replace(form.variant, seed=0) == Variant():
            return nnx.value_and_grad(function, argnums=argnums, has_aux=has_aux)(*args, **kwargs)
        state = argnums if isinstance(argnums, nnx.DiffState) else nnx.DiffState(argnums, nnx.Param)
        return _gradient(function, args, kwargs, state, has_aux, form)

    return gradient


def _gradient(
    function: Callable[..., Any], args: Any, kwargs: Any, state: nnx.DiffState, has_aux: bool, form: LossForm
) -> Any:
    """Returns `(loss, gradient)` or `((loss, other results), gradient)`, and updates the objects."""
    model = args[state.argnum]
    leaves, treedef = jax.tree.flatten((args, kwargs), is_leaf=_is_object)
    nodes = [model, *(leaf for leaf in leaves if _is_object(leaf) and leaf is not model)]
    arrays = [leaf for leaf in leaves if not _is_object(leaf) and hasattr(leaf, "shape")]
    places = {id(node): index for index, node in enumerate((*nodes, *arrays))}
    is_trained = nnx.filterlib.to_predicate(state.filter)

    def call(nodes: Any, arrays: list[Any]) -> tuple[Any, Any]:
        values = *nodes, *arrays
        merged = [values[places[id(leaf)]] if id(leaf) in places else leaf for leaf in leaves]
        args, kwargs = jax.tree.unflatten(treedef, merged)
        returned = function(*args, **kwargs)
        return returned if has_aux else (returned, None)

    wrt = lambda path, value: path[0] == 0 and is_trained(path[1:], value)  # noqa: E731
    value, params, rest = pure_function(call, form.variant.compute_dtype, nodes, wrt)
    count = form.variant.microbatches
    if count > 1:
        _check_closure(function, arrays)
    operands = params, rest, arrays
    dims = examples(value, operands, count) if count > 1 else ()
    result = loss_gradient(value, operands, dims, form.variant, EXACT, form.attentions)
    nnx.update(nodes, result.params)
    nnx.update(nodes, result.rest)
    return ((result.scalar, result.extra) if has_aux else result.scalar), result.grads[0]


def _check_closure(function: Callable[..., Any], arrays: list[Any]) -> None:
    """Checks that a loss receives its batch as an argument, and no traced array by a closure.

    Raises:
      SpanaxError: it closes over a traced array, which would not be in microbatches.
    """
    cells = [cell.cell_contents for cell in getattr(function, "__closure__", None) or ()]
    values = jax.tree.leaves(cells, is_leaf=_is_object)
    if any(isinstance(value, jax.core.Tracer) for value in values):
        raise VariantError(
            "the loss uses an array of the enclosing function, which cannot be divided into microbatches.",
            where=getattr(function, "__name__", ""),
            fix="spanax.value_and_grad(loss)(model, batch), with the batch as an argument of the loss",
        )


def _is_object(value: Any) -> bool:
    return isinstance(value, nnx.Pytree | nnx.Variable)
