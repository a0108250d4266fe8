"""Wraps an optimizer so that its state also stores the gradients of the last step."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from spanax.errors import OptimizerError

PREFIX = "optimizer.opt_state.0.gradients."
"""The path prefix of a recorded gradient; the path of its parameter follows."""


class RecordedGradients(NamedTuple):
    """The state of the gradient transformation that records the gradients."""

    gradients: Any


def recording(optimizer: Any, updated: Any = None) -> Callable[[nnx.Module], nnx.Optimizer]:
    """Returns the optimizer with the gradients of the last step as an additional part of its state.

    Gradients are recorded after clipping by the train step, and before the optimizer's transformations.

    Args:
      optimizer: an optimizer, as `spanax.trace` accepts it.
      updated: shapes of the parameters that the step passes to an `nnx.Optimizer` of the user, as `observing` appends
        them; by default, those of the model.

    Example:
      >>> optimizer = recording(optax.sgd(0.1))(nnx.Linear(2, 3, rngs=nnx.Rngs(0)))
      >>> sorted(optimizer.opt_state[0].gradients)
      ['bias', 'kernel']
    """

    def init(params: Any) -> RecordedGradients:
        return RecordedGradients(jax.tree.map(jnp.zeros_like, params))

    def update(updates: Any, state: RecordedGradients, params: Any = None) -> tuple[Any, RecordedGradients]:
        # Cast to the parameter's dtype: the dtype of a variable must not change.
        return updates, RecordedGradients(
            jax.tree.map(lambda new, old: new.astype(old.dtype), updates, state.gradients)
        )

    recorder = optax.GradientTransformation(init, update)

    def make(model: nnx.Module) -> nnx.Optimizer:
        if hasattr(optimizer, "init") and hasattr(optimizer, "update"):
            return nnx.Optimizer(model, optax.chain(recorder, optimizer), wrt=nnx.Param)
        user_optimizer = optimizer(model)
        if type(user_optimizer) is not nnx.Optimizer:
            raise OptimizerError(
                f"the gradients that a {type(user_optimizer).__name__} receives cannot be recorded.",
                fix="an optax transformation, or a function that returns an nnx.Optimizer",
            )
        module = _module_of(model, user_optimizer.wrt, updated)
        return nnx.Optimizer(module, optax.chain(recorder, user_optimizer.tx), wrt=user_optimizer.wrt)

    return make


def observing(step: Callable[..., Any], params: list[Any]) -> Callable[..., Any]:
    """Returns a train step that appends to `params` the shapes of the parameters that each update receives.

    Args:
      step: a function of model, optimizer and batch that updates the optimizer.
      params: a list, to which a trace of the returned function appends.
    """

    def observed(model: nnx.Module, optimizer: Any, batch: Any) -> Any:
        transformation = optimizer.tx

        def update(updates: Any, state: Any, values: Any = None, **extra: Any) -> Any:
            params.append(jax.tree.map(_shape, values))
            return optax.with_extra_args_support(transformation).update(updates, state, values, **extra)

        optimizer.tx = optax.GradientTransformationExtraArgs(transformation.init, update)
        try:
            return step(model, optimizer, batch)
        finally:
            optimizer.tx = transformation

    return observed


def _module_of(model: nnx.Module, wrt: Any, updated: Any) -> nnx.Module:
    """Returns the first module of a model that has parameters of these shapes; the model, if there are none.

    Modules with the same parameters, such as a teacher and its student, record the same arrays.

    Raises:
      SpanaxError: no module has them.
    """
    modules = [module for _, module in nnx.iter_modules(model)] if updated is not None else [model]
    for module in sorted(modules, key=lambda each: each is not model):
        params = jax.tree.map(_shape, nnx.as_pure(nnx.state(module, wrt)))
        if updated is None or params == updated:
            return module
    raise OptimizerError(
        "the gradients of this optimizer cannot be recorded: its parameters are not those of one module.",
        where=f"{len(jax.tree.leaves(updated))} arrays; the model has {len(modules)} modules",
        fix="an nnx.Optimizer of the model, or of one of its modules",
    )


def _shape(array: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(jnp.shape(array), jnp.result_type(array))
