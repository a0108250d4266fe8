"""Stacked LSTMs that predict and tag: nnx.RNN with lengths, then nnx.Bidirectional of two GRUs."""

import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

VOCAB, DIM, TAGS = 64, 32, 8


class Tagger(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.embed = nnx.Embed(VOCAB, DIM, rngs=rngs)
        self.lstms = nnx.List([nnx.RNN(nnx.OptimizedLSTMCell(DIM, DIM, rngs=rngs)) for _ in range(2)])
        self.both = nnx.Bidirectional(
            nnx.RNN(nnx.GRUCell(DIM, 16, rngs=rngs)), nnx.RNN(nnx.GRUCell(DIM, 16, rngs=rngs))
        )
        self.next_token, self.tag = nnx.Linear(DIM, VOCAB, rngs=rngs), nnx.Linear(32, TAGS, rngs=rngs)
        self.dropout = nnx.Dropout(0.1, rngs=rngs)

    def __call__(self, ids, lengths):
        x = self.embed(ids)
        for lstm in self.lstms:
            x = x + self.dropout(lstm(x, seq_lengths=lengths))
        return self.next_token(x), self.tag(self.both(x, seq_lengths=lengths))


build = Tagger


def loss(model, batch):
    ids, lengths = batch["ids"], batch["lengths"]
    logits, tags = model(ids, lengths)
    mask = jnp.arange(ids.shape[1]) < lengths[:, None]
    lm = optax.softmax_cross_entropy_with_integer_labels(logits[:, :-1], ids[:, 1:])
    tagging = optax.softmax_cross_entropy_with_integer_labels(tags, batch["tags"])
    return jnp.mean(lm, where=mask[:, 1:]) + jnp.mean(tagging, where=mask)


def batch(size):
    rng = np.random.default_rng(0)
    return {
        "ids": rng.integers(0, VOCAB, (size, 12)).astype(np.int32),
        "tags": rng.integers(0, TAGS, (size, 12)).astype(np.int32),
        "lengths": rng.integers(2, 13, size).astype(np.int32),
    }
