"""Count terms: FLOPs, bytes and collectives of small programs, computed by hand."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
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
from spanax.plan.spmd.compiler import Compiler
from spanax.plan.spmd.count_terms import count_terms
from spanax.plan.spmd.sharded_program import ShardedProgram
from spanax.plan.spmd.terms import KINDS, Collectives, Matmuls, Terms, table
from spanax.trace.analysis.op_groups import Phase
from spanax.trace.program import Program

BATCH, WIDTH, HIDDEN = 256, 32, 64
KERNEL_BYTES = 4 * WIDTH * HIDDEN


def traced(build: Callable[[nnx.Rngs], nnx.Module]) -> Program:
    return spanax.trace(
        build=build, optimizer=optax.sgd(0.1), batch=jax.ShapeDtypeStruct((BATCH, WIDTH), "float32"),
        loss=lambda model, x: (model(x) ** 2).mean(),
    )  # fmt: skip


def linear(rngs: nnx.Rngs) -> nnx.Module:
    return nnx.Linear(WIDTH, HIDDEN, use_bias=False, rngs=rngs)


def counted(program: Program, layout: str, mesh: str, **options: Any) -> Terms:
    shape = MeshShape.of(mesh)
    resolver = resolve(program, layout_named(layout, shape), shape, {})
    return count_terms(ShardedProgram(resolver, program.step), **options)


def test_a_linear_layer_has_a_forward_matmul_and_the_gradient_of_its_kernel() -> None:
    matmuls = counted(traced(linear), "data", "data=4").matmuls
    assert matmuls.flops.tolist() == [2.0 * BATCH * WIDTH * HIDDEN] * 2
    assert matmuls.phase.tolist() == [Phase.FORWARD, Phase.BACKWARD]
    assert set(matmuls.dtypes) == {"fp32"} and matmuls.runs.tolist() == [1, 1] and not matmuls.in_layers.any()
    assert sorted(matmuls.sizes[0]) == sorted([BATCH, HIDDEN, WIDTH, 1])


def test_data_parallelism_all_reduces_the_gradient() -> None:
    moved = counted(traced(linear), "data", "data=4").moved_bytes(MeshShape.of("data=4"))
    assert moved.pop(("all-reduce", "data")) == KERNEL_BYTES + 4 and not moved, "the gradient and the loss"


def test_fsdp_gathers_the_kernel_and_scatters_its_gradient() -> None:
    mesh = MeshShape.of("fsdp=4")
    terms = counted(traced(linear), "fsdp", "fsdp=4")
    assert terms.moved_bytes(mesh) == {
        ("all-gather", "fsdp"): KERNEL_BYTES,
        ("reduce-scatter", "fsdp"): KERNEL_BYTES / 4,
        ("all-reduce", "fsdp"): 4 + 4,  # the loss, and the norm of the gradient
    }
    gathers = terms.collectives.of_weights & (terms.collectives.kind == KINDS.index("all-gather"))
    assert terms.collectives.num_bytes[gathers].tolist() == [KERNEL_BYTES]


def test_only_the_collectives_of_some_values_are_counted() -> None:
    program = traced(linear)
    kernel = counted(program, "fsdp", "fsdp=4", only=program.step.leaf_aliases(0))
    assert ("all-reduce", "fsdp") not in kernel.moved_bytes(MeshShape.of("fsdp=4"))
    assert counted(program, "fsdp", "fsdp=4", only=frozenset()).collectives.kind.size == 0


class Repeated(nnx.Module):
    """A layer that runs three times in a scan, with one kernel per iteration."""

    def __init__(self, rngs: nnx.Rngs):
        self.kernels = nnx.Param(rngs.params.normal((3, WIDTH, WIDTH)))

    def __call__(self, x: jax.Array) -> jax.Array:
        return jax.lax.scan(lambda x, kernel: (jnp.tanh(x @ kernel), None), x, self.kernels[...])[0]


def test_an_operation_in_a_loop_runs_once_per_iteration() -> None:
    terms = counted(traced(Repeated), "fsdp", "fsdp=4")
    assert terms.num_layers == 3 and terms.carry_bytes == 4 * BATCH * WIDTH
    assert terms.matmuls.in_layers.all() and set(terms.matmuls.runs) == {3}
    gathers = terms.collectives.kind == KINDS.index("all-gather")
    assert terms.collectives.runs[gathers].sum() >= 3


class Shared(nnx.Module):
    """One kernel that multiplies two inputs."""

    def __init__(self, rngs: nnx.Rngs):
        self.kernel = nnx.Param(rngs.params.normal((WIDTH, WIDTH)))

    def __call__(self, x: jax.Array) -> jax.Array:
        return jnp.tanh(x @ self.kernel[...]) @ self.kernel[...]


def test_a_compiler_that_adds_first_reduces_a_shared_gradient_once() -> None:
    program, mesh = traced(Shared), MeshShape.of("data=4")
    twice, once = (
        counted(program, "data", "data=4", compiler=Compiler(adds_first=first)).moved_bytes(mesh)
        for first in (False, True)
    )
    assert twice["all-reduce", "data"] - once["all-reduce", "data"] == 4 * WIDTH**2


@pytest.mark.parametrize("narrows_first, num_bytes", [(False, 4), (True, 2 * 2)])
def test_sums_that_are_converted_before_they_are_added_are_reduced_one_by_one(
    narrows_first: bool, num_bytes: int
) -> None:
    """Weights in bfloat16 are converted where they are used: their gradients are float32 sums, added in bfloat16."""

    class Converted(Shared):
        def __call__(self, x: jax.Array) -> jax.Array:
            first, second = (self.kernel[...].astype("float32") for _ in range(2))
            exact = partial(jnp.matmul, precision="highest")
            return exact(jnp.tanh(exact(x.astype("float32"), first)), second)

    batch = jax.ShapeDtypeStruct((16, WIDTH), "float32")
    program = spanax.trace(
        build=Converted, optimizer=optax.sgd(0.1), batch=batch, loss=lambda model, x: (model(x) ** 2).mean(),
        compute_dtype="bfloat16",
    )  # fmt: skip
    terms = counted(program, "data", "data=4", compiler=Compiler(adds_first=True, narrows_first=narrows_first))
    moved = terms.moved_bytes(MeshShape.of("data=4"))["all-reduce", "data"]
    assert moved == num_bytes * WIDTH**2 + 4  # and the loss


@pytest.mark.parametrize(
    ("kind", "expected"), [("all-gather", 512), ("all-reduce", 512), ("reduce-scatter", 128), ("all-to-all", 128)]
)
def test_the_bytes_of_a_collective_are_those_of_its_result(kind: str, expected: float) -> None:
    row = (KINDS.index(kind), 1024.0, 0b01, 0b10, False, 1, Phase.FORWARD, False, False)
    other = counted(traced(linear), "data", "data=4")
    terms = replace(other, axes=("data", "model"), matmuls=table(Matmuls, []), collectives=table(Collectives, [row]))
    assert terms.moved_bytes(MeshShape.of("data=4,model=2")) == {(kind, "data"): expected}
    assert terms.moved_bytes(MeshShape.of("data=1,model=2")) == {}, "no collective over one device"


def test_a_table_has_the_shape_of_its_columns_without_rows() -> None:
    none = table(Matmuls, [])
    assert none.sizes.shape == (0, 4) and none.scores.shape == (0, 3) and none.dtypes == ()
    assert none.flops.dtype == float and none.in_layers.dtype == bool


def test_tpus_all_reduce_the_narrower_copy_of_a_sum():
    # A float32 batch promotes bfloat16 weights: their gradients are float32 sums, used only in bfloat16.
    program = spanax.trace(
        build=lambda rngs: nnx.Linear(8, 4, dtype="float32", precision="highest", use_bias=False, rngs=rngs),
        optimizer=optax.sgd(0.1),
        batch=jax.ShapeDtypeStruct((16, 8), "float32"),
        loss=lambda model, x: (model(x) ** 2).mean(),
        compute_dtype="bfloat16",
    )
    mesh = MeshShape.of("data=4")
    moved = {
        first: counted(program, "data", "data=4", compiler=Compiler(narrows_first=first)).moved_bytes(mesh)
        for first in (False, True)
    }
    full, narrow = moved[False]["all-reduce", "data"], moved[True]["all-reduce", "data"]
    assert full - narrow == 8 * 4 * 2, "of the weight alone: the loss remains float32"
