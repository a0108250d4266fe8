"""Wraps an optimizer so that its moments are stored in a narrower dtype than they are computed in."""

from typing import Any

import jax
import jax.numpy as jnp
import optax

STATE_DTYPES = ("float32", "bfloat16")
"""The dtypes in which the state of an optimizer can be stored."""


def stored_as(dtype: Any, optimizer: optax.GradientTransformation) -> optax.GradientTransformation:
    """Returns an optimizer that stores its floating-point state in a dtype between steps, and computes in float32.

    A moving average that changes by less than half an ulp per step (0.4 % in bfloat16) never changes. Use this for
    averages over less than about a hundred steps, not for Adam's second moment with the default `b2` of 0.999.

    Example:
      >>> state = stored_as("bfloat16", optax.adamw(1e-3, b2=0.95)).init({"w": jnp.ones(4)})
      >>> str(state[0].mu["w"].dtype), str(state[0].nu["w"].dtype), str(state[0].count.dtype)
      ('bfloat16', 'bfloat16', 'int32')
    """

    def init(params: Any) -> Any:
        return _cast(optimizer.init(params), dtype)

    def update(grads: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        updates, state = optimizer.update(grads, _cast(state, jnp.float32), params)
        return updates, _cast(state, dtype)

    return optax.GradientTransformation(init, update)


def _cast(state: Any, dtype: Any) -> Any:
    """Returns the state with its floating-point leaves in a dtype; integer counts are unchanged."""
    return jax.tree.map(lambda leaf: leaf.astype(dtype) if jnp.issubdtype(leaf.dtype, jnp.floating) else leaf, state)
