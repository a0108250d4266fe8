"""Modules with raw arrays: rotary tables, a causal mask, running numbers and a random key, none of them a Variable."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

VOCAB, DIM, HEADS, LENGTH = 64, 32, 4, 16


class Attention(nnx.Module):
    def __init__(self, *, rngs):
        self.qkv, self.out = nnx.Linear(DIM, 3 * DIM, rngs=rngs), nnx.Linear(DIM, DIM, rngs=rngs)
        size = DIM // HEADS
        angles = jnp.outer(jnp.arange(LENGTH), 10_000.0 ** (-jnp.arange(0, size, 2) / size))
        self.cos, self.sin = jnp.cos(angles)[:, None], jnp.sin(angles)[:, None]
        self.mask = np.tril(np.ones((LENGTH, LENGTH), bool))

    def rotate(self, x):
        left, right = jnp.split(x, 2, axis=-1)
        return jnp.concatenate([left * self.cos - right * self.sin, left * self.sin + right * self.cos], axis=-1)

    def __call__(self, x):
        b, t, d = x.shape
        q, k, v = (each.reshape(b, t, HEADS, d // HEADS) for each in jnp.split(self.qkv(x), 3, axis=-1))
        scores = jnp.einsum("bqhd,bkhd->bhqk", self.rotate(q), self.rotate(k)) / (d // HEADS) ** 0.5
        weights = jax.nn.softmax(jnp.where(self.mask, scores, -1e9))
        return self.out(jnp.einsum("bhqk,bkhd->bqhd", weights, v).reshape(b, t, d))


class Block(nnx.Module):
    def __init__(self, *, rngs):
        self.norm, self.attention = nnx.RMSNorm(DIM, rngs=rngs), Attention(rngs=rngs)
        self.up, self.down = nnx.Linear(DIM, 4 * DIM, rngs=rngs), nnx.Linear(4 * DIM, DIM, rngs=rngs)

    def __call__(self, x):
        x = x + self.attention(self.norm(x))
        return x + self.down(nnx.gelu(self.up(x)))


class Model(nnx.Module):
    def __init__(self, *, rngs):
        self.embed = nnx.Embed(VOCAB, DIM, rngs=rngs)
        self.blocks = nnx.List([Block(rngs=rngs) for _ in range(2)])
        self.scales = nnx.List([jnp.ones(DIM), jnp.full(DIM, 0.5)])
        self.num_calls, self.mean, self.key = jnp.array(0), jnp.zeros(DIM), rngs.params()

    def __call__(self, ids):
        self.key, key = jax.random.split(self.key)
        self.num_calls += 1
        x = self.embed(ids) + 0.01 * jax.random.normal(key, (DIM,))
        for block, scale in zip(self.blocks, self.scales, strict=True):
            x = block(x) * scale
        self.mean = 0.9 * self.mean + 0.1 * jax.lax.stop_gradient(x.mean((0, 1)))
        return self.embed.attend(x)


def build(rngs: nnx.Rngs):
    return Model(rngs=rngs)


def loss(model, batch):
    ids = batch["ids"]
    return optax.softmax_cross_entropy_with_integer_labels(model(ids)[:, :-1], ids[:, 1:]).mean()


def batch(size):
    return {"ids": np.random.default_rng(0).integers(0, VOCAB, (size, LENGTH)).astype(np.int32)}
