"""A diffusion U-Net: levels in lists, skips on a stack, time embeddings, attention at the bottom, noise in the loss."""

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx


def timestep_embedding(t, dim):
    freqs = jnp.exp(-jnp.log(10_000.0) * jnp.arange(dim // 2) / (dim // 2))
    args = t[:, None].astype(jnp.float32) * freqs[None]
    return jnp.concatenate([jnp.cos(args), jnp.sin(args)], axis=-1)


class ResBlock(nnx.Module):
    def __init__(self, cin, cout, temb, *, rngs):
        self.norm1, self.norm2 = (
            nnx.GroupNorm(cin, num_groups=4, rngs=rngs),
            nnx.GroupNorm(cout, num_groups=4, rngs=rngs),
        )
        self.conv1, self.conv2 = nnx.Conv(cin, cout, (3, 3), rngs=rngs), nnx.Conv(cout, cout, (3, 3), rngs=rngs)
        self.time = nnx.Linear(temb, 2 * cout, rngs=rngs)
        self.skip = nnx.Conv(cin, cout, (1, 1), rngs=rngs) if cin != cout else None

    def __call__(self, x, temb):
        h = self.conv1(nnx.silu(self.norm1(x)))
        scale, shift = jnp.split(self.time(nnx.silu(temb))[:, None, None, :], 2, axis=-1)
        h = self.conv2(nnx.silu(self.norm2(h) * (1 + scale) + shift))
        return h + (x if self.skip is None else self.skip(x))


class AttentionBlock(nnx.Module):
    def __init__(self, channels, heads, *, rngs):
        self.heads, self.norm = heads, nnx.GroupNorm(channels, num_groups=4, rngs=rngs)
        self.qkv = nnx.Conv(channels, 3 * channels, (1, 1), rngs=rngs)
        self.proj = nnx.Conv(channels, channels, (1, 1), kernel_init=nnx.initializers.normal(0.02), rngs=rngs)

    def __call__(self, x):
        b, h, w, c = x.shape
        q, k, v = jnp.split(self.qkv(self.norm(x)).reshape(b, h * w, self.heads, 3 * c // self.heads), 3, axis=-1)
        weights = jax.nn.softmax(jnp.einsum("bqhd,bkhd->bhqk", q, k) / np.sqrt(c // self.heads))
        return x + self.proj(jnp.einsum("bhqk,bkhd->bqhd", weights, v).reshape(b, h, w, c))


class UNet(nnx.Module):
    def __init__(self, rngs: nnx.Rngs, widths=(8, 16), temb=32):
        self.time = nnx.Sequential(nnx.Linear(8, temb, rngs=rngs), nnx.silu, nnx.Linear(temb, temb, rngs=rngs))
        self.enter = nnx.Conv(3, widths[0], (3, 3), rngs=rngs)
        self.downs, self.ups = nnx.List(), nnx.List()
        for cin, cout in zip((widths[0], *widths), widths, strict=False):
            down = nnx.Conv(cout, cout, (3, 3), strides=(2, 2), rngs=rngs)
            self.downs.append(nnx.Dict(block=ResBlock(cin, cout, temb, rngs=rngs), down=down))
        self.mid1 = ResBlock(widths[-1], widths[-1], temb, rngs=rngs)
        self.attn = AttentionBlock(widths[-1], 2, rngs=rngs)
        self.mid2 = ResBlock(widths[-1], widths[-1], temb, rngs=rngs)
        for cout, cin in zip((widths[0], *widths[:-1])[::-1], widths[::-1], strict=True):
            up = nnx.ConvTranspose(cin, cin, (2, 2), strides=(2, 2), rngs=rngs)
            self.ups.append(nnx.Dict(up=up, block=ResBlock(2 * cin, cout, temb, rngs=rngs)))
        self.norm = nnx.GroupNorm(widths[0], num_groups=4, rngs=rngs)
        self.leave = nnx.Conv(widths[0], 3, (3, 3), rngs=rngs)
        self.noise = rngs

    def __call__(self, x, t):
        temb, x, skips = self.time(timestep_embedding(t, 8)), self.enter(x), []
        for level in self.downs:
            x = level["block"](x, temb)
            skips.append(x)
            x = level["down"](x)
        x = self.mid2(self.attn(self.mid1(x, temb)), temb)
        for level in self.ups:
            x = jnp.concatenate([level["up"](x), skips.pop()], axis=-1)
            x = level["block"](x, temb)
        return self.leave(nnx.silu(self.norm(x)))


build = UNet


def loss(model, batch):
    x0 = batch["image"]
    betas = jnp.linspace(1e-4, 0.02, 100)
    alpha_bar = jnp.cumprod(1.0 - betas)
    t = jax.random.randint(model.noise.default(), (x0.shape[0],), 0, 100)
    eps = jax.random.normal(model.noise.default(), x0.shape)
    a = alpha_bar[t][:, None, None, None]
    return jnp.mean((model(jnp.sqrt(a) * x0 + jnp.sqrt(1 - a) * eps, t) - eps) ** 2)


def batch(size):
    return {"image": np.random.default_rng(0).normal(size=(size, 8, 8, 3)).astype(np.float32)}
