"""Mamba: a causal depthwise convolution, then a selective state space by lax.scan, or by associative_scan."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

VOCAB, DIM, INNER, STATE, RANK = 64, 32, 64, 8, 4


class Mamba(nnx.Module):
    def __init__(self, rngs, parallel):
        self.parallel = parallel
        self.norm = nnx.RMSNorm(DIM, rngs=rngs)
        self.in_proj = nnx.Linear(DIM, 2 * INNER, use_bias=False, rngs=rngs)
        self.conv1d = nnx.Conv(INNER, INNER, (4,), padding="CAUSAL", feature_group_count=INNER, rngs=rngs)
        self.x_proj = nnx.Linear(INNER, RANK + 2 * STATE, use_bias=False, rngs=rngs)
        self.dt_proj = nnx.Linear(RANK, INNER, rngs=rngs)
        self.A_log = nnx.Param(jnp.log(jnp.tile(jnp.arange(1.0, STATE + 1), (INNER, 1))))
        self.D = nnx.Param(jnp.ones(INNER))
        self.out_proj = nnx.Linear(INNER, DIM, use_bias=False, rngs=rngs)

    def __call__(self, x):
        u, gate = jnp.split(self.in_proj(self.norm(x)), 2, axis=-1)
        u = nnx.silu(self.conv1d(u))
        dt, b, c = jnp.split(self.x_proj(u), [RANK, RANK + STATE], axis=-1)
        dt = nnx.softplus(self.dt_proj(dt))
        decay = jnp.exp(dt[..., None] * -jnp.exp(self.A_log[...]))  # b t inner state
        push = (dt * u)[..., None] * b[:, :, None, :]
        if self.parallel:
            _, h = jax.lax.associative_scan(lambda p, q: (p[0] * q[0], q[0] * p[1] + q[1]), (decay, push), axis=1)
            y = jnp.einsum("btds,bts->btd", h, c)
        else:

            def step(h, inputs):
                decay, push, c = inputs
                h = decay * h + push
                return h, jnp.einsum("bds,bs->bd", h, c)

            inputs = jax.tree.map(lambda v: jnp.moveaxis(v, 1, 0), (decay, push, c))
            _, y = jax.lax.scan(step, jnp.zeros_like(push[:, 0]), inputs)
            y = jnp.moveaxis(y, 0, 1)
        return x + self.out_proj((y + self.D * u) * nnx.silu(gate))


class MambaLM(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.embed = nnx.Embed(VOCAB, DIM, rngs=rngs)
        self.layers = nnx.List([Mamba(rngs, parallel) for parallel in (False, True)])
        self.norm_f = nnx.RMSNorm(DIM, rngs=rngs)

    def __call__(self, ids):
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return self.embed.attend(self.norm_f(x))


build = MambaLM


def loss(model, batch):
    ids = batch["ids"]
    return optax.softmax_cross_entropy_with_integer_labels(model(ids)[:, :-1], ids[:, 1:]).mean()


def batch(size):
    return {"ids": np.random.default_rng(0).integers(0, VOCAB, (size, 16)).astype(np.int32)}
