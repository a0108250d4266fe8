"""A masked autoencoder: patches shuffled by argsort, most of them dropped, put back by take_along_axis."""

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

PATCHES, VISIBLE, DIM = 16, 4, 32


class Block(nnx.Module):
    def __init__(self, dim, heads, *, rngs):
        self.norm1, self.norm2 = nnx.LayerNorm(dim, rngs=rngs), nnx.LayerNorm(dim, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(heads, dim, decode=False, rngs=rngs)
        self.mlp = nnx.Sequential(nnx.Linear(dim, 2 * dim, rngs=rngs), nnx.gelu, nnx.Linear(2 * dim, dim, rngs=rngs))

    def __call__(self, x):
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class MAE(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.embed, self.narrow = nnx.Linear(12, DIM, rngs=rngs), nnx.Linear(DIM, 16, rngs=rngs)
        init = nnx.initializers.normal(0.02)
        self.positions = nnx.Param(init(rngs.params(), (1, PATCHES, DIM)))
        self.decoder_positions = nnx.Param(init(rngs.params(), (1, PATCHES, 16)))
        self.mask_token = nnx.Param(init(rngs.params(), (1, 1, 16)))
        self.encoder = nnx.Sequential(*[Block(DIM, 4, rngs=rngs) for _ in range(2)])
        self.decoder = nnx.Sequential(Block(16, 2, rngs=rngs))
        self.predict = nnx.Linear(16, 12, rngs=rngs)
        self.rngs = rngs

    def __call__(self, patches):
        noise = jax.random.uniform(self.rngs.mask(), patches.shape[:2])
        shuffle = jnp.argsort(noise, axis=1)
        restore = jnp.argsort(shuffle, axis=1)
        x = self.embed(patches) + self.positions[...]
        x = self.narrow(self.encoder(jnp.take_along_axis(x, shuffle[:, :VISIBLE, None], axis=1)))
        masked = jnp.broadcast_to(self.mask_token[...], (len(x), PATCHES - VISIBLE, 16))
        x = jnp.take_along_axis(jnp.concatenate([x, masked], axis=1), restore[..., None], axis=1)
        return self.predict(self.decoder(x + self.decoder_positions[...])), restore >= VISIBLE


def build(rngs: nnx.Rngs):
    return MAE(rngs)


def loss(model, batch):
    b = len(batch["image"])
    patches = batch["image"].reshape(b, 4, 2, 4, 2, 3).transpose(0, 1, 3, 2, 4, 5).reshape(b, PATCHES, 12)
    result, is_masked = model(patches)
    target = (patches - patches.mean(-1, keepdims=True)) / (patches.std(-1, keepdims=True) + 1e-6)
    return jnp.sum(jnp.mean((result - target) ** 2, axis=-1) * is_masked) / is_masked.sum()


def batch(size):
    return {"image": np.random.default_rng(0).normal(size=(size, 8, 8, 3)).astype(np.float32)}
