"""The U-Net of denoising diffusion (DDPM) in plain Flax NNX: residual blocks, GroupNorm, attention at one size.

Shape suffixes: B batch, Y and X rows and columns of pixels, C channels, T positions in an image, D time embedding.

Source: Ho et al., "Denoising Diffusion Probabilistic Models", 2020 (arXiv 2006.11239), sections 2 to 4 and appendix B;
details that the paper omits follow its authors' code, hojonathanho/diffusion.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from spanax import logged


@dataclasses.dataclass(frozen=True)
class UNetConfig:
    """The configuration of a U-Net and its diffusion; each of `multipliers` is a level with half the image size."""

    image_size: int
    width: int
    multipliers: tuple[int, ...] = (1, 2, 2, 2)
    blocks_per_level: int = 2
    attention_size: int = 16
    num_groups: int = 32
    dropout: float = 0.1
    num_times: int = 1000
    betas: tuple[float, float] = (1e-4, 0.02)


SIZES = {
    "nano": UNetConfig(32, width=16, multipliers=(1, 2, 2), blocks_per_level=1, num_groups=4, dropout=0.0),
    "cifar10": UNetConfig(32, width=128),
}

INIT = nnx.initializers.variance_scaling(1.0, "fan_avg", "uniform")
LAST_INIT = nnx.initializers.variance_scaling(1e-10, "fan_avg", "uniform")
"""For the last layer of a residual branch and for the output: close to zero."""


def conv(
    fan_in: int, fan_out: int, size: int, rngs: nnx.Rngs, stride: int = 1, init: nnx.Initializer = INIT
) -> nnx.Conv:
    """Returns a square convolution with bias that divides the image size by the stride."""
    return nnx.Conv(fan_in, fan_out, (size, size), stride, padding="SAME", kernel_init=init, rngs=rngs)


def embed_time(time_B: jax.Array, dim: int) -> jax.Array:
    """Returns sines and cosines of the time, at frequencies from 1 down to 1 / 10,000."""
    frequencies = jnp.exp(-jnp.log(10_000.0) * jnp.arange(dim // 2) / (dim // 2 - 1))
    angles = time_B[:, None] * frequencies
    return jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], axis=-1)


class Residual(nnx.Module):
    """Two convolutions, each after GroupNorm and SiLU, with the time added between them; the input is added."""

    def __init__(self, config: UNetConfig, fan_in: int, fan_out: int, rngs: nnx.Rngs):
        groups = config.num_groups
        self.norm1 = nnx.GroupNorm(fan_in, groups, epsilon=1e-6, rngs=rngs)
        self.conv1 = conv(fan_in, fan_out, 3, rngs)
        self.time = nnx.Linear(4 * config.width, fan_out, kernel_init=INIT, rngs=rngs)
        self.norm2 = nnx.GroupNorm(fan_out, groups, epsilon=1e-6, rngs=rngs)
        self.drop = nnx.Dropout(config.dropout, rngs=rngs if config.dropout else None)
        self.conv2 = conv(fan_out, fan_out, 3, rngs, init=LAST_INIT)
        self.shortcut = None if fan_in == fan_out else conv(fan_in, fan_out, 1, rngs)

    def __call__(self, x_BYXC: jax.Array, time_BD: jax.Array) -> jax.Array:
        h_BYXC = self.conv1(jax.nn.silu(self.norm1(x_BYXC)))
        h_BYXC = h_BYXC + self.time(jax.nn.silu(time_BD))[:, None, None]
        h_BYXC = self.conv2(self.drop(jax.nn.silu(self.norm2(h_BYXC))))
        return h_BYXC + (self.shortcut(x_BYXC) if self.shortcut else x_BYXC)


class Attention(nnx.Module):
    """Self-attention over the positions of an image, with one head."""

    def __init__(self, config: UNetConfig, width: int, rngs: nnx.Rngs):
        self.norm = nnx.GroupNorm(width, config.num_groups, epsilon=1e-6, rngs=rngs)
        self.q, self.k, self.v = (nnx.Linear(width, width, kernel_init=INIT, rngs=rngs) for _ in range(3))
        self.out = nnx.Linear(width, width, kernel_init=LAST_INIT, rngs=rngs)

    def __call__(self, x_BYXC: jax.Array) -> jax.Array:
        x_BTC = self.norm(x_BYXC).reshape(x_BYXC.shape[0], -1, x_BYXC.shape[-1])
        q_BT1C, k_BT1C, v_BT1C = (project(x_BTC)[:, :, None] for project in (self.q, self.k, self.v))
        h_BT1C = jax.nn.dot_product_attention(q_BT1C, k_BT1C, v_BT1C)
        return x_BYXC + self.out(h_BT1C.reshape(x_BYXC.shape))


class Block(nnx.Module):
    """A residual block, followed by attention if `size` is the configuration's `attention_size`."""

    def __init__(self, config: UNetConfig, size: int, fan_in: int, fan_out: int, rngs: nnx.Rngs):
        self.residual = Residual(config, fan_in, fan_out, rngs)
        self.attention = Attention(config, fan_out, rngs) if size == config.attention_size else None

    def __call__(self, x_BYXC: jax.Array, time_BD: jax.Array) -> jax.Array:
        x_BYXC = self.residual(x_BYXC, time_BD)
        return self.attention(x_BYXC) if self.attention else x_BYXC


class Level(nnx.Module):
    """The blocks at one image size, and the convolution that halves or doubles the size afterwards."""

    def __init__(self, blocks: list[Block], resize: nnx.Conv | None):
        self.blocks = nnx.List(blocks)
        self.resize = resize


class UNet(nnx.Module):
    """Maps noisy images (B, height, width, 3) and their times (B,) to the predicted noise."""

    def __init__(self, config: UNetConfig, rngs: nnx.Rngs):
        self.config = config
        width = config.width
        self.time_in = nnx.Linear(width, 4 * width, kernel_init=INIT, rngs=rngs)
        self.time_out = nnx.Linear(4 * width, 4 * width, kernel_init=INIT, rngs=rngs)
        self.enter = conv(3, width, 3, rngs)

        levels = [(config.image_size >> level, width * times) for level, times in enumerate(config.multipliers)]
        last_size, _ = levels[-1]
        skip_widths = [width]  # the channels of the skip connections
        down = []
        for size, fan_out in levels:
            blocks = []
            for _ in range(config.blocks_per_level):
                blocks.append(Block(config, size, skip_widths[-1], fan_out, rngs))
                skip_widths.append(fan_out)
            down.append(Level(blocks, conv(fan_out, fan_out, 3, rngs, stride=2) if size != last_size else None))
            skip_widths.extend([fan_out] if size != last_size else [])
        fan_in = skip_widths[-1]
        self.middle_in, self.middle_out = (Residual(config, fan_in, fan_in, rngs) for _ in range(2))
        self.middle_attention = Attention(config, fan_in, rngs)
        up = []
        for size, fan_out in reversed(levels):
            blocks = []
            for _ in range(config.blocks_per_level + 1):
                blocks.append(Block(config, size, fan_in + skip_widths.pop(), fan_out, rngs))
                fan_in = fan_out
            up.append(Level(blocks, conv(fan_out, fan_out, 3, rngs) if size != config.image_size else None))
        self.down = nnx.List(down)
        self.up = nnx.List(up)

        self.norm = nnx.GroupNorm(fan_in, config.num_groups, epsilon=1e-6, rngs=rngs)
        self.leave = conv(fan_in, 3, 3, rngs, init=LAST_INIT)
        self.noise = rngs["noise"].fork()

    def __call__(self, x_BYXC: jax.Array, time_B: jax.Array) -> jax.Array:
        time_BD = self.time_out(jax.nn.silu(self.time_in(embed_time(time_B, self.config.width))))
        skips = [self.enter(x_BYXC)]
        for level in self.down:
            for block in level.blocks:
                skips.append(block(skips[-1], time_BD))
            if level.resize:
                skips.append(level.resize(skips[-1]))
        x_BYXC = self.middle_attention(self.middle_in(skips[-1], time_BD))
        x_BYXC = self.middle_out(x_BYXC, time_BD)
        for level in self.up:
            for block in level.blocks:
                x_BYXC = block(jnp.concatenate([x_BYXC, skips.pop()], axis=-1), time_BD)
            if level.resize:
                x_BYXC = level.resize(x_BYXC.repeat(2, axis=1).repeat(2, axis=2))
        return self.leave(jax.nn.silu(self.norm(x_BYXC)))


def signal_share(config: UNetConfig) -> jax.Array:
    """Returns the share of signal variance at each time: the paper's alpha bar, for linearly spaced betas."""
    return jnp.cumprod(1 - jnp.linspace(*config.betas, config.num_times))


def loss(model: UNet, batch: dict[str, jax.Array]) -> jax.Array:
    """Returns the mean squared error of the predicted noise at random times (equation 14); `images` are in [-1, 1]."""
    images_BYXC = batch["images"]
    time_B = jax.random.randint(model.noise(), images_BYXC.shape[:1], 0, model.config.num_times)
    noise_BYXC = jax.random.normal(model.noise(), images_BYXC.shape, images_BYXC.dtype)
    share_B111 = signal_share(model.config)[time_B][:, None, None, None].astype(images_BYXC.dtype)
    noisy_BYXC = jnp.sqrt(share_B111) * images_BYXC + jnp.sqrt(1 - share_B111) * noise_BYXC
    return jnp.mean(jnp.square(model(noisy_BYXC, time_B) - noise_BYXC).astype(jnp.float32))


def sample(model: UNet, key: jax.Array, num_images: int) -> jax.Array:
    """Samples images from noise (algorithm 2, with variances of beta)."""
    config = model.config
    betas = jnp.linspace(*config.betas, config.num_times)
    share = signal_share(config)

    def denoise(step: jax.Array, x_BYXC: jax.Array) -> jax.Array:
        time = config.num_times - 1 - step
        noise_BYXC = model(x_BYXC, jnp.full(num_images, time))
        mean_BYXC = (x_BYXC - betas[time] / jnp.sqrt(1 - share[time]) * noise_BYXC) / jnp.sqrt(1 - betas[time])
        fresh_BYXC = jax.random.normal(jax.random.fold_in(key, time), x_BYXC.shape)
        return mean_BYXC + jnp.where(time > 0, jnp.sqrt(betas[time]), 0) * fresh_BYXC

    shape = (num_images, config.image_size, config.image_size, 3)
    return jax.lax.fori_loop(0, config.num_times, denoise, jax.random.normal(key, shape))


def adam(learning_rate: float, num_steps: int, *, state_dtype: Any = None) -> optax.GradientTransformation:
    """Returns Adam with 5,000 warmup steps (1/20 of a shorter run) and gradients clipped to a norm of 1.

    `state_dtype` applies to the first moment only: the second averages 1,000 steps, too many for bfloat16.
    """
    warmup = max(1, min(5000, num_steps // 20))
    schedule = optax.linear_schedule(0.0, learning_rate, warmup)
    return optax.chain(optax.clip_by_global_norm(1.0), optax.adam(logged(schedule), mu_dtype=state_dtype))


def example_batch(batch_size: int, image_size: int) -> dict[str, jax.ShapeDtypeStruct]:
    """Returns the shapes and dtypes of a batch for `loss`."""
    return {"images": jax.ShapeDtypeStruct((batch_size, image_size, image_size, 3), jnp.float32)}
