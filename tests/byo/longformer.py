"""Local attention in blocks with their neighbours, a few global tokens, and linear attention in parallel."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

VOCAB, DIM, HEADS, BLOCK = 64, 32, 4, 4


def with_neighbours(x):
    """b n l h d -> b n 3l h d: each block with the ones before and after it."""
    padded = jnp.pad(x, ((0, 0), (1, 1), (0, 0), (0, 0), (0, 0)))
    return jnp.concatenate([padded[:, :-2], padded[:, 1:-1], padded[:, 2:]], axis=2)


class LocalAttention(nnx.Module):
    def __init__(self, rngs):
        self.qkv = nnx.LinearGeneral(DIM, (3, HEADS, DIM // HEADS), rngs=rngs)
        self.out = nnx.LinearGeneral((HEADS, DIM // HEADS), DIM, axis=(-2, -1), rngs=rngs)
        self.mix = nnx.Param(jnp.zeros((HEADS, 1)))

    def __call__(self, x):
        b, t, _ = x.shape
        q, k, v = (y.squeeze(2) for y in jnp.split(self.qkv(x), 3, axis=2))
        blocks = [y.reshape(b, t // BLOCK, BLOCK, HEADS, -1) for y in (q, k, v)]
        qb, kb, vb = blocks[0], with_neighbours(blocks[1]), with_neighbours(blocks[2])
        scores = jnp.einsum("bnqhd,bnkhd->bnhqk", qb, kb) / np.sqrt(DIM // HEADS)
        place = jnp.arange(t // BLOCK)[:, None] * BLOCK + jnp.arange(-BLOCK, 2 * BLOCK)
        inside = (place >= 0) & (place < t)
        scores = jnp.where(inside[None, :, None, None], scores, -1e9)
        local = jnp.einsum("bnhqk,bnkhd->bnqhd", jax.nn.softmax(scores), vb).reshape(q.shape)
        far_scores = jnp.einsum("bqhd,bghd->bhqg", q, k[:, :2]) / np.sqrt(DIM // HEADS)
        far = jnp.einsum("bhqg,bghd->bqhd", jax.nn.softmax(far_scores), v[:, :2])
        fq, fk = nnx.elu(q) + 1, nnx.elu(k) + 1
        state = jnp.einsum("bshd,bshe->bhde", fk, v)
        linear = jnp.einsum("bthd,bhde->bthe", fq, state)
        linear = linear / jnp.einsum("bthd,bhd->bth", fq, fk.sum(1))[..., None]
        gate = nnx.sigmoid(self.mix[...])
        return self.out(gate * (local + far) + (1 - gate) * linear)


class Longformer(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.embed = nnx.Embed(VOCAB, DIM, rngs=rngs)
        self.layers = nnx.List([LocalAttention(rngs) for _ in range(2)])
        self.norms = nnx.List([nnx.LayerNorm(DIM, rngs=rngs) for _ in range(2)])
        self.head = nnx.Linear(DIM, VOCAB, rngs=rngs)

    def __call__(self, ids):
        x = self.embed(ids)
        for layer, norm in zip(self.layers, self.norms, strict=True):
            x = x + layer(norm(x))
        return self.head(x)


build = Longformer


def loss(model, batch):
    masked = jnp.where(batch["mask"], 0, batch["ids"])
    losses = optax.softmax_cross_entropy_with_integer_labels(model(masked), batch["ids"])
    return jnp.sum(losses * batch["mask"]) / jnp.maximum(batch["mask"].sum(), 1)


def batch(size):
    rng = np.random.default_rng(0)
    return {
        "ids": rng.integers(1, VOCAB, (size, 16)).astype(np.int32),
        "mask": rng.uniform(size=(size, 16)) < 0.3,
    }
