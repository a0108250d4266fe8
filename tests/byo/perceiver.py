"""A Perceiver: learned latents that attend to a long input, one block applied again and again, an output query."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

LATENTS, DIM, HEADS = 8, 32, 4


class Attend(nnx.Module):
    def __init__(self, kv_dim, *, rngs):
        self.norm_q, self.norm_kv = nnx.LayerNorm(DIM, rngs=rngs), nnx.LayerNorm(kv_dim, rngs=rngs)
        self.to_q = nnx.Linear(DIM, DIM, use_bias=False, rngs=rngs)
        self.to_kv = nnx.Linear(kv_dim, 2 * DIM, use_bias=False, rngs=rngs)
        self.to_out = nnx.Linear(DIM, DIM, rngs=rngs)

    def __call__(self, x, context):
        q, (k, v) = self.to_q(self.norm_q(x)), jnp.split(self.to_kv(self.norm_kv(context)), 2, axis=-1)
        q, k, v = (y.reshape(*y.shape[:-1], HEADS, DIM // HEADS) for y in (q, k, v))
        return x + self.to_out(jax.nn.dot_product_attention(q, k, v).reshape(x.shape))


class Perceiver(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.latents = nnx.Param(nnx.initializers.normal(0.02)(rngs.params(), (LATENTS, DIM)))
        self.query = nnx.Param(nnx.initializers.normal(0.02)(rngs.params(), (1, DIM)))
        self.read, self.think, self.answer = Attend(16, rngs=rngs), Attend(DIM, rngs=rngs), Attend(DIM, rngs=rngs)
        self.mlp = nnx.Sequential(nnx.Linear(DIM, 64, rngs=rngs), nnx.gelu, nnx.Linear(64, DIM, rngs=rngs))
        self.head = nnx.Linear(DIM, 8, rngs=rngs)

    def __call__(self, x):
        z = jnp.broadcast_to(self.latents[...], (len(x), LATENTS, DIM))
        for _ in range(2):
            z = self.read(z, x)
            z = self.think(z, z)
            z = z + self.mlp(z)
        out = self.answer(jnp.broadcast_to(self.query[...], (len(x), 1, DIM)), z)
        return self.head(out[:, 0])


build = Perceiver


def loss(model, batch):
    return optax.softmax_cross_entropy_with_integer_labels(model(batch["x"]), batch["y"]).mean()


def batch(size):
    rng = np.random.default_rng(0)
    return {
        "x": rng.normal(size=(size, 24, 16)).astype(np.float32),
        "y": rng.integers(0, 8, size).astype(np.int32),
    }
