"""Which values of a layer to save: compared with all choices, and with what JAX recomputes of each."""

import functools
from collections.abc import Callable
from itertools import chain, combinations
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax import lax

import spanax
import zoo
from spanax.models import gpt
from spanax.trace.analysis.recomputation import Recomputation, recomputation, values_around
from spanax.trace.jaxpr.graph import NAME, Body
from spanax.trace.jaxpr.remat_policies import NAMED, saving
from spanax.trace.program import Program

L, D = 3, 8
CONTRACTED = ("dot_general", "spanax_attention")


class Layers(nnx.Module):
    """Layers with a branch, a value that two operations read, and one that only the next layer reads."""

    def __init__(self, rngs: nnx.Rngs):
        self.weights = nnx.Param(jax.random.normal(rngs.params(), (L, 3, D, D)))

    def __call__(self, x: Any) -> Any:
        def layer(x: Any, w: Any) -> tuple[Any, None]:
            y = x @ w[0]
            gate = jnp.sin(y) @ w[1]
            both = gate * y + jnp.cos(gate)
            return x + (both @ w[2]) * y, None

        return lax.scan(layer, x, self.weights[...])[0]


@functools.cache
def program(build: Callable[..., Any], context: str = "gathered") -> Program:
    if build is Layers:
        loss = lambda model, batch: (model(batch["x"]) ** 2).mean()  # noqa: E731
        batch: Any = {"x": jax.ShapeDtypeStruct((16, D), "float32")}
    else:
        loss, batch = gpt.loss, zoo.GPT_TEXT(16)
    traced = spanax.trace(build=build, optimizer=optax.sgd(0.1), batch=batch, loss=loss)
    return traced.variant(context=context)


GPT = functools.partial(gpt.GPT, zoo.GPT_SCAN)


def choices_of(traced: Program) -> Recomputation:
    return recomputation(traced.variant(remat=NAMED).step.traced)


def test_no_choice_of_the_same_bytes_repeats_less() -> None:
    choices = choices_of(program(Layers))
    random = np.random.default_rng(0)
    read = [value for value, name in choices.names.items() if not name.startswith(("slice", "squeeze"))]
    assert 8 <= len(read) <= 12, choices.names
    for _ in range(32):
        seconds = {op: float(random.integers(0, 100)) if op.name != NAME else 0.0 for op in choices.ops}
        num_bytes = {value: float(random.integers(1, 100)) for value in read}
        cost = lambda saved: sum(seconds[op] for op in choices.repeated(saved))  # noqa: B023, E731
        size = lambda saved: sum(num_bytes[value] for value in saved)  # noqa: B023, E731
        every = list(chain.from_iterable(combinations(read, count) for count in range(len(read) + 1)))
        limit = float(random.integers(1, 500))
        fitting, larger = values_around(choices, seconds, num_bytes, limit, 0.0)
        assert size(fitting) <= limit and (size(larger) > limit or cost(larger) == cost(fitting))
        for chosen in (fitting, larger):
            assert cost(chosen) == min(cost(each) for each in every if size(each) <= size(chosen))


def matmuls(body: Body) -> int:
    turns = lambda op: op.params["length"] if op.name == "scan" else 1  # noqa: E731
    return sum((op.name in CONTRACTED) + turns(op) * sum(map(matmuls, op.bodies)) for op in body.ops)


@pytest.mark.parametrize(("build", "context"), [(Layers, "gathered"), (GPT, "gathered"), (GPT, "ring")])
def test_jax_recomputes_what_a_choice_repeats(build: Callable[..., Any], context: str) -> None:
    traced = program(build, context)
    choices = choices_of(traced)
    once = matmuls(traced.variant(remat="none").step.graph.body)
    names = sorted(set(choices.names.values()))
    contracted = [name for name in names if name.startswith(("dot_general", "attention"))]
    rows = [value for value, name in choices.names.items() if name == "attention.1"]
    is_fused = context == "ring"
    assert is_fused == bool(rows) == any(op.name == "spanax_attention" for op in choices.repeated(()))
    assert not any(op.name == "spanax_attention" for op in choices.repeated(rows)) or not is_fused
    random = np.random.default_rng(0)
    for number in range(3):
        chosen = {*random.choice(names, 3), *contracted[number::3]}
        saved = [value for value, name in choices.names.items() if name in chosen]
        again = choices.repeated(saved)
        repeated = sum(runs for op, runs in choices.ops.items() if op.name in CONTRACTED and op in again)
        assert matmuls(traced.variant(remat=saving(chosen)).step.graph.body) == once + repeated
