"""Operands: how each operation reshards what it reads and writes."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx

import spanax
from programs import small_gpt
from spanax.hardware.mesh import MeshShape
from spanax.plan.presets import layout_named
from spanax.plan.sharding.operands import OperandSharding, operand_shardings
from spanax.plan.sharding.resolve import Resolver, resolve
from spanax.trace.jaxpr.graph import CONTRACTIONS, Op
from spanax.trace.program import Program


def shardings(program: Program, layout: str, mesh: str) -> tuple[Resolver, dict[Op, OperandSharding]]:
    shape = MeshShape.of(mesh)
    resolver = resolve(program, layout_named(layout, shape), shape, {})
    return resolver, operand_shardings(resolver, program.step, resolver.constraints(program.step))


def traced(build: Callable[[nnx.Rngs], nnx.Module], *shape: int) -> Program:
    return spanax.trace(
        build=build, optimizer=optax.sgd(0.1), batch=jax.ShapeDtypeStruct(shape, "float32"),
        loss=lambda model, x: (model(x) ** 2).mean(),
    )  # fmt: skip


@pytest.mark.parametrize(("batch", "is_exchanged"), [(8, True), (512, False)])
def test_the_activations_of_a_gradient_move_where_they_are_smaller(batch: int, is_exchanged: bool) -> None:
    program = traced(lambda rngs: nnx.Linear(64, 32, use_bias=False, rngs=rngs), batch, 64)
    _, by_op = shardings(program, "fsdp", "fsdp=4")
    matmuls = [op for op in program.step.graph.ops() if op.name == "dot_general"]
    (gradient,) = (op for op in matmuls if program.step.graph.shape(op.outputs[0]) in ((64, 32), (32, 64)))
    assert (gradient in by_op) is is_exchanged


def test_data_parallelism_reshards_no_matmul() -> None:
    _, by_op = shardings(small_gpt(), "data", "data=4")
    assert not [op.name for op in by_op if op.name in CONTRACTIONS]


def test_fsdp_gathers_a_stored_weight_before_its_matmuls() -> None:
    program = traced(lambda rngs: nnx.Linear(32, 64, use_bias=False, rngs=rngs), 512, 32)
    resolver, by_op = shardings(program, "fsdp", "fsdp=4")
    (kernel,) = (value for leaf, value in zip(program.leaves, program.step.graph.body.inputs, strict=False)
                 if leaf.kind == "param")  # fmt: skip
    stored = resolver.constraints(program.step)[kernel]
    assert stored is not None and any(stored.spec) and not any(stored.computed)
    matmul = next(op for op in program.step.graph.ops() if op.name == "dot_general" and kernel in op.inputs)
    gathered = by_op[matmul].inputs[matmul.inputs.index(kernel)]
    assert gathered is not None and gathered.spec == stored.computed


class Sorted(nnx.Module):
    """A linear layer, and a kernel that XLA cannot partition."""

    def __init__(self, rngs: nnx.Rngs):
        self.up = nnx.Linear(16, 32, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return jax.lax.top_k(self.up(x), 4)[0]


def test_a_kernel_runs_shard_by_shard_along_independent_dims() -> None:
    program = traced(Sorted, 16, 16)
    _, by_op = shardings(program, "data+tensor", "data=2,model=2")
    (sharding,) = (sharding for op, sharding in by_op.items() if op.name == "top_k")
    (operand,) = sharding.inputs
    assert sharding.is_local and operand is not None and operand.spec == (("data",), ())


class Grouped(nnx.Module):
    """A convolution in groups."""

    def __init__(self, rngs: nnx.Rngs):
        self.conv = nnx.Conv(8, 8, (3,), feature_group_count=4, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.conv(x)


def test_the_kernel_gradient_of_a_grouped_convolution_is_summed_over_the_batch() -> None:
    program = traced(Grouped, 16, 6, 8)
    _, by_op = shardings(program, "data", "data=4")
    convolutions = {op: by_op[op] for op in program.step.graph.ops() if op.name == "conv_general_dilated"}
    assert convolutions and all(sharding.is_local for sharding in convolutions.values())
    gradients = [sharding for op, sharding in convolutions.items() if op.params["batch_group_count"] > 1]
    assert [sharding.summed for sharding in gradients] == [(("data",),)]
    assert sorted({sharding.summed for sharding in convolutions.values()}) == [(), (("data",),)]


class Table(nnx.Module):
    """A lookup in a large or a small table."""

    def __init__(self, rows: int, rngs: nnx.Rngs):
        self.embed = nnx.Embed(rows, 32, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.embed(jnp.argmax(x, -1))


@pytest.mark.parametrize(("rows", "is_gathered"), [(8, True), (65536, False)])
def test_a_lookup_moves_the_smaller_of_table_and_rows(rows: int, is_gathered: bool) -> None:
    program = traced(lambda rngs: Table(rows, rngs), 64, 8)
    _, by_op = shardings(program, "fsdp", "fsdp=4")
    specs: list[Any] = [by_op[op].inputs[0].spec for op in by_op if op.name == "gather" and by_op[op].inputs[0]]
    assert specs and all((not any(spec)) == is_gathered for spec in specs)
