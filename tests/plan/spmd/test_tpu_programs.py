"""What a program compiled for TPUs runs: matmuls with vectors, complex ones, rounded operands, sharded slices."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx

import spanax
from spanax.hardware.mesh import MeshShape
from spanax.plan.presets import layout_named
from spanax.plan.sharding.resolve import resolve
from spanax.plan.spmd.count_terms import count_terms
from spanax.plan.spmd.sharded_program import ShardedProgram
from spanax.plan.spmd.terms import Terms
from spanax.trace.program import Program

BATCH = 64


def traced(build: Callable[[nnx.Rngs], Any], width: int, loss: Callable[[Any, jax.Array], jax.Array]) -> Program:
    batch = jax.ShapeDtypeStruct((BATCH, width), "float32")
    return spanax.trace(build=build, optimizer=optax.sgd(0.1), batch=batch, loss=loss)


def counted(program: Program, layout: str, sizes: str, *, is_tpu_program: bool) -> Terms:
    mesh = MeshShape.of(sizes)
    resolver = resolve(program, layout_named(layout, mesh), mesh, {})
    return count_terms(ShardedProgram(resolver, program.step), is_tpu_program=is_tpu_program)


def flops(terms: Terms) -> float:
    return float((terms.matmuls.flops * terms.matmuls.runs).sum())


def squared(model: Any, x: jax.Array) -> jax.Array:
    return jnp.mean(jnp.abs(model(x)) ** 2)


@pytest.mark.parametrize("features, share", [(1, 0), (2, 1)])
def test_a_matmul_with_a_vector_is_not_counted(features: int, share: int) -> None:
    program = traced(lambda rngs: nnx.Linear(32, features, rngs=rngs), 32, squared)
    before, after = (flops(counted(program, "data", "data=4", is_tpu_program=is_tpu)) for is_tpu in (False, True))
    assert before == 2 * 2 * BATCH * 32 * features and after == share * before


class Skipped(nnx.Module):
    """Two layers, of which the second reads the inputs as well."""

    def __init__(self, rngs: nnx.Rngs):
        self.enter = nnx.Linear(32, 16, use_bias=False, rngs=rngs)
        self.leave = nnx.Linear(48, 8, use_bias=False, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.leave(jnp.concatenate([self.enter(x), x], -1))


def test_only_the_used_part_of_a_concatenation_gradient_is_computed() -> None:
    program = traced(Skipped, 32, squared)
    before, after = (flops(counted(program, "data", "data=4", is_tpu_program=is_tpu)) for is_tpu in (False, True))
    assert before - after == 2 * BATCH * 8 * (48 - 16)


@pytest.mark.parametrize("is_equal", [True, False])
def test_a_matmul_that_equals_an_earlier_one_runs_once(is_equal: bool) -> None:
    def loss(model: nnx.Linear, x: jax.Array) -> jax.Array:
        other = model(x) if is_equal else model(2 * x)
        return (model(x) ** 2).mean() + jnp.abs(jax.lax.stop_gradient(other)).mean()

    program = traced(lambda rngs: nnx.Linear(32, 16, use_bias=False, rngs=rngs), 32, loss)
    num_matmuls = 2 if is_equal else 3
    assert flops(counted(program, "data", "data=4", is_tpu_program=False)) == num_matmuls * 2 * BATCH * 32 * 16


class ComplexLinear(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.kernel = nnx.Param(jnp.ones((32, 16), jnp.complex64))

    def __call__(self, x: jax.Array) -> jax.Array:
        return x.astype(jnp.complex64) @ self.kernel[...]


def test_a_complex_matmul_is_three_and_its_sum_has_three_parts() -> None:
    program = traced(ComplexLinear, 32, squared)
    mesh = MeshShape.of("data=4")
    before, after = (counted(program, "data", "data=4", is_tpu_program=is_tpu) for is_tpu in (False, True))
    assert flops(after) == 3 * flops(before)
    grown = [terms.moved_bytes(mesh)["all-reduce", "data"] for terms in (before, after)]
    assert grown[1] - grown[0] == 32 * 16 * 4


def test_the_real_part_of_a_complex_matmul_takes_two_products() -> None:
    def real(model: ComplexLinear, x: jax.Array) -> jax.Array:
        return jnp.mean(jnp.real(model(x)) ** 2)

    program = traced(ComplexLinear, 32, real)
    before, after = (flops(counted(program, "data", "data=4", is_tpu_program=is_tpu)) for is_tpu in (False, True))
    assert after == (2 + 3) * before / 2  # the result, and the gradient of the weights


class Spectrum(nnx.Module):
    """A complex gain per frequency, of rank 1, or per frequency and channel."""

    def __init__(self, rngs: nnx.Rngs, shape: tuple[int, ...]):
        self.gain = nnx.Param(jnp.ones(shape, jnp.complex64))

    def __call__(self, x: jax.Array) -> jax.Array:
        return x.reshape(BATCH, *self.gain[...].shape) * self.gain[...]


@pytest.mark.parametrize("shape, kind", [((32,), "all-reduce"), ((4, 8), "all-gather")])
def test_complex_sums_are_gathered(shape: tuple[int, ...], kind: str) -> None:
    program, mesh = traced(lambda rngs: Spectrum(rngs, shape), 32, squared), MeshShape.of("data=4")
    before, after = (
        counted(program, "data", "data=4", is_tpu_program=is_tpu).moved_bytes(mesh) for is_tpu in (False, True)
    )
    gradient = 8 * 32
    assert after[kind, "data"] - before.get((kind, "data"), 0) == (4 if kind == "all-gather" else 3) * gradient


class Block(nnx.Module):
    """Two layers, of which the second sums over a dim that tensor parallelism shards."""

    def __init__(self, rngs: nnx.Rngs):
        self.enter = nnx.Linear(32, 64, use_bias=False, rngs=rngs)
        self.leave = nnx.Linear(64, 32, use_bias=False, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.leave(jnp.sin(self.enter(x)))


@pytest.mark.parametrize("is_equal", [True, False])
def test_the_sum_of_a_matmul_that_equals_an_earlier_one_is_reduced_once(is_equal: bool) -> None:
    def loss(model: Block, x: jax.Array) -> jax.Array:
        other = model(x) if is_equal else model(2 * x)
        return (model(x) ** 2).mean() + jnp.abs(jax.lax.stop_gradient(other)).mean()

    moved = counted(traced(Block, 32, loss), "tensor", "model=4", is_tpu_program=False).moved_bytes(
        MeshShape.of("model=4")
    )
    assert moved["all-reduce", "model"] // (4 * BATCH * 32) == (1 if is_equal else 2)


@pytest.mark.parametrize("is_rounded", [True, False])
def test_a_weight_that_only_matmuls_read_is_gathered_rounded(is_rounded: bool) -> None:
    def loss(model: nnx.Linear, x: jax.Array) -> jax.Array:
        penalty = 0.0 if is_rounded else jnp.cumsum(jax.lax.stop_gradient(model.kernel[...]), 0).mean()
        return (model(x) ** 2).mean() + penalty

    program = traced(lambda rngs: nnx.Linear(64, 64, use_bias=False, rngs=rngs), 64, loss)
    moved = counted(program, "fsdp", "fsdp=8", is_tpu_program=True).moved_bytes(MeshShape.of("fsdp=8"))
    num_elements = 64 * 64
    if is_rounded:
        assert moved["all-gather", "fsdp"] == 2 * num_elements
    else:
        assert moved["all-gather", "fsdp"] >= 4 * num_elements


class Gated(nnx.Module):
    """A layer whose result is divided into a value and a gate."""

    def __init__(self, rngs: nnx.Rngs):
        self.enter = nnx.Linear(32, 64, use_bias=False, rngs=rngs)
        self.leave = nnx.Linear(32, 32, use_bias=False, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        value, gate = jnp.split(self.enter(x), 2, axis=-1)
        return self.leave(jnp.tanh(value) * jnp.sin(gate))


@pytest.mark.parametrize("ways", [2, 4])
def test_devices_exchange_slices_of_a_sharded_dim(ways: int) -> None:
    # Of the shards of each half, the first of the first half and the last of the second are in place.
    mesh = MeshShape.of(f"model={ways}")
    program = traced(Gated, 32, squared)
    moved = counted(program, "tensor", f"model={ways}", is_tpu_program=True).moved_bytes(mesh)
    shard = BATCH * 32 // ways * 4
    distances = {2: 1 + 1, 4: 2.0 * 2}[ways]
    assert moved["collective-permute", "model"] == distances * shard
    # The gradient of both halves is concatenated: as much of the parts, and the result in bfloat16, as matmuls read it.
    assert moved["all-to-all", "model"] == 2 * 2 * shard / 2
