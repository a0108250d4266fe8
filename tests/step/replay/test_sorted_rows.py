"""Rows sorted by expert: steps equal those of one device, and move and multiply what the plan counts."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import spanax
from byo import corpus
from sampling import sampled
from spanax.plan.place import resolver_of
from spanax.plan.plan import Schedule

SGD = optax.sgd(0.1)

CASES = [
    ("sorted_moe", "data=8", 1),
    ("sorted_moe", "fsdp=8", 2),
    ("sorted_moe", "expert=4,data=2", 1),
    ("sorted_moe", "expert=4,model=2", 1),
    ("sorted_moe", "fsdp=2,expert=2,model=2", 2),
    ("sorted_taken", "data=8", 1),
    ("sorted_taken", "fsdp=4,expert=2", 2),
    ("sorted_taken", "expert=8", 1),
    ("sorted_taken", "fsdp=2,expert=2,model=2", 1),
    ("sorted_taken", "pipe=2,data=4", 4),
    ("sorted_taken", "pipe=2,fsdp=2,expert=2", 4),
]

QUICK = [("sorted_moe", "expert=4,model=2", 1), ("sorted_taken", "fsdp=2,expert=2,model=2", 1)]
"""Experts that are gathered, and tokens that are."""

EXACT = {"sorted_moe"}
"""Models whose loss in microbatches is that of the batch. The other one updates a bias in every microbatch."""


@functools.cache
def program(name: str, microbatches: int = 1) -> spanax.Program:
    case = corpus.model(name)
    rest = {"loss": case.loss, "microbatches": microbatches, "accumulate": "exact" if name in EXACT else "mean"}
    return spanax.trace(build=case.build, optimizer=SGD, batch=case.batch(corpus.SIZE), **rest)


def planned(name: str, mesh: str, microbatches: int = 1) -> spanax.Plan:
    staged = {"schedule": Schedule(pipeline="1f1b", microbatches=microbatches)} if "pipe" in mesh else {}
    return spanax.plan(program(name, microbatches), "cpu:8", mesh=mesh, **staged)


def trained(name: str, plan: spanax.Plan, microbatches: int) -> dict[str, Any]:
    run = spanax.start(program(name, microbatches), plan, seed=1)
    losses = [float(run.step(corpus.batch(name, step))["loss"]) for step in range(2)]
    return {"loss": np.array(losses)} | {path: corpus.numbers(array) for path, array in run.arrays().items()}


@functools.cache
def reference(name: str, microbatches: int) -> dict[str, Any]:
    return trained(name, spanax.plan(program(name, microbatches), "cpu:1", layout="data"), microbatches)


@pytest.mark.usefixtures("devices")
@pytest.mark.parametrize(("name", "mesh", "microbatches"), sampled(CASES, QUICK))
def test_no_row_is_lost(name: str, mesh: str, microbatches: int) -> None:
    result = trained(name, planned(name, mesh, microbatches), microbatches)
    for path, expected in reference(name, 1 if name in EXACT else microbatches).items():
        scale = max(np.abs(expected).max(initial=0), 1e-3)
        assert np.abs(result[path] - expected).max(initial=0) <= 1e-5 * scale, path


class Repeated(nnx.Module):
    """Experts that apply a loop under a remat to their rows, with equal rows from outside of both."""

    def __init__(self, rngs: nnx.Rngs):
        self.router = nnx.Linear(8, 4, rngs=rngs)
        self.up = nnx.Param(jax.random.normal(rngs.params(), (4, 8, 8)) * 0.3)

    def __call__(self, x: jax.Array) -> jax.Array:
        chosen = jax.lax.top_k(self.router(x), 2)[1].reshape(-1)
        order, sizes = jnp.argsort(chosen), jnp.bincount(chosen, length=4).astype(jnp.int32)
        twos = jnp.full((len(order), 1), 2.0)

        @jax.checkpoint
        def multiplied(rows: jax.Array, twos: jax.Array, up: jax.Array) -> jax.Array:
            added = jax.lax.ragged_dot(rows, up, sizes)
            start = jnp.broadcast_to(twos, added.shape)
            return jax.lax.scan(lambda rows, _: (jnp.tanh(rows * twos + added), None), start, None, length=2)[0]

        return jnp.zeros_like(x).at[order // 2].add(multiplied(x[order // 2], twos, self.up[...]))


@pytest.mark.slow
@pytest.mark.usefixtures("devices")
def test_equal_rows_from_outside_of_a_loop_are_those_of_every_device() -> None:
    def step(model: nnx.Module, x: jax.Array) -> Any:
        return nnx.value_and_grad(lambda model: jnp.square(model(x)).mean())(model)

    x = np.random.default_rng(0).normal(size=(8, 8)).astype(np.float32)
    expected, actual = (
        jax.tree.leaves(run(Repeated(nnx.Rngs(0)), x)) for run in (nnx.jit(step), spanax.jit(step, mesh="expert=4"))
    )
    for got, want in zip(actual, expected, strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)


@pytest.mark.usefixtures("devices")
@pytest.mark.parametrize(
    ("name", "mesh", "stays"),
    sampled(
        [
            ("sorted_moe", "data=8", False),
            ("sorted_moe", "expert=4,model=2", False),
            ("sorted_moe", "data=2,expert=4", True),
            ("sorted_taken", "expert=8", True),
            ("sorted_taken", "data=2,expert=4", True),
        ],
        [("sorted_moe", "data=2,expert=4", True)],
    ),
)
def test_the_plan_counts_what_is_compiled(name: str, mesh: str, stays: bool) -> None:
    """Experts stay on their devices where gathering tokens moves less than gathering experts."""
    plan = planned(name, mesh)
    assert resolver_of(program(name), plan).assignment.staying == (("expert",) if stays else ())
    report = spanax.check(program(name), plan, "cpu:8", level=2, cache=False)
    assert report.compiled.flops == pytest.approx(report.predicted.flops, rel=0.01)
    for axes, expected in report.predicted.collectives.items():
        for kind, num_bytes in expected.items():
            if num_bytes > 10_000:
                assert report.compiled.collectives[axes][kind] == pytest.approx(num_bytes, rel=0.05), (axes, kind)
