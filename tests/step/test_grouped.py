"""Convolutions in groups: the gradient of their kernel is the one operation that XLA's partitioner gets wrong."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import spanax
from sampling import sampled
from spanax.trace.program import Program

IMAGES = np.random.default_rng(0).normal(size=(16, 6, 6, 16)).astype(np.float32)
CELLS = [
    ("data", "data=8"), ("tensor", "data=2,model=4"), ("tensor", "model=8"), ("fsdp+tensor", "fsdp=4,model=2"),
    ("hsdp", "data=2,fsdp=4"),
]  # fmt: skip


class Grouped(nnx.Module):
    """Two convolutions, the second in groups."""

    def __init__(self, rngs: nnx.Rngs, groups: int, strides: int):
        self.first = nnx.Conv(16, 32, (3, 3), rngs=rngs)
        self.second = nnx.Conv(32, 32, (3, 3), feature_group_count=groups, strides=strides, rngs=rngs)
        self.head = nnx.Linear(32, 8, rngs=rngs)

    def __call__(self, x_BHWC: jax.Array) -> jax.Array:
        return self.head(jnp.tanh(self.second(jnp.tanh(self.first(x_BHWC)))).mean((1, 2)))


def traced(groups: int, strides: int) -> Program:
    return spanax.trace(
        build=lambda rngs: Grouped(rngs, groups, strides), optimizer=optax.sgd(0.5),
        batch=jax.ShapeDtypeStruct(IMAGES.shape, "float32"), loss=lambda model, x: (model(x) ** 2).mean(),
    )  # fmt: skip


def trained(program: Program, layout: str, mesh: str) -> dict[str, np.ndarray]:
    machine = spanax.cluster("cpu", spanax.MeshShape.of(mesh).size)
    run = spanax.start(program, spanax.plan(program, machine, layout=layout, mesh=mesh), seed=0)
    for _ in range(2):
        run.step(IMAGES)
    return {leaf.path: np.asarray(value) for leaf, value in zip(program.leaves, run.state, strict=True)}


@pytest.mark.parametrize(
    ("groups", "strides", "cells"), sampled([(8, 2, CELLS), (2, 1, CELLS), (32, 1, CELLS)], [(8, 2, CELLS)])
)
def test_the_numbers_are_those_of_one_device(groups: int, strides: int, cells: list[tuple[str, str]]) -> None:
    """XLA's own partitioning is three times the gradient too far on `data=2,model=4`."""
    program = traced(groups, strides)
    whole = trained(program, "data", "data=1")
    for layout, mesh in cells:
        for path, value in trained(program, layout, mesh).items():
            np.testing.assert_allclose(value, whole[path], rtol=1e-5, atol=1e-6, err_msg=f"{path} {layout} {mesh}")


@pytest.mark.parametrize(("layout", "mesh"), sampled(CELLS, CELLS[3:]))
def test_compiled_communication_equals_the_predicted(layout: str, mesh: str) -> None:
    program, machine = traced(8, 1), spanax.cluster("cpu:8")
    plan = spanax.plan(program, machine, layout=layout, mesh=mesh)
    report = spanax.check(program, plan, machine, level=2, cache=False)
    output, result = (
        sum(size for kinds in (item.collectives or {}).values() for size in kinds.values())
        for item in (report.predicted, report.compiled)
    )
    assert output == pytest.approx(result, rel=0.1, abs=256)
