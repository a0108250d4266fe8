"""A Fourier neural operator: complex weights for the lowest frequencies of an rfft2 and a parallel pointwise path."""

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

WIDTH, MODES = 16, 3


class SpectralConv(nnx.Module):
    def __init__(self, rngs):
        scale = 1 / WIDTH
        make = lambda: scale * jax.random.normal(rngs.params(), (WIDTH, WIDTH, MODES, MODES), jnp.complex64)  # noqa: E731
        self.low, self.high = nnx.Param(make()), nnx.Param(make())

    def __call__(self, x):
        _, h, w, _ = x.shape
        spectrum = jnp.fft.rfft2(x, axes=(1, 2))
        out = jnp.zeros_like(spectrum)
        out = out.at[:, :MODES, :MODES].set(jnp.einsum("bxyi,ioxy->bxyo", spectrum[:, :MODES, :MODES], self.low[...]))
        out = out.at[:, -MODES:, :MODES].set(
            jnp.einsum("bxyi,ioxy->bxyo", spectrum[:, -MODES:, :MODES], self.high[...])
        )
        return jnp.fft.irfft2(out, s=(h, w), axes=(1, 2))


class FNO(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.lift = nnx.Linear(3, WIDTH, rngs=rngs)
        self.spectral = nnx.List([SpectralConv(rngs) for _ in range(2)])
        self.local = nnx.List([nnx.Conv(WIDTH, WIDTH, (1, 1), rngs=rngs) for _ in range(2)])
        self.project = nnx.Sequential(nnx.Linear(WIDTH, 32, rngs=rngs), nnx.gelu, nnx.Linear(32, 1, rngs=rngs))

    def __call__(self, field):
        b, h, w = field.shape
        grid = jnp.stack(jnp.meshgrid(jnp.linspace(0, 1, h), jnp.linspace(0, 1, w), indexing="ij"), axis=-1)
        x = self.lift(jnp.concatenate([field[..., None], jnp.broadcast_to(grid, (b, h, w, 2))], axis=-1))
        for spectral, local in zip(self.spectral, self.local, strict=True):
            x = nnx.gelu(spectral(x) + local(x))
        return self.project(x)[..., 0]


build = FNO


def loss(model, batch):
    error = jnp.linalg.norm((model(batch["a"]) - batch["u"]).reshape(len(batch["a"]), -1), axis=-1)
    return jnp.mean(error / jnp.linalg.norm(batch["u"].reshape(len(batch["u"]), -1), axis=-1))


def batch(size):
    rng = np.random.default_rng(0)
    return {key: rng.normal(size=(size, 8, 8)).astype(np.float32) for key in "au"}
