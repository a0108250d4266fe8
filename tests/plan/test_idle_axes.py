"""A mesh axis that shards no weight and saves no work is refused, and never chosen."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx

import spanax
from spanax.errors import IdleAxisError
from spanax.plan.reason import Code, Reason

EXPERTS, EMBED, TOKENS = 8, 16, 32


def matched(gates: jax.Array, weights: jax.Array, chosen: jax.Array) -> jax.Array:
    return jnp.stack([((chosen == expert) * weights).sum(-1) for expert in range(EXPERTS)], -1)


def scattered(gates: jax.Array, weights: jax.Array, chosen: jax.Array) -> jax.Array:
    return jnp.zeros_like(gates).at[jnp.arange(len(gates))[:, None], chosen].set(weights)


def masked(gates: jax.Array, weights: jax.Array, chosen: jax.Array) -> jax.Array:
    return jnp.where(gates >= weights.min(-1, keepdims=True), gates, 0)


MIXES: dict[str, Callable[[jax.Array, jax.Array, jax.Array], jax.Array]] = {
    "matched": matched,
    "scattered": scattered,
    "masked": masked,
}


class Routed(nnx.Module):
    """Two of eight experts for each token, in a Python loop or in one product."""

    def __init__(self, mix: str, rngs: nnx.Rngs, is_looped: bool = True):
        self.mix, self.is_looped = mix, is_looped
        self.router = nnx.Linear(EMBED, EXPERTS, rngs=rngs)
        self.up = nnx.Param(0.3 * jax.random.normal(rngs.params(), (EXPERTS, EMBED, EMBED)))

    def __call__(self, x: jax.Array) -> jax.Array:
        gates = jax.nn.softmax(self.router(x))
        mix = MIXES[self.mix](gates, *jax.lax.top_k(gates, 2))
        if not self.is_looped:
            return x + jnp.einsum("be,bef->bf", mix, jax.nn.relu(jnp.einsum("bd,edf->bef", x, self.up[...])))
        weights = self.up[...]
        return x + sum(mix[:, i : i + 1] * jax.nn.relu(x @ weights[i]) for i in range(EXPERTS))


def program(build: Callable[..., nnx.Module]) -> spanax.Program:
    batch = {name: jax.ShapeDtypeStruct((TOKENS, EMBED), "float32") for name in ("x", "y")}

    def loss(model: Any, batch: Any) -> jax.Array:
        return jnp.square(model(batch["x"]) - batch["y"]).mean()

    return spanax.trace(build=build, optimizer=optax.adam(1e-2), batch=batch, loss=loss)


@pytest.mark.parametrize("mix", MIXES)
def test_an_axis_that_shards_only_scores_is_refused_and_never_chosen(mix: str) -> None:
    looped = program(partial(Routed, mix))
    with pytest.raises(IdleAxisError, match="only a router's scores have experts"):
        spanax.plan(looped, "cpu:4", layout="expert")
    ranked = spanax.search(looped, "h100:8", top=1000)
    assert ranked.candidates and not any("expert" in each.mesh.names for each in ranked.candidates)
    assert ranked.rejected[Reason(Code.IDLE_AXIS)] > 0


def test_experts_in_one_product_are_sharded() -> None:
    plan = spanax.plan(program(partial(Routed, "masked", is_looped=False)), "cpu:4", layout="expert")
    assert plan["up"].spec == (("expert",), (), ())
