"""RWKV: token shift, a linear attention as a numerically stable scan over time, squared ReLU channel mixing."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

VOCAB, DIM = 64, 32


def shift(x):
    return jnp.pad(x, ((0, 0), (1, 0), (0, 0)))[:, :-1]


class TimeMix(nnx.Module):
    def __init__(self, rngs):
        self.mix = nnx.Param(jnp.linspace(0, 1, 3 * DIM).reshape(3, DIM))
        self.decay, self.first = nnx.Param(jnp.linspace(-3, 1, DIM)), nnx.Param(jnp.full(DIM, 0.3))
        self.key, self.value, self.receptance, self.output = (
            nnx.Linear(DIM, DIM, use_bias=False, rngs=rngs) for _ in range(4)
        )

    def __call__(self, x):
        before = shift(x)
        xk, xv, xr = (x * m + before * (1 - m) for m in self.mix[...])
        k, v, r = self.key(xk), self.value(xv), nnx.sigmoid(self.receptance(xr))
        decay, first = -jnp.exp(self.decay[...]), self.first[...]

        def step(state, kv):
            top, bottom, largest = state
            k, v = kv
            now = jnp.maximum(largest, first + k)
            a, b = jnp.exp(largest - now), jnp.exp(first + k - now)
            out = (a * top + b * v) / (a * bottom + b)
            after = jnp.maximum(largest + decay, k)
            a, b = jnp.exp(largest + decay - after), jnp.exp(k - after)
            return (a * top + b * v, a * bottom + b, after), out

        zeros = jnp.zeros((x.shape[0], DIM))
        _, out = jax.lax.scan(step, (zeros, zeros, zeros - 1e30), (k.swapaxes(0, 1), v.swapaxes(0, 1)), unroll=2)
        return self.output(r * out.swapaxes(0, 1))


class ChannelMix(nnx.Module):
    def __init__(self, rngs):
        self.key, self.value = nnx.Linear(DIM, 4 * DIM, rngs=rngs), nnx.Linear(4 * DIM, DIM, rngs=rngs)
        self.receptance = nnx.Linear(DIM, DIM, rngs=rngs)

    def __call__(self, x):
        mixed = 0.5 * (x + shift(x))
        return nnx.sigmoid(self.receptance(mixed)) * self.value(jnp.square(nnx.relu(self.key(mixed))))


class RWKV(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.embed, self.head = nnx.Embed(VOCAB, DIM, rngs=rngs), nnx.Linear(DIM, VOCAB, use_bias=False, rngs=rngs)
        self.blocks = nnx.List([nnx.List([TimeMix(rngs), ChannelMix(rngs)]) for _ in range(2)])
        self.norms = nnx.List([nnx.LayerNorm(DIM, rngs=rngs) for _ in range(5)])

    def __call__(self, ids):
        norms = iter(self.norms)
        x = next(norms)(self.embed(ids))
        for time, channel in self.blocks:
            x = x + time(next(norms)(x))
            x = x + channel(next(norms)(x))
        return self.head(x)


build = RWKV


def loss(model, batch):
    ids = batch["ids"]
    return optax.softmax_cross_entropy_with_integer_labels(model(ids)[:, :-1], ids[:, 1:]).mean()


def batch(size):
    return {"ids": np.random.default_rng(0).integers(0, VOCAB, (size, 16)).astype(np.int32)}
