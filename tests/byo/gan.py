"""DCGAN: two networks and two optimizers in one train step, a gradient penalty by a gradient inside of the loss."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx


class Generator(nnx.Module):
    def __init__(self, rngs):
        self.enter = nnx.Linear(16, 4 * 4 * 16, rngs=rngs)
        self.norm = nnx.BatchNorm(16, rngs=rngs)
        self.up = nnx.ConvTranspose(16, 1, (4, 4), strides=(2, 2), rngs=rngs)

    def __call__(self, z):
        x = nnx.relu(self.norm(self.enter(z).reshape(-1, 4, 4, 16)))
        return jnp.tanh(self.up(x))


class Critic(nnx.Module):
    def __init__(self, rngs):
        self.conv = nnx.Conv(1, 16, (4, 4), strides=2, rngs=rngs)
        self.out = nnx.Linear(4 * 4 * 16, 1, rngs=rngs)

    def __call__(self, x):
        return self.out(nnx.leaky_relu(self.conv(x), 0.2).reshape(len(x), -1))[:, 0]


class GAN(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.generator, self.critic, self.rngs = Generator(rngs), Critic(rngs), rngs


build = GAN


class Both(nnx.Module):
    def __init__(self, model):
        self.generator = nnx.Optimizer(model.generator, optax.adam(1e-3, b1=0.5, eps=1e-3), wrt=nnx.Param)
        self.critic = nnx.Optimizer(model.critic, optax.adam(1e-3, b1=0.5, eps=1e-3), wrt=nnx.Param)


optimizers = Both


def train_step(model, optimizer, batch):
    real = batch["image"]
    z = model.rngs.normal((len(real), 16))
    fake = model.generator(z)
    mix = model.rngs.uniform((len(real), 1, 1, 1))

    def critic_loss(critic):
        between = mix * real + (1 - mix) * fake
        slopes = jax.grad(lambda x: critic(x).sum())(between)
        norms = jnp.sqrt(jnp.sum(slopes**2, axis=(1, 2, 3)) + 1e-12)
        return critic(fake).mean() - critic(real).mean() + 10.0 * jnp.mean((norms - 1) ** 2)

    critic_value, grads = nnx.value_and_grad(critic_loss)(model.critic)
    optimizer.critic.update(model.critic, grads)
    value, grads = nnx.value_and_grad(lambda g: -model.critic(g(z)).mean())(model.generator)
    optimizer.generator.update(model.generator, grads)
    return {"loss": value, "critic": critic_value}


def batch(size):
    return {"image": np.tanh(np.random.default_rng(0).normal(size=(size, 8, 8, 1))).astype(np.float32)}
