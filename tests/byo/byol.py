"""BYOL: a target network that is a running average (EMA) of the trained one, in a train step of one's own."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx


class Encoder(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.layers = nnx.List(
            [nnx.Linear(32, 64, rngs=rngs), nnx.Linear(64, 64, rngs=rngs), nnx.Linear(64, 32, rngs=rngs)]
        )
        self.norms = nnx.List([nnx.BatchNorm(64, rngs=rngs) for _ in range(2)])

    def __call__(self, x):
        for layer, norm in zip(self.layers, self.norms, strict=False):
            x = nnx.relu(norm(layer(x)))
        return self.layers[-1](x)


class BYOL(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.online, self.target = Encoder(rngs), Encoder(rngs)
        nnx.update(self.target, nnx.state(self.online))
        self.predictor = nnx.Linear(32, 32, rngs=rngs)
        self.steps = nnx.Variable(jnp.zeros((), jnp.int32))


build = BYOL
wrt = nnx.All(nnx.Param, nnx.Any(nnx.PathContains("online"), nnx.PathContains("predictor")))


def unit(x):
    return x / jnp.maximum(jnp.linalg.norm(x, axis=-1, keepdims=True), 1e-6)


def regression(model, batch):
    total = 0.0
    for item, other in (("a", "b"), ("b", "a")):
        prediction = model.predictor(model.online(batch[item]))
        target = jax.lax.stop_gradient(model.target(batch[other]))
        total += jnp.mean(2 - 2 * jnp.sum(unit(prediction) * unit(target), axis=-1))
    return total


def train_step(model, optimizer, batch):
    value, grads = nnx.value_and_grad(regression, argnums=nnx.DiffState(0, wrt))(model, batch)
    optimizer.update(model, grads)
    model.steps[...] += 1
    tau = 1 - 0.1 * (jnp.cos(jnp.pi * model.steps[...] / 100) + 1) / 2
    average = lambda target, online: tau * target + (1 - tau) * online  # noqa: E731
    online, target = nnx.state(model.online, nnx.Param), nnx.state(model.target, nnx.Param)
    nnx.update(model.target, jax.tree.map(average, target, online))
    return {"loss": value, "tau": tau}


optimizer = optax.sgd(0.05, momentum=0.9, nesterov=True)


def batch(size):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(size, 32))
    a, b = (x + 0.1 * rng.normal(size=x.shape) for _ in range(2))
    return {"a": a.astype(np.float32), "b": b.astype(np.float32)}
