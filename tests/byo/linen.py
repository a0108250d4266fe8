"""A Linen module inside of an NNX model, through the bridge, with BatchNorm statistics, followed by an NNX layer."""

import jax.numpy as jnp
import numpy as np
from flax import linen, nnx


class Old(linen.Module):
    @linen.compact
    def __call__(self, x):
        for width in (64, 64):
            x = linen.relu(linen.BatchNorm(use_running_average=False)(linen.Dense(width)(x)))
        return x


class Model(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.old = nnx.bridge.ToNNX(Old(), rngs=rngs).lazy_init(jnp.ones((1, 16)))
        self.head = nnx.Linear(64, 4, rngs=rngs)

    def __call__(self, x):
        return self.head(self.old(x, mutable=["batch_stats"]))


build = Model
# The gradient of a bias before a BatchNorm is rounding, and nothing else.
looser = {"Dense_0.bias": 1e-3, "Dense_1.bias": 1e-3}


def loss(model, batch):
    return jnp.mean((model(batch["x"]) - batch["y"]) ** 2)


def batch(size):
    rng = np.random.default_rng(0)
    return {key: rng.normal(size=(size, n)).astype(np.float32) for key, n in (("x", 16), ("y", 4))}
