"""Chunked: logits are found however a loss is written, and in chunks it has the same value and gradients."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

from sampling import sampled
from spanax.errors import SpanaxError
from spanax.trace.jaxpr.graph import from_jaxpr
from spanax.trace.rewrites.chunked_loss import chunked_loss
from spanax.trace.rewrites.remat import rematerialized

pytestmark = pytest.mark.usefixtures("devices")  # they compare values

ROWS, LENGTH, WIDTH, VOCAB = 4, 8, 16, 64
LOGITS = ROWS * LENGTH * VOCAB
Params, Batch = dict[str, Any], dict[str, Any]


def hidden(params: Params, batch: Batch) -> Any:
    return jnp.tanh(batch["x"] @ params["body"])


def logits_of(params: Params, batch: Batch) -> Any:
    return hidden(params, batch) @ params["head"]


def library(params: Params, batch: Batch) -> Any:
    return optax.softmax_cross_entropy_with_integer_labels(logits_of(params, batch), batch["y"]).mean()


def tied(params: Params, batch: Batch) -> Any:
    logits = jnp.einsum("btd,vd->btv", hidden(params, batch), params["table"])
    return library_of(logits, batch) + 1e-3 * (params["table"] ** 2).sum()


def library_of(logits: Any, batch: Batch) -> Any:
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"]).mean()


def handwritten_loss(params: Params, batch: Batch) -> Any:
    log_p = jax.nn.log_softmax(logits_of(params, batch).reshape(-1, VOCAB))
    return -jnp.take_along_axis(log_p, batch["y"].reshape(-1, 1), axis=-1).mean()


def flat(params: Params, batch: Batch) -> Any:
    logits = hidden(params, batch).reshape(-1, WIDTH) @ params["head"] + params["bias"]
    labels = batch["y"].ravel()
    picked = jnp.take_along_axis(logits, labels[:, None], axis=1)[:, 0]
    return (jax.nn.logsumexp(logits, axis=1) - picked).sum() / labels.size


def smoothed(params: Params, batch: Batch) -> Any:
    expected = optax.smooth_labels(jax.nn.one_hot(batch["y"], VOCAB), 0.1)
    return optax.softmax_cross_entropy(logits_of(params, batch), expected).mean()


def summed_at_once(params: Params, batch: Batch) -> Any:
    log_p = jax.nn.log_softmax(logits_of(params, batch))
    return -(jax.nn.one_hot(batch["y"], VOCAB) * log_p).sum() / batch["y"].size


def masked(params: Params, batch: Batch) -> Any:
    logits = 30 * jnp.tanh(logits_of(params, batch) / 30)
    real = batch["y"] > 5
    lost = optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"])
    pulled = 1e-2 * jax.nn.logsumexp(logits, axis=-1) ** 2
    return jnp.where(real, lost + pulled, 0.0).sum() / jnp.maximum(real.sum(), 1)


def weighted(params: Params, batch: Batch) -> Any:
    # The weight of a token is learned: it has a gradient of its own.
    lost = optax.softmax_cross_entropy_with_integer_labels(logits_of(params, batch), batch["y"])
    weight = jax.nn.softmax(hidden(params, batch) @ params["bias"][:WIDTH])
    return (lost * weight).sum() / ROWS


def focal(params: Params, batch: Batch) -> Any:
    lost = optax.softmax_cross_entropy_with_integer_labels(logits_of(params, batch), batch["y"])
    return ((1 - jnp.exp(-lost)) ** 2 * lost).mean()


def shifted(params: Params, batch: Batch) -> Any:
    logits = logits_of(params, batch)[:, :-1]
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"][:, 1:]).mean()


def taught(params: Params, batch: Batch) -> Any:
    teacher = lax.stop_gradient(jax.nn.log_softmax(hidden(params, batch) @ params["table"].T))
    student = jax.nn.log_softmax(logits_of(params, batch))
    return (jnp.exp(teacher) * (teacher - student)).sum(-1).mean()


def taught_by_the_likeliest(params: Params, batch: Batch) -> Any:
    student = jax.nn.log_softmax(logits_of(params, batch))
    logits, tokens = lax.top_k(hidden(params, batch) @ params["table"].T, 4)
    return -(jax.nn.softmax(logits) * jnp.take_along_axis(student, tokens, axis=-1)).sum(-1).mean()


def two_heads(params: Params, batch: Batch) -> Any:
    other = hidden(params, batch)[:, ::-1] @ params["table"].T
    return library(params, batch) + 0.3 * library_of(other, batch)


def token_losses(x: Any, head: Any, batch: Batch) -> Any:
    return optax.softmax_cross_entropy_with_integer_labels(x @ head, batch["y"])


def summed_per_token(params: Params, batch: Batch) -> Any:
    """Adds the losses of several heads before their mean, one after another."""
    x, total = hidden(params, batch), 0.0
    for head in (params["head"], params["table"].T, params["head"] + 1.0):
        total = total + token_losses(x, head, batch)
    return total.mean()


def scaled_by_another(params: Params, batch: Batch) -> Any:
    """The second head reads tokens that the loss of the first scales; both are weights of each other's losses."""
    x = hidden(params, batch)
    first = token_losses(x, params["head"], batch)
    second = token_losses(x * jnp.tanh(first)[..., None], params["table"].T, batch)
    return (first * second).sum(1).mean()


def preferred(params: Params, batch: Batch) -> Any:
    """Not linear in what the tokens give, which are added up before (the loss of DPO)."""
    lost = optax.softmax_cross_entropy_with_integer_labels(logits_of(params, batch), batch["y"]).sum(1)
    return jnp.log1p(jnp.exp(lost[::2] - lost[1::2])).mean()


def multiplied(params: Params, batch: Batch) -> Any:
    lost = optax.softmax_cross_entropy_with_integer_labels(logits_of(params, batch), batch["y"])
    return lost.mean() * lost[0].mean()


LOSSES: list[Callable[..., Any]] = [
    library, tied, handwritten_loss, flat, smoothed, summed_at_once, masked, weighted, focal, shifted, taught,
    two_heads, summed_per_token, scaled_by_another, preferred, multiplied, taught_by_the_likeliest,
]  # fmt: skip


def params(dtype: Any = jnp.float32) -> Params:
    random = np.random.default_rng(0)
    shapes = {"body": (WIDTH, WIDTH), "head": (WIDTH, VOCAB), "table": (VOCAB, WIDTH), "bias": (VOCAB,)}
    return {name: jnp.asarray(random.normal(size=shape) / 4, dtype) for name, shape in shapes.items()}


def batch() -> Batch:
    random = np.random.default_rng(1)
    x = random.normal(size=(ROWS, LENGTH, WIDTH))
    return {"x": jnp.asarray(x, jnp.float32), "y": jnp.asarray(random.integers(0, VOCAB, (ROWS, LENGTH)))}


def largest(function: Callable[..., Any], *args: Any) -> int:
    """The most numbers of any value of a function."""
    graph = from_jaxpr(jax.make_jaxpr(function)(*args))
    return max(int(np.prod(graph.shape(value))) for op in graph.ops() for value in op.outputs)


def same(result: Any, expected: Any, tolerance: float) -> None:
    for leaf, other in zip(jax.tree.leaves(result), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(leaf, other, rtol=0, atol=tolerance * float(jnp.abs(other).max() + 1e-30))


@pytest.mark.parametrize("loss", sampled(LOSSES, [*LOSSES[::3], LOSSES[-1]]), ids=lambda loss: loss.__name__)
def test_chunks_have_the_same_value_and_gradients(loss: Callable[..., Any]) -> None:
    in_chunks = jax.value_and_grad(chunked_loss(loss, 2))
    assert largest(jax.value_and_grad(loss), params(), batch()) >= LOGITS * 7 // 8
    assert largest(in_chunks, params(), batch()) <= LOGITS // 2
    (value, grads), (expected, of_wanted) = (
        jax.jit(item)(params(), batch()) for item in (in_chunks, jax.value_and_grad(loss))
    )
    same(value, expected, 1e-6)
    same(grads, of_wanted, 1e-5)


def test_a_batch_that_a_loss_closes_over_is_chunked() -> None:
    def in_chunks(params: Params, batch: Batch) -> Any:
        return jax.value_and_grad(chunked_loss(lambda params, _: handwritten_loss(params, batch), 2))(params, ())

    assert largest(in_chunks, params(), batch()) <= LOGITS // 2


def reversed_between(params: Params, batch: Batch) -> Any:
    x = hidden(params, batch)
    first = token_losses(x, params["head"], batch)
    second = token_losses(x * jnp.tanh(first[::-1, ::-1])[..., None], params["table"].T, batch)
    return (first + second).mean()


def weighted_by_a_mean(params: Params, batch: Batch) -> Any:
    x = hidden(params, batch)
    first = token_losses(x, params["head"], batch)
    return (first + token_losses(x, params["table"].T * first.mean(), batch)).mean()


def sorted_between(params: Params, batch: Batch) -> Any:
    x = hidden(params, batch)
    first, second = (token_losses(x, head, batch) for head in (params["head"], params["table"].T))
    return (first * jnp.sort(second.ravel()).reshape(first.shape)).mean()


@pytest.mark.parametrize("loss", [reversed_between, weighted_by_a_mean, sorted_between], ids=lambda loss: loss.__name__)
def test_heads_that_combine_the_tokens_of_another(loss: Callable[..., Any]) -> None:
    in_chunks, at_once = (jax.value_and_grad(item) for item in (chunked_loss(loss, 2), loss))
    assert count_logits(in_chunks) < count_logits(at_once)
    (value, grads), (expected, expected_grads) = (jax.jit(item)(params(), batch()) for item in (in_chunks, at_once))
    same(value, expected, 1e-6)
    same(grads, expected_grads, 1e-5)


def count_logits(function: Callable[..., Any]) -> int:
    """The number of values with the size of the logits."""
    graph = from_jaxpr(jax.make_jaxpr(function)(params(), batch()))
    return sum(int(np.prod(graph.shape(value))) == LOGITS for op in graph.ops() for value in op.outputs)


def test_operations_on_the_loss_affect_the_gradients() -> None:
    result, expected = (
        jax.grad(lambda p, b, f=item: f(p, b) ** 3)(params(), batch())
        for item in (chunked_loss(handwritten_loss, 4), handwritten_loss)
    )
    same(result, expected, 1e-5)


def test_nothing_is_computed_twice() -> None:
    def products(loss: Any) -> int:
        return sum(
            op.name == "dot_general" for op in from_jaxpr(jax.make_jaxpr(jax.grad(loss))(params(), batch())).ops()
        )

    assert products(chunked_loss(library, 4)) == products(library)
    assert products(chunked_loss(preferred, 4)) == products(preferred) + 1


def test_remat_of_a_loss_stores_gradients_but_no_logits() -> None:
    in_chunks = jax.grad(rematerialized(chunked_loss(library, 4), "dots"))
    assert largest(in_chunks, params(), batch()) <= LOGITS // 2
    same(in_chunks(params(), batch()), jax.grad(library)(params(), batch()), 1e-5)


def test_low_precision_accumulates_in_32_bits() -> None:
    def low(params: Params, batch: Batch) -> Any:
        logits = (hidden(params, batch).astype(jnp.bfloat16) @ params["head"].astype(jnp.bfloat16)).astype(jnp.float32)
        return library_of(logits, batch)

    losses = (chunked_loss(low, 8), low, library)
    result, expected, exact = (jax.jit(jax.grad(loss))(params(), batch())["head"] for loss in losses)
    assert jnp.abs(result - exact).mean() <= 1.2 * jnp.abs(expected - exact).mean()


def test_auxiliary_values_of_a_loss_are_returned() -> None:
    def loss(params: Params, batch: Batch) -> Any:
        logits = logits_of(params, batch)
        right = logits.argmax(-1) == batch["y"]
        lost = optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"])
        return lost.mean(), {"accuracy": right.mean(), "of each": lost, "right": right}

    result, expected = (
        jax.value_and_grad(item, has_aux=True)(params(), batch()) for item in (chunked_loss(loss, 4), loss)
    )
    same(result, expected, 1e-5)
    assert result[0][1]["of each"].shape == (ROWS, LENGTH)


def handed_out(params: Params, batch: Batch) -> Any:
    logits = logits_of(params, batch)
    return library_of(logits, batch), logits


def across_tokens(params: Params, batch: Batch) -> Any:
    logits = logits_of(params, batch)
    return library_of(jax.nn.softmax(logits, axis=(0, 1)), batch)


def no_logits(params: Params, batch: Batch) -> Any:
    return (batch["x"] ** 2).mean() * params["bias"].sum()


@pytest.mark.parametrize(
    ("loss", "count", "reported"),
    [
        (across_tokens, 2, "uses all of the logits, or combines tokens"),
        (no_logits, 2, "no logits to compute in chunks"),
        (library, 3, "3 chunks do not divide the 8 tokens of a row"),
    ],
)
def test_losses_that_cannot_be_chunked_raise(loss: Callable[..., Any], count: int, reported: str) -> None:
    with pytest.raises(SpanaxError, match=reported):
        chunked_loss(loss, count)(params(), batch())


def test_returned_logits_raise() -> None:
    with pytest.raises(SpanaxError, match="among the results"):
        chunked_loss(handed_out, 2)(params(), batch())
