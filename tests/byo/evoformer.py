"""AlphaFold's manner: row and column attention over an alignment, outer product mean, triangle multiplication."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

ROWS, LENGTH, MSA, PAIR, HEADS = 4, 8, 16, 8, 2


class GatedAttention(nnx.Module):
    def __init__(self, dim, rngs, bias=False):
        self.norm = nnx.LayerNorm(dim, rngs=rngs)
        self.qkv = nnx.LinearGeneral(dim, (3, HEADS, dim // HEADS), use_bias=False, rngs=rngs)
        self.gate, self.out = (
            nnx.LinearGeneral(dim, (HEADS, dim // HEADS), rngs=rngs),
            nnx.LinearGeneral((HEADS, dim // HEADS), dim, axis=(-2, -1), rngs=rngs),
        )
        self.bias = nnx.Linear(PAIR, HEADS, use_bias=False, rngs=rngs) if bias else None

    def __call__(self, x, pair=None):
        x = self.norm(x)
        q, k, v = jnp.moveaxis(self.qkv(x), -3, 0)
        scores = jnp.einsum("...qhd,...khd->...hqk", q, k) / np.sqrt(q.shape[-1])
        if pair is not None:
            scores = scores + jnp.moveaxis(self.bias(pair), -1, 1)[:, None]
        mixed = jnp.einsum("...hqk,...khd->...qhd", jax.nn.softmax(scores), v)
        return self.out(mixed * nnx.sigmoid(self.gate(x)))


class Triangle(nnx.Module):
    def __init__(self, rngs, outgoing):
        self.norm, self.norm_out = nnx.LayerNorm(PAIR, rngs=rngs), nnx.LayerNorm(PAIR, rngs=rngs)
        self.ab, self.gate, self.out = (nnx.Linear(PAIR, n * PAIR, rngs=rngs) for n in (2, 2, 1))
        self.equation = "bikc,bjkc->bijc" if outgoing else "bkic,bkjc->bijc"

    def __call__(self, z):
        z = self.norm(z)
        a, b = jnp.split(self.ab(z) * nnx.sigmoid(self.gate(z)), 2, axis=-1)
        return self.out(self.norm_out(jnp.einsum(self.equation, a, b)))


class Evoformer(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.embed, self.pair = nnx.Embed(22, MSA, rngs=rngs), nnx.Linear(2 * MSA, PAIR, rngs=rngs)
        self.row, self.column = GatedAttention(MSA, rngs, bias=True), GatedAttention(MSA, rngs)
        self.left, self.right = nnx.Linear(MSA, 4, rngs=rngs), nnx.Linear(MSA, 4, rngs=rngs)
        self.outer = nnx.Linear(16, PAIR, rngs=rngs)
        self.outgoing, self.incoming = Triangle(rngs, True), Triangle(rngs, False)
        self.distance = nnx.Linear(PAIR, 8, rngs=rngs)

    def __call__(self, alignment):
        m = self.embed(alignment)  # b rows length c
        first = m[:, 0]
        z = self.pair(jnp.concatenate(jnp.broadcast_arrays(first[:, :, None], first[:, None]), axis=-1))
        m = m + self.row(m, z)
        m = m + jnp.swapaxes(self.column(jnp.swapaxes(m, 1, 2)), 1, 2)
        outer = jnp.einsum("bsic,bsjd->bijcd", self.left(m), self.right(m)) / m.shape[1]
        z = z + self.outer(outer.reshape(*outer.shape[:3], -1))
        z = z + self.outgoing(z)
        z = z + self.incoming(z)
        return self.distance(z + jnp.swapaxes(z, 1, 2))


build = Evoformer


def loss(model, batch):
    logits = model(batch["alignment"])
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["distances"]).mean()


def batch(size):
    rng = np.random.default_rng(0)
    return {
        "alignment": rng.integers(0, 22, (size, ROWS, LENGTH)).astype(np.int32),
        "distances": rng.integers(0, 8, (size, LENGTH, LENGTH)).astype(np.int32),
    }
