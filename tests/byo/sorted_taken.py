"""Experts of a scanned stack that drop nothing, by other words than `sorted_moe`: one sort of several operands, counts
by one-hots, rows taken back by the inverse permutation, a bias per expert, and a router balanced by its own bias."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

VOCAB, DIM, FF, EXPERTS, TOP, LAYERS = 64, 16, 24, 8, 2, 2


class Counts(nnx.Variable):
    pass


class Layer(nnx.Module):
    def __init__(self, rngs):
        init = nnx.initializers.normal(0.2)
        self.norm, self.router = nnx.RMSNorm(DIM, rngs=rngs), nnx.Linear(DIM, EXPERTS, use_bias=False, rngs=rngs)
        shapes = (EXPERTS, DIM, FF), (EXPERTS, DIM, FF), (EXPERTS, FF, DIM)
        self.gate, self.up, self.down = (nnx.Param(init(rngs.params(), shape)) for shape in shapes)
        self.offset = nnx.Param(init(rngs.params(), (EXPERTS, DIM)))
        self.bias = Counts(jnp.zeros(EXPERTS))

    def __call__(self, x):
        batch, length, _ = x.shape
        h = self.norm(x).reshape(-1, DIM)
        scores = jax.nn.sigmoid(self.router(h))
        chosen = jax.lax.top_k(scores + self.bias[...], TOP)[1]
        weights = jnp.take_along_axis(scores, chosen, axis=1)
        sizes = jax.nn.one_hot(chosen, EXPERTS).sum((0, 1))
        self.bias[...] += 0.01 * jnp.sign(sizes.mean() - sizes)
        tokens = jnp.repeat(jnp.arange(batch * length), TOP)
        expert, token, order = jax.lax.sort((chosen.reshape(-1), tokens, jnp.arange(len(tokens))), num_keys=1)
        rows = jnp.take(h, token, axis=0)
        sizes = sizes.astype(jnp.int32)
        y = nnx.silu(jax.lax.ragged_dot(rows, self.gate[...], sizes)) * jax.lax.ragged_dot(rows, self.up[...], sizes)
        y = jax.lax.ragged_dot(y, self.down[...], sizes) + self.offset[...][expert]
        y = jnp.take(y, jnp.argsort(order), axis=0).reshape(-1, TOP, DIM)
        return x + jnp.einsum("tkd,tk->td", y, weights).reshape(x.shape)


class LM(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.embed = nnx.Embed(VOCAB, DIM, rngs=rngs)
        self.layers = nnx.vmap(Layer, in_axes=0, out_axes=0)(rngs.split(LAYERS))

    def __call__(self, ids):
        @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
        @nnx.remat
        def forward(x, layer):
            return layer(x)

        return self.embed.attend(forward(self.embed(ids), self.layers))


build = LM


def loss(model, batch):
    return optax.softmax_cross_entropy_with_integer_labels(model(batch["ids"][:, :-1]), batch["ids"][:, 1:]).mean()


def batch(size):
    return {"ids": np.random.default_rng(0).integers(0, VOCAB, (size, 9)).astype(np.int32)}
