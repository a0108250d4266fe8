"""Recurrences: their weights are gathered once, before the loop, and their gradients are reduced once, after it."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import spanax
from sampling import sampled
from spanax.check.check import check
from spanax.check.report import Report

DIM, TIME, SIZE = 32, 6, 16
MACHINE = spanax.cluster("cpu:8")


class OverTime(nnx.Module):
    """Two cells in the body of one scan, time-major."""

    def __init__(self, rngs: nnx.Rngs):
        self.cells = nnx.List([nnx.GRUCell(DIM, DIM, rngs=rngs) for _ in range(2)])
        self.head = nnx.Linear(DIM, DIM, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        def step(carry: list[jax.Array], row: jax.Array) -> tuple[list[jax.Array], jax.Array]:
            after = []
            for cell, state in zip(self.cells, carry, strict=True):
                state, row = cell(state, row)
                after.append(state)
            return after, row

        rows = jnp.swapaxes(x, 0, 1)
        first = [jnp.zeros(rows.shape[1:]) for _ in self.cells]
        return self.head(jnp.swapaxes(jax.lax.scan(step, first, rows)[1], 0, 1))


class OverLayers(nnx.Module):
    """One block applied several times, each under remat, with a loop over time in it."""

    def __init__(self, rngs: nnx.Rngs):
        self.cell = nnx.GRUCell(DIM, DIM, rngs=rngs)
        self.up, self.down = nnx.Linear(DIM, 2 * DIM, rngs=rngs), nnx.Linear(2 * DIM, DIM, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        @jax.checkpoint
        def block(x: jax.Array, _: None) -> tuple[jax.Array, None]:
            rows = jnp.swapaxes(x, 0, 1)
            y = jnp.swapaxes(jax.lax.scan(self.cell, jnp.zeros_like(rows[0]), rows)[1], 0, 1)
            return x + self.down(nnx.gelu(self.up(y))), None

        return jax.lax.scan(block, x, None, length=3)[0]


class ToAFixedPoint(nnx.Module):
    """A solver, differentiated through its last iteration."""

    def __init__(self, rngs: nnx.Rngs):
        self.inner, self.outer = nnx.Linear(DIM, DIM, rngs=rngs), nnx.Linear(DIM, DIM, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        u = self.outer(x)
        again = lambda z: jnp.tanh(0.1 * self.inner(z) + u)  # noqa: E731
        body = lambda carry: (carry[0] + 1, again(carry[1]))  # noqa: E731
        solved = jax.lax.while_loop(lambda carry: carry[0] < 5, body, (0, jnp.zeros_like(u)))[1]
        return again(jax.lax.stop_gradient(solved))


@functools.cache
def traced(build: Callable[..., nnx.Module], microbatches: int = 1) -> spanax.Program:
    return spanax.trace(
        build=build,
        optimizer=optax.adamw(1e-2, eps=0.1),
        loss=lambda model, batch: ((model(batch) - batch) ** 2).mean(),
        batch=jax.ShapeDtypeStruct((SIZE, TIME, DIM), "float32"),
        microbatches=microbatches,
    )


def checked(program: spanax.Program, layout: str, **changes: Any) -> Report:
    return check(program, spanax.plan(program, MACHINE, layout=layout), MACHINE, level=2, cache=False, **changes)


CASES = [
    (OverTime, "fsdp"),
    (OverTime, "data"),
    (OverTime, "fsdp+tensor"),
    (OverLayers, "fsdp"),
    (ToAFixedPoint, "fsdp"),
]
QUICK = [CASES[0], *CASES[2:]]


@pytest.mark.parametrize(("build", "layout"), sampled(CASES, QUICK))
def test_what_the_compiler_moves_is_predicted_and_no_weight_moves_in_the_loop(
    build: Callable[..., nnx.Module], layout: str
) -> None:
    report = checked(traced(build), layout)
    assert report.compiled.collectives == report.predicted.collectives
    if layout != "fsdp+tensor":  # a matmul that is divided over `model` sums activations
        assert {move.runs for move in report.collectives} == {1}


@pytest.mark.parametrize("build", [OverTime, OverLayers])
def test_microbatches_gather_the_weights_and_reduce_the_gradients_each(build: Callable[..., nnx.Module]) -> None:
    report = checked(traced(build, 2), "fsdp")
    assert report.compiled.collectives == report.predicted.collectives
    assert max(move.runs for move in report.collectives) == 2


@pytest.mark.parametrize(("build", "layout"), sampled(CASES, QUICK))
def test_the_numbers_are_those_of_one_device(devices: object, build: Callable[..., nnx.Module], layout: str) -> None:
    program = traced(build)
    batches = np.random.default_rng(0).normal(size=(3, SIZE, TIME, DIM)).astype(np.float32)

    def trained(cluster: str, layout: str) -> dict[str, np.ndarray]:
        run = spanax.start(program, spanax.plan(program, spanax.cluster(cluster), layout=layout), seed=1)
        losses = [float(run.step(batch)["loss"]) for batch in batches]
        return {"loss": np.array(losses)} | {path: np.asarray(array) for path, array in run.arrays().items()}

    expected, result = trained("cpu:1", "data"), trained("cpu:8", layout)
    for path, target in expected.items():
        np.testing.assert_allclose(result[path], target, rtol=1e-4, atol=1e-5, err_msg=path)
