"""A mean teacher: a clone of the student, its dropout's keys included, follows the student's weights."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

DIM, CLASSES = 32, 8


class Net(nnx.Module):
    def __init__(self, *, rngs):
        self.up, self.down = nnx.Linear(16, 2 * DIM, rngs=rngs), nnx.Linear(2 * DIM, DIM, rngs=rngs)
        self.dropout, self.head = nnx.Dropout(0.3, rngs=rngs), nnx.Linear(DIM, CLASSES, rngs=rngs)

    def __call__(self, x):
        return self.head(self.dropout(self.down(nnx.relu(self.up(x)))))


class MeanTeacher(nnx.Module):
    def __init__(self, *, rngs):
        self.student = Net(rngs=rngs)
        self.teacher = nnx.clone(self.student)


def build(rngs: nnx.Rngs):
    return MeanTeacher(rngs=rngs)


def optimizers(model):
    return nnx.Optimizer(model.student, optax.adamw(1e-2, eps=0.1), wrt=nnx.Param)


def train_step(model, optimizer, batch):
    def loss(student):
        logits = student(batch["x"])
        supervised = -jnp.take_along_axis(jax.nn.log_softmax(logits), batch["y"][:, None], 1).mean()
        return supervised + ((jax.nn.softmax(logits) - target) ** 2).sum(-1).mean()

    target = jax.nn.softmax(model.teacher(batch["x"]))
    value, grads = nnx.value_and_grad(loss)(model.student)
    optimizer.update(model.student, grads)
    new, old = nnx.state(model.student, nnx.Param), nnx.state(model.teacher, nnx.Param)
    nnx.update(model.teacher, jax.tree.map(lambda old, new: 0.95 * old + 0.05 * new, old, new))
    return {"loss": value}


def batch(size):
    rng = np.random.default_rng(0)
    return {"x": rng.normal(size=(size, 16)).astype("float32"), "y": rng.integers(0, CLASSES, size).astype("int32")}
