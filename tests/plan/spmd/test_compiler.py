"""What compilers change in a partitioned program: rounded gathers, all-reduced sums, equal matmuls."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx

import spanax
from spanax.hardware.mesh import MeshShape
from spanax.plan.evaluate import evaluate
from spanax.plan.presets import layout_named
from spanax.plan.sharding.resolve import resolve
from spanax.plan.spmd.compiler import Compiler
from spanax.plan.spmd.count_terms import count_terms
from spanax.plan.spmd.sharded_program import ShardedProgram
from spanax.trace.program import Program

BATCH, WIDTH, VOCAB = 64, 32, 48


def squared(model: Any, x: jax.Array) -> jax.Array:
    return jnp.mean(model(x) ** 2)


def linear(rows: int, columns: int, loss: Callable[..., Any] = squared, batch: int = BATCH) -> Program:
    return spanax.trace(
        build=lambda rngs: nnx.Linear(rows, columns, use_bias=False, rngs=rngs), optimizer=optax.sgd(0.1),
        batch=jax.ShapeDtypeStruct((batch, rows), "float32"), loss=loss,
    )  # fmt: skip


def moved(program: Program, layout: str, sizes: str, compiler: Compiler | None = None) -> dict[tuple[str, str], float]:
    mesh = MeshShape.of(sizes)
    resolver = resolve(program, layout_named(layout, MeshShape.of("fsdp=2" if "fsdp" in sizes else sizes)), mesh, {})
    return count_terms(ShardedProgram(resolver, program.step), compiler=compiler).moved_bytes(mesh)


@pytest.mark.parametrize("is_equal", [True, False])
def test_a_matmul_that_equals_an_earlier_one_and_its_sum_run_once(is_equal: bool) -> None:
    class Block(nnx.Module):
        """Two layers, of which the second sums over a dim that tensor parallelism shards."""

        def __init__(self, rngs: nnx.Rngs):
            self.enter = nnx.Linear(WIDTH, 2 * WIDTH, use_bias=False, rngs=rngs)
            self.leave = nnx.Linear(2 * WIDTH, WIDTH, use_bias=False, rngs=rngs)

        def __call__(self, x: jax.Array) -> jax.Array:
            return self.leave(jnp.sin(self.enter(x)))

    def loss(model: Block, x: jax.Array) -> jax.Array:
        other = model(x) if is_equal else model(2 * x)
        return (model(x) ** 2).mean() + jnp.abs(jax.lax.stop_gradient(other)).mean()

    batch = jax.ShapeDtypeStruct((BATCH, WIDTH), "float32")
    program = spanax.trace(build=Block, optimizer=optax.sgd(0.1), batch=batch, loss=loss)
    sums = moved(program, "tensor", "model=4")["all-reduce", "model"]
    assert sums // (4 * BATCH * WIDTH) == (1 if is_equal else 2)
    mesh = MeshShape.of("model=4")
    resolver = resolve(program, layout_named("tensor", mesh), mesh, {})
    matmuls = count_terms(ShardedProgram(resolver, program.step)).matmuls
    num_matmuls = 5 if is_equal else 7
    assert (matmuls.flops * matmuls.runs).sum() == num_matmuls * 2 * BATCH * WIDTH * 2 * WIDTH


@pytest.mark.parametrize("is_rounded", [True, False])
def test_a_weight_that_only_matmuls_read_is_gathered_rounded(is_rounded: bool) -> None:
    def loss(model: nnx.Linear, x: jax.Array) -> jax.Array:
        penalty = 0.0 if is_rounded else jnp.cumsum(jax.lax.stop_gradient(model.kernel[...]), 0).mean()
        return (model(x) ** 2).mean() + penalty

    program = linear(64, 64, loss, batch=256)
    gathered = moved(program, "fsdp", "fsdp=8", Compiler(rounds_first=True))["all-gather", "fsdp"]
    num_elements = 64 * 64
    assert gathered == 2 * num_elements if is_rounded else gathered >= 4 * num_elements


@pytest.mark.parametrize(
    "rows, columns, batch, is_scattered",
    [(8, 8, 64, True), (24, 8, 64, True), (16, 16, 64, False), (24, 16, 64, False), (64, 64, 4096, False),
     (64, 64, 8408, False), (64, 64, 8472, True), (512, 1024, 4096, True)],
)  # fmt: skip
def test_a_sum_over_a_square_slice_is_all_reduced_without_permutes(
    rows: int, columns: int, batch: int, is_scattered: bool
) -> None:
    program, gradient = linear(rows, columns, batch=batch), 4 * rows * columns
    plain = moved(program, "fsdp", "fsdp=8")
    whole, part = (moved(program, "fsdp", "fsdp=8", Compiler(all_reduced=count)) for count in (8, 16))
    assert part == plain and plain["reduce-scatter", "fsdp"] == gradient / 8
    assert whole.get(("reduce-scatter", "fsdp"), 0) == (gradient / 8 if is_scattered else 0)
    assert whole["all-reduce", "fsdp"] - plain["all-reduce", "fsdp"] == (0 if is_scattered else gradient)


class Head(nnx.Module):
    """A layer and a head."""

    def __init__(self, rngs: nnx.Rngs):
        self.enter = nnx.Linear(WIDTH, WIDTH, use_bias=False, rngs=rngs)
        self.head = nnx.Linear(WIDTH, VOCAB, use_bias=False, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.head(jnp.tanh(self.enter(x)))


def cross_entropy(model: Head, batch: dict[str, jax.Array]) -> jax.Array:
    return optax.softmax_cross_entropy_with_integer_labels(model(batch["x"]), batch["y"]).mean()


@pytest.mark.parametrize(
    "on, layout, mesh, is_scattered",
    [
        ("v5e:4x4", "fsdp", "fsdp=16", False),
        ("v5e:2x8", "fsdp", "fsdp=16", True),
        ("v5e:4x4", "hsdp", "data=4,fsdp=4", True),
        ("h100:16", "fsdp", "fsdp=16", True),
    ],
)
def test_the_sum_after_a_loop_is_reduced_once_as_the_shape_of_the_slice_suits(
    on: str, layout: str, mesh: str, is_scattered: bool
) -> None:
    shapes = {"x": jax.ShapeDtypeStruct((64, 8, WIDTH), "float32"), "y": jax.ShapeDtypeStruct((64, 8), "int32")}
    program = spanax.trace(build=Head, optimizer=optax.sgd(0.1), batch=shapes, loss=cross_entropy)
    plan = spanax.plan(program, spanax.cluster(on), layout=layout, mesh=mesh, loss_chunks=4)
    of_fsdp = evaluate(program, plan, spanax.cluster(on)).collectives["fsdp"]
    num_shards = plan.mesh.ways(["fsdp"])
    scattered = of_fsdp.get("reduce-scatter", 0) * num_shards
    assert scattered >= 4 * WIDTH * VOCAB if is_scattered else scattered < WIDTH * VOCAB
    all_reduced = of_fsdp["all-reduce"]
    assert all_reduced < WIDTH * VOCAB if is_scattered else all_reduced >= 2 * WIDTH * VOCAB
