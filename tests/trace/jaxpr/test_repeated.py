"""Operations that equal an earlier one, which compilers run once."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from spanax.trace.analysis.fusion import repeated_ops
from spanax.trace.jaxpr.graph import from_jaxpr

X = np.ones((4, 4), np.float32)
KEY = jax.eval_shape(lambda: jax.random.key(0))


def repeated(function: Callable[..., Any], *arrays: jax.Array) -> list[str]:
    return sorted(op.name for op in repeated_ops(from_jaxpr(jax.make_jaxpr(function)(*arrays))))


def test_a_chain_of_equal_operations_is_repeated_and_another_operand_is_not() -> None:
    def twice(x: jax.Array, y: jax.Array) -> jax.Array:
        return jnp.sin((x * 2.0) @ y) + jnp.cos((x * 2.0) @ y) + (x * 3.0) @ y + (y * 2.0) @ x

    assert repeated(twice, X, 2 * X) == ["dot_general", "mul"]


def test_other_parameters_are_another_operation() -> None:
    def sums(x: jax.Array) -> jax.Array:
        return jax.lax.reduce_max(x, [0]) + jax.lax.reduce_max(x, [1])

    assert repeated(sums, X) == []


def test_equal_random_numbers_are_repeated_and_those_of_another_key_are_not() -> None:
    def noise(key: jax.Array) -> jax.Array:
        return jax.random.bits(key, (4,)) + jax.random.bits(key, (4,))

    assert "random_bits" in repeated(noise, KEY)
    assert "random_bits" not in repeated(lambda key: [jax.random.bits(each) for each in jax.random.split(key)], KEY)


def test_recomputed_operations_are_not_merged_with_those_of_the_forward_pass() -> None:
    def loss(x: jax.Array) -> jax.Array:
        return jax.checkpoint(lambda y: jnp.sin(y @ y) @ y)(x).sum()

    assert "dot_general" not in repeated(jax.grad(loss), X)


def test_operations_of_different_bodies_are_not_merged() -> None:
    def loops(x: jax.Array) -> jax.Array:
        total, _ = jax.lax.scan(lambda total, _: (total + x @ x, None), x, None, length=3)
        return total + x @ x

    assert repeated(loops, X) == []
