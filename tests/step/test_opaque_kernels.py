"""Kernels that no compiler can partition run replicated: the numbers of one device, and a program for TPUs."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.experimental import pallas

import spanax
from spanax.check.lint.lint import lint

X = np.random.default_rng(0).normal(size=(16, 8, 16)).astype(np.float32)


def kernel(x_ref: Any, weight_ref: Any, out_ref: Any) -> None:
    x = x_ref[...]
    out_ref[...] = x * jax.lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-6) * weight_ref[...]


def normalized(x: jax.Array, weight: jax.Array, *, interpret: bool) -> jax.Array:
    """RMSNorm as a Pallas kernel, with the gradient of its plain form."""
    rows, width = x.shape
    block, whole = (
        pallas.BlockSpec((8, width), lambda row: (row, 0)),
        pallas.BlockSpec((1, width), lambda row: (0, 0)),
    )
    call = pallas.pallas_call(
        kernel, grid=(rows // 8,), in_specs=[block, whole], out_specs=block,
        out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype), interpret=interpret,
    )  # fmt: skip
    plain = lambda x, weight: x * jax.lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-6) * weight  # noqa: E731
    function = jax.custom_vjp(lambda x, weight: call(x, weight[None]))
    function.defvjp(
        lambda x, weight: (call(x, weight[None]), (x, weight)), lambda saved, grad: jax.vjp(plain, *saved)[1](grad)
    )
    return function(x, weight)


class Block(nnx.Module):
    def __init__(self, rngs: nnx.Rngs, interpret: bool, wrapper: str = "") -> None:
        self.hidden = nnx.Linear(16, 128, rngs=rngs)
        self.weight = nnx.Param(jnp.ones(128))
        self.out = nnx.Linear(128, 16, rngs=rngs)
        self.interpret, self.wrapper = interpret, wrapper

    def __call__(self, x: jax.Array) -> jax.Array:
        def norm(hidden: jax.Array) -> jax.Array:
            rows = normalized(hidden.reshape(-1, 128), self.weight[...], interpret=self.interpret)
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


def losses(jitted: Any, wrapper: str) -> list[float]:
    model = Block(nnx.Rngs(0), True, wrapper)
    optimizer = nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)
    return [float(jitted(model, optimizer, X)) for _ in range(3)]


@pytest.mark.parametrize("mesh", ["data=8", "fsdp=4,model=2"])
@pytest.mark.parametrize("wrapper", ["", "scan", "remat"])
def test_numbers_equal_one_device(wrapper: str, mesh: str) -> None:
    np.testing.assert_allclose(losses(spanax.jit(step, mesh=mesh), wrapper), losses(nnx.jit(step), wrapper), rtol=1e-5)


@pytest.mark.parametrize("mesh", ["pipe=2,data=4", pytest.param("pipe=2", marks=pytest.mark.slow)])
def test_a_pipeline_equals_one_device(mesh: str) -> None:
    program = spanax.trace(
        build=lambda rngs: spanax.stack(nnx.Sequential(*(Block(rngs, True) for _ in range(4)))),
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
    model = Block(nnx.Rngs(0), False)
    optimizer = nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)
    train = spanax.jit(step, mesh="data=8")
    train.prepare(model, optimizer, X)
    report = train.check("v5e:2x4", level=1)
    assert report.fits
    findings = [
        finding for finding in lint(train.program, train.plan, spanax.cluster("v5e:2x4")) if finding.code == "SPX026"
    ]
    assert len(findings) == 1 and "test_opaque_kernels.py" in str(findings[0])
