"""MoCo: a momentum encoder and a queue of keys as state, written at a cyclic pointer."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

QUEUE, DIM = 64, 16


class State(nnx.Variable):
    """What training moves without a gradient."""


class Encoder(nnx.Module):
    def __init__(self, rngs):
        self.conv = nnx.Conv(3, 16, (3, 3), strides=2, rngs=rngs)
        self.norm = nnx.GroupNorm(16, num_groups=4, rngs=rngs)
        self.out = nnx.Linear(16, DIM, rngs=rngs)

    def __call__(self, x):
        x = self.out(nnx.relu(self.norm(self.conv(x))).mean((1, 2)))
        return x / jnp.linalg.norm(x, axis=-1, keepdims=True)


class MoCo(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.encoder = Encoder(rngs)
        self.momentum = nnx.data(jax.tree.map(jnp.copy, nnx.state(self.encoder, nnx.Param)))
        queue = jax.random.normal(rngs.params(), (QUEUE, DIM))
        self.queue = State(queue / jnp.linalg.norm(queue, axis=-1, keepdims=True))
        self.pointer = State(jnp.zeros((), jnp.int32))


def build(rngs: nnx.Rngs):
    model = MoCo(rngs)
    model.momentum = nnx.data(jax.tree.map(State, jax.tree.map(lambda p: p, nnx.to_pure_dict(model.momentum))))
    return model


def loss(model, batch):
    online = nnx.to_pure_dict(nnx.state(model.encoder, nnx.Param))
    average = jax.tree.map(lambda m, p: 0.9 * m[...] + 0.1 * jax.lax.stop_gradient(p), model.momentum, online,
                           is_leaf=lambda x: isinstance(x, State))  # fmt: skip
    jax.tree.map(lambda m, new: m.set_value(new), model.momentum, average, is_leaf=lambda x: isinstance(x, State))
    keys_encoder = nnx.clone(model.encoder)
    nnx.update(keys_encoder, average)
    q, k = model.encoder(batch["a"]), jax.lax.stop_gradient(keys_encoder(batch["b"]))
    positive = jnp.sum(q * k, axis=-1, keepdims=True)
    logits = jnp.concatenate([positive, q @ model.queue[...].T], axis=-1) / 0.2
    model.queue[...] = jax.lax.dynamic_update_slice(model.queue[...], k, (model.pointer[...], 0))
    model.pointer[...] = (model.pointer[...] + len(k)) % QUEUE
    return optax.softmax_cross_entropy_with_integer_labels(logits, jnp.zeros(len(q), jnp.int32)).mean()


def batch(size):
    rng = np.random.default_rng(0)
    return {key: rng.normal(size=(size, 8, 8, 3)).astype(np.float32) for key in "ab"}
