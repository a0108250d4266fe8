"""A linear recurrent unit: complex diagonal states by associative_scan, and a long convolution by FFT in parallel."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

DIM, STATE, CLASSES = 16, 32, 8


class LRU(nnx.Module):
    def __init__(self, rngs):
        self.nu_log = nnx.Param(jnp.log(-jnp.log(jnp.linspace(0.5, 0.95, STATE))))
        self.theta = nnx.Param(jnp.linspace(0.0, 3.0, STATE))
        init = nnx.initializers.normal(0.2)
        self.B_re, self.B_im = (nnx.Param(init(rngs.params(), (STATE, DIM))) for _ in range(2))
        self.C_re, self.C_im = (nnx.Param(init(rngs.params(), (DIM, STATE))) for _ in range(2))
        self.D = nnx.Param(init(rngs.params(), (DIM,)))

    def __call__(self, u):
        lam = jnp.exp(-jnp.exp(self.nu_log[...]) + 1j * self.theta[...])
        bu = u.astype(jnp.complex64) @ (self.B_re[...] + 1j * self.B_im[...]).T
        lam = jnp.broadcast_to(lam, bu.shape)
        _, h = jax.lax.associative_scan(lambda p, q: (q[0] * p[0], q[0] * p[1] + q[1]), (lam, bu), axis=1)
        return (h @ (self.C_re[...] + 1j * self.C_im[...]).T).real + self.D * u


class LongConv(nnx.Module):
    def __init__(self, length, rngs):
        self.kernel = nnx.Param(nnx.initializers.normal(0.1)(rngs.params(), (length, DIM)))

    def __call__(self, u):
        n = 2 * u.shape[1]
        y = jnp.fft.irfft(jnp.fft.rfft(u, n, axis=1) * jnp.fft.rfft(self.kernel[...], n, axis=0), n, axis=1)
        return y[:, : u.shape[1]]


class Classifier(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.enter = nnx.Linear(4, DIM, rngs=rngs)
        self.mixers = nnx.List([LRU(rngs), LongConv(12, rngs)])
        self.norms = nnx.List([nnx.LayerNorm(DIM, rngs=rngs) for _ in range(2)])
        self.glu = nnx.List([nnx.Linear(DIM, 2 * DIM, rngs=rngs) for _ in range(2)])
        self.head = nnx.Linear(DIM, CLASSES, rngs=rngs)

    def __call__(self, x):
        x = self.enter(x)
        for mixer, norm, glu in zip(self.mixers, self.norms, self.glu, strict=True):
            x = x + nnx.glu(glu(nnx.gelu(mixer(norm(x)))))
        return self.head(x.mean(axis=1))


build = Classifier


def loss(model, batch):
    return optax.softmax_cross_entropy_with_integer_labels(model(batch["x"]), batch["y"]).mean()


def batch(size):
    rng = np.random.default_rng(0)
    return {
        "x": rng.normal(size=(size, 12, 4)).astype(np.float32),
        "y": rng.integers(0, CLASSES, size).astype(np.int32),
    }
