"""The user's loss is traced once for all forms that rewrite it, and its evaluation when it is read."""

from typing import Any

import jax
import optax
import pytest
from flax import nnx

import spanax
from spanax.compat import unsharded_tracers
from spanax.trace.jaxpr.remat_policies import RING
from spanax.trace.program import Program
from spanax.trace.rewrites.traced_once import TracedOnce, jaxpr_of
from spanax.trace.variant import Variant


class Attending(nnx.Module):
    """One attention, and logits."""

    def __init__(self, rngs: nnx.Rngs):
        self.attention = nnx.MultiHeadAttention(2, 8, decode=False, rngs=rngs)
        self.head = nnx.Linear(8, 64, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.head(self.attention(x))


def traced(calls: list[bool]) -> Program:
    """A program that records each call of its loss: whether the model is in training mode."""

    def loss(model: Attending, batch: Any) -> jax.Array:
        calls.append(not model.attention.deterministic)
        logits = model(batch["x"])
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"]).mean()

    batch = {"x": jax.ShapeDtypeStruct((8, 4, 8), "float32"), "y": jax.ShapeDtypeStruct((8, 4), "int32")}
    return spanax.trace(build=lambda rngs: Attending(rngs), optimizer=optax.sgd(0.1), batch=batch, loss=loss)


def test_all_forms_of_a_loss_read_one_trace() -> None:
    calls = list[bool]()
    program = traced(calls)
    calls.clear()
    forms = [Variant(remat="dots"), Variant(loss_chunks=2), Variant(context=RING), Variant("dots", context=RING)]
    graphs = [str(program.variant(form).step.graph.body.ops) for form in forms]
    assert not calls
    alone = [str(traced([]).variant(form).step.graph.body.ops) for form in forms]
    assert [text.count("=") for text in graphs] == [text.count("=") for text in alone]
    program.variant(remat="dots", compute_dtype="bfloat16")
    assert len(calls) == 1


def test_the_evaluation_is_traced_when_it_is_read() -> None:
    calls = list[bool]()
    program = traced(calls)
    num_calls = len(calls)
    assert program.has_evaluation and num_calls == 1
    assert program.evaluation is not None and len(calls) == num_calls + 1
    assert program.evaluation is program.evaluation and len(calls) == num_calls + 1


def test_a_program_without_remat_is_that_without_a_policy() -> None:
    program = traced([])
    written = program.variant(compute_dtype="bfloat16")
    assert program.variant(remat="none", compute_dtype="bfloat16").step is written.step


def test_a_function_that_reads_a_traced_array_is_traced_again() -> None:
    known: dict[Any, Any] = {}

    def outer(x: jax.Array) -> Any:
        return jaxpr_of(TracedOnce(lambda y: x * y, known), 1.0)[1]

    jax.eval_shape(outer, 2.0)
    assert known == {}


def test_only_in_a_context_does_jax_not_search_for_the_origin_of_an_array(monkeypatch: pytest.MonkeyPatch) -> None:
    searched = list[bool]()

    def has_sharding(x: jax.Array) -> jax.Array:
        monkeypatch.setattr(type(x), "_origin_msg", lambda self: searched.append(True) or "")
        assert not hasattr(x, "sharding")
        return x

    with unsharded_tracers(), unsharded_tracers():
        jax.make_jaxpr(lambda x: has_sharding(x))(1.0)
    assert searched == []
    jax.make_jaxpr(lambda x: has_sharding(x))(1.0)
    assert searched == [True] * (jax.__version_info__ < (0, 12)), "the patch can go with jax 0.11"
