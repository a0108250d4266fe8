"""Logits of the derived prefill and decode step are those of the forward pass, on models not written for it."""

from contextlib import nullcontext
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import spanax
import zoo
from byo import longformer
from causal import CAUSAL, DIM, VOCAB, Causal, Layers, Learned, WindowAttention
from spanax.errors import CausalityError, DecodeError, RangeError

LENGTH = 32
STARTS = np.array([3, 7])

QUICK = (
    "llama",
    "window, soft cap, sinks",
    "local and global",
    "nnx attention, dropout, two heads",
    "padding by id",
    "alibi, segments",
    "experts, enough slots",
    "experts, scarce slots",
    "experts, one-hot",
    "mamba 2, chunks",
    "griffin",
    "rwkv",
    "lstm",
    "t5 decoder",
)


def largest_error(case: Causal) -> tuple[float, Any, int]:
    """The largest difference to the forward pass, relative to the largest logit; the decoder; bytes of its cache."""
    model = case.build(nnx.Rngs(0))
    call = case.call or (lambda model, tokens: model(tokens))
    decoder = spanax.decode(model, case.call, length=case.length, per_token=case.per_token)
    length = case.length
    tokens = np.random.default_rng(2).integers(1, 16, (2, length)).astype(np.int32)
    width = STARTS.max()
    given = {name: array[:, :width] if name in case.per_token else array for name, array in case.inputs.items()}
    warned = pytest.warns(UserWarning, match=case.warns) if case.warns else nullcontext()
    with warned:
        logits, cache = decoder.prefill(tokens[:, :width], STARTS, **given)
    model.eval()
    results = nnx.jit(call)(model, tokens, **case.inputs)
    expected = np.asarray(results[0] if isinstance(results, tuple) else results, np.float64)
    rows, positions, error = np.arange(2), STARTS, 0.0
    while True:
        error = max(error, float(np.abs(logits - expected[rows, positions - 1]).max()))
        if positions.max() == length:
            return error / np.abs(expected).max(), decoder, cache.num_bytes
        row = {name: case.inputs[name][rows, positions] for name in case.per_token}
        logits, cache = decoder.step(tokens[rows, positions], cache, **row)
        positions = positions + 1


@pytest.mark.parametrize("name", [n if n in QUICK else pytest.param(n, marks=pytest.mark.slow) for n in CAUSAL])
def test_each_position_has_the_logits_of_the_forward_pass(name: str) -> None:
    error, decoder, num_bytes = largest_error(CAUSAL[name])
    assert error < (1e-2 if name == "bfloat16" else 1e-5)
    assert bool(decoder.recomputed) == CAUSAL[name].is_recomputed, decoder.recomputed
    if CAUSAL[name].cache_rows:  # keys and values of two sequences in float32
        assert num_bytes == CAUSAL[name].cache_rows * 2 * 2 * DIM * 4


def test_the_cache_of_attention_is_its_keys_and_values() -> None:
    model = zoo.ZOO["llama"].build(nnx.Rngs(0))
    _, cache = spanax.decode(model, length=LENGTH).prefill(np.ones((3, 4), int))
    config = model.config
    head = config.embed_dim // config.num_heads
    assert cache.num_bytes == 2 * 3 * LENGTH * config.num_layers * config.num_kv_heads * head * 4


class Bidirectional(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.attention = nnx.MultiHeadAttention(4, DIM, decode=False, rngs=rngs)

    def __call__(self, x):
        return self.attention(x)


class Centered(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.linear = nnx.Linear(DIM, DIM, rngs=rngs)

    def __call__(self, x):
        return self.linear(x - x.mean(1, keepdims=True))


class Sifted(nnx.Module):
    """Only half of the tokens pass, those with the largest scores of all."""

    def __init__(self, rngs: nnx.Rngs):
        self.score, self.linear = nnx.Linear(DIM, 1, rngs=rngs), nnx.Linear(DIM, DIM, rngs=rngs)

    def __call__(self, x):
        score = self.score(x)[..., 0]
        least = jax.lax.top_k(score, x.shape[1] // 2)[0][:, -1:]
        return self.linear(x) * (score >= least)[..., None]


class Peeking(nnx.Module):
    """The last position of each block sees the next one, by a mask that is off by one."""

    def __init__(self, rngs: nnx.Rngs):
        self.attention = nnx.MultiHeadAttention(4, DIM, decode=False, rngs=rngs)

    def __call__(self, x):
        row, column = jnp.arange(x.shape[1])[:, None], jnp.arange(x.shape[1])
        return self.attention(x, mask=(column <= row) | ((row % 4 == 3) & (column == row + 1)))


class Flipped(nnx.Module):
    """Causal attention over the sequence in the other direction: causal, but no row is where it was."""

    def __init__(self, rngs: nnx.Rngs):
        self.attention = nnx.MultiHeadAttention(4, DIM, decode=False, rngs=rngs)

    def __call__(self, x):
        mask = jnp.triu(jnp.ones((x.shape[1],) * 2, bool))
        return self.attention(jnp.roll(x, 0, 1)[:, ::-1], mask=mask)[:, ::-1]


class Coupled(nnx.Module):
    """Adds the mean over the batch."""

    def __init__(self, rngs: nnx.Rngs):
        self.linear = nnx.Linear(DIM, DIM, rngs=rngs)

    def __call__(self, x):
        return self.linear(x).mean(0, keepdims=True) + x


def test_a_causal_model_in_another_order_is_recomputed() -> None:
    model = Layers(nnx.Rngs(0), Flipped)
    with pytest.raises(DecodeError, match=r"\[SPX411\]"):
        spanax.decode(model, length=16).prefill([[1, 2, 3]])
    with pytest.warns(UserWarning, match="computes the whole sequence"):
        (result,) = spanax.generate(model, [[1, 2, 3]], 3, temperature=0)
    assert result.tokens[0] == int(model(jnp.array([[1, 2, 3]]))[0, -1].argmax())


def test_sequences_that_depend_on_each_other_are_reported() -> None:
    with pytest.warns(UserWarning, match="other sequences of the batch"):
        spanax.decode(Layers(nnx.Rngs(0), Coupled), length=16).prefill([[1, 2, 3]])


@pytest.mark.parametrize(
    ("build", "line"),
    [
        (lambda rngs: Layers(rngs, Bidirectional), "(Bidirectional.__call__)"),
        (lambda rngs: Layers(rngs, Centered), "(Centered.__call__)"),
        (longformer.build, "(LocalAttention.__call__)"),
        (lambda rngs: Layers(rngs, Sifted), "(Sifted.__call__)"),
        (lambda rngs: Layers(rngs, Peeking), "(Peeking.__call__)"),
    ],
)
def test_a_model_that_is_not_causal_is_refused_with_its_line(build: Any, line: str) -> None:
    decoder = spanax.decode(build(nnx.Rngs(0)), length=16, fallback=True)
    with pytest.raises(CausalityError, match="not causal") as caught:
        decoder.prefill(np.ones((1, 3), int))
    assert line in str(caught.value)


def learned() -> Learned:
    model = Learned(nnx.Rngs(0))
    model.eval()
    return model


class Pooled(nnx.Module):
    def __call__(self, x):
        return x


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda: spanax.decode(learned(), length=65).prefill([[1]]), RangeError, "has 64 positions"),
        (lambda: spanax.decode(learned(), length=4).prefill(np.ones((1, 5), int)), RangeError, "length=4"),
        (lambda: spanax.decode(learned()).prefill(np.ones((2, 0), int)), RangeError, "shape"),
        (lambda: spanax.decode(learned()).prefill([[1, 2]], [3]), RangeError, "`lengths`"),
        (lambda: spanax.decode(Pooled()).prefill([[1, 2]]), DecodeError, "returns logits"),
        (lambda: spanax.decode(learned(), length=8).prefill([[1, VOCAB]]), RangeError, f"has token {VOCAB}"),
        (
            lambda: spanax.decode(
                learned(), lambda model, tokens: (model.embed(tokens), model(tokens)[0][..., :5])
            ).prefill([[1]]),
            DecodeError,
            "returns logits",
        ),
        (lambda: spanax.decode(lambda x: x), spanax.SpanaxError, "`model`"),
    ],
)
def test_bad_input(call: Any, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        call()


def test_a_full_cache_is_an_error() -> None:
    decoder = spanax.decode(Layers(nnx.Rngs(0), WindowAttention), length=8)
    _, cache = decoder.prefill(np.ones((1, 7), int))
    _, cache = decoder.step(np.ones(1, int), cache)
    with pytest.raises(RangeError, match="8 positions"):
        decoder.step(np.ones(1, int), cache)


def test_a_wrong_derivation_never_returns_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    """A row that is written to the place after its own, as a faulty rule would, is found by the comparison."""
    from spanax.decoding.derive import advance

    write = advance.Advance._write
    monkeypatch.setattr(
        advance.Advance, "_write", lambda self, *args: write(advance.replace(self, position=self.position + 1), *args)
    )
    model = Layers(nnx.Rngs(0), WindowAttention)
    with pytest.raises(DecodeError, match="differs from its forward pass"):
        spanax.decode(model, length=16).prefill([[1, 2, 3]])
    with pytest.warns(UserWarning, match="Each token computes the whole sequence"):
        logits, _ = spanax.decode(model, length=16, fallback=True).prefill([[1, 2, 3]])
    assert np.allclose(logits[0], model(jnp.array([[1, 2, 3]]))[0, -1], atol=1e-5)
