"""Matmuls of a loss in the compute dtype, wherever they stand."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from spanax.trace.jaxpr.graph import CALLS, CONTRACTIONS, from_jaxpr
from spanax.trace.rewrites.matmul_dtype import MatmulDtypes, matmuls_in

Function = Callable[..., Any]

X = jax.ShapeDtypeStruct((8, 8), "float32")
LOW = MatmulDtypes("bfloat16")


def plain(weight: Any, x: Any) -> Any:
    return jax.nn.softmax(x @ weight)


def scanned(weight: Any, x: Any) -> Any:
    return jax.lax.scan(lambda x, _: (jnp.sin(x @ weight), None), x, length=2)[0]


def branched(weight: Any, x: Any) -> Any:
    return jax.lax.cond(x[0, 0] > 0, lambda: x @ weight, lambda: x)


def convolved(weight: Any, x: Any) -> Any:
    return jax.lax.conv(x[None, None], weight[None, None, :3, :3], (1, 1), "SAME")


def grouped(weight: Any, x: Any) -> Any:
    return jax.lax.ragged_dot(x, jnp.stack([weight, 2 * weight]), jnp.full(2, 4))


def dtypes(function: Function) -> set[str]:
    """Returns the dtypes of the operands of the matmuls of a gradient."""
    graph = from_jaxpr(jax.make_jaxpr(jax.grad(lambda *args: function(*args).var()))(X, X), CALLS)
    values = [graph.avals[value] for op in graph.ops() if op.name in CONTRACTIONS for value in op.inputs]
    return {str(aval.dtype) for aval in values if jnp.issubdtype(aval.dtype, jnp.floating)}


@pytest.mark.parametrize("function", [plain, scanned, branched, convolved, grouped, jax.checkpoint(scanned)])
def test_matmuls_and_their_gradients_are_in_the_dtype(function: Function) -> None:
    low = matmuls_in(function, LOW)
    assert dtypes(function) == {"float32"} and dtypes(low) == {"bfloat16"}
    assert jax.eval_shape(low, X, X) == jax.eval_shape(function, X, X)
    assert matmuls_in(function, MatmulDtypes("float32")) is function


def test_a_triangular_solve_stays_in_the_dtype() -> None:
    low = jax.ShapeDtypeStruct((8, 8), "bfloat16")
    assert jax.eval_shape(matmuls_in(jax.scipy.linalg.solve_triangular, LOW), low, low) == low


def test_a_requested_precision_and_other_operations_stay_in_float32() -> None:
    assert dtypes(matmuls_in(lambda weight, x: jax.lax.dot(x, weight, precision="highest"), LOW)) == {"float32"}

    def by_hand(weight: Any, x: Any) -> Any:
        return jax.nn.softmax(jnp.matmul(*(each.astype("bfloat16") for each in (x, weight))).astype("float32"))

    low, expected = (jax.make_jaxpr(function)(X, X) for function in (matmuls_in(plain, LOW), by_hand))
    assert str(low).count("bf16") == str(expected).count("bf16")
