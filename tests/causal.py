"""Causal models as strangers write them: none was written for a cache."""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import zoo
from byo import alibi, half, lora_gpt, lstm_lm, mamba, rwkv, scanned, seq2seq_gru, sorted_moe, t5, wavenet
from spanax.models import llama, moe

VOCAB, DIM, HEADS, HEAD = 32, 32, 4, 8


@dataclasses.dataclass(frozen=True)
class Causal:
    """A model, how it is called, its inputs besides tokens, and those of them with an element for each token."""

    build: Callable[[nnx.Rngs], nnx.Module]
    call: Callable[..., Any] | None = None
    inputs: dict[str, np.ndarray] = dataclasses.field(default_factory=dict)
    per_token: tuple[str, ...] = ()
    cache_rows: int = 0  # the number of keys, summed over layers, where it was counted
    is_recomputed: bool = False  # whether some lines are computed for all positions
    length: int = 32
    warns: str = ""  # what is warned of


def heads(x):
    return x.reshape(*x.shape[:-1], -1, HEAD)


class Layers(nnx.Module):
    """An embedding, pre-norm residual layers of some kind, and a head."""

    def __init__(self, rngs: nnx.Rngs, layer: Callable[..., nnx.Module], count: int = 2):
        self.embed, self.head = nnx.Embed(VOCAB, DIM, rngs=rngs), nnx.Linear(DIM, VOCAB, rngs=rngs)
        self.norms = nnx.List([nnx.RMSNorm(DIM, rngs=rngs) for _ in range(count)])
        self.layers = nnx.List([layer(rngs) for _ in range(count)])

    def __call__(self, tokens):
        x = self.embed(tokens)
        for norm, layer in zip(self.norms, self.layers, strict=True):
            x = x + layer(norm(x))
        return self.head(x)


class WindowAttention(nnx.Module):
    """Sliding windows, a soft cap of scores, and one sink per head, as Gemma and gpt-oss have them."""

    def __init__(self, rngs: nnx.Rngs):
        self.qkv, self.out = nnx.Linear(DIM, 3 * DIM, rngs=rngs), nnx.Linear(DIM, DIM, rngs=rngs)
        self.sinks = nnx.Param(jnp.ones(HEADS))

    def __call__(self, x):
        q, k, v = map(heads, jnp.split(self.qkv(x), 3, -1))
        place = jnp.arange(x.shape[1])
        mask = (place[:, None] >= place) & (place[:, None] - place < 5)
        scores = jnp.where(mask, 5.0 * jnp.tanh(jnp.einsum("bqhd,bkhd->bhqk", q, k) / 5.0), -1e30)
        sinks = jnp.broadcast_to(self.sinks[...][:, None, None], (*scores.shape[:3], 1))
        weights = jax.nn.softmax(jnp.concatenate([scores, sinks], -1))[..., :-1]
        return self.out(jnp.einsum("bhqk,bkhd->bqhd", weights, v).reshape(x.shape))


def turned(x):
    """Rotary positions by complex numbers, as the authors of Llama write them."""
    angles = jnp.outer(jnp.arange(x.shape[1]), 1e4 ** (-jnp.arange(0, HEAD, 2) / HEAD))
    y = jax.lax.complex(x[..., ::2], x[..., 1::2]) * jnp.exp(1j * angles)[:, None]
    return jnp.stack([y.real, y.imag], -1).reshape(x.shape)


class LocalAndGlobal(nnx.Module):
    """Two scanned layers with windows, under a mask that is computed once, before a global layer, as in Gemma."""

    def __init__(self, rngs: nnx.Rngs):
        self.embed, self.head = nnx.Embed(VOCAB, DIM, rngs=rngs), nnx.Linear(DIM, VOCAB, rngs=rngs)
        self.qkv = nnx.Param(0.2 * jax.random.normal(rngs.params(), (3, DIM, 3 * DIM)))

    def __call__(self, tokens):
        place = jnp.arange(tokens.shape[1])
        later = place > place[:, None]

        def layer(mask, x, kernel):
            q, k, v = map(heads, jnp.split(x @ kernel, 3, -1))
            q, k = llama.rotate(q, 10_000.0), llama.rotate(k, 10_000.0)
            scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) + jnp.where(mask, -1e9, 0.0)
            return x + jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores), v).reshape(x.shape), None

        x = self.embed(tokens)
        local = jax.checkpoint(partial(layer, later | (place[:, None] - place > 5)))
        x, _ = jax.lax.scan(local, x, self.qkv[:2])
        return self.head(layer(later, x, self.qkv[2])[0])


class LatentAttention(nnx.Module):
    """Keys and values from a small latent, and one rotary key for all heads (DeepSeek-V2)."""

    def __init__(self, rngs: nnx.Rngs):
        linear = partial(nnx.Linear, use_bias=False, rngs=rngs)
        self.q, self.latent, self.key = linear(DIM, 2 * DIM), linear(DIM, 8), linear(DIM, HEAD)
        self.up, self.out, self.norm = linear(8, 2 * DIM), linear(DIM, DIM), nnx.RMSNorm(8, rngs=rngs)

    def __call__(self, x):
        q, rest = jnp.split(self.q(x), 2, -1)
        k, v = map(heads, jnp.split(self.up(self.norm(self.latent(x))), 2, -1))
        rotary = turned(self.key(x)[:, :, None])
        scores = jnp.einsum("bqhd,bkhd->bhqk", heads(q), k)
        scores += jnp.einsum("bqhd,bkod->bhqk", turned(heads(rest)), rotary)
        scores = jnp.where(jnp.tril(jnp.ones(scores.shape[-2:], bool)), scores / 4.0, -jnp.inf)
        return self.out(jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores), v).reshape(x.shape))


class Griffin(nnx.Module):
    """A short causal convolution and a gated linear recurrence by an associative scan (RG-LRU)."""

    def __init__(self, rngs: nnx.Rngs):
        self.enter, self.gates, self.out = (nnx.Linear(DIM, size, rngs=rngs) for size in (DIM, 2 * DIM, DIM))
        self.conv = nnx.Conv(DIM, DIM, (4,), padding="CAUSAL", feature_group_count=DIM, rngs=rngs)
        self.decay = nnx.Param(jnp.linspace(0.5, 3.0, DIM))

    def __call__(self, x):
        u = self.conv(self.enter(x))
        gate, forget = jnp.split(jax.nn.sigmoid(self.gates(u)), 2, -1)
        log_a = -8.0 * forget * jax.nn.softplus(self.decay[...])
        a, push = jnp.exp(log_a), jnp.sqrt(1 - jnp.exp(2 * log_a)) * gate * u
        _, h = jax.lax.associative_scan(lambda p, q: (p[0] * q[0], p[1] * q[0] + q[1]), (a, push), axis=1)
        return self.out(h)


class ChunkedStates(nnx.Module):
    """A state space in chunks: matmuls with cumulative decays inside, a scan between them (Mamba 2)."""

    def __init__(self, rngs: nnx.Rngs):
        self.enter, self.out = nnx.Linear(DIM, DIM + 2 * HEAD + HEADS, rngs=rngs), nnx.Linear(DIM, DIM, rngs=rngs)

    def __call__(self, x, size=8):
        u, b, c, dt = jnp.split(self.enter(x), [DIM, DIM + HEAD, DIM + 2 * HEAD], -1)
        dt = jax.nn.softplus(dt)
        chunk = lambda y: y.reshape(y.shape[0], -1, size, *y.shape[2:])  # noqa: E731
        u, b, c, log_a = chunk(heads(u) * dt[..., None]), chunk(b), chunk(c), chunk(-dt)
        total = jnp.cumsum(log_a, axis=2)
        within = jnp.where(
            jnp.tril(jnp.ones((size, size), bool))[..., None], total[:, :, :, None] - total[:, :, None], -1e9
        )
        y = jnp.einsum("nisd,nitd,nistb,nitbh->nisbh", c, b, jnp.exp(within), u)
        states = jnp.einsum("nitd,nitb,nitbh->nibhd", b, jnp.exp(total[:, :, -1:] - total), u)

        def carry(state, inputs):
            new, decay = inputs
            return state * jnp.exp(decay)[..., None, None] + new, state

        over = lambda y: jnp.moveaxis(y, 1, 0)  # noqa: E731
        _, before = jax.lax.scan(carry, jnp.zeros_like(states[:, 0]), (over(states), over(total[:, :, -1])))
        y += jnp.einsum("nisd,nisb,nibhd->nisbh", c, jnp.exp(total), over(before))
        return self.out(y.reshape(x.shape))


class LinearAttention(nnx.Module):
    """Attention without a softmax, by cumulative sums of outer products (Katharopoulos et al., 2020)."""

    def __init__(self, rngs: nnx.Rngs):
        self.qkv = nnx.Linear(DIM, 3 * DIM, rngs=rngs)

    def __call__(self, x):
        q, k, v = map(heads, jnp.split(self.qkv(x), 3, -1))
        q, k = nnx.elu(q) + 1, nnx.elu(k) + 1
        states = jnp.cumsum(jnp.einsum("bthd,bthe->bthde", k, v), 1)
        total = jnp.einsum("bthd,bthd->bth", q, jnp.cumsum(k, 1))
        return (jnp.einsum("bthd,bthde->bthe", q, states) / total[..., None]).reshape(x.shape)


class BlockwiseAttention(nnx.Module):
    """A scan over blocks of keys with a running maximum, and layers in a counted loop."""

    def __init__(self, rngs: nnx.Rngs):
        self.qkv, self.mix = nnx.Linear(DIM, 3 * DIM, rngs=rngs), nnx.Param(jnp.ones((2, DIM)))

    def __call__(self, x, size=8):
        q, k, v = map(heads, jnp.split(self.qkv(x), 3, -1))
        places = jnp.arange(x.shape[1])
        blocks = [jnp.moveaxis(y.reshape(y.shape[0], -1, size, HEADS, HEAD), 1, 0) for y in (k, v)]

        def block(carry, inputs):
            (best, total, out), (keys, values, first) = carry, inputs
            scores = jnp.einsum("bqhd,bkhd->bhqk", q, keys) / HEAD**0.5
            scores = jnp.where(places[:, None] >= first + jnp.arange(size), scores, -1e30)
            new = jnp.maximum(best, scores.max(-1))
            weights, old = jnp.exp(scores - new[..., None]), jnp.exp(best - new)
            out = out * old[..., None] + jnp.einsum("bhqk,bkhd->bhqd", weights, values)
            return (new, total * old + weights.sum(-1), out), None

        zero = jnp.zeros((x.shape[0], HEADS, x.shape[1]))
        start = zero - 1e30, zero, jnp.zeros((*zero.shape, HEAD))
        (_, total, out), _ = jax.lax.scan(block, start, (*blocks, places[::size]))
        y = jnp.moveaxis(out / total[..., None], 1, 2).reshape(x.shape)
        return jax.lax.fori_loop(0, 2, lambda index, y: y + jnp.tanh(y * self.mix[...][index]), y)


class Slots(nnx.Module):
    """Routed experts whose tokens are written into slots by index; none is dropped if these are twice their share."""

    def __init__(self, rngs: nnx.Rngs, capacity_factor: float):
        config = moe.MoEConfig(VOCAB, 32, 1, HEADS, HEADS, DIM, DIM, num_experts=4, capacity_factor=capacity_factor)
        self.experts = moe.Experts(config, rngs)

    def __call__(self, x):
        places = jnp.arange(x.shape[1])[:, None] * jnp.arange(1, DIM + 1)
        return 100 * self.experts(x + 4 * jnp.sin(places))[0]  # copies of a token are not alike


class RepeatedKeys(nnx.Module):
    """Grouped queries by repeated keys and values, and positions that a padding mask counts."""

    def __init__(self, rngs: nnx.Rngs):
        self.q, self.kv, self.out = (nnx.Linear(DIM, size, rngs=rngs) for size in (DIM, 2 * HEAD, DIM))

    def __call__(self, x):
        q, (k, v) = heads(self.q(x)), (jnp.repeat(heads(y), HEADS, 2) for y in jnp.split(self.kv(x), 2, -1))
        return self.out(jax.nn.dot_product_attention(q, k, v, is_causal=True).reshape(x.shape))


class Learned(nnx.Module):
    """Learned positions, `nnx.MultiHeadAttention` as it stands, dropout, and several heads for later tokens."""

    def __init__(self, rngs: nnx.Rngs):
        self.embed, self.places = nnx.Embed(VOCAB, DIM, rngs=rngs), nnx.Embed(64, DIM, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(HEADS, DIM, dropout_rate=0.1, decode=False, rngs=rngs)
        self.dropout, self.heads = nnx.Dropout(0.1, rngs=rngs), nnx.Linear(DIM, 2 * VOCAB, rngs=rngs)

    def __call__(self, tokens):
        x = self.dropout(self.embed(tokens) + self.places(jnp.arange(tokens.shape[1])))
        x = x + self.attention(x, mask=nnx.make_causal_mask(tokens))
        return tuple(jnp.split(self.heads(x), 2, -1))


class Padded(nnx.Module):
    """Positions by the number of tokens that are not padding, which is id 0; padding attends to all tokens."""

    def __init__(self, rngs: nnx.Rngs):
        self.embed, self.places = nnx.Embed(VOCAB, DIM, rngs=rngs), nnx.Embed(64, DIM, rngs=rngs)
        self.qkv, self.out = nnx.Linear(DIM, 3 * DIM, rngs=rngs), nnx.Linear(DIM, VOCAB, rngs=rngs)

    def __call__(self, tokens):
        is_token = tokens != 0
        x = self.embed(tokens) + self.places(jnp.maximum(jnp.cumsum(is_token, -1) - 1, 0))
        q, k, v = map(heads, jnp.split(self.qkv(x), 3, -1))
        mask = nnx.make_causal_mask(tokens) * nnx.make_attention_mask(is_token, is_token)
        return self.out(nnx.dot_product_attention(q, k, v, mask=mask).reshape(x.shape))


SOURCE = np.random.default_rng(0).integers(1, 20, (2, 10)).astype(np.int32)
SEGMENTS = np.sort(np.random.default_rng(1).integers(0, 3, (2, 32)), 1).astype(np.int32)
of_source: dict[str, Any] = {"call": lambda model, tokens, source: model(source, tokens), "inputs": {"source": SOURCE}}


def layers(layer: Callable[..., nnx.Module]) -> Callable[[nnx.Rngs], nnx.Module]:
    return lambda rngs: Layers(rngs, layer)


CAUSAL = {
    "gpt": Causal(zoo.ZOO["gpt"].build),
    "llama": Causal(zoo.ZOO["llama"].build),
    "qwen3": Causal(zoo.ZOO["qwen"].build),
    "window, soft cap, sinks": Causal(layers(WindowAttention), cache_rows=2 * 5),
    "local and global": Causal(LocalAndGlobal, cache_rows=2 * 6 + 32),
    "latent attention": Causal(layers(LatentAttention)),
    "linear attention": Causal(layers(LinearAttention)),
    "blockwise attention": Causal(layers(BlockwiseAttention)),
    "repeated keys": Causal(layers(RepeatedKeys)),
    "nnx attention, dropout, two heads": Causal(Learned, warns="with dropout"),
    "padding by id": Causal(Padded),
    "alibi, segments": Causal(
        alibi.build,
        lambda model, tokens, segments: model(tokens, segments),
        {"segments": SEGMENTS},
        per_token=("segments",),
        warns="with dropout",
    ),
    "bfloat16": Causal(half.build, length=16),
    "lora": Causal(lora_gpt.build, length=16),
    "scan and remat": Causal(scanned.build, warns="with dropout"),
    "tied": Causal(zoo.ZOO["tied"].build),
    "mixtral, slots": Causal(zoo.ZOO["mixtral"].build, is_recomputed=True, warns="number of tokens"),
    "experts, all": Causal(zoo.ZOO["dropless"].build),
    "experts, sorted": Causal(sorted_moe.build),
    "experts, enough slots": Causal(layers(partial(Slots, capacity_factor=2.0))),
    "experts, scarce slots": Causal(
        layers(partial(Slots, capacity_factor=1.7)), is_recomputed=True, warns="number of tokens"
    ),
    "experts, one-hot": Causal(zoo.ZOO["moe"].build, is_recomputed=True, warns="number of tokens"),
    "mamba, two scans": Causal(mamba.build),
    "mamba 2, chunks": Causal(layers(ChunkedStates)),
    "griffin": Causal(layers(Griffin)),
    "rwkv": Causal(rwkv.build),
    "lstm": Causal(
        lstm_lm.build,
        lambda model, tokens: model(tokens, jnp.full(tokens.shape[0], tokens.shape[1]))[0],
        warns="with dropout",
    ),
    "wavenet": Causal(wavenet.build),
    "t5 decoder": Causal(t5.build, **of_source),
    "gru with attention": Causal(seq2seq_gru.build, **of_source),
    "cross attention": Causal(zoo.ZOO["seq2seq"].build, **of_source),
}
