"""Sharding in types: a language model for a mesh with Explicit axes, which says where every value is."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import PartitionSpec as P

VOCAB, DIM, LENGTH = 64, 32, 16


def mesh():
    return jax.make_mesh((4, 2), ("data", "model"), axis_types=(jax.sharding.AxisType.Explicit,) * 2)


def column(*, rngs):
    init = nnx.with_partitioning(nnx.initializers.lecun_normal(), (None, "model"))
    return nnx.Linear(DIM, 4 * DIM, kernel_init=init, use_bias=False, rngs=rngs)


class Block(nnx.Module):
    def __init__(self, *, rngs):
        self.norm, self.up = nnx.RMSNorm(DIM, rngs=rngs), column(rngs=rngs)
        init = nnx.with_partitioning(nnx.initializers.lecun_normal(), ("model", None))
        self.down = nnx.Param(init(rngs.params(), (4 * DIM, DIM)))

    def __call__(self, x):
        hidden = nnx.gelu(self.up(self.norm(x), out_sharding=P("data", None, "model")))
        return x + jnp.dot(hidden, self.down[...], out_sharding=P("data", None, None))


class Model(nnx.Module):
    def __init__(self, *, rngs):
        self.embed = nnx.Embed(VOCAB, DIM, rngs=rngs)
        self.blocks = nnx.List([Block(rngs=rngs) for _ in range(2)])
        self.head = nnx.Linear(DIM, VOCAB, rngs=rngs)

    def __call__(self, ids):
        x = self.embed(ids, out_sharding=P("data", None, None))
        for block in self.blocks:
            x = block(x)
        return self.head(jax.lax.with_sharding_constraint(x, P("data", None, None)))


def build(rngs: nnx.Rngs):
    return Model(rngs=rngs)


def loss(model, batch):
    ids = jax.sharding.reshard(batch["ids"], P("data", None))
    return optax.softmax_cross_entropy_with_integer_labels(model(ids)[:, :-1], ids[:, 1:]).mean()


def batch(size):
    return {"ids": np.random.default_rng(0).integers(0, VOCAB, (size, LENGTH)).astype(np.int32)}
