"""Gradient accumulation on losses of arrays: sums, noise, loops and branches that no model in tests/losses.py has."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sampling import sampled
from spanax.errors import SpanaxError
from spanax.trace.jaxpr.graph import from_jaxpr
from spanax.trace.rewrites.microbatches.accumulation import accumulated
from spanax.trace.rewrites.microbatches.decomposition import drawn, rows_of

pytestmark = pytest.mark.usefixtures("devices")  # they compare values

KEY = np.array([0, 5], np.uint32)
SIZE = 8


def batch() -> dict[str, jax.Array]:
    x, mask = jax.random.normal(KEY, (SIZE, 6, 5)), jax.random.uniform(KEY, (SIZE, 6)) > 0.4
    return {"ids": jnp.arange(SIZE * 6).reshape(SIZE, 6) % 7, "mask": mask.astype(jnp.float32), "x": x}


def dropout_mask(shape: tuple[int, ...]) -> jax.Array:
    return jax.random.bernoulli(jax.random.fold_in(KEY, 3), 0.5, shape)


def noise_in_a_loop(w: Any, batch: Any) -> Any:
    def layer(h: Any, number: Any) -> Any:
        return jnp.tanh(h @ w @ w.T) * jax.random.bernoulli(jax.random.fold_in(KEY, number), 0.5, h.shape), None

    return jnp.square(jax.lax.scan(layer, batch["x"], jnp.arange(3))[0]).mean()


def noise_in_a_remat(w: Any, batch: Any) -> Any:
    layer = jax.checkpoint(lambda x: jnp.tanh(x @ w) * dropout_mask((*x.shape[:-1], 7)) / x.shape[0])
    return jnp.square(layer(batch["x"])).sum()


def noise_in_a_branch(w: Any, batch: Any) -> Any:
    branches = (lambda x: x * dropout_mask(x.shape), lambda x: x / x.shape[0])
    return jnp.square(jax.lax.switch(jnp.int32(w[0, 0] > 9), branches, batch["x"] @ w)).mean()


def noise_in_a_while(w: Any, batch: Any) -> Any:
    turn = lambda carry: (carry[0] + 1, carry[1] * dropout_mask(carry[1].shape))  # noqa: E731
    _, noisy = jax.lax.while_loop(lambda carry: carry[0] < 3, turn, (0, batch["x"]))
    return jnp.square(noisy @ w).mean()


def keys_of_examples(w: Any, batch: Any) -> Any:
    noise = jax.vmap(lambda key: jax.random.normal(key, (6, 5)))(jax.random.split(KEY, batch["x"].shape[0]))
    return jnp.square((batch["x"] + noise) @ w).mean()


def keys_of_members(w: Any, batch: Any) -> Any:
    """An ensemble: each member has its own key, and all of them see the same examples."""
    noise = jax.vmap(lambda key: jax.random.normal(key, batch["x"].shape))(jax.random.split(KEY, 3))
    return jnp.square((batch["x"] + noise) @ w).mean()


def one_by_one(w: Any, batch: Any) -> Any:
    return jax.lax.map(lambda x: jnp.square(x @ w).mean(), batch["x"]).mean()


def balance(w: Any, batch: Any) -> Any:
    gates = jax.nn.softmax(batch["x"] @ w)
    load = jax.nn.one_hot(gates.argmax(-1), 7).mean((0, 1))
    return (load * gates.mean((0, 1))).sum(), {"load": load, "first": gates[..., 0].min()}


def counted(w: Any, batch: Any) -> Any:
    sums = jnp.zeros(7).at[batch["ids"]].add(jnp.square(batch["x"] @ w).mean(-1))
    return sums[1:].sum() / jnp.zeros(7).at[batch["ids"]].add(1.0).max()


def sorted_experts(w: Any, batch: Any, scale: Any = 1.0) -> Any:
    """Rows of two experts per token, sorted with those of all examples; the numbers of rows are the batch's."""
    x = batch["x"].reshape(-1, 5)
    chosen = jax.lax.top_k(x @ w, 2)[1].reshape(-1)
    order, sizes = jnp.argsort(chosen), jnp.bincount(chosen, length=7).astype(jnp.int32)
    rows = jax.lax.ragged_dot(x[order // 2], w.T[:, :, None] * w, sizes) * scale
    out = jnp.zeros((len(x), 7)).at[order // 2].add(rows)
    return jnp.square(out).mean() * (sizes / len(chosen) * (x @ w).mean(0)).sum()


def positions(w: Any, batch: Any) -> Any:
    """Weights by the number of an example in the batch, not in its microbatch."""
    return (jnp.square(batch["x"] @ w).mean((1, 2)) * jnp.linspace(0, 1, batch["x"].shape[0])).sum()


def sorted_rewards(w: Any, batch: Any) -> Any:
    """What no parameter enters may compare examples."""
    ranks = jnp.argsort(jnp.argsort(batch["x"][:, 0, 0]))
    return (jnp.square(batch["x"] @ w).mean((1, 2)) * ranks).mean()


def reversed_in_time(w: Any, batch: Any) -> Any:
    start = jnp.tile(w[:1, :5] + 1, (batch["x"].shape[0], 1))
    return jnp.square(jnp.cumsum(batch["x"][:, ::-1], 1) @ w).mean() + jnp.square(start + batch["x"][:, 0]).mean()


def constant(w: Any, batch: Any) -> Any:
    return jnp.square(w).sum()


LOSSES: tuple[Callable[[Any, Any], Any], ...] = (
    noise_in_a_loop, noise_in_a_remat, noise_in_a_branch, noise_in_a_while, keys_of_examples, keys_of_members,
    one_by_one, balance, counted, sorted_experts, positions, sorted_rewards, reversed_in_time, constant,
)  # fmt: skip


def pure(loss: Callable[[Any, Any], Any]) -> Callable[..., Any]:
    def value(w: Any, rest: Any, batch: Any) -> Any:
        returned = loss(w, batch)
        scalar, metrics = returned if isinstance(returned, tuple) else (returned, {})
        return scalar, (metrics, rest, [])

    return value


def parts(loss: Callable[[Any, Any], Any], count: int) -> Callable[..., Any]:
    dims = (0,) * len(batch())
    return lambda *args: accumulated(pure(loss), lambda term: term, args, dims, count)


CASES = [(loss, count) for loss in LOSSES for count in (2, 4 if loss is positions else SIZE)]
"""The second are of one example each, which JAX traces apart: `jnp.linspace` even to other equations."""


@pytest.mark.parametrize(
    ("loss", "count"), sampled(CASES, CASES[::4]), ids=lambda value: getattr(value, "__name__", str(value))
)
def test_microbatches_have_the_results_and_gradients_of_the_batch(loss: Any, count: int) -> None:
    args = jax.random.normal(KEY, (5, 7)) * 0.3, {"step": jnp.int32(3)}, batch()
    expected = jax.value_and_grad(pure(loss), has_aux=True)(*args)
    actual = jax.jit(parts(loss, count))(*args)
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    for got, want in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6 * float(jnp.abs(want).max() + 1e-3))


def test_a_loss_of_a_fixed_size_is_refused() -> None:
    fixed = lambda w, batch: jnp.square(batch["x"].reshape(SIZE, 30)).mean() * w.sum()  # noqa: E731
    with pytest.raises(SpanaxError, match="another program for 4 examples than for the batch of 8"):
        jax.eval_shape(parts(fixed, 2), jnp.ones((5, 7)), {}, batch())


def test_rows_with_a_number_of_the_batch_are_refused() -> None:
    loss = lambda w, batch: sorted_experts(w, batch, (batch["x"] @ w).mean())  # noqa: E731
    with pytest.raises(SpanaxError, match="`mul` combines examples of the full batch"):
        jax.eval_shape(parts(loss, 2), jnp.ones((5, 7)), {}, batch())


def test_noise_in_a_function_with_a_custom_derivative_raises() -> None:
    rounded = jax.custom_jvp(lambda x: x + jax.random.normal(KEY, x.shape))
    rounded.defjvp(lambda primals, tangents: (rounded(*primals), tangents[0]))
    loss = lambda w, batch: jnp.square(rounded(batch["x"] @ w)).mean()  # noqa: E731
    with pytest.raises(SpanaxError, match="`custom_jvp_call` combines examples"):
        jax.eval_shape(parts(loss, 2), jnp.ones((5, 7)), {}, batch())


@pytest.mark.parametrize(("impl", "dtype"), [("threefry2x32", "uint32"), ("threefry2x32", "uint8"), ("rbg", "uint32")])
def test_noise_is_that_of_the_batch(impl: str, dtype: str) -> None:
    """Rows of several shapes: examples in front, in the middle, and each with several consecutive rows."""
    for shape, dim, inner in (((8, 3), 0, 1), ((3, 8, 2), 1, 1), ((16, 3), 0, 2)):
        closed = jax.make_jaxpr(lambda key, shape=shape: jax.random.bits(key, shape, dtype))(
            jax.random.key(1, impl=impl)
        )
        (op,) = (op for op in from_jaxpr(closed).ops() if op.name == "random_bits")
        key = jax.random.key(1, impl=impl)
        full = jax.random.bits(key, shape, dtype)
        for index in range(4):
            (rows,) = drawn(op, [key], [(dim, inner)], jnp.int32(index), 4)
            np.testing.assert_array_equal(rows, rows_of(full, dim, inner, index, 4))
            assert rows.dtype == full.dtype
