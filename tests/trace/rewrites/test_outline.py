"""Equal blocks of a loss are calls of one function, and only those."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spanax.trace.jaxpr.graph import CALLS
from spanax.trace.rewrites.outline import outlined

Weights = list[jax.Array]


@jax.custom_vjp
def cubed(x: jax.Array) -> jax.Array:
    """A function with a derivative rule of its own, which differs from its derivative."""
    return x**3


cubed.defvjp(lambda x: (x**3, x), lambda x, grad: (grad * x,))


def block(w: jax.Array, x: jax.Array, factor: float = 0.5) -> jax.Array:
    """A residual block of more than the least number of operations."""
    inner = jnp.tanh(x @ w) * factor - jnp.sin(x) / (1.0 + jnp.exp(-x))
    return x + jnp.sqrt(jnp.square(inner) + 1e-3) * jnp.cos(inner) - inner


def equal(weights: Weights, x: jax.Array) -> jax.Array:
    for w in weights:
        x = block(w, x)
    return x.sum()


def repeated(weights: Weights, x: jax.Array) -> jax.Array:
    for _ in weights:
        x = block(weights[0], x)
    return x.sum()


def with_factors(weights: Weights, x: jax.Array) -> jax.Array:
    for index, w in enumerate(weights):
        x = block(w, x, 1.0 + index)
    return x.sum()


def at_other_lines(weights: Weights, x: jax.Array) -> jax.Array:
    a, b, *_ = weights
    x = jnp.tanh(jnp.sin(jnp.cos(jnp.exp(jnp.tanh(jnp.sin(jnp.cos(jnp.sin(jnp.tanh(jnp.sin(jnp.sin(x @ a) + x))))))))))
    x = jnp.tanh(jnp.sin(jnp.cos(jnp.exp(jnp.tanh(jnp.sin(jnp.cos(jnp.sin(jnp.tanh(jnp.sin(jnp.sin(x @ b) + x))))))))))
    return x.sum()


def alternating(weights: Weights, x: jax.Array) -> jax.Array:
    for index, w in enumerate(weights):
        x = block(w, x)
        x = x + x.mean(1, keepdims=True) if index % 3 == 2 else x
    return x.sum()


def with_two_inputs(weights: Weights, x: jax.Array) -> jax.Array:
    y = x
    for index, w in enumerate(weights):
        y = y if index % 2 else x
        x = block(w, x) + block(w, y)
    return x.sum()


def with_a_rule(weights: Weights, x: jax.Array) -> jax.Array:
    for w in weights:
        x = block(w, cubed(block(w, x)))
    return x.sum()


def with_loops(weights: Weights, x: jax.Array) -> jax.Array:
    for w in weights:
        x, _ = jax.lax.scan(lambda x, _, w=w: (block(w, x), None), block(w, x), length=2)
    return x.sum()


def with_remat(weights: Weights, x: jax.Array) -> jax.Array:
    for w in weights:
        x = block(w, jax.checkpoint(block)(w, x))
    return x.sum()


@pytest.mark.parametrize(
    ("loss", "num_functions", "num_calls"),
    [
        (equal, 1, 6),
        (repeated, 1, 6),
        (with_factors, 0, 0),
        (at_other_lines, 0, 0),
        (alternating, 1, 2),
        (with_two_inputs, 2, 6),
        (with_a_rule, 2, 12),
        (with_loops, 1, 6),
        (with_remat, 1, 6),
    ],
)
def test_equal_blocks_are_calls_of_one_function(
    loss: Callable[..., Any], num_functions: int, num_calls: int, devices: Any
) -> None:
    keys = jax.random.split(jax.random.key(0), 7)
    weights = [jax.random.normal(key, (8, 8)) / 3 for key in keys[1:]]
    x = jax.random.normal(keys[0], (4, 8))
    jaxpr = jax.make_jaxpr(outlined(loss))(weights, x)
    called = [
        eqn.params["jaxpr"] for eqn in jaxpr.eqns if eqn.primitive.name in CALLS and "_evaluate" in eqn.params["name"]
    ]
    assert (len(set(called)), len(called)) == (num_functions, num_calls)
    expected = jax.jit(jax.value_and_grad(loss))(weights, x)
    result = jax.jit(jax.value_and_grad(outlined(loss)))(weights, x)
    jax.tree.map(lambda *pair: np.testing.assert_allclose(*pair, rtol=2e-5, atol=1e-5), result, expected)
