"""NeRF: points along rays with a frequency encoding, an MLP with a skip, volume rendering by cumprod."""

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

SAMPLES = 8


def encode(x, levels):
    angles = x[..., None, :] * 2.0 ** jnp.arange(levels)[:, None]
    waves = jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], axis=-1)
    return jnp.concatenate([x, waves.reshape(*x.shape[:-1], -1)], axis=-1)


class NeRF(nnx.Module):
    def __init__(self, rngs: nnx.Rngs, width=32):
        points, views = 3 + 3 * 2 * 4, 3 + 3 * 2 * 2
        self.layers = nnx.List([
            nnx.Linear(points if i == 0 else width + points if i == 3 else width, width, rngs=rngs) for i in range(5)
        ])  # fmt: skip
        self.density, self.feature = nnx.Linear(width, 1, rngs=rngs), nnx.Linear(width, width, rngs=rngs)
        self.view, self.color = nnx.Linear(width + views, 16, rngs=rngs), nnx.Linear(16, 3, rngs=rngs)
        self.rngs = rngs

    def __call__(self, points, directions):
        inputs = encode(points, 4)
        x = inputs
        for i, layer in enumerate(self.layers):
            x = nnx.relu(layer(jnp.concatenate([x, inputs], axis=-1) if i == 3 else x))
        views = jnp.broadcast_to(encode(directions, 2)[:, None], (*points.shape[:2], 15))
        color = nnx.relu(self.view(jnp.concatenate([self.feature(x), views], axis=-1)))
        return nnx.softplus(self.density(x))[..., 0], nnx.sigmoid(self.color(color))


build = NeRF


def loss(model, batch):
    origins, directions = batch["origins"], batch["directions"]
    width = 1.0 / SAMPLES
    depths = (jnp.arange(SAMPLES) + jax.random.uniform(model.rngs.default(), (len(origins), SAMPLES))) * width
    points = origins[:, None] + depths[..., None] * directions[:, None]
    density, color = model(points, directions)
    alpha = 1 - jnp.exp(-density * width)
    clear = jnp.cumprod(jnp.concatenate([jnp.ones_like(alpha[:, :1]), 1 - alpha + 1e-10], axis=1), axis=1)
    weights = alpha * clear[:, :-1]
    result = jnp.sum(weights[..., None] * color, axis=1)
    mse = jnp.mean((result - batch["rgb"]) ** 2)
    return mse, {"psnr": -10 * jnp.log10(mse)}


def batch(size):
    rng = np.random.default_rng(0)
    directions = rng.normal(size=(size, 3))
    data = {
        "origins": rng.normal(size=(size, 3)),
        "directions": directions / np.linalg.norm(directions, axis=-1, keepdims=True),
        "rgb": rng.uniform(size=(size, 3)),
    }
    return {key: value.astype(np.float32) for key, value in data.items()}
