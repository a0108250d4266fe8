"""A hypernetwork: the weights of a small network are made for each example; FiLM, bilinear sampling by gather."""

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx


class Hyper(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.encode = nnx.Sequential(nnx.Linear(16, 64, rngs=rngs), nnx.relu)
        self.w1, self.w2 = nnx.Linear(64, 2 * 16, rngs=rngs), nnx.Linear(64, 16 * 4, rngs=rngs)
        self.film = nnx.Linear(64, 2 * 4, rngs=rngs)
        self.localize = nnx.Linear(64, 6, kernel_init=nnx.initializers.normal(0.01), rngs=rngs)

    def __call__(self, code, coordinates, image):
        h = self.encode(code)
        w1, w2 = self.w1(h).reshape(-1, 2, 16), self.w2(h).reshape(-1, 16, 4)
        y = jnp.sin(jnp.einsum("bpi,bio->bpo", coordinates, w1))
        y = jnp.einsum("bpi,bio->bpo", y, w2)
        gamma, beta = jnp.split(self.film(h)[:, None], 2, axis=-1)
        theta = self.localize(h).reshape(-1, 2, 3) + jnp.eye(2, 3)
        return y * (1 + gamma) + beta + jax.vmap(sample)(image, theta, coordinates)


def sample(image, theta, points):
    """Bilinear interpolation at affinely moved points (a spatial transformer)."""
    height, width, _ = image.shape
    moved = points @ theta[:, :2].T + theta[:, 2]
    y, x = (moved[:, 0] + 1) * (height - 1) / 2, (moved[:, 1] + 1) * (width - 1) / 2
    y0, x0 = jnp.clip(jnp.floor(y), 0, height - 2), jnp.clip(jnp.floor(x), 0, width - 2)
    dy, dx = (y - y0)[:, None], (x - x0)[:, None]
    i, j = y0.astype(jnp.int32), x0.astype(jnp.int32)
    top = image[i, j] * (1 - dx) + image[i, j + 1] * dx
    return top * (1 - dy) + (image[i + 1, j] * (1 - dx) + image[i + 1, j + 1] * dx) * dy


build = Hyper


def loss(model, batch):
    return jnp.mean((model(batch["code"], batch["points"], batch["image"]) - batch["y"]) ** 2)


def batch(size):
    rng = np.random.default_rng(0)
    data = {
        "code": rng.normal(size=(size, 16)),
        "points": rng.uniform(-1, 1, (size, 10, 2)),
        "image": rng.normal(size=(size, 8, 8, 4)),
        "y": rng.normal(size=(size, 10, 4)),
    }
    return {key: value.astype(np.float32) for key, value in data.items()}
