"""A causal transformer of two scanned blocks on made-up tokens."""

import jax
import numpy as np
import optax
from flax import nnx

from spanax import Stack, Workload


class Block(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.attention = nnx.MultiHeadAttention(4, 16, decode=False, rngs=rngs)
        self.mlp = nnx.Linear(16, 16, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        mask = nnx.make_causal_mask(x[..., 0])
        return x + nnx.gelu(self.mlp(self.attention(x, mask=mask)))


class Transformer(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.embed = nnx.Embed(64, 16, rngs=rngs)
        self.blocks = Stack(Block, 2, rngs=rngs)
        self.head = nnx.Linear(16, 64, rngs=rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        return self.head(self.blocks(self.embed(tokens)))


def loss(model: Transformer, batch: dict[str, jax.Array]) -> jax.Array:
    logits = model(batch["tokens"][:, :-1])
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["tokens"][:, 1:]).mean()


tiny = Workload(
    build=Transformer,
    batch={"tokens": jax.ShapeDtypeStruct((8, 17), "int32")},
    loss=loss,
    source=[{"tokens": row} for row in np.random.default_rng(0).integers(0, 64, (64, 17), dtype=np.int32)],
    num_steps=4,
)
