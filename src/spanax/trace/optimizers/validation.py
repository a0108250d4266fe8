"""Validates the optimizer that a step around a loss updates."""

import inspect
from collections.abc import Callable
from typing import Any

import jax
from flax import nnx

from spanax.errors import OptimizerError
from spanax.trace.variables import optimizer_of

PART = "nnx.Optimizer(model, tx, wrt=nnx.All(nnx.Param, nnx.PathContains('head'))) trains a part of the model"
STEP = "train_step= in place of loss=, which updates it"


def of_loss(optimizer: Any) -> Callable[[nnx.Module], nnx.Optimizer]:
    """The function from a model to its optimizer, which raises on one that a step around a loss cannot update.

    Args:
      optimizer: as `spanax.trace` takes it.

    Example:
      >>> import optax
      >>> type(of_loss(optax.adam(0.1))(nnx.Linear(2, 3, rngs=nnx.Rngs(0)))).__name__
      'Optimizer'
    """

    def make(model: nnx.Module) -> nnx.Optimizer:
        created = optimizer_of(model, optimizer)
        if not (hasattr(created, "wrt") and _takes_model(created)):
            raise OptimizerError(
                f"`optimizer` returned a {type(created).__name__}, which a step around a `loss` cannot update.",
                fix=f"an nnx.Optimizer, or {STEP}",
            )
        if type(created).update is nnx.Optimizer.update:
            _check_same_parameters(model, created)
        return created

    return make


def _takes_model(optimizer: Any) -> bool:
    """Whether it is updated with a model and gradients; `nnx.ModelAndOptimizer` holds its model."""
    try:
        inspect.signature(optimizer.update).bind(None, None)
    except (AttributeError, TypeError):  # it has no `update`, or one of other arguments
        return False
    return True


def _check_same_parameters(model: nnx.Module, optimizer: nnx.Optimizer) -> None:
    """Raises unless the state of an optimizer is that of the parameters that its `wrt` selects in the model."""
    new = jax.eval_shape(lambda: nnx.state(nnx.Optimizer(model, optimizer.tx, wrt=optimizer.wrt)))
    expected = _shapes(new)
    state = _shapes(nnx.state(optimizer))
    if expected != state:
        raise OptimizerError(
            "`optimizer` returned an nnx.Optimizer of other parameters than its `wrt` selects in the model.",
            where=f"{len(state)} arrays of optimizer state; for the model there are {len(expected)}",
            fix=f"{PART}; or {STEP}",
        )


def _shapes(state: Any) -> dict[str, tuple[int, ...]]:
    flat = jax.tree_util.tree_leaves_with_path(state)
    return {jax.tree_util.keystr(path): leaf.shape for path, leaf in flat}
