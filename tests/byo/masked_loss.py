"""Padding: cross-entropy over the tokens that count, of which each row has another number."""

import numpy as np
import optax
from flax import nnx

VOCAB, DIM, LENGTH = 64, 32, 16


class Model(nnx.Module):
    def __init__(self, *, rngs):
        self.embed, self.norm = nnx.Embed(VOCAB, DIM, rngs=rngs), nnx.LayerNorm(DIM, rngs=rngs)
        self.up, self.down = nnx.Linear(DIM, 4 * DIM, rngs=rngs), nnx.Linear(4 * DIM, DIM, rngs=rngs)
        self.head = nnx.Linear(DIM, VOCAB, rngs=rngs)

    def __call__(self, ids):
        x = self.embed(ids)
        return self.head(x + self.down(nnx.gelu(self.up(self.norm(x)))))


def build(rngs: nnx.Rngs):
    return Model(rngs=rngs)


def loss(model, batch):
    logits, ids, mask = model(batch["ids"])[:, :-1], batch["ids"][:, 1:], batch["mask"][:, 1:]
    each = optax.softmax_cross_entropy_with_integer_labels(logits, ids)
    is_right = (logits.argmax(-1) == ids) * mask
    return (each * mask).sum() / mask.sum(), {"accuracy": is_right.sum() / mask.sum(), "tokens": mask.sum()}


def batch(size):
    rng = np.random.default_rng(0)
    lengths = rng.integers(2, LENGTH + 1, (size, 1))
    mask = (np.arange(LENGTH) < lengths).astype("float32")
    return {"ids": rng.integers(0, VOCAB, (size, LENGTH)).astype("int32"), "mask": mask}
