"""Variants of a program: each is traced once, from whichever program it is reached."""

from collections.abc import Callable
from typing import Any

import jax
import optax
import pytest
from flax import nnx

import spanax
from programs import small_gpt
from spanax.errors import SpanaxError
from spanax.trace import definition
from spanax.trace.program import Program
from spanax.trace.variant import Variant

METHODS: list[tuple[Callable[[Program], Program], Variant]] = [
    (lambda program: program.variant(remat="dots"), Variant(remat="dots")),
    (lambda program: program.variant(compute_dtype="bfloat16"), Variant(compute_dtype="bfloat16")),
    (lambda program: program.variant(records_gradients=True), Variant(records_gradients=True)),
]


def linear(**options: Any) -> Program:
    return spanax.trace(
        build=lambda rngs: nnx.Linear(4, 2, rngs=rngs), optimizer=optax.sgd(0.1),
        batch=jax.ShapeDtypeStruct((8, 4), "float32"), loss=lambda model, x: (model(x) ** 2).mean(), **options,
    )  # fmt: skip


@pytest.mark.parametrize(("method", "form"), METHODS)
def test_each_method_is_a_variant_that_differs_in_one_field(
    method: Callable[[Program], Program], form: Variant
) -> None:
    program = linear()
    variant = method(program)
    assert variant.options == form != program.options
    assert variant is program.variant(variant.options) and variant.variant(Variant()) is program


def test_the_order_of_changes_does_not_matter() -> None:
    program = linear()
    both = program.variant(Variant(remat="dots", microbatches=2))
    microbatched = program.variant(Variant(microbatches=2))
    assert microbatched.variant(remat="dots") is both and both.variant(Variant(microbatches=2)) is microbatched


def test_a_variant_shares_what_its_options_do_not_change(monkeypatch: pytest.MonkeyPatch) -> None:
    program, traces = linear(), list[Any]()
    step_graph = definition.step_graph
    monkeypatch.setattr(definition, "step_graph", lambda jaxpr: traces.append(jaxpr) or step_graph(jaxpr))
    first = program.variant(Variant(remat="dots", compute_dtype="bfloat16"))
    assert len(traces) == 1 and program.variant(remat="dots").variant(compute_dtype="bfloat16") is first
    assert len(traces) == 2  # `remat` alone, and no evaluation: it has no remat and no compute dtype
    assert first.variables is program.variables and first.init is program.init
    assert program.evaluation and first.evaluation and first.evaluation.graph is program.evaluation.graph
    assert program.variant(records_gradients=True).variables is not program.variables


def test_a_variant_of_a_renamed_program_is_renamed() -> None:
    program = linear()
    renamed = program.rename({"features": "size"}).rename({"size": "width"})
    variant = renamed.variant(remat="dots")
    assert "width" in {axis.name for axis in variant.axes}
    assert variant.variant(remat=None) is renamed and renamed.variant(remat="dots") is variant
    assert "width" not in {axis.name for axis in program.variant(remat="dots").axes}


@pytest.mark.usefixtures("devices")
def test_a_traced_build_has_one_variant_for_all_seeds() -> None:
    program = linear()
    assert program.variant(seed=3) is program and program.variant(Variant(seed=3, remat="dots")).options.seed == 0
    eager = linear(eager_build=True)
    assert eager.variant(seed=3).init.seed == 3 and eager.variant(seed=3).variant(seed=0) is eager


def test_every_variant_computes_the_same() -> None:
    program = linear(compute_dtype="bfloat16", microbatches=2)
    variants = [Variant(), Variant(remat="dots"), Variant(records_gradients=True), Variant(compute_dtype="float16")]
    assert all(program.variant(variant).computation is program.computation for variant in variants)


@pytest.mark.parametrize("wrong", [{"remat": "some"}, {"context": "square"}, {"loss_chunks": 3}, {"microbatches": 3}])
def test_an_unsupported_variant_raises_each_time(wrong: dict[str, Any]) -> None:
    program = small_gpt()
    for _ in range(2):
        with pytest.raises(SpanaxError):
            program.variant(**wrong)
    assert program.variant(Variant()) is program
