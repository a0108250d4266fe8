"""WaveNet: dilated causal convolutions with gates, skips summed up, a softmax over quantized samples."""

import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

CHANNELS, SKIP, LEVELS = 16, 32, 32


class Layer(nnx.Module):
    def __init__(self, dilation, rngs):
        self.gated = nnx.Conv(CHANNELS, 2 * CHANNELS, (2,), kernel_dilation=dilation, padding="CAUSAL", rngs=rngs)
        self.residual, self.skip = (
            nnx.Conv(CHANNELS, CHANNELS, (1,), rngs=rngs),
            nnx.Conv(CHANNELS, SKIP, (1,), rngs=rngs),
        )

    def __call__(self, x):
        a, b = jnp.split(self.gated(x), 2, axis=-1)
        h = jnp.tanh(a) * nnx.sigmoid(b)
        return x + self.residual(h), self.skip(h)


class WaveNet(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.embed = nnx.Embed(LEVELS, CHANNELS, rngs=rngs)
        self.layers = nnx.List([Layer(2**i, rngs) for i in range(3)])
        self.out1, self.out2 = nnx.Conv(SKIP, SKIP, (1,), rngs=rngs), nnx.Conv(SKIP, LEVELS, (1,), rngs=rngs)

    def __call__(self, samples):
        x, total = self.embed(samples), 0
        for layer in self.layers:
            x, skip = layer(x)
            total += skip
        return self.out2(nnx.relu(self.out1(nnx.relu(total))))


build = WaveNet


def loss(model, batch):
    samples = batch["samples"]
    return optax.softmax_cross_entropy_with_integer_labels(model(samples)[:, :-1], samples[:, 1:]).mean()


def batch(size):
    return {"samples": np.random.default_rng(0).integers(0, LEVELS, (size, 24)).astype(np.int32)}
