"""Wraps an optimizer so that its state also stores the gradients of the last step."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from spanax.errors import SpanaxError

PREFIX = "optimizer.opt_state.0.gradients."
"""The path prefix of a recorded gradient; the path of its parameter follows."""


class RecordedGradients(NamedTuple):
    """The state of the gradient transformation that records the gradients."""

    gradients: Any


def recording(optimizer: Any) -> Callable[[nnx.Module], nnx.Optimizer]:
    """Returns the optimizer with the gradients of the last step as an additional part of its state.

    Gradients are recorded after clipping by the train step, and before the optimizer's transformations.

    Args:
      optimizer: an optimizer, as `spanax.trace` accepts it.

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
            raise SpanaxError(
                f"the gradients that a {type(user_optimizer).__name__} receives cannot be recorded.",
                fix="an optax transformation, or a function that returns an nnx.Optimizer",
            )
        return nnx.Optimizer(model, optax.chain(recorder, user_optimizer.tx), wrt=user_optimizer.wrt)

    return make
