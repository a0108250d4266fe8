"""Losses across the batch: mixup by a permutation, hard negatives by sorting and top_k, Sinkhorn, Barlow Twins."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx


class Embedder(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.body = nnx.Sequential(nnx.Linear(16, 64, rngs=rngs), nnx.gelu, nnx.Linear(64, 32, rngs=rngs))
        self.classify, self.prototypes = nnx.Linear(32, 8, rngs=rngs), nnx.Linear(32, 6, use_bias=False, rngs=rngs)
        self.rngs = rngs


build = Embedder


def sinkhorn(scores):
    q = jnp.exp(scores / 0.5)
    for _ in range(3):
        q = q / q.sum(axis=0, keepdims=True) / q.shape[1]
        q = q / q.sum(axis=1, keepdims=True) / q.shape[0]
    return q * q.shape[0]


def loss(model, batch):
    x, y = batch["x"], nnx.one_hot(batch["y"], 8)
    order = jax.random.permutation(model.rngs.mix(), len(x))
    share = jax.random.beta(model.rngs.mix(), 0.4, 0.4)
    logits = model.classify(model.body(share * x + (1 - share) * x[order]))
    mixup = optax.softmax_cross_entropy(logits, share * y + (1 - share) * y[order]).mean()

    a, b = model.body(x), model.body(batch["view"])
    distances = jnp.sum((a[:, None] - a[None]) ** 2, axis=-1)
    same = batch["y"][:, None] == batch["y"][None]
    farthest = jnp.max(jnp.where(same, distances, 0.0), axis=1)
    nearest = -jax.lax.top_k(jnp.where(same, -1e9, -distances), 3)[0].mean(axis=1)
    triplet = jnp.sort(nnx.relu(0.5 + farthest - nearest))[len(x) // 2 :].mean()

    za, zb = ((z - z.mean(0)) / (z.std(0) + 1e-3) for z in (a, b))
    correlation = za.T @ zb / len(za)
    barlow = jnp.mean((correlation - jnp.eye(32)) ** 2)
    codes = jax.lax.stop_gradient(sinkhorn(model.prototypes(b) / 10))
    swapped = -jnp.mean(jnp.sum(codes * jax.nn.log_softmax(model.prototypes(a)), axis=1))
    return mixup + 0.1 * triplet + barlow + swapped, {"triplet": triplet}


def batch(size):
    rng = np.random.default_rng(0)
    return {
        "x": rng.normal(size=(size, 16)).astype(np.float32),
        "view": rng.normal(size=(size, 16)).astype(np.float32),
        "y": rng.integers(0, 8, size).astype(np.int32),
    }
