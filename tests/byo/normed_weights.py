"""A discriminator whose weights are normed: nnx.WeightNorm, nnx.SpectralNorm with its state, a hand-made one."""

import jax.numpy as jnp
import numpy as np
from flax import nnx


class WeightNormLinear(nnx.Module):
    def __init__(self, din, dout, *, rngs):
        self.v = nnx.Param(nnx.initializers.normal(0.1)(rngs.params(), (din, dout)))
        self.g, self.b = nnx.Param(jnp.ones(dout)), nnx.Param(jnp.zeros(dout))

    def __call__(self, x):
        w = self.g * self.v[...] / jnp.linalg.norm(self.v[...], axis=0, keepdims=True)
        return x @ w + self.b


class Discriminator(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.conv = nnx.WeightNorm(nnx.Conv(1, 16, (3, 3), strides=2, rngs=rngs), rngs=rngs)
        self.hidden = nnx.Linear(16, 32, rngs=rngs)
        self.spectral = nnx.SpectralNorm(self.hidden, rngs=rngs)
        self.wide, self.score = (
            WeightNormLinear(32, 64, rngs=rngs),
            nnx.WeightNorm(nnx.Linear(64, 1, rngs=rngs), rngs=rngs),
        )

    def __call__(self, x):
        x = nnx.leaky_relu(self.conv(x), 0.2).mean((1, 2))
        x = nnx.leaky_relu(self.spectral(x, update_stats=True), 0.2)
        return self.score(nnx.leaky_relu(self.wide(x), 0.2))[:, 0]


build = Discriminator


def loss(model, batch):
    return jnp.mean(nnx.relu(1.0 - model(batch["real"])) + nnx.relu(1.0 + model(batch["fake"])))


def batch(size):
    rng = np.random.default_rng(0)
    real, fake = (rng.normal(size=(size, 8, 8, 1)).astype(np.float32) for _ in range(2))
    return {"real": real + 0.5, "fake": fake}
