"""PixelCNN: masked kernels that the layers multiply themselves, a mixture of logistics as the loss."""

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

MIXTURES = 3


class MaskedConv(nnx.Module):
    def __init__(self, cin, cout, size, kind, *, rngs):
        mask = np.ones((size, size, 1, 1), np.float32)
        mask[size // 2, size // 2 + (kind == "B") :] = 0
        mask[size // 2 + 1 :] = 0
        self.conv = nnx.Conv(cin, cout, (size, size), rngs=rngs)
        self.mask = nnx.Variable(jnp.asarray(mask))

    def __call__(self, x):
        kernel = self.conv.kernel[...] * self.mask[...]
        out = jax.lax.conv_general_dilated(x, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
        return out + self.conv.bias


class PixelCNN(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.enter = MaskedConv(1, 16, 5, "A", rngs=rngs)
        self.layers = nnx.List([MaskedConv(16, 32, 3, "B", rngs=rngs) for _ in range(2)])
        self.leave = nnx.Conv(16, 3 * MIXTURES, (1, 1), rngs=rngs)

    def __call__(self, x):
        x = self.enter(x)
        for layer in self.layers:
            a, b = jnp.split(layer(nnx.relu(x)), 2, axis=-1)
            x = x + jnp.tanh(a) * nnx.sigmoid(b)
        return self.leave(x)


build = PixelCNN


def loss(model, batch):
    x = batch["image"]
    weights, means, log_scales = jnp.split(model(x), 3, axis=-1)
    inverse = jnp.exp(-jnp.maximum(log_scales, -5.0))
    above, below = (nnx.sigmoid((x + half - means) * inverse) for half in (1 / 16, -1 / 16))
    above, below = jnp.where(x > 0.99, 1.0, above), jnp.where(x < -0.99, 0.0, below)
    log_prob = jnp.log(jnp.maximum(above - below, 1e-7)) + jax.nn.log_softmax(weights)
    return -jax.nn.logsumexp(log_prob, axis=-1).sum((1, 2)).mean() / (64 * jnp.log(2.0))


def batch(size):
    return {"image": np.random.default_rng(0).uniform(-1, 1, (size, 8, 8, 1)).round(1).astype(np.float32)}
