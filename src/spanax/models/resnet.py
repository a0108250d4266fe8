"""ResNet-50 in plain Flax NNX: bottleneck blocks with BatchNorm.

Source: He et al., "Deep Residual Learning", 2015 (arXiv 1512.03385), table 1, with projections where
shapes differ (option B); strides in the 3 x 3 convolutions, the last norm of a block initialized to zero and the
classifier's weights to a standard deviation of 0.01 as in Goyal et al., 2017 (arXiv 1706.02677), section 5.1.
"""

import dataclasses
import functools

import jax
from flax import nnx


@dataclasses.dataclass(frozen=True)
class ResNetConfig:
    """The configuration of a ResNet; `width` is the number of channels in the first stage."""

    image_size: int
    stage_sizes: tuple[int, ...]
    width: int
    num_classes: int = 1000


SIZES = {
    "nano": ResNetConfig(32, stage_sizes=(1, 1), width=16, num_classes=10),
    "50": ResNetConfig(224, stage_sizes=(3, 4, 6, 3), width=64),
}

INIT = nnx.initializers.variance_scaling(2.0, "fan_out", "normal")


class ConvNorm(nnx.Module):
    """A convolution without bias, then BatchNorm over the global batch."""

    def __init__(
        self,
        fan_in: int,
        fan_out: int,
        size: int,
        rngs: nnx.Rngs,
        stride: int = 1,
        scale: nnx.Initializer | None = None,
    ):
        self.conv = nnx.Conv(
            fan_in, fan_out, (size, size), stride, padding=size // 2, use_bias=False, kernel_init=INIT, rngs=rngs
        )
        self.norm = nnx.BatchNorm(
            fan_out, momentum=0.9, epsilon=1e-5, scale_init=scale or nnx.initializers.ones, rngs=rngs
        )

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.norm(self.conv(x)).astype(x.dtype)  # the norm's float32 statistics promote the result


class Bottleneck(nnx.Module):
    """A bottleneck block: 1 x 1, 3 x 3 and 1 x 1 convolutions, with a residual that is projected if shapes differ."""

    def __init__(self, fan_in: int, width: int, stride: int, rngs: nnx.Rngs):
        fan_out = 4 * width
        self.narrow = ConvNorm(fan_in, width, 1, rngs)
        self.conv = ConvNorm(width, width, 3, rngs, stride)
        self.widen = ConvNorm(width, fan_out, 1, rngs, scale=nnx.initializers.zeros)
        has_shortcut = stride > 1 or fan_in != fan_out
        self.shortcut = ConvNorm(fan_in, fan_out, 1, rngs, stride) if has_shortcut else None

    def __call__(self, x: jax.Array) -> jax.Array:
        y = jax.nn.relu(self.narrow(x))
        y = self.widen(jax.nn.relu(self.conv(y)))
        return jax.nn.relu(y + (self.shortcut(x) if self.shortcut else x))


class ResNet(nnx.Module):
    """Maps images (B, height, width, 3) to logits of the classes."""

    def __init__(self, config: ResNetConfig, rngs: nnx.Rngs):
        self.stem = ConvNorm(3, config.width, 7, rngs, stride=2)
        blocks = []
        fan_in = config.width
        for stage, num_blocks in enumerate(config.stage_sizes):
            width = config.width * 2**stage
            for index in range(num_blocks):
                blocks.append(Bottleneck(fan_in, width, 2 if stage and not index else 1, rngs))
                fan_in = 4 * width
        self.blocks = nnx.List(blocks)
        self.head = nnx.Linear(fan_in, config.num_classes, kernel_init=nnx.initializers.normal(0.01), rngs=rngs)

    def __call__(self, images: jax.Array) -> jax.Array:
        x = jax.nn.relu(self.stem(images))
        x = nnx.max_pool(x, (3, 3), strides=(2, 2), padding=((1, 1), (1, 1)))
        x = functools.reduce(lambda x, block: block(x), self.blocks, x)
        return self.head(x.mean((1, 2)))
