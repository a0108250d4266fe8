"""Kernels that no compiler can partition run replicated: the numbers of one device, and a program for TPUs."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import spanax
from own_kernels import kernels
from spanax.check.lint.lint import lint

X = np.random.default_rng(0).normal(size=(16, 8, 16)).astype(np.float32)


class Block(nnx.Module):
    """A residual block with RMSNorm as a kernel of `own_kernels.kernels(kind)`."""

    def __init__(self, rngs: nnx.Rngs, kind: str, wrapper: str = "") -> None:
        self.hidden = nnx.Linear(16, 128, rngs=rngs)
        self.weight = nnx.Param(jnp.ones(128))
        self.out = nnx.Linear(128, 16, rngs=rngs)
        self.kind, self.wrapper = kind, wrapper

    def __call__(self, x: jax.Array) -> jax.Array:
        def norm(hidden: jax.Array) -> jax.Array:
            rows = kernels(self.kind)["norm"](hidden.reshape(-1, 128), self.weight[...])
            return rows.reshape(hidden.shape)

        hidden = self.hidden(x)
        if self.wrapper == "scan":
            hidden, _ = jax.lax.scan(lambda carry, _: (norm(carry), None), hidden, None, length=2)
        else:
            hidden = (jax.checkpoint(norm) if self.wrapper == "remat" else norm)(hidden)
        return x + self.out(nnx.relu(hidden))


def step(model: Block, optimizer: nnx.Optimizer, x: jax.Array) -> jax.Array:
    loss, grads = nnx.value_and_grad(lambda model: (model(x) ** 2).mean())(model)
    optimizer.update(model, grads)
    return loss


def losses(jitted: Any, kind: str, wrapper: str) -> list[float]:
    model = Block(nnx.Rngs(0), kind, wrapper)
    optimizer = nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)
    return [float(jitted(model, optimizer, X)) for _ in range(3)]


@pytest.mark.parametrize("kind, mesh", [("bare", "data=8"), ("own", "fsdp=4,model=2")])
@pytest.mark.parametrize("wrapper", ["", "scan", "remat"])
def test_numbers_equal_one_device(wrapper: str, kind: str, mesh: str) -> None:
    known = losses(nnx.jit(step), "plain", wrapper)
    np.testing.assert_allclose(losses(spanax.jit(step, mesh=mesh), kind, wrapper), known, rtol=1e-5)


@pytest.mark.parametrize(
    "kind, mesh", [("own", "pipe=2,data=4"), pytest.param("bare", "pipe=2", marks=pytest.mark.slow)]
)
def test_a_pipeline_equals_one_device(kind: str, mesh: str) -> None:
    program = spanax.trace(
        build=lambda rngs: spanax.stack(nnx.Sequential(*(Block(rngs, kind) for _ in range(4)))),
        loss=lambda model, x: (model(x) ** 2).mean(),
        optimizer=optax.adam(1e-2),
        batch=jax.ShapeDtypeStruct(X.shape, X.dtype),
        accumulate="mean",
    )
    devices = spanax.MeshShape.of(mesh).size
    pipelined = spanax.start(program, spanax.plan(program, f"cpu:{devices}", layout="pipeline", mesh=mesh), seed=0)
    single = spanax.start(program, spanax.plan(program, "cpu:1"), seed=0)
    for _ in range(3):
        np.testing.assert_allclose(pipelined.step(X)["loss"], single.step(X)["loss"], rtol=1e-5)


def test_a_mosaic_kernel_compiles_for_tpus_and_its_cost_is_reported() -> None:
    model = Block(nnx.Rngs(0), "compiled")
    optimizer = nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)
    train = spanax.jit(step, mesh="data=8")
    train.prepare(model, optimizer, X)
    report = train.check("v5e:2x4", level=1)
    assert report.fits
    findings = [
        finding for finding in lint(train.program, train.plan, spanax.cluster("v5e:2x4")) if finding.code == "SPX026"
    ]
    assert len(findings) == 1 and "own_kernels.py" in str(findings[0])
