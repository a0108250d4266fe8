"""Matmuls of a loss in the compute dtype, wherever they stand."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spanax.trace.jaxpr.graph import CALLS, CONTRACTIONS, from_jaxpr
from spanax.trace.rewrites.matmul_dtype import matmuls_in

Function = Callable[..., Any]


def plain(weight: Any, x: Any) -> Any:
    return jax.nn.softmax(x @ weight)


def scanned(weight: Any, x: Any) -> Any:
    return jax.lax.scan(lambda x, _: (jnp.sin(x @ weight), None), x, length=2)[0]


def branched(weight: Any, x: Any) -> Any:
    return jax.lax.cond(x[0, 0] > 0, lambda: x @ weight, lambda: x)


def convolved(weight: Any, x: Any) -> Any:
    return jax.lax.conv(x[None, None], weight[None, None, :3, :3], (1, 1), "SAME")


def grouped(weight: Any, x: Any) -> Any:
    return jax.lax.ragged_dot(x, jnp.stack([weight, 2 * weight]), jnp.array([3, 5]))


def dtypes(function: Function, *args: Any) -> set[str]:
    """Returns the dtypes of the operands of the matmuls of a gradient."""
    graph = from_jaxpr(jax.make_jaxpr(jax.grad(lambda *args: function(*args).var()))(*args), CALLS)
    values = [graph.avals[value] for op in graph.ops() if op.name in CONTRACTIONS for value in op.inputs]
    return {str(aval.dtype) for aval in values if jnp.issubdtype(aval.dtype, jnp.floating)}


@pytest.mark.parametrize("function", [plain, scanned, branched, convolved, grouped, jax.checkpoint(scanned)])
def test_matmuls_and_their_gradients_are_in_the_dtype(function: Function) -> None:
    """They equal those of operands that the author casts; results keep their dtypes."""
    weight, x = np.random.default_rng(0).normal(size=(2, 8, 8)).astype("float32")
    low = matmuls_in(function, "bfloat16")
    assert dtypes(function, weight, x) == {"float32"} and dtypes(low, weight, x) == {"bfloat16"}
    assert low(weight, x).dtype == "float32"
    np.testing.assert_allclose(low(weight, x), function(weight, x), rtol=0.1, atol=0.1)
    assert np.any(low(weight, x) != function(weight, x))
    assert matmuls_in(function, "float32") is function


def test_a_requested_precision_and_other_operations_stay_in_float32() -> None:
    x = jnp.ones((8, 8))
    exact = matmuls_in(lambda weight, x: jax.lax.dot(x, weight, precision="highest"), "bfloat16")
    assert dtypes(exact, x, x) == {"float32"}
    by_hand = jax.nn.softmax((x.astype("bfloat16") @ x.astype("bfloat16")).astype("float32"))
    np.testing.assert_array_equal(matmuls_in(plain, "bfloat16")(x, x), by_hand)
