"""Kernels of the user's own run on shards: the numbers of one device, no gathers of operands, planned bytes."""

import functools
from typing import Any

import jax
import numpy as np
import optax
import pytest
from flax import nnx

import spanax
from own_kernels import Model

TOKENS = np.random.default_rng(0).integers(0, 64, (16, 33))


def make(kind: str, layers: int = 1) -> tuple[Model, nnx.Optimizer]:
    model = Model(64, 64, 4, layers, nnx.Rngs(0), kind)
    return model, nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)


def step(model: Model, optimizer: nnx.Optimizer, tokens: jax.Array) -> jax.Array:
    loss, grads = nnx.value_and_grad(lambda model: model(tokens))(model)
    optimizer.update(model, grads)
    return loss


@functools.cache
def on_one_device(kind: str) -> tuple[list[float], list[np.ndarray]]:
    return trained(nnx.jit(step), *make(kind))


def trained(jitted: Any, model: Model, optimizer: nnx.Optimizer) -> tuple[list[float], list[np.ndarray]]:
    losses = [float(jitted(model, optimizer, TOKENS)) for _ in range(2)]
    return losses, [np.asarray(leaf) for leaf in jax.tree.leaves(nnx.state(model))]


def gathers_of_activations(report: Any) -> list[str]:
    """The shapes that are gathered and are those of no array of the state."""
    return [move.shapes for move in report.collectives if move.kind == "all-gather" and not move.tensors]


@pytest.mark.parametrize(
    "mesh",
    ["fsdp=4,model=2", *(pytest.param(mesh, marks=pytest.mark.slow) for mesh in ("data=8", "fsdp=8", "model=4"))],
)
def test_five_kernels_on_shards_equal_one_device_and_gather_no_activation(mesh: str) -> None:
    jitted = spanax.jit(step, mesh=mesh)
    losses, params = trained(jitted, *make("own"))
    for known_losses, known_params in map(on_one_device, ("plain", "bare")):
        np.testing.assert_allclose(losses, known_losses, rtol=1e-6)
        for array, known in zip(params, known_params, strict=True):
            np.testing.assert_allclose(array, known, rtol=1e-5, atol=1e-6)
    report = jitted.check(level=2)
    for axis, bytes_by_kind in report.compiled.collectives.items():
        assert sum(bytes_by_kind.values()) == sum(report.predicted.collectives[axis].values())
    assert not gathers_of_activations(report)


@pytest.mark.slow
def test_bare_kernels_gather_activations() -> None:
    jitted = spanax.jit(step, mesh="fsdp=4,model=2")
    jitted.prepare(*make("bare"), TOKENS)
    assert gathers_of_activations(jitted.check(level=2))
