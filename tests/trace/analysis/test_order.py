"""The order in which operations run: everything after what it needs, and right before what needs it."""

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx

import spanax
from programs import zoo_program
from spanax.trace.analysis.step_analysis import StepAnalysis
from spanax.trace.jaxpr.graph import Body, Op


@pytest.mark.parametrize("name", ["mlp", "gpt", "moe", "cnn", "tied", "clip", "ssm"])
def test_every_operation_runs_once_after_its_dependencies(name: str) -> None:
    traced = zoo_program(name).step
    for body, ops in traced.order.items():
        assert sorted(map(id, ops)) == sorted(map(id, body.ops))
        built = {value for op in body.ops for value in op.outputs}
        for op in ops:
            assert not built.intersection(op.inputs)
            built.difference_update(op.outputs)


class Tower(nnx.Module):
    """Layers one after the other; the first matrix is also the last, transposed."""

    def __init__(self, rngs: nnx.Rngs, layers: int = 4):
        self.embed = nnx.Linear(32, 64, use_bias=False, rngs=rngs)
        self.layers = nnx.List([nnx.Linear(64, 64, use_bias=False, rngs=rngs) for _ in range(layers)])

    def __call__(self, x_BD: jax.Array) -> jax.Array:
        x_BD = self.embed(x_BD)
        for layer in self.layers:
            x_BD = jnp.tanh(layer(x_BD))
        return x_BD @ self.embed.kernel.T


def tower(optimizer: optax.GradientTransformation) -> StepAnalysis:
    return spanax.trace(
        build=Tower, optimizer=optimizer, batch=jax.ShapeDtypeStruct((16, 32), "float32"),
        loss=lambda model, x: ((model(x) - x) ** 2).mean(),
    ).step  # fmt: skip


def made_at(traced: StepAnalysis, body: Body, shape: tuple[int, ...]) -> list[int]:
    """Where matmuls with a result of this shape run."""
    ops: tuple[Op, ...] = traced.order[body]
    built = [op.name == "dot_general" and traced.graph.shape(op.outputs[0]) == shape for op in ops]
    return [index for index, is_made in enumerate(built) if is_made]


@pytest.mark.parametrize("optimizer", [optax.adam(1e-3), optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-3))])
def test_gradients_do_not_wait_for_the_update(optimizer: optax.GradientTransformation) -> None:
    """The gradient of every layer is made before the gradient of its input has gone through the layer below."""
    traced = tower(optimizer)
    gradients, passed = made_at(traced, traced.graph.body, (64, 64)), made_at(traced, traced.graph.body, (16, 64))
    assert len(gradients) == 4
    backward = passed[-5:]  # of the head, and then through the layers, the last one first
    for gradient, below in zip(gradients, backward[2:], strict=False):
        assert gradient < below


def test_gradients_that_are_added_are_computed_together() -> None:
    """What the head gives to the shared matrix waits for what the input gives, for nothing needs it before."""
    traced = tower(optax.adam(1e-3))
    body = traced.graph.body
    shared = [*made_at(traced, body, (32, 64)), *made_at(traced, body, (64, 32))]
    assert len(shared) == 2 and min(shared) > max(made_at(traced, body, (64, 64)))
