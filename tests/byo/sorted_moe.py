"""Experts that drop nothing: tokens sorted by expert, ragged matmuls over all of them, put back by scatter-add."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

VOCAB, DIM, FF, EXPERTS, TOP = 64, 32, 48, 4, 2


class Experts(nnx.Module):
    def __init__(self, rngs):
        init = nnx.initializers.normal(0.1)
        self.norm, self.router = nnx.RMSNorm(DIM, rngs=rngs), nnx.Linear(DIM, EXPERTS, use_bias=False, rngs=rngs)
        self.w1, self.w2 = (nnx.Param(init(rngs.params(), shape)) for shape in ((EXPERTS, DIM, FF), (EXPERTS, FF, DIM)))

    def __call__(self, x):
        h = self.norm(x).reshape(-1, DIM)
        weights, chosen = jax.lax.top_k(jax.nn.softmax(self.router(h)), TOP)
        flat = chosen.reshape(-1)
        order = jnp.argsort(flat)
        rows = order // TOP
        sizes = jnp.bincount(flat, length=EXPERTS).astype(jnp.int32)
        y = nnx.silu(jax.lax.ragged_dot(h[rows], self.w1[...], sizes))
        y = jax.lax.ragged_dot(y, self.w2[...], sizes) * weights.reshape(-1)[order][:, None]
        balance = EXPERTS * jnp.sum(jnp.mean(jax.nn.softmax(self.router(h)), axis=0) * sizes / len(flat))
        return x + jnp.zeros_like(h).at[rows].add(y).reshape(x.shape), balance


class LM(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.embed, self.norm = nnx.Embed(VOCAB, DIM, rngs=rngs), nnx.RMSNorm(DIM, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(4, DIM, use_bias=False, decode=False, rngs=rngs)
        self.experts = Experts(rngs)

    def __call__(self, ids):
        x = self.embed(ids)
        x = x + self.attention(self.norm(x), mask=nnx.make_causal_mask(ids))
        x, balance = self.experts(x)
        return self.embed.attend(x), balance


build = LM


def loss(model, batch):
    logits, balance = model(batch["ids"])
    losses = optax.softmax_cross_entropy_with_integer_labels(logits[:, :-1], batch["ids"][:, 1:])
    return losses.mean() + 0.01 * balance


def batch(size):
    return {"ids": np.random.default_rng(0).integers(0, VOCAB, (size, 16)).astype(np.int32)}
