"""ConvNeXt: 7x7 depthwise convolutions, LayerNorm, layer scale, stochastic depth with a key a block."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx


class DropPath(nnx.Module):
    def __init__(self, rate, *, rngs):
        self.rate, self.rngs, self.deterministic = rate, rngs.fork() if hasattr(rngs, "fork") else rngs, False

    def __call__(self, x):
        if self.deterministic or not self.rate:
            return x
        keep = 1.0 - self.rate
        mask = jax.random.bernoulli(self.rngs.dropout(), keep, (x.shape[0],) + (1,) * (x.ndim - 1))
        return x * mask / keep


class Block(nnx.Module):
    def __init__(self, dim, drop, *, rngs):
        self.dwconv = nnx.Conv(dim, dim, (7, 7), padding="SAME", feature_group_count=dim, rngs=rngs)
        self.norm = nnx.LayerNorm(dim, epsilon=1e-6, rngs=rngs)
        self.pwconv1, self.pwconv2 = nnx.Linear(dim, 4 * dim, rngs=rngs), nnx.Linear(4 * dim, dim, rngs=rngs)
        self.gamma = nnx.Param(0.1 * jnp.ones(dim))
        self.drop_path = DropPath(drop, rngs=rngs)

    def __call__(self, x):
        y = self.pwconv2(nnx.gelu(self.pwconv1(self.norm(self.dwconv(x)))))
        return x + self.drop_path(self.gamma * y)


class ConvNeXt(nnx.Module):
    def __init__(self, rngs: nnx.Rngs, depths=(1, 2), dims=(16, 32)):
        rates = iter(np.linspace(0, 0.2, sum(depths)).tolist())
        self.downsample = nnx.List()
        self.stages = nnx.List()
        before = 3
        for depth, dim in zip(depths, dims, strict=True):
            conv = nnx.Conv(before, dim, (2, 2), strides=(2, 2), rngs=rngs)
            norm = nnx.LayerNorm(dim if before == 3 else before, rngs=rngs)
            self.downsample.append(nnx.Sequential(conv, norm) if before == 3 else nnx.Sequential(norm, conv))
            self.stages.append(nnx.List([Block(dim, next(rates), rngs=rngs) for _ in range(depth)]))
            before = dim
        self.norm, self.head = nnx.LayerNorm(before, rngs=rngs), nnx.Linear(before, 8, rngs=rngs)

    def __call__(self, x):
        for down, blocks in zip(self.downsample, self.stages, strict=True):
            x = down(x)
            for block in blocks:
                x = block(x)
        return self.head(self.norm(x.mean([1, 2])))


build = ConvNeXt


def loss(model, batch):
    return optax.softmax_cross_entropy_with_integer_labels(model(batch["image"]), batch["label"]).mean()


def batch(size):
    rng = np.random.default_rng(0)
    return {
        "image": rng.normal(size=(size, 16, 16, 3)).astype(np.float32),
        "label": rng.integers(0, 8, size).astype(np.int32),
    }
