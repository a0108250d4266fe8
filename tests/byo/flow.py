"""A normalizing flow: coupling layers with reversed channels, an invertible matrix with its determinant, ActNorm."""

import jax.numpy as jnp
import numpy as np
from flax import nnx

DIM = 16


class Coupling(nnx.Module):
    def __init__(self, *, rngs):
        self.net = nnx.Sequential(
            nnx.Linear(DIM // 2, 64, rngs=rngs), nnx.tanh, nnx.Linear(64, 64, rngs=rngs), nnx.tanh,
            nnx.Linear(64, DIM, kernel_init=nnx.initializers.normal(0.01), rngs=rngs),
        )  # fmt: skip
        self.log_scale, self.shift = nnx.Param(jnp.zeros(DIM)), nnx.Param(jnp.zeros(DIM))
        self.matrix = nnx.Param(nnx.initializers.orthogonal()(rngs.params(), (DIM, DIM)))

    def __call__(self, x):
        x = (x + self.shift) * jnp.exp(self.log_scale[...])
        x = x @ self.matrix[...]
        _, log_det = jnp.linalg.slogdet(self.matrix[...])
        a, b = jnp.split(x, 2, axis=-1)
        log_s, t = jnp.split(self.net(a), 2, axis=-1)
        log_s = jnp.tanh(log_s)
        x = jnp.concatenate([a, b * jnp.exp(log_s) + t], axis=-1)[:, ::-1]
        return x, log_s.sum(-1) + log_det + self.log_scale[...].sum()


class Flow(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.layers = nnx.List([Coupling(rngs=rngs) for _ in range(2)])


build = Flow


def loss(model, batch):
    x, total = batch["x"], 0.0
    for layer in model.layers:
        x, log_det = layer(x)
        total = total + log_det
    log_prob = -0.5 * jnp.sum(x**2 + jnp.log(2 * jnp.pi), axis=-1) + total
    return -log_prob.mean() / DIM


def batch(size):
    return {"x": np.random.default_rng(0).gamma(2.0, size=(size, DIM)).astype(np.float32)}
