"""Slices, pads and shifts of a dim that a mesh axis shards, of sizes that it does not divide."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import spanax
from spanax.errors import SpanaxError

EXPERTS, EMBED, MLP, TOKENS = 8, 8, 16, 32

PARTS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "repeat": lambda sizes: jnp.repeat(jnp.arange(EXPERTS), sizes, total_repeat_length=TOKENS),
    "differences": lambda sizes: jnp.abs(jnp.diff(sizes)).sum() % EXPERTS,
    "padded": lambda sizes: jnp.pad(sizes[:-1] * 2, (1, 2)).argmax() % EXPERTS,
    "shifted": lambda sizes: jnp.concatenate([sizes[:1] * 0, jnp.cumsum(sizes)[:-1]]).max() % EXPERTS,
    "window": lambda sizes: jax.lax.dynamic_slice(sizes, (sizes[0] % 2,), (5,)).argmax(),
}


class Sorted(nnx.Module):
    """Tokens sorted by expert, one ragged product for all experts, and a scale for each token's expert."""

    def __init__(self, part: str, rngs: nnx.Rngs):
        self.part = part
        self.router = nnx.Linear(EMBED, EXPERTS, rngs=rngs)
        self.up = nnx.Param(0.3 * jax.random.normal(rngs.params(), (EXPERTS, EMBED, MLP)))
        self.down = nnx.Param(0.3 * jax.random.normal(rngs.params(), (EXPERTS, MLP, EMBED)))
        self.scale = nnx.Param(jnp.linspace(0.5, 1.5, EXPERTS))

    def __call__(self, x: jax.Array) -> jax.Array:
        gates = jax.nn.softmax(self.router(x))
        chosen = gates.argmax(-1)
        order, sizes = jnp.argsort(chosen), jnp.bincount(chosen, length=EXPERTS).astype(jnp.int32)
        hidden = jax.nn.relu(jax.lax.ragged_dot(x[order], self.up[...], sizes))
        out = jax.lax.ragged_dot(hidden, self.down[...], sizes) * self.scale[...][PARTS[self.part](sizes)][..., None]
        return x + out[jnp.argsort(order)] * gates.max(-1)[:, None]


class Listed(nnx.Module):
    """Experts in a Python loop: no equation works on all of them."""

    def __init__(self, rngs: nnx.Rngs):
        self.router = nnx.Linear(EMBED, EXPERTS, rngs=rngs)
        self.up = nnx.Param(0.3 * jax.random.normal(rngs.params(), (EXPERTS, EMBED, EMBED)))

    def __call__(self, x: jax.Array) -> jax.Array:
        gates = jax.nn.softmax(self.router(x))
        return x + sum(gates[:, i : i + 1] * jax.nn.relu(x @ self.up[...][i]) for i in range(EXPERTS))


def loss(model: Any, batch: Any) -> jax.Array:
    return jnp.square(model(batch["x"]) - batch["y"]).mean()


def batch() -> dict[str, np.ndarray]:
    random = np.random.default_rng(0)
    return {name: random.normal(size=(TOKENS, EMBED)).astype(np.float32) for name in ("x", "y")}


def traced(build: Callable[..., nnx.Module]) -> spanax.Program:
    return spanax.trace(build=build, optimizer=optax.adam(1e-2), batch=batch(), loss=loss)


def losses(program: spanax.Program, plan: spanax.Plan) -> list[float]:
    run = spanax.start(program, plan, seed=1)
    return [float(run.step(batch())["loss"]) for _ in range(3)]


@pytest.mark.parametrize("part", PARTS)
def test_experts_are_sharded_whatever_is_made_of_their_sizes(part: str) -> None:
    program = traced(partial(Sorted, part))
    plan = spanax.plan(program, "cpu:4", layout="expert", mesh="data=2,expert=2")
    assert plan["up"].spec[0] == plan["down"].spec[0] == ("expert",)
    np.testing.assert_allclose(
        losses(program, plan), losses(program, spanax.plan(program, "cpu:1", layout="data")), rtol=1e-5
    )


def test_an_expert_axis_that_shards_no_expert_is_refused_and_never_chosen() -> None:
    program = traced(Listed)
    with pytest.raises(SpanaxError, match="mesh axis 'expert'"):
        spanax.plan(program, "cpu:4", layout="expert")
    ranked = spanax.search(program, "h100:8", top=1000)
    assert ranked.candidates and not any("expert" in each.mesh.names for each in ranked.candidates)


def grouped(model: Any, batch: Any) -> jax.Array:
    """Rewards relative to those of the same prompt, in groups that no mesh of 8 divides."""
    rewards = batch["y"][:, 0].reshape(4, TOKENS // 4)
    advantages = (rewards - rewards.mean(1, keepdims=True)) / (rewards.std(1, keepdims=True) + 1e-4)
    return (jnp.square(model(batch["x"])).mean(1) * advantages.reshape(-1)).mean()


def test_small_values_that_do_not_divide_are_gathered_and_large_ones_refused() -> None:
    make = partial(spanax.trace, build=lambda rngs: nnx.Linear(EMBED, 64, rngs=rngs), optimizer=optax.adam(1e-2))
    program = make(batch=batch(), loss=grouped)
    expected = losses(program, spanax.plan(program, "cpu:1", layout="data"))
    for layout in ("data", "fsdp"):
        np.testing.assert_allclose(losses(program, spanax.plan(program, "cpu:8", layout=layout)), expected, rtol=1e-5)
    large = make(batch=batch(), loss=lambda model, batch: jnp.square(model(batch["x"]).reshape(4, 8, 64).max(1)).mean())
    with pytest.raises(SpanaxError, match="does not divide 8 ways"):
        spanax.plan(large, "cpu:8", layout="data")
