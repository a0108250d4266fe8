"""A model that was sharded by hand before: logical names with rules, specs on variables, constraints between layers."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import PartitionSpec as P

VOCAB, DIM, FF = 64, 32, 64
RULES = (("batch", "data"), ("hidden", "model"), ("vocab", "model"), ("embed", None))


def partitioned(init, *names):
    return nnx.with_partitioning(init, names, sharding_rules=RULES)


class Block(nnx.Module):
    def __init__(self, rngs):
        init = nnx.initializers.lecun_normal()
        self.norm = nnx.LayerNorm(DIM, rngs=rngs)
        self.up = nnx.Linear(DIM, FF, use_bias=False, kernel_init=partitioned(init, "embed", "hidden"), rngs=rngs)
        self.down = nnx.Linear(FF, DIM, use_bias=False, kernel_init=partitioned(init, "hidden", "embed"), rngs=rngs)

    def __call__(self, x):
        h = nnx.relu(self.up(self.norm(x)))
        mesh = jax.make_mesh((1, 1), ("data", "model"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
        h = jax.lax.with_sharding_constraint(h, jax.NamedSharding(mesh, P("data", None, "model")))
        return x + self.down(h)


class LM(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        normal = nnx.initializers.normal(0.02)
        self.embed = nnx.Embed(VOCAB, DIM, embedding_init=partitioned(normal, "vocab", "embed"), rngs=rngs)
        self.positions = nnx.Param(normal(rngs.params(), (16, DIM)), out_sharding=(None, None))
        self.blocks = nnx.List([Block(rngs) for _ in range(2)])
        self.head = nnx.Linear(DIM, VOCAB, kernel_init=nnx.with_partitioning(normal, (None, "model")), rngs=rngs)

    def __call__(self, ids):
        x = self.embed(ids) + self.positions[...]
        for block in self.blocks:
            x = block(x)
        return self.head(jnp.cumsum(x, axis=1) / jnp.arange(1, 17)[:, None])


build = LM


def loss(model, batch):
    ids = batch["ids"]
    return optax.softmax_cross_entropy_with_integer_labels(model(ids)[:, :-1], ids[:, 1:]).mean()


def batch(size):
    return {"ids": np.random.default_rng(0).integers(0, VOCAB, (size, 16)).astype(np.int32)}
