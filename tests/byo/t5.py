"""T5: encoder and decoder with cross-attention, relative positions in buckets shared by the layers, a tied head."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

VOCAB, DIM, HEADS, KV, FF, BUCKETS = 64, 32, 4, 8, 64, 8


def relative_bucket(relative, bidirectional, max_distance=16):
    buckets, base = BUCKETS, 0
    if bidirectional:
        buckets //= 2
        base = (relative > 0).astype(jnp.int32) * buckets
        relative = jnp.abs(relative)
    else:
        relative = -jnp.minimum(relative, 0)
    exact = buckets // 2
    scaled = jnp.log(jnp.maximum(relative, 1) / exact) / np.log(max_distance / exact) * (buckets - exact)
    large = jnp.minimum(exact + scaled.astype(jnp.int32), buckets - 1)
    return base + jnp.where(relative < exact, relative, large)


class Attention(nnx.Module):
    def __init__(self, rngs, has_bias=False, bidirectional=True):
        kernel = dict(use_bias=False, rngs=rngs)
        self.q, self.k, self.v = (nnx.Linear(DIM, HEADS * KV, **kernel) for _ in range(3))
        self.o = nnx.Linear(HEADS * KV, DIM, **kernel)
        self.bidirectional = bidirectional
        self.relative = nnx.Embed(BUCKETS, HEADS, rngs=rngs) if has_bias else None

    def bias(self, queries, keys):
        relative = jnp.arange(keys)[None, :] - jnp.arange(queries)[:, None]
        return self.relative(relative_bucket(relative, self.bidirectional)).transpose(2, 0, 1)[None]

    def __call__(self, x, memory=None, bias=None, mask=None):
        memory = x if memory is None else memory
        split = lambda y: y.reshape(*y.shape[:2], HEADS, KV).transpose(0, 2, 1, 3)  # noqa: E731
        q, k, v = split(self.q(x)), split(self.k(memory)), split(self.v(memory))
        scores = jnp.einsum("bhqd,bhkd->bhqk", q, k)
        scores = scores if bias is None else scores + bias
        if mask is not None:
            scores = jnp.where(mask, scores, -1e9)
        out = jnp.einsum("bhqk,bhkd->bhqd", jax.nn.softmax(scores), v)
        return self.o(out.transpose(0, 2, 1, 3).reshape(*x.shape[:2], HEADS * KV))


class GatedFF(nnx.Module):
    def __init__(self, rngs):
        self.wi_0, self.wi_1 = (nnx.Linear(DIM, FF, use_bias=False, rngs=rngs) for _ in range(2))
        self.wo = nnx.Linear(FF, DIM, use_bias=False, rngs=rngs)

    def __call__(self, x):
        return self.wo(nnx.gelu(self.wi_0(x)) * self.wi_1(x))


class Layer(nnx.Module):
    def __init__(self, rngs, first, is_decoder):
        self.norms = nnx.List([nnx.RMSNorm(DIM, rngs=rngs) for _ in range(3 if is_decoder else 2)])
        self.attention = Attention(rngs, has_bias=first, bidirectional=not is_decoder)
        self.cross = Attention(rngs) if is_decoder else None
        self.ff = GatedFF(rngs)

    def __call__(self, x, bias, mask, memory=None, memory_mask=None):
        x = x + self.attention(self.norms[0](x), bias=bias, mask=mask)
        if self.cross is not None:
            x = x + self.cross(self.norms[1](x), memory, mask=memory_mask)
        return x + self.ff(self.norms[-1](x))


class T5(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.shared = nnx.Embed(VOCAB, DIM, rngs=rngs)
        self.encoder = nnx.List([Layer(rngs, i == 0, False) for i in range(2)])
        self.decoder = nnx.List([Layer(rngs, i == 0, True) for i in range(2)])
        self.encoder_norm, self.decoder_norm = nnx.RMSNorm(DIM, rngs=rngs), nnx.RMSNorm(DIM, rngs=rngs)

    def encode(self, source):
        mask, x = (source > 0)[:, None, None, :], self.shared(source)
        bias = self.encoder[0].attention.bias(source.shape[1], source.shape[1])
        for layer in self.encoder:
            x = layer(x, bias, mask)
        return self.encoder_norm(x), mask

    def __call__(self, source, target):
        memory, memory_mask = self.encode(source)
        x, length = self.shared(target), target.shape[1]
        bias = self.decoder[0].attention.bias(length, length)
        causal = jnp.tril(jnp.ones((1, 1, length, length), bool))
        for layer in self.decoder:
            x = layer(x, bias, causal, memory, memory_mask)
        return self.shared.attend(self.decoder_norm(x) * DIM**-0.5)


build = T5


def loss(model, batch):
    target = batch["target"]
    inputs = jnp.pad(target[:, :-1], ((0, 0), (1, 0)))
    losses = optax.softmax_cross_entropy_with_integer_labels(model(batch["source"], inputs), target)
    weights = (target > 0).astype(losses.dtype)
    return (losses * weights).sum() / weights.sum()


def batch(size):
    rng = np.random.default_rng(0)
    source = rng.integers(1, VOCAB, (size, 24)).astype(np.int32)
    source[:, 20:] = 0
    return {"source": source, "target": rng.integers(0, VOCAB, (size, 16)).astype(np.int32)}
