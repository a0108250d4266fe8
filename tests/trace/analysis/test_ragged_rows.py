"""Rows sorted for ragged matmuls: which dims they are, and that the rows of the batch are not among them."""

import jax
import jax.numpy as jnp

from programs import array, step_of
from spanax.trace.analysis.step_analysis import StepAnalysis

W, U, X, ROUTER = array(4, 7, 5), array(4, 5, 7), array(6, 7), array(7, 4)


def sorted_experts(w: jax.Array, u: jax.Array, router: jax.Array, x: jax.Array) -> jax.Array:
    chosen = jnp.argmax(x @ router, -1)
    rows = jnp.argsort(chosen)
    sizes = jnp.bincount(chosen, length=4).astype(jnp.int32)
    y = jnp.tanh(jax.lax.ragged_dot(x[rows], w, sizes))
    return x + jnp.zeros_like(x).at[rows].add(jax.lax.ragged_dot(y, u, sizes))


def rows_of(step: StepAnalysis, primitive: str) -> list[bool]:
    """Whether the first dim of each result of a primitive is one of sorted rows."""
    rows = step.sorted_rows.ragged
    return [(op.outputs[0], 0) in rows for op in step.graph.ops() if op.name == primitive]


def test_rows_between_ragged_matmuls_are_sorted_and_tokens_are_not() -> None:
    step = step_of(sorted_experts, [W, U, ROUTER], X)
    assert rows_of(step, "ragged_dot_general") == [True, True]
    assert rows_of(step, "tanh") == rows_of(step, "gather") == [True]
    assert rows_of(step, "scatter-add") == [False, False] and rows_of(step, "add")[-1:] == [False]
    (indices,) = (op.inputs[1] for op in step.graph.ops() if op.name == "gather")
    assert (indices, 0) in step.sorted_rows.ragged
    assert all(value not in step.graph.body.inputs for value, _ in step.sorted_rows.ragged)


def test_rows_of_the_batch_are_not_sorted() -> None:
    def experts(w: jax.Array, u: jax.Array, router: jax.Array, x: jax.Array) -> jax.Array:
        sizes = jnp.full(4, 2, jnp.int32)
        return x + jax.lax.ragged_dot(jnp.tanh(jax.lax.ragged_dot(x, w, sizes)), u, sizes) + x @ router @ router.T

    step = step_of(experts, [W, U, ROUTER], X)
    assert rows_of(step, "tanh") == [True]  # between the matmuls alone
    assert rows_of(step, "add") == [False, False]
