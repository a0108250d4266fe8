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
from sampling import sampled
from spanax.errors import SpanaxError
from spanax.plan.sharding.resolve import Constraint
from spanax.step.replay.replay import Replay
from spanax.step.replay.specs import ConstraintError
from spanax.trace.jaxpr.graph import Body, Graph

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


def traced(build: Callable[..., nnx.Module], rate: float = 0.0) -> spanax.Program:
    optimizer = optax.sgd(rate) if rate else optax.adam(1e-2)
    return spanax.trace(build=build, optimizer=optimizer, batch=batch(), loss=loss)


def losses(program: spanax.Program, plan: spanax.Plan) -> list[float]:
    run = spanax.start(program, plan, seed=1)
    return [float(run.step(batch())["loss"]) for _ in range(3)]


@pytest.mark.parametrize("part", sampled(PARTS, ["window"]))
def test_experts_are_sharded_for_any_sizes(part: str) -> None:
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
    with pytest.raises(SpanaxError, match="is not divisible by 8"):
        spanax.plan(large, "cpu:8", layout="data")


SHIFTED: dict[str, Callable[[Any, jax.Array], jax.Array]] = {
    # Scattered into: a parameter, its gradient, and what is computed replicated and used both ways.
    "set": lambda model, h: model.down(h * model.scale[...].at[3].set(0.0)),
    "set after cumsum": lambda model, h: model.down(
        h * (jnp.cumsum(model.scale[...]) + model.scale[...]).at[3].set(0.0)
    ),
    "shifted": lambda model, h: model.down(h) + model.short(jnp.cumsum(h, 1)[:, 1:] * h[:, :-1]),
    "cut": lambda model, h: model.down(h * jax.lax.pad(jnp.cumsum(model.scale[...]), 0.0, [(-1, 1, 0)])),
}


class Shifted(nnx.Module):
    """Layers whose hidden values, or a scale of theirs, are used in part."""

    def __init__(self, part: str, rngs: nnx.Rngs):
        self.part = part
        self.up, self.down = nnx.Linear(EMBED, MLP, rngs=rngs), nnx.Linear(MLP, EMBED, rngs=rngs)
        self.short = nnx.Linear(MLP - 1, EMBED, rngs=rngs)
        self.scale = nnx.Param(jax.random.normal(rngs.params(), (MLP,)))

    def __call__(self, x: jax.Array) -> jax.Array:
        return SHIFTED[self.part](self, self.up(x))


def parameters(program: spanax.Program, plan: spanax.Plan) -> Any:
    run = spanax.start(program, plan, seed=1)
    run.step(batch())
    return jax.device_get(nnx.to_pure_dict(nnx.state(run.model(), nnx.Param)))


@pytest.mark.parametrize("part", sampled(SHIFTED, ["set after cumsum", "cut"]))
def test_parts_of_a_sharded_dim_leave_the_numbers_of_one_device(part: str) -> None:
    program = traced(partial(Shifted, part), rate=0.1)  # Adam's first step would hide the size of a gradient
    expected = parameters(program, spanax.plan(program, "cpu:1", layout="data"))
    for num_devices, mesh in ((8, "fsdp=8"), (8, "fsdp=2,model=4"), (4, "data=2,model=2")):
        plan = spanax.plan(program, f"cpu:{num_devices}", mesh=mesh)
        jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-5), parameters(program, plan), expected)


def test_a_constraint_that_does_not_fit_a_value_raises() -> None:
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:2]), ("data",))
    replay = Replay(Graph(Body((), (), ()), (), {}), (), {}, mesh)
    with pytest.raises(ConstraintError, match=r"does not fit shape \(2, 4\)"):
        replay.constrained(jnp.zeros((2, 4)), Constraint((("data",),)))
    with pytest.raises(ConstraintError, match=r"does not fit shape \(7, 4\)"):
        replay.constrained(jnp.zeros((7, 4)), Constraint((("data",), ())))
