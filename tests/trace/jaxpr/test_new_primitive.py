"""A primitive unknown to Spanax becomes known by one row: discovered, priced, run, chunked and fused like others."""

import math
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

import spanax
from spanax.errors import SpanaxError
from spanax.plan.place import resolver_of
from spanax.plan.spmd.sharded_program import ShardedProgram
from spanax.trace.analysis.fusion import FUSED
from spanax.trace.jaxpr.dim_maps.registry import TABLE
from spanax.trace.jaxpr.graph import Op
from spanax.trace.program import Program
from spanax.trace.rewrites.attention.operation import RING

SIZE, LENGTH, HEADS, WIDTH, VOCAB = 16, 8, 4, 8, 256

soft_cap = Primitive("soft_cap")
soft_cap.def_impl(jnp.tanh)
soft_cap.def_abstract_eval(lambda x: x)
mlir.register_lowering(soft_cap, mlir.lower_fun(jnp.tanh, multiple_results=False))
ad.defjvp2(soft_cap, lambda tangent, out, x: tangent * (1 - out**2))
batching.defvectorized(soft_cap)


class Capped(nnx.Module):
    """One attention block with capped scores and capped logits."""

    def __init__(self, rngs: nnx.Rngs):
        width = HEADS * WIDTH
        self.embed = nnx.Embed(VOCAB, width, rngs=rngs)
        self.qkv = nnx.LinearGeneral(width, (3, HEADS, WIDTH), rngs=rngs)
        self.out = nnx.LinearGeneral((HEADS, WIDTH), width, axis=(-2, -1), rngs=rngs)
        self.head = nnx.Linear(width, VOCAB, rngs=rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = self.embed(tokens)
        q, k, v = jnp.moveaxis(self.qkv(x), -3, 0)
        scores = soft_cap.bind(jnp.einsum("bqhd,bkhd->bhqk", q, k) / WIDTH**0.5)
        x = x + self.out(jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores), v))
        return soft_cap.bind(self.head(x))


def loss(model: Capped, batch: dict[str, jax.Array]) -> jax.Array:
    logits = model(batch["tokens"])
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["targets"]).mean()


def traced() -> Program:
    ids = jax.ShapeDtypeStruct((SIZE, LENGTH), "int32")
    return spanax.trace(
        build=Capped, optimizer=optax.adam(1e-2, eps=1e-3), batch={"tokens": ids, "targets": ids}, loss=loss
    )


@pytest.fixture
def program(monkeypatch: pytest.MonkeyPatch) -> Iterator[Program]:
    monkeypatch.delitem(TABLE, "soft_cap", raising=False)

    @spanax.rule("soft_cap")
    def soft_cap_rule(op: Any, dims: Any) -> None:
        dims.same(*op.inputs, *op.outputs)

    yield traced()
    del TABLE["soft_cap"]


def caps(program: Program) -> list[Op]:
    return [op for op in program.step.graph.ops() if op.name == "soft_cap"]


def largest(program: Program) -> int:
    """Returns the number of elements of the largest capped array."""
    return max(math.prod(program.step.graph.shape(op.outputs[0])) for op in caps(program))


def losses(program: Program, on: str = "cpu:1", layout: str = "data", **options: Any) -> list[float]:
    random = np.random.default_rng(0)
    run = spanax.start(program, spanax.plan(program, on, layout=layout, **options))
    batches = random.integers(0, VOCAB, (3, 2, SIZE, LENGTH)).astype("int32")
    return [float(run.step({"tokens": tokens, "targets": targets})["loss"]) for tokens, targets in batches]


def test_the_new_primitive_has_the_axes_of_its_operand(program: Program) -> None:
    axes = program.step.axes
    assert not axes.unknown and len(caps(program)) == 2
    assert all(axes.classes[op.inputs[0]] == axes.classes[op.outputs[0]] for op in caps(program))
    assert {axes.of(op.outputs[0]) for op in caps(program)} == {
        ("batch", "heads", "seq", "seq"),
        ("batch", "seq", "vocab"),
    }


def test_the_new_primitive_is_priced_as_sharded_and_fused(program: Program) -> None:
    plan = spanax.plan(program, "cpu:8", layout="fsdp+tensor", mesh="fsdp=4,model=2")
    laid = ShardedProgram(resolver_of(program, plan), program.step)
    for op in caps(program):
        assert laid.division(op).partition is None and sum(map(bool, laid.masks(op.outputs[0]))) == 2
        assert laid.masks(op.inputs[0]) == laid.masks(op.outputs[0])
        assert op.family in FUSED


@pytest.mark.usefixtures("devices")
def test_a_model_with_the_new_primitive_trains_sharded_as_on_one_device(program: Program) -> None:
    sharded = losses(program, "cpu:8", "fsdp+tensor", mesh="fsdp=4,model=2")
    np.testing.assert_allclose(sharded, losses(program), rtol=1e-5)


@pytest.mark.usefixtures("devices")
def test_a_loss_is_chunked_through_it(program: Program) -> None:
    chunked = program.variant(loss_chunks=4)
    assert largest(chunked) == SIZE * LENGTH * VOCAB // 4
    np.testing.assert_allclose(losses(chunked), losses(program), rtol=1e-5)


@pytest.mark.usefixtures("devices")
def test_attention_with_it_before_the_softmax_is_fused(program: Program) -> None:
    fused = program.variant(context="ring")
    assert any(op.name in RING for op in fused.step.graph.ops())
    sharded = losses(fused, "cpu:8", "ring", mesh="data=2,context=4")
    np.testing.assert_allclose(sharded, losses(program), rtol=1e-5)


@pytest.mark.filterwarnings("ignore:no rule for the primitives 'soft_cap'")
def test_without_its_rule_the_primitive_is_unknown() -> None:
    assert "soft_cap" not in TABLE
    program = traced()
    assert program.step.axes.unknown and not any(op.is_elementwise for op in caps(program))
    with suppress(SpanaxError):  # raised if no other product can be chunked instead of the logits
        assert largest(program.variant(loss_chunks=4)) == SIZE * LENGTH * VOCAB
    with pytest.raises(SpanaxError, match="no softmax attention"):
        program.variant(context="ring")
