"""Mixed precision as people have it: float32 parameters, bfloat16 in the layers, float32 in norms, softmax and loss."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

VOCAB, DIM, HEADS = 64, 32, 4
half = dict(dtype=jnp.bfloat16, param_dtype=jnp.float32)
tolerance = 5e-2


class Block(nnx.Module):
    def __init__(self, rngs):
        self.norm1, self.norm2 = (nnx.LayerNorm(DIM, dtype=jnp.float32, rngs=rngs) for _ in range(2))
        self.attention = nnx.MultiHeadAttention(HEADS, DIM, decode=False, **half, rngs=rngs)
        self.up, self.down = nnx.Linear(DIM, 64, **half, rngs=rngs), nnx.Linear(64, DIM, **half, rngs=rngs)

    def __call__(self, x, mask):
        x = x + self.attention(self.norm1(x).astype(jnp.bfloat16), mask=mask)
        return x + self.down(nnx.gelu(self.up(self.norm2(x))))


class LM(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.embed = nnx.Embed(VOCAB, DIM, **half, rngs=rngs)
        self.positions = nnx.Param(0.02 * jax.random.normal(rngs.params(), (16, DIM), jnp.bfloat16))
        self.blocks = nnx.List([Block(rngs) for _ in range(2)])
        self.norm = nnx.RMSNorm(DIM, dtype=jnp.float32, rngs=rngs)
        self.head = nnx.Linear(DIM, VOCAB, use_bias=False, dtype=jnp.float32, rngs=rngs)

    def __call__(self, ids):
        x = self.embed(ids) + self.positions[...][: ids.shape[1]]
        mask = nnx.make_causal_mask(ids, dtype=bool)
        for block in self.blocks:
            x = block(x, mask)
        return self.head(self.norm(x))


build = LM


def loss(model, batch):
    ids = batch["ids"]
    return optax.softmax_cross_entropy_with_integer_labels(model(ids)[:, :-1].astype(jnp.float32), ids[:, 1:]).mean()


def batch(size):
    return {"ids": np.random.default_rng(0).integers(0, VOCAB, (size, 16)).astype(np.int32)}
