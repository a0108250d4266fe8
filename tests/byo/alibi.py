"""BLOOM's manner: ALiBi instead of positions, keys and values of all heads in one matrix, segments packed in a row."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

VOCAB, DIM, HEADS = 64, 32, 4


def alibi(heads, length):
    slopes = 2.0 ** (-8.0 / heads * np.arange(1, heads + 1))
    distance = np.arange(length)[None, :] - np.arange(length)[:, None]
    return jnp.asarray(slopes[:, None, None] * np.minimum(distance, 0), jnp.float32)


class Block(nnx.Module):
    def __init__(self, rngs):
        self.ln1, self.ln2 = nnx.LayerNorm(DIM, rngs=rngs), nnx.LayerNorm(DIM, rngs=rngs)
        self.query_key_value = nnx.Linear(DIM, 3 * DIM, rngs=rngs)
        self.dense = nnx.Linear(DIM, DIM, rngs=rngs)
        self.up, self.down = nnx.Linear(DIM, 4 * DIM, rngs=rngs), nnx.Linear(4 * DIM, DIM, rngs=rngs)
        self.dropout = nnx.Dropout(0.1, rngs=rngs)

    def __call__(self, x, mask):
        b, t, d = x.shape
        fused = self.query_key_value(self.ln1(x)).reshape(b, t, HEADS, 3, d // HEADS)  # by head: q, k, v
        q, k, v = fused[..., 0, :], fused[..., 1, :], fused[..., 2, :]
        scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / np.sqrt(d // HEADS) + alibi(HEADS, t)
        scores = jnp.where(mask, scores, jnp.finfo(scores.dtype).min)
        out = jnp.einsum("bhqk,bkhd->bqhd", self.dropout(jax.nn.softmax(scores)), v).reshape(b, t, d)
        x = x + self.dropout(self.dense(out))
        return x + self.dropout(self.down(nnx.gelu(self.up(self.ln2(x)))))


class Bloom(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.embeddings, self.embed_norm = nnx.Embed(VOCAB, DIM, rngs=rngs), nnx.LayerNorm(DIM, rngs=rngs)
        self.h = nnx.List([Block(rngs) for _ in range(2)])
        self.ln_f = nnx.LayerNorm(DIM, rngs=rngs)

    def __call__(self, ids, segments):
        mask = (segments[:, None, :, None] == segments[:, None, None, :]) & jnp.tril(
            jnp.ones((ids.shape[1],) * 2, bool)
        )
        x = self.embed_norm(self.embeddings(ids))
        for block in self.h:
            x = block(x, mask)
        return self.embeddings.attend(self.ln_f(x))


build = Bloom


def loss(model, batch):
    logits = model(batch["ids"], batch["segments"])[:, :-1]
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["ids"][:, 1:])
    same = batch["segments"][:, 1:] == batch["segments"][:, :-1]
    z_loss = 1e-4 * jnp.square(jax.nn.logsumexp(logits, axis=-1))
    return jnp.sum((losses + z_loss) * same) / jnp.sum(same), {
        "accuracy": (logits.argmax(-1) == batch["ids"][:, 1:]).mean()
    }


def batch(size):
    rng = np.random.default_rng(0)
    segments = np.sort(rng.integers(0, 3, (size, 16)), axis=1).astype(np.int32)
    return {"ids": rng.integers(0, VOCAB, (size, 16)).astype(np.int32), "segments": segments}
