"""Blocks made by nnx.vmap and run by nnx.scan under nnx.remat, as the Flax guide has it, with dropout in them."""

import functools

import jax
import numpy as np
import optax
from flax import nnx

VOCAB, DIM, LAYERS = 64, 32, 4


class Block(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.norm1, self.norm2 = nnx.LayerNorm(DIM, rngs=rngs), nnx.LayerNorm(DIM, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(4, DIM, dropout_rate=0.1, deterministic=False, decode=False, rngs=rngs)
        self.mlp = nnx.Sequential(nnx.Linear(DIM, 64, rngs=rngs), nnx.gelu, nnx.Linear(64, DIM, rngs=rngs))
        self.dropout = nnx.Dropout(0.1, rngs=rngs)

    def __call__(self, x, mask):
        x = x + self.attention(self.norm1(x), mask=mask)
        return x + self.dropout(self.mlp(self.norm2(x)))


class Decoder(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        @nnx.split_rngs(splits=LAYERS)
        @nnx.vmap(in_axes=(0,), out_axes=0)
        def create(rngs: nnx.Rngs):
            return Block(rngs)

        self.embed = nnx.Embed(VOCAB, DIM, rngs=rngs)
        self.blocks = create(rngs)
        self.norm = nnx.LayerNorm(DIM, rngs=rngs)
        self.head = nnx.Linear(DIM, VOCAB, rngs=rngs)

    def __call__(self, ids):
        mask = nnx.make_causal_mask(ids)

        @nnx.scan(in_axes=(0, nnx.Carry), out_axes=nnx.Carry)
        @functools.partial(nnx.remat, policy=jax.checkpoint_policies.dots_with_no_batch_dims_saveable)
        def forward(block, x):
            return block(x, mask)

        return self.head(self.norm(forward(self.blocks, self.embed(ids))))


build = Decoder


def loss(model, batch):
    ids = batch["ids"]
    return optax.softmax_cross_entropy_with_integer_labels(model(ids)[:, :-1], ids[:, 1:]).mean()


def batch(size):
    return {"ids": np.random.default_rng(0).integers(0, VOCAB, (size, 16)).astype(np.int32)}
