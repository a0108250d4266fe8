"""MAML: every task of the batch adapts a copy of the weights by a gradient step, vmapped; the loss goes through it."""

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx


class Regressor(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.l1, self.l2, self.l3 = (
            nnx.Linear(1, 32, rngs=rngs),
            nnx.Linear(32, 32, rngs=rngs),
            nnx.Linear(32, 1, rngs=rngs),
        )
        self.step_size = nnx.Param(jnp.asarray(0.05))

    def __call__(self, x):
        return self.l3(nnx.tanh(self.l2(nnx.tanh(self.l1(x)))))


build = Regressor


def loss(model, batch):
    graphdef, params = nnx.split(model, nnx.Param)

    def error(params, x, y):
        return jnp.mean((nnx.merge(graphdef, params)(x) - y) ** 2)

    def one_task(xs, ys, xq, yq):
        grads = jax.grad(error)(params, xs, ys)
        adapted = jax.tree.map(lambda p, g: p - model.step_size[...] * g, params, grads)
        return error(adapted, xq, yq)

    return jax.vmap(one_task)(batch["xs"], batch["ys"], batch["xq"], batch["yq"]).mean()


def batch(size):
    rng = np.random.default_rng(0)
    phase = rng.uniform(0, 3, (size, 1, 1))
    xs, xq = (rng.uniform(-3, 3, (size, 6, 1)) for _ in range(2))
    data = {"xs": xs, "ys": np.sin(xs + phase), "xq": xq, "yq": np.sin(xq + phase)}
    return {key: value.astype(np.float32) for key, value in data.items()}
