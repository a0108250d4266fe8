"""A deep ensemble: one network vmapped over its members, each with its own dropout, on the same examples."""

import jax.numpy as jnp
import numpy as np
from flax import nnx

MEMBERS = 4


class Member(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.layers = nnx.Sequential(
            nnx.Linear(16, 64, rngs=rngs), nnx.relu, nnx.Dropout(0.2, rngs=rngs), nnx.Linear(64, 64, rngs=rngs),
            nnx.PReLU(), nnx.Linear(64, 2, rngs=rngs),
        )  # fmt: skip

    def __call__(self, x):
        mean, raw = jnp.split(self.layers(x), 2, axis=-1)
        return mean[..., 0], nnx.softplus(raw[..., 0]) + 1e-3


class Ensemble(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.members = nnx.split_rngs(splits=MEMBERS)(nnx.vmap(Member))(rngs)

    def __call__(self, x):
        return nnx.vmap(lambda member, x: member(x), in_axes=(0, None), out_axes=0)(self.members, x)


build = Ensemble


def loss(model, batch):
    mean, variance = model(batch["x"])
    nll = 0.5 * (jnp.log(variance) + (batch["y"] - mean) ** 2 / variance)
    return nll.mean(), {"spread": mean.std(axis=0).mean()}


def batch(size):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(size, 16)).astype(np.float32)
    return {"x": x, "y": np.sin(x.sum(-1)).astype(np.float32)}
