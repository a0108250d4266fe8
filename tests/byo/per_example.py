"""A model written for one example, without a batch dim, and vmapped in the loss; blocks and heads in dicts."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx


def mlp(size, hidden, rngs):
    return nnx.Sequential(nnx.Linear(size, hidden, rngs=rngs), nnx.gelu, nnx.Linear(hidden, size, rngs=rngs))


class TokenMixer(nnx.Module):
    def __init__(self, rngs: nnx.Rngs, tokens=16, dim=32, hidden=64):
        self.embed = nnx.Linear(12, dim, rngs=rngs)
        self.blocks = nnx.Dict()
        for i in range(2):
            norm1, norm2 = nnx.LayerNorm(dim, rngs=rngs), nnx.LayerNorm(dim, rngs=rngs)
            mixers = dict(tokens=mlp(tokens, hidden, rngs), channels=mlp(dim, hidden, rngs))
            self.blocks[f"block_{i}"] = nnx.Dict(norm1=norm1, norm2=norm2, **mixers)
        self.heads = nnx.Dict(kind=nnx.Linear(dim, 8, rngs=rngs), angle=nnx.Linear(dim, 2, rngs=rngs))

    def __call__(self, image):
        patches = image.reshape(4, 2, 4, 2, 3).transpose(0, 2, 1, 3, 4).reshape(16, 12)
        x = self.embed(patches)
        for block in self.blocks.values():
            x = x + block["tokens"](block["norm1"](x).T).T
            x = x + block["channels"](block["norm2"](x))
        x = x.max(axis=0)
        return {name: head(x) for name, head in self.heads.items()}


build = TokenMixer


def loss(model, batch):
    result = jax.vmap(model)(batch["image"])
    kind = optax.softmax_cross_entropy_with_integer_labels(result["kind"], batch["kind"])
    angle = optax.cosine_distance(result["angle"], batch["angle"], epsilon=1e-6)
    return jnp.mean(kind + 0.5 * angle), {"kind": kind.mean(), "angle": angle.mean()}


def batch(size):
    rng = np.random.default_rng(0)
    return {
        "image": rng.normal(size=(size, 8, 8, 3)).astype(np.float32),
        "kind": rng.integers(0, 8, size).astype(np.int32),
        "angle": rng.normal(size=(size, 2)).astype(np.float32),
    }
