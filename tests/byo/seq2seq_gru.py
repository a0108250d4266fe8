"""Translation before transformers: a GRU by hand over lax.scan, a decoder that attends at every step (Bahdanau)."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

VOCAB, DIM = 48, 32


class GRU(nnx.Module):
    def __init__(self, inputs, rngs):
        self.hidden = DIM
        self.wx = nnx.Linear(inputs, 3 * DIM, rngs=rngs)
        self.wh = nnx.Linear(DIM, 3 * DIM, use_bias=False, kernel_init=nnx.initializers.orthogonal(), rngs=rngs)

    def step(self, h, x):
        xr, xz, xn = jnp.split(self.wx(x), 3, axis=-1)
        hr, hz, hn = jnp.split(self.wh(h), 3, axis=-1)
        r, z = nnx.sigmoid(xr + hr), nnx.sigmoid(xz + hz)
        return (1 - z) * jnp.tanh(xn + r * hn) + z * h


class Translator(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.source_embed, self.target_embed = nnx.Embed(VOCAB, DIM, rngs=rngs), nnx.Embed(VOCAB, DIM, rngs=rngs)
        self.encoder, self.decoder = GRU(DIM, rngs), GRU(2 * DIM, rngs)
        self.query, self.key = nnx.Linear(DIM, DIM, rngs=rngs), nnx.Linear(DIM, DIM, use_bias=False, rngs=rngs)
        self.v = nnx.Param(nnx.initializers.normal(0.1)(rngs.params(), (DIM,)))
        self.out = nnx.Linear(2 * DIM, VOCAB, rngs=rngs)

    def __call__(self, source, target):
        def encode(h, x):
            h = self.encoder.step(h, x)
            return h, h

        h0 = jnp.zeros((source.shape[0], DIM))
        h, memory = jax.lax.scan(encode, h0, self.source_embed(source).transpose(1, 0, 2))
        memory = memory.transpose(1, 0, 2)
        keys = self.key(memory)

        def decode(h, y):
            energy = jnp.tanh(keys + self.query(h)[:, None, :]) @ self.v[...]
            context = jnp.einsum("bs,bsd->bd", jax.nn.softmax(energy, axis=-1), memory)
            h = self.decoder.step(h, jnp.concatenate([y, context], axis=-1))
            return h, self.out(jnp.concatenate([h, context], axis=-1))

        _, logits = jax.lax.scan(decode, h, self.target_embed(target).transpose(1, 0, 2))
        return logits.transpose(1, 0, 2)


build = Translator


def loss(model, batch):
    logits = model(batch["source"], batch["target"][:, :-1])
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["target"][:, 1:]).mean()


def batch(size):
    rng = np.random.default_rng(0)
    return {
        "source": rng.integers(0, VOCAB, (size, 10)).astype(np.int32),
        "target": rng.integers(0, VOCAB, (size, 9)).astype(np.int32),
    }
