"""Models of a stranger, into which weights are imported without a table."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

import spanax


class Norm(nnx.Module):
    def __init__(self, dim: int):
        self.w = nnx.Param(jnp.ones(dim))


class Layer(nnx.Module):
    """A layer of a Llama, as a stranger writes it: names, projections to heads, and raw arrays of their own."""

    def __init__(self, rngs: nnx.Rngs):
        self.attn_norm = Norm(16)
        self.wq = nnx.Linear(16, 16, use_bias=False, rngs=rngs)
        self.wk = nnx.LinearGeneral(16, (2, 4), use_bias=False, rngs=rngs)
        self.wv = nnx.Einsum("btd,dhk->bthk", (16, 2, 4), rngs=rngs)
        self.wo = nnx.LinearGeneral((4, 4), 16, axis=(-2, -1), use_bias=False, rngs=rngs)
        self.ffn_norm = nnx.RMSNorm(16, rngs=rngs)
        self.gate = nnx.Param(jnp.zeros((16, 24)))
        self.up, self.down = (nnx.Linear(*dims, use_bias=False, rngs=rngs) for dims in ((16, 24), (24, 16)))


class Listed(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.tok_embed = nnx.Embed(96, 16, rngs=rngs)
        self.layers = self.make_layers(rngs)
        self.ln_f = Norm(16)
        self.lm_head = nnx.Linear(16, 96, use_bias=False, rngs=rngs)

    def make_layers(self, rngs: nnx.Rngs) -> Any:
        return nnx.List([Layer(rngs) for _ in range(2)])


class Stacked(Listed):
    def make_layers(self, rngs: nnx.Rngs) -> Any:
        return nnx.split_rngs(splits=2)(nnx.vmap(lambda rngs: Layer(rngs)))(rngs)


class Square(nnx.Module):
    """Square matrices, of which nothing but the others and the type of the module says how they are stored."""

    def __init__(self, rngs: nnx.Rngs, width: int = 8):
        self.first = nnx.Linear(8, width, rngs=rngs)
        self.second = nnx.Linear(8, 8, use_bias=False, rngs=rngs)


class Net(nnx.Module):
    """A convolution, statistics, a square array of its own, and a new head."""

    def __init__(self, rngs: nnx.Rngs):
        self.conv = nnx.Conv(3, 8, (3, 3), rngs=rngs)
        self.bn = nnx.BatchNorm(8, rngs=rngs)
        self.square = nnx.Param(jnp.zeros((8, 8)))
        self.head = nnx.Linear(8, 5, rngs=rngs)


def _work(build: type[nnx.Module]) -> spanax.Workload:
    tokens = jax.ShapeDtypeStruct((4, 8), "int32")
    return spanax.Workload(build=build, batch=tokens, loss=lambda model, x: model.lm_head(model.tok_embed(x)).mean())


listed, stacked = _work(Listed), _work(Stacked)
