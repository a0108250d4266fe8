"""`spanax.value_and_grad` is `nnx.value_and_grad`, and under `spanax.jit` computes a loss in the requested form."""

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import optax
import pytest
from flax import nnx

import spanax
from spanax.errors import SpanaxError

pytestmark = pytest.mark.usefixtures("devices")  # they compare values

VOCAB, EMBED, LENGTH = 32, 16, 8


class Model(nnx.Module):
    """A language model with dropout, statistics and two blocks under `nnx.remat`."""

    def __init__(self) -> None:
        rngs = nnx.Rngs(0)
        self.embed, self.dropout = nnx.Embed(VOCAB, EMBED, rngs=rngs), nnx.Dropout(0.1, rngs=rngs)
        self.blocks = nnx.List([nnx.Linear(EMBED, EMBED, rngs=rngs) for _ in range(2)])
        self.head, self.count = nnx.Linear(EMBED, VOCAB, rngs=rngs), nnx.Variable(np.zeros((), np.float32))

    def __call__(self, tokens: Any) -> Any:
        x = self.dropout(self.embed(tokens))
        for block in self.blocks:
            x = nnx.remat(lambda block, x: x + nnx.tanh(block(x)))(block, x)
        self.count[...] += 1
        return self.head(x)


def loss(model: Any, tokens: Any, weight: Any = 1.0) -> tuple[Any, dict[str, Any]]:
    losses = optax.softmax_cross_entropy_with_integer_labels(model(tokens[:, :-1]), tokens[:, 1:])
    return weight * losses.mean(), {"largest": losses.max()}


def train_step(value_and_grad: Callable[..., Any], *, is_closure: bool = False) -> Callable[..., Any]:
    def step(model: Any, optimizer: Any, tokens: Any) -> Any:
        if is_closure:
            (value, extra), grads = value_and_grad(lambda model: loss(model, tokens, 0.5), has_aux=True)(model)
        else:
            (value, extra), grads = value_and_grad(loss, has_aux=True)(model, tokens, 0.5)
        optimizer.update(model, grads)
        return value, extra["largest"]

    return step


def trained(step: Callable[..., Any]) -> list[Any]:
    model = Model()
    optimizer, random = nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param), np.random.default_rng(0)
    results = [step(model, optimizer, random.integers(0, VOCAB, (8, LENGTH + 1))) for _ in range(3)]
    return [*map(np.asarray, (*sum(results, ()), model.head.kernel[...]))]


@functools.cache
def expected() -> list[Any]:
    return trained(nnx.jit(train_step(nnx.value_and_grad)))


def test_under_nnx_jit_it_equals_nnx_value_and_grad() -> None:
    for result, value in zip(trained(nnx.jit(train_step(spanax.value_and_grad))), expected(), strict=True):
        np.testing.assert_array_equal(result, value)


@pytest.mark.parametrize("is_closure", [False, True])
@pytest.mark.parametrize("options", [{}, {"remat": "full"}, {"loss_chunks": 2}, {"microbatches": 4, "remat": "dots"}])
def test_every_form_equals_nnx(options: dict[str, Any], is_closure: bool) -> None:
    step = spanax.jit(train_step(spanax.value_and_grad, is_closure=is_closure), mesh="fsdp=2,model=2", **options)
    for result, value in zip(trained(step), expected(), strict=True):
        np.testing.assert_allclose(result, value, rtol=1e-4, atol=1e-5)
    form = step.program.options
    assert {name: getattr(form, name) for name in options} == options


def test_microbatches_are_a_scan_in_the_program() -> None:
    names = {}
    for microbatches in (1, 4):
        step = spanax.jit(train_step(spanax.value_and_grad), mesh="data=2", microbatches=microbatches)
        trained(step)
        names[microbatches] = [op.name for op in step.program.step.graph.ops()].count("scan")
    assert names[4] > names[1]


def test_microbatches_of_a_batch_inside_a_captured_function_are_refused() -> None:
    def step(model: Any, tokens: Any) -> Any:
        inner = lambda model: loss(model, tokens)[0]  # noqa: E731
        return spanax.value_and_grad(lambda model: inner(model))(model)[0]

    tokens = np.zeros((8, LENGTH + 1), np.int32)
    spanax.jit(step, mesh="data=2", remat="dots")(Model(), tokens)
    with pytest.raises(SpanaxError, match="has no arrays to divide into microbatches"):
        spanax.jit(step, mesh="data=2", microbatches=2)(Model(), tokens)
