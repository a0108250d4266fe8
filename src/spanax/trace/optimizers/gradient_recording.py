"""Wraps an optimizer so that its state also stores the gradients of the last step."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from spanax.errors import SpanaxError

PREFIX = "optimizer.opt_state.0.gradients."
"""What the path of a kept gradient begins with; the path of its parameter follows."""


class RecordedGradients(NamedTuple):
    """The state of the part of an optimizer that keeps the gradients."""

    gradients: Any


def recording(optimizer: Any) -> Callable[[nnx.Module], nnx.Optimizer]:
    """The same optimizer with one more group of arrays in its state: the gradients of the last step.

    They are those that reach the optimizer: after clipping by the train step, before the optimizer's own.

    Args:
      optimizer: as `spanax.trace` takes it.

    Example:
      >>> made = recording(optax.sgd(0.1))(nnx.Linear(2, 3, rngs=nnx.Rngs(0)))
      >>> sorted(made.opt_state[0].gradients)
      ['bias', 'kernel']
    """

    def init(params: Any) -> RecordedGradients:
        return RecordedGradients(jax.tree.map(jnp.zeros_like, params))

    def update(updates: Any, state: RecordedGradients, params: Any = None) -> tuple[Any, RecordedGradients]:
        # In the parameter's dtype: a variable keeps its own.
        return updates, RecordedGradients(
            jax.tree.map(lambda new, old: new.astype(old.dtype), updates, state.gradients)
        )

    keep = optax.GradientTransformation(init, update)

    def make(model: nnx.Module) -> nnx.Optimizer:
        if hasattr(optimizer, "init") and hasattr(optimizer, "update"):
            return nnx.Optimizer(model, optax.chain(keep, optimizer), wrt=nnx.Param)
        made = optimizer(model)
        if type(made) is not nnx.Optimizer:
            raise SpanaxError(
                f"the gradients that a {type(made).__name__} is given cannot be kept.",
                fix="an optax transformation, or a function that returns an nnx.Optimizer",
            )
        return nnx.Optimizer(model, optax.chain(keep, made.tx), wrt=made.wrt)

    return make
