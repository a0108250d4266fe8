"""Kernels of the user's own run on shards: the numbers of one device, no gathers of operands, planned bytes."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import own_kernels
import spanax
from own_kernels import Model
from spanax.check.compilers.target import install_command
from spanax.errors import KernelError

TOKENS = np.random.default_rng(0).integers(0, 64, (16, 33))


def make(kind: str) -> tuple[Model, nnx.Optimizer]:
    model = Model(64, 64, 4, 1, nnx.Rngs(0), kind)
    return model, nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)


def step(model: Model, optimizer: nnx.Optimizer, tokens: jax.Array) -> jax.Array:
    loss, grads = nnx.value_and_grad(lambda model: model(tokens))(model)
    optimizer.update(model, grads)
    return loss


@functools.cache
def on_one_device() -> tuple[list[float], list[np.ndarray]]:
    return trained(nnx.jit(step), *make("plain"))


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
    known_losses, known_params = on_one_device()
    np.testing.assert_allclose(losses, known_losses, rtol=1e-6)
    for array, known in zip(params, known_params, strict=True):
        np.testing.assert_allclose(array, known, rtol=1e-6, atol=3e-7)
    report = jitted.check(level=2)
    for axis, bytes_by_kind in report.compiled.collectives.items():
        assert sum(bytes_by_kind.values()) == sum(report.predicted.collectives[axis].values())
    assert not gathers_of_activations(report)


@pytest.mark.slow
@pytest.mark.parametrize(
    "layout, mesh", [("data", "data=8"), ("fsdp+tensor", "fsdp=4,model=2"), ("3d", "pipe=2,data=2,model=2")]
)
def test_sums_over_microbatches_are_reduced_once(layout: str, mesh: str) -> None:
    built = {
        kind: spanax.trace(
            build=lambda rngs, kind=kind: spanax.stack(Model(64, 64, 4, 2, rngs, kind)),
            loss=lambda model, tokens: model(tokens), optimizer=optax.sgd(0.1), batch=TOKENS,
        )
        for kind in ("plain", "own")
    }  # fmt: skip
    program = built["own"].variant(microbatches=2)
    plan = spanax.plan(program, "cpu:8", layout=layout, mesh=mesh)
    run = spanax.start(program, plan, seed=0)
    single = spanax.start(built["plain"], spanax.plan(built["plain"], "cpu:1"), seed=0)
    for _ in range(2):
        np.testing.assert_allclose(run.step(TOKENS)["loss"], single.step(TOKENS)["loss"], rtol=1e-6)
    report = spanax.check(program, plan, spanax.cluster("cpu:8"), level=2)
    if layout == "data":
        gradients = sum(leaf.local_bytes for leaf in plan.leaves if leaf.kind == "param")
        assert report.compiled.collectives["data"]["all-reduce"] < 1.01 * gradients
    for axis, bytes_by_kind in report.compiled.collectives.items() if layout != "3d" else ():
        assert sum(bytes_by_kind.values()) == sum(report.predicted.collectives[axis].values())


@pytest.mark.skipif(bool(install_command("tpu")), reason="libtpu is not installed")
@pytest.mark.parametrize("mesh", ["fsdp=8", pytest.param("fsdp=4,model=2", marks=pytest.mark.slow)])
def test_kernels_compile_for_tpus_with_the_planned_sums(monkeypatch: pytest.MonkeyPatch, mesh: str) -> None:
    monkeypatch.setenv("XLA_FLAGS", "")  # libtpu exits at a flag of the tests that it does not know
    model = Model(512, 512, 4, 1, nnx.Rngs(0), "tpu")
    jitted = spanax.jit(step, mesh=mesh)
    jitted.prepare(model, nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param), np.zeros((16, 129), int))
    report = jitted.check("v5e:2x4", level=3)
    predicted, compiled = (
        figures.collectives["fsdp"]["reduce-scatter"] for figures in (report.predicted, report.compiled)
    )
    assert compiled == pytest.approx(predicted, rel=1e-3)  # without vectors, which it all-reduces
    assert report.compiled.peak_bytes == pytest.approx(report.predicted.peak_bytes, rel=0.1)


@pytest.mark.slow
def test_bare_kernels_gather_activations() -> None:
    jitted = spanax.jit(step, mesh="fsdp=4,model=2")
    jitted.prepare(*make("bare"), TOKENS)
    assert gathers_of_activations(jitted.check(level=2))


X, W = np.ones((16, 8), np.float32), np.ones(8, np.float32)
norm, plain = own_kernels.norm(True), own_kernels.plain_norm


def test_a_reference_that_differs_on_shards_is_refused() -> None:
    """Of 8 devices each has 2 rows, and the kernel computes blocks of 8."""
    jitted = spanax.jit(lambda model, x: model(x), mesh="data=8")

    class Norm(nnx.Module):
        def __init__(self) -> None:
            self.weight = nnx.Param(jnp.ones(8))

        def __call__(self, x: Any) -> Any:
            return spanax.partition_like(norm, plain)(x, self.weight[...])

    with pytest.raises(KernelError, match=r"differs from its reference by \S+ in result 0"):
        jitted(Norm(), X)


def test_integers_may_need_an_example() -> None:
    kernel = lambda x, i: x[i]  # noqa: E731
    reference = lambda x, i: jnp.where((i < 2)[:, None], x[i], 0.0)  # noqa: E731
    like = functools.partial(spanax.partition_like, kernel, reference)
    index = np.asarray([0, 1, 1])
    assert like()(X, index).shape == (3, 8)
    with pytest.raises(KernelError, match="differs"):
        like(example=(X, np.asarray([2, 3])))(X, index)


def test_a_kernel_without_a_gradient_has_that_of_its_reference() -> None:
    def bare(x: Any) -> Any:
        def kernel(x_ref: Any, out_ref: Any) -> None:
            out_ref[...] = jnp.sin(x_ref[...])

        return own_kernels.call(kernel, True, out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype))(x)

    sine = spanax.partition_like(bare, jnp.sin)
    np.testing.assert_allclose(jax.vmap(jax.grad(lambda x: sine(x).sum()))(X), np.cos(X), rtol=1e-6)


def test_a_mapped_kernel_equals_its_reference() -> None:
    both = [
        jax.vmap(jax.grad(lambda x, w, f=f: (f(x, w) ** 3).sum(), (0, 1)), (0, None))
        for f in (spanax.partition_like(norm, plain), plain)
    ]
    x = np.random.default_rng(0).normal(size=(3, 16, 8)).astype(np.float32)
    for array, known in zip(*(jax.jit(f)(x, W) for f in both), strict=True):
        np.testing.assert_allclose(array, known, rtol=1e-5, atol=1e-5)


def product(x: Any, w: Any) -> Any:
    return jnp.dot(x, w, preferred_element_type=jnp.float32).astype(x.dtype)


def product_kernel(x_ref: Any, w_ref: Any, out_ref: Any) -> None:
    out_ref[...] = jnp.dot(x_ref[...].astype(jnp.float32), w_ref[...].astype(jnp.float32)).astype(out_ref.dtype)


def own_product(x: Any, w: Any) -> Any:
    shape = jax.ShapeDtypeStruct((x.shape[0], w.shape[1]), x.dtype)
    return own_kernels.call(product_kernel, True, out_shape=shape)(x, w)


class Layers(nnx.Module):
    """Two matmuls, column- and row-parallel under `tensor`."""

    def __init__(self, rngs: nnx.Rngs, dtype: str) -> None:
        self.up, self.down = (
            nnx.Param(jax.random.normal(rngs.params(), shape, dtype)) for shape in ((16, 128), (128, 16))
        )

    def __call__(self, x: Any) -> Any:
        like = spanax.partition_like(
            own_kernels.with_gradient(
                lambda x, w: (own_product(x, w), (x, w)),
                lambda saved, grad: (own_product(grad, saved[1].T), own_product(saved[0].T, grad)),
            ),
            product,
        )
        return (like(jax.nn.relu(like(x, self.up[...])), self.down[...]).astype(jnp.float32) ** 2).mean()


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("mesh", ["data=8", "fsdp=4,model=2", "model=8"])
def test_bytes_and_flops_equal_those_of_the_compiled_program(mesh: str, dtype: str) -> None:
    model = Layers(nnx.Rngs(0), dtype)
    jitted = spanax.jit(step, mesh=mesh)
    jitted.prepare(model, nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param), np.ones((64, 16), dtype))
    report = jitted.check(level=2)
    assert report.compiled.collectives == report.predicted.collectives
    assert report.compiled.flops == report.predicted.flops
