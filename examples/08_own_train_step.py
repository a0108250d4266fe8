"""Your own train step, with nothing of Spanax in it: a GAN-like second loss, your own metrics, anything NNX can do.

Usage:
  python examples/08_own_train_step.py
"""

import jax
import numpy as np
import optax
from flax import nnx

import spanax

spanax.simulate(8)


class Autoencoder(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.encode, self.decode = nnx.Linear(32, 64, rngs=rngs), nnx.Linear(64, 32, rngs=rngs)
        self.drop = nnx.Dropout(0.1, rngs=rngs)

    def __call__(self, x):
        return self.decode(self.drop(nnx.tanh(self.encode(x))))


def train_step(model, optimizer, batch):
    def loss_fn(model):
        error = ((model(batch) - batch) ** 2).mean()
        size = sum((kernel**2).sum() for kernel in jax.tree.leaves(nnx.state(model, nnx.Param)))
        return error + 1e-4 * size, error

    (total, error), grads = nnx.value_and_grad(loss_fn, has_aux=True)(model)
    optimizer.update(model, grads)
    return {"loss": total, "error": error, "grad_norm": optax.tree.norm(grads)}


batch = np.random.default_rng(0).normal(size=(64, 32)).astype(np.float32)
program = spanax.trace(build=Autoencoder, optimizer=optax.lion(1e-2), batch=batch, train_step=train_step)
run = spanax.start(program, spanax.plan(program, spanax.local(), layout="fsdp"))
for _ in range(20):
    metrics = run.step(batch)
print({name: round(float(value), 4) for name, value in metrics.items()})
