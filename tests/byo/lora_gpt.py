"""Fine-tuning: a GPT whose query and value projections get low-rank additions; only those are trained."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

VOCAB, DIM, HEADS = 64, 32, 4
wrt = nnx.LoRAParam
optimizer = optax.adamw(1e-2, eps=0.1)


class Attention(nnx.Module):
    def __init__(self, *, rngs):
        self.q, self.k, self.v, self.o = (nnx.Linear(DIM, DIM, rngs=rngs) for _ in range(4))

    def __call__(self, x):
        b, t, d = x.shape
        q, k, v = (f(x).reshape(b, t, HEADS, d // HEADS) for f in (self.q, self.k, self.v))
        return self.o(jax.nn.dot_product_attention(q, k, v, is_causal=True).reshape(b, t, d))


class Block(nnx.Module):
    def __init__(self, *, rngs):
        self.ln1, self.ln2 = nnx.LayerNorm(DIM, rngs=rngs), nnx.LayerNorm(DIM, rngs=rngs)
        self.attn = Attention(rngs=rngs)
        self.fc1, self.fc2 = nnx.Linear(DIM, 4 * DIM, rngs=rngs), nnx.Linear(4 * DIM, DIM, rngs=rngs)

    def __call__(self, x):
        x = x + self.attn(self.ln1(x))
        return x + self.fc2(nnx.gelu(self.fc1(self.ln2(x))))


class GPT(nnx.Module):
    def __init__(self, *, rngs):
        self.wte, self.wpe = nnx.Embed(VOCAB, DIM, rngs=rngs), nnx.Embed(16, DIM, rngs=rngs)
        self.h = nnx.List([Block(rngs=rngs) for _ in range(2)])
        self.ln_f = nnx.LayerNorm(DIM, rngs=rngs)

    def __call__(self, ids):
        x = self.wte(ids) + self.wpe(jnp.arange(ids.shape[1]))
        for block in self.h:
            x = block(x)
        return self.wte.attend(self.ln_f(x))


def build(rngs: nnx.Rngs):
    model = GPT(rngs=rngs)
    for block in model.h:
        for name in ("q", "v"):
            linear = getattr(block.attn, name)
            setattr(block.attn, name, nnx.LoRA(DIM, 4, DIM, base_module=linear, rngs=rngs))
    return model


def loss(model, batch):
    ids = batch["ids"]
    return optax.softmax_cross_entropy_with_integer_labels(model(ids)[:, :-1], ids[:, 1:]).mean()


def batch(size):
    return {"ids": np.random.default_rng(0).integers(0, VOCAB, (size, 16)).astype(np.int32)}
