"""Least squares and a Gaussian process for each example: Cholesky, triangular and dense solves, a determinant."""

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

POINTS, DIM = 8, 16


class DeepKernel(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.features = nnx.Sequential(nnx.Linear(4, 32, rngs=rngs), nnx.tanh, nnx.Linear(32, DIM, rngs=rngs))
        self.log_noise, self.ridge = nnx.Param(jnp.asarray(-1.0)), nnx.Param(jnp.asarray(0.5))

    def __call__(self, x, y):
        h = self.features(x)
        distance = jnp.sum((h[:, :, None] - h[:, None]) ** 2, axis=-1)
        kernel = jnp.exp(-0.5 * distance) + jnp.exp(self.log_noise[...]) * jnp.eye(POINTS)
        lower = jnp.linalg.cholesky(kernel)
        alpha = jax.scipy.linalg.cho_solve((lower, True), y[..., None])[..., 0]
        nll = 0.5 * jnp.sum(y * alpha, axis=-1) + jnp.log(jnp.diagonal(lower, axis1=1, axis2=2)).sum(-1)
        gram = jnp.einsum("bnd,bne->bde", h, h) + self.ridge[...] ** 2 * jnp.eye(DIM) + 0.1 * jnp.eye(DIM)
        weights = jnp.linalg.solve(gram, jnp.einsum("bnd,bn->bd", h, y)[..., None])[..., 0]
        residual = jnp.einsum("bnd,bd->bn", h, weights) - y
        return nll, jnp.mean(residual**2, axis=-1) + 0.01 * jnp.linalg.slogdet(gram)[1]


build = DeepKernel


def loss(model, batch):
    nll, ridge = model(batch["x"], batch["y"])
    return nll.mean() + ridge.mean(), {"nll": nll.mean()}


def batch(size):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(size, POINTS, 4)).astype(np.float32)
    return {"x": x, "y": np.sin(x.sum(-1)).astype(np.float32)}
