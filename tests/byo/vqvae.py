"""VQ-VAE: nearest codes by custom_vjp (straight through), transposed convolutions, a codebook that is an average."""

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

CODES, DIM = 16, 8


class Codebook(nnx.Variable):
    """State that the forward pass moves, and no gradient."""


@jax.custom_vjp
def quantize(z, codes):
    distances = jnp.sum(z**2, -1, keepdims=True) - 2 * z @ codes.T + jnp.sum(codes**2, -1)
    index = jnp.argmin(distances, axis=-1)
    return codes[index], index


def quantize_fwd(z, codes):
    return quantize(z, codes), codes


def quantize_bwd(codes, grads):
    return grads[0], jnp.zeros_like(codes)


quantize.defvjp(quantize_fwd, quantize_bwd)


class Quantizer(nnx.Module):
    def __init__(self, rngs):
        self.codes = Codebook(jax.random.normal(rngs.params(), (CODES, DIM)))
        self.counts = Codebook(jnp.ones(CODES))

    def __call__(self, z):
        quantized, index = quantize(z, self.codes[...])
        chosen = jax.nn.one_hot(index.reshape(-1), CODES)
        flat = jax.lax.stop_gradient(z.reshape(-1, DIM))
        self.counts[...] = 0.9 * self.counts[...] + 0.1 * chosen.sum(0)
        means = chosen.T @ flat / jnp.maximum(chosen.sum(0), 1.0)[:, None]
        used = (chosen.sum(0) > 0)[:, None]
        self.codes[...] = jnp.where(used, 0.9 * self.codes[...] + 0.1 * means, self.codes[...])
        return quantized, index


class VQVAE(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.encoder = nnx.Sequential(
            nnx.Conv(3, 16, (4, 4), strides=2, rngs=rngs), nnx.relu, nnx.Conv(16, DIM, (3, 3), rngs=rngs)
        )
        self.quantizer = Quantizer(rngs)
        self.decoder = nnx.Sequential(
            nnx.ConvTranspose(DIM, 16, (4, 4), strides=2, padding="SAME", rngs=rngs), nnx.relu,
            nnx.ConvTranspose(16, 3, (3, 3), transpose_kernel=False, rngs=rngs),
        )  # fmt: skip


build = VQVAE


def loss(model, batch):
    z = model.encoder(batch["image"])
    quantized, index = model.quantizer(z)
    commitment = jnp.mean((z - jax.lax.stop_gradient(quantized)) ** 2)
    usage = jnp.bincount(index.reshape(-1), length=CODES) / index.size
    reconstruction = jnp.mean((model.decoder(quantized) - batch["image"]) ** 2)
    return reconstruction + 0.25 * commitment, {"perplexity": jnp.exp(-jnp.sum(usage * jnp.log(usage + 1e-9)))}


def batch(size):
    return {"image": np.random.default_rng(0).normal(size=(size, 8, 8, 3)).astype(np.float32)}
