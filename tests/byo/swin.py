"""Swin: attention inside windows, every second layer shifted by a roll and masked, patches merged between stages."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx


def window_partition(x, size):
    b, h, w, c = x.shape
    x = x.reshape(b, h // size, size, w // size, size, c)
    return x.transpose(0, 1, 3, 2, 4, 5).reshape(-1, size * size, c)


def window_reverse(windows, size, h, w):
    x = windows.reshape(-1, h // size, w // size, size, size, windows.shape[-1])
    return x.transpose(0, 1, 3, 2, 4, 5).reshape(-1, h, w, windows.shape[-1])


def relative_index(size):
    coords = np.stack(np.meshgrid(np.arange(size), np.arange(size), indexing="ij")).reshape(2, -1)
    relative = coords[:, :, None] - coords[:, None, :] + size - 1
    return relative[0] * (2 * size - 1) + relative[1]


def shift_mask(h, w, size, shift):
    regions = np.zeros((1, h, w, 1))
    slices = (slice(0, -size), slice(-size, -shift), slice(-shift, None))
    for i, rows in enumerate(slices):
        for j, columns in enumerate(slices):
            regions[:, rows, columns] = 3 * i + j
    ids = np.asarray(regions).reshape(1, h // size, size, w // size, size, 1)
    ids = ids.transpose(0, 1, 3, 2, 4, 5).reshape(-1, size * size)
    return np.where(ids[:, None, :] == ids[:, :, None], 0.0, -100.0).astype(np.float32)


class WindowAttention(nnx.Module):
    def __init__(self, dim, heads, size, *, rngs):
        self.heads, self.scale = heads, (dim // heads) ** -0.5
        self.qkv, self.proj = nnx.Linear(dim, 3 * dim, rngs=rngs), nnx.Linear(dim, dim, rngs=rngs)
        self.bias_table = nnx.Param(
            nnx.initializers.truncated_normal(0.02)(rngs.params(), ((2 * size - 1) ** 2, heads))
        )
        self.index = relative_index(size)

    def __call__(self, x, mask=None):
        b, n, c = x.shape
        qkv = self.qkv(x).reshape(b, n, 3, self.heads, c // self.heads).transpose(2, 0, 3, 1, 4)
        q, k, v = qkv[0], qkv[1], qkv[2]
        scores = (q * self.scale) @ k.transpose(0, 1, 3, 2)
        bias = self.bias_table[...][self.index.reshape(-1)].reshape(n, n, -1).transpose(2, 0, 1)
        scores = scores + bias[None]
        if mask is not None:
            scores = scores.reshape(b // len(mask), len(mask), self.heads, n, n) + mask[None, :, None]
            scores = scores.reshape(-1, self.heads, n, n)
        x = jax.nn.softmax(scores, axis=-1) @ v
        return self.proj(x.transpose(0, 2, 1, 3).reshape(b, n, c))


class SwinBlock(nnx.Module):
    def __init__(self, dim, heads, resolution, size, shift, *, rngs):
        self.size, self.shift, self.resolution = size, shift, resolution
        self.norm1, self.norm2 = nnx.LayerNorm(dim, rngs=rngs), nnx.LayerNorm(dim, rngs=rngs)
        self.attn = WindowAttention(dim, heads, size, rngs=rngs)
        self.mlp = nnx.Sequential(nnx.Linear(dim, 2 * dim, rngs=rngs), nnx.gelu, nnx.Linear(2 * dim, dim, rngs=rngs))

    def __call__(self, x):
        h, w = self.resolution
        shortcut, y = x, self.norm1(x)
        if self.shift:
            y = jnp.roll(y, (-self.shift, -self.shift), axis=(1, 2))
        mask = jnp.asarray(shift_mask(h, w, self.size, self.shift)) if self.shift else None
        y = window_reverse(self.attn(window_partition(y, self.size), mask), self.size, h, w)
        if self.shift:
            y = jnp.roll(y, (self.shift, self.shift), axis=(1, 2))
        x = shortcut + y
        return x + self.mlp(self.norm2(x))


class PatchMerging(nnx.Module):
    def __init__(self, dim, *, rngs):
        self.norm = nnx.LayerNorm(4 * dim, rngs=rngs)
        self.reduction = nnx.Linear(4 * dim, 2 * dim, use_bias=False, rngs=rngs)

    def __call__(self, x):
        x = jnp.concatenate([x[:, 0::2, 0::2], x[:, 1::2, 0::2], x[:, 0::2, 1::2], x[:, 1::2, 1::2]], axis=-1)
        return self.reduction(self.norm(x))


class Swin(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.patch_embed = nnx.Conv(3, 16, (2, 2), strides=(2, 2), rngs=rngs)
        self.stage1 = nnx.List([SwinBlock(16, 2, (8, 8), 4, shift, rngs=rngs) for shift in (0, 2)])
        self.merge = PatchMerging(16, rngs=rngs)
        self.stage2 = nnx.List([SwinBlock(32, 4, (4, 4), 4, 0, rngs=rngs)])
        self.norm, self.head = nnx.LayerNorm(32, rngs=rngs), nnx.Linear(32, 8, rngs=rngs)

    def __call__(self, x):
        x = self.patch_embed(x)
        for block in self.stage1:
            x = block(x)
        x = self.merge(x)
        for block in self.stage2:
            x = block(x)
        return self.head(self.norm(x).mean((1, 2)))


build = Swin


def loss(model, batch):
    logits = model(batch["image"])
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"]).mean()


def batch(size):
    rng = np.random.default_rng(0)
    return {
        "image": rng.normal(size=(size, 16, 16, 3)).astype(np.float32),
        "label": rng.integers(0, 8, size).astype(np.int32),
    }
