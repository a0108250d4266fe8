"""Likelihoods of continuations equal those of the plain forward pass, and models for which they cannot are reported."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import spanax
from spanax.decoding.likelihood import log_likelihoods
from spanax.models import gpt

SIZES: dict[str, Any] = {"num_layers": 1, "num_heads": 2, "embed_dim": 16}
LENGTHS = [(3, 4), (70, 9), (140, 5), (1, 1), (1, 100), (60, 5), (61, 5)]  # on both sides of 64 and 100 positions


def pairs_of(lengths: list[tuple[int, int]]) -> list[tuple[list[int], list[int]]]:
    generator = np.random.default_rng(0)
    return [tuple(generator.integers(0, 32, count).tolist() for count in pair) for pair in lengths]


@pytest.mark.usefixtures("devices")
def test_likelihoods_are_those_of_the_forward_pass() -> None:
    model = gpt.GPT(gpt.GPTConfig(32, 100, **SIZES, dropout=0.5), nnx.Rngs(0))  # in training mode
    plain = nnx.clone(model)
    plain.eval()
    pairs = pairs_of(LENGTHS)
    greedy = [int(plain(jnp.array([[3, 1]]))[0, -1].argmax())]
    results = log_likelihoods(model, [*pairs, ([3, 1], greedy)], length=100)
    forward = nnx.jit(lambda model, tokens: jax.nn.log_softmax(model(tokens))[0])
    for (context, continuation), result in zip(pairs, results, strict=False):
        ids = [*context, *continuation][-101:]
        read = np.array([ids[:-1] + [0] * (101 - len(ids))])
        numbers = forward(plain, read)[len(ids) - 1 - len(continuation) : len(ids) - 1]
        expected = float(numbers[jnp.arange(len(continuation)), jnp.array(continuation)].sum())
        assert result.log_probability == pytest.approx(expected, rel=1e-5)
        assert result.is_greedy == (numbers.argmax(-1).tolist() == continuation)
        assert result.num_tokens == len(continuation) and result.num_cut == max(0, len(context + continuation) - 101)
    assert results[-1].is_greedy and not model.drop.deterministic


class Mixed(nnx.Module):
    """Adds the mean along one dim: of the sequences, or of the positions."""

    def __init__(self, dim: int) -> None:
        self.embed = nnx.Embed(32, 16, rngs=nnx.Rngs(0))
        self.dim = dim

    def __call__(self, tokens: Any) -> Any:
        x = self.embed(tokens)
        return self.embed.attend(x + x.mean(self.dim, keepdims=True))


def test_models_whose_numbers_depend_on_other_tokens_are_reported() -> None:
    with pytest.raises(spanax.SpanaxError, match="not causal"):
        log_likelihoods(Mixed(1), pairs_of([(3, 4)]), length=64)
    with pytest.warns(UserWarning, match="other sequences"):
        log_likelihoods(Mixed(0), pairs_of([(3, 4)] * 2), length=64)


@pytest.mark.parametrize(
    ("pair", "words"),
    [
        (([], [1]), "pair 0: the context has no tokens"),
        (([1], []), "pair 0: the continuation has no tokens"),
        (([1], [1] * 65), "65 tokens; the model has 64 positions"),
        (([1], [32]), "token 32; the model has 32 tokens"),
    ],
)
def test_bad_pairs(pair: Any, words: str) -> None:
    with pytest.raises(spanax.SpanaxError, match=words):
        log_likelihoods(Mixed(1), [pair], length=64)
