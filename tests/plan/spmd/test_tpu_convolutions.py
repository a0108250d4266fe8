"""FLOPs of convolutions on a TPU over those of the traced program, next to compiled ones."""

import functools

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx

import spanax
from spanax.hardware.mesh import MeshShape
from spanax.plan.presets import layout_named
from spanax.plan.sharding.resolve import resolve
from spanax.plan.spmd.sharded_program import ShardedProgram
from spanax.plan.spmd.tpu_convolutions import convolution_share

MEASURED = [
    (1, 16, 3, 1, "SAME", 1.5652),
    (4, 16, 3, 1, "SAME", 1.5652),
    (7, 16, 3, 1, "SAME", 1.5652),
    (8, 16, 3, 1, "SAME", 1.0),
    (4, 8, 3, 1, "SAME", 1.0),
    (4, 12, 3, 1, "SAME", 1.0),
    (4, 32, 3, 1, "SAME", 1.2766),
    (2, 56, 3, 1, "SAME", 1.1566),
    (4, 64, 3, 1, "SAME", 1.1368),
    (4, 224, 7, 2, "SAME", 1.0797),
    (4, 32, 7, 2, "SAME", 1.0),
    (4, 32, 5, 1, "SAME", 1.2987),
    (4, 32, 3, 2, "SAME", 1.5319),
    (4, 32, 3, 1, "VALID", 1.0667),
    (4, 32, 2, 2, "VALID", 1.0),
    (4, 32, 4, 4, "VALID", 1.0),
    (4, 32, 1, 1, "SAME", 1.0),
]
"""Examples, size, window, stride, padding: compiled FLOPs over those of the traced convolution (libtpu 0.0.52, v5e)."""


@functools.cache
def program(batch: int, size: int, window: int, stride: int, padding: str) -> spanax.Program:
    def build(rngs: nnx.Rngs) -> nnx.Conv:
        return nnx.Conv(4, 16, (window, window), strides=stride, padding=padding, use_bias=False, rngs=rngs)

    return spanax.trace(
        build=build,
        optimizer=optax.sgd(0.1),
        loss=lambda model, x: (model(x) ** 2).mean(),
        batch=jax.ShapeDtypeStruct((batch, size, size, 4), "float32"),
    )


def shares(traced: spanax.Program, sizes: str) -> list[float]:
    mesh = MeshShape.of(sizes)
    sharded = ShardedProgram(resolve(traced, layout_named("data", mesh), mesh, {}), traced.step)
    ops = [op for op in traced.step.graph.ops() if op.name == "conv_general_dilated"]
    return [convolution_share(sharded, op) for op in ops]


@pytest.mark.parametrize("batch, size, window, stride, padding, ratio", MEASURED)
def test_flops_of_a_convolution_are_those_of_its_compiled_form(
    batch: int, size: int, window: int, stride: int, padding: str, ratio: float
) -> None:
    share, *_ = shares(program(batch, size, window, stride, padding), "data=1")
    assert share == pytest.approx(ratio, abs=1e-4)


def test_the_examples_per_device_determine_the_division() -> None:
    """The gradient of the kernel sums over examples: its window is the result, and it is not divided."""
    assert shares(program(8, 16, 3, 1, "SAME"), "data=1") == [1.0, 1.0]
    assert shares(program(8, 16, 3, 1, "SAME"), "data=2") == [pytest.approx(1.5652, abs=1e-4), 1.0]


def test_explicit_zeros_before_a_convolution_are_not_multiplied() -> None:
    def loss(model: nnx.Conv, x: jax.Array) -> jax.Array:
        return (model(jnp.pad(x, ((0, 0), (3, 0), (0, 0)))) ** 2).mean()

    def build(rngs: nnx.Rngs) -> nnx.Conv:
        return nnx.Conv(4, 16, (4,), padding="VALID", use_bias=False, rngs=rngs)

    batch = jax.ShapeDtypeStruct((16, 24, 4), "float32")
    traced = spanax.trace(build=build, optimizer=optax.sgd(0.1), loss=loss, batch=batch)
    assert shares(traced, "data=1") == [pytest.approx((24 * 4 - 6) / (24 * 4))] * 2
