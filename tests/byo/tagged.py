"""A step as tutorials end: jitted by its author, ModelAndOptimizer, sown activations, a debug print, a tuple batch."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx


class Classifier(nnx.Module):
    def __init__(self, *, hidden: int, rngs: nnx.Rngs):
        self.linear1, self.linear2 = nnx.Linear(16, hidden, rngs=rngs), nnx.Linear(hidden, 8, rngs=rngs)
        self.bn, self.dropout = nnx.BatchNorm(hidden, rngs=rngs), nnx.Dropout(0.1, rngs=rngs)

    @nnx.jit
    def __call__(self, x):
        x = nnx.relu(self.dropout(self.bn(self.linear1(x))))
        self.sow(nnx.Intermediate, "hidden", x.mean())
        return self.linear2(x)


build = functools.partial(Classifier, hidden=64)


def loss_fn(model, batch):
    x, labels = batch
    logits = model(x)
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean(), logits


@nnx.jit
def train_step(model, optimizer, batch):
    (loss, logits), grads = nnx.value_and_grad(loss_fn, has_aux=True)(model, batch)
    optimizer.update(grads)
    norm = optax.tree.norm(grads)
    jax.lax.cond(norm > 1e6, lambda n: jax.debug.print("gradients explode: {}", n), lambda n: None, norm)
    return {"loss": loss, "accuracy": jnp.mean(jnp.argmax(logits, -1) == batch[1]), "norm": norm}


def optimizers(model):
    return nnx.ModelAndOptimizer(model, optax.adamw(1e-2, eps=0.1), wrt=nnx.Param)


def batch(size):
    rng = np.random.default_rng(0)
    return rng.normal(size=(size, 16)).astype(np.float32), rng.integers(0, 8, size)
