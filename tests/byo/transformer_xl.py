"""Transformer-XL: the relative shift by pad and reshape, biases on queries, a memory of the last batch as state."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

VOCAB, DIM, HEADS, LENGTH = 64, 32, 4, 8


class Memory(nnx.Variable):
    """What the layers saw in the last step, for every row of the batch."""


def rel_shift(x):
    b, h, q, k = x.shape
    x = jnp.pad(x, ((0, 0), (0, 0), (0, 0), (1, 0)))
    return x.reshape(b, h, k + 1, q)[:, :, 1:].reshape(b, h, q, k)


class RelativeAttention(nnx.Module):
    def __init__(self, rngs):
        self.q, self.kv, self.r = (nnx.Linear(DIM, n * DIM, use_bias=False, rngs=rngs) for n in (1, 2, 1))
        self.u, self.v = (nnx.Param(jnp.zeros((HEADS, DIM // HEADS))) for _ in range(2))
        self.o = nnx.Linear(DIM, DIM, use_bias=False, rngs=rngs)

    def __call__(self, x, memory, positions):
        b, t, d = x.shape
        seen = jnp.concatenate([memory, x], axis=1)
        split = lambda y: y.reshape(*y.shape[:-1], HEADS, d // HEADS)  # noqa: E731
        q, r = split(self.q(x)), split(self.r(positions))
        k, v = (split(y) for y in jnp.split(self.kv(seen), 2, axis=-1))
        content = jnp.einsum("bqhd,bkhd->bhqk", q + self.u[...], k)
        place = rel_shift(jnp.einsum("bqhd,khd->bhqk", q + self.v[...], r))
        causal = jnp.tril(jnp.ones((t, seen.shape[1]), bool), k=memory.shape[1])
        scores = jnp.where(causal, (content + place) / np.sqrt(d // HEADS), -1e9)
        return self.o(jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores), v).reshape(b, t, d))


class TransformerXL(nnx.Module):
    def __init__(self, rngs: nnx.Rngs, batch_size=16):
        self.embed, self.head = nnx.Embed(VOCAB, DIM, rngs=rngs), nnx.Linear(DIM, VOCAB, rngs=rngs)
        self.layers = nnx.List([RelativeAttention(rngs) for _ in range(2)])
        self.norms = nnx.List([nnx.LayerNorm(DIM, rngs=rngs) for _ in range(2)])
        self.memory = nnx.List([Memory(jnp.zeros((batch_size, LENGTH, DIM))) for _ in range(2)])

    def __call__(self, ids):
        x = self.embed(ids)
        places = jnp.arange(2 * LENGTH - 1, -1, -1.0)
        angles = places[:, None] / 10_000 ** (jnp.arange(0, DIM, 2) / DIM)
        positions = jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], axis=-1)
        for layer, norm, memory in zip(self.layers, self.norms, self.memory, strict=True):
            before, memory[...] = memory[...], jax.lax.stop_gradient(x)
            x = norm(x + layer(x, before, positions))
        return self.head(x)


build = TransformerXL


def loss(model, batch):
    return optax.softmax_cross_entropy_with_integer_labels(model(batch["x"]), batch["y"]).mean()


def batch(size):
    rng = np.random.default_rng(0)
    return {key: rng.integers(0, VOCAB, (size, LENGTH)).astype(np.int32) for key in "xy"}
