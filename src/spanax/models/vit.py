"""The vision transformer in plain Flax NNX: patches, a class token, learned positions, pre-norm blocks.

Shape suffixes: B batch, T tokens, D embed, F mlp, H heads, K head_dim, Y and X rows and columns of patches.

Source: Dosovitskiy et al., "An Image is Worth 16x16 Words", 2020 (arXiv 2010.11929), section 3.1 and table 1, with
the initial values of google-research/vision_transformer, vit_jax/models_vit.py, and the exact GELU; `g14` is ViT-g/14
of Zhai et al., "Scaling Vision Transformers", 2021 (arXiv 2106.04560), table 2, which counts 1,011 M without the
classes.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from flax import nnx

from spanax.stack.stack import Stack


@dataclasses.dataclass(frozen=True)
class ViTConfig:
    """The configuration of a vision transformer for square images."""

    image_size: int
    patch_size: int
    num_layers: int
    num_heads: int
    embed_dim: int
    mlp_dim: int
    num_classes: int = 1000
    remat: bool = False
    norm_epsilon: float = 1e-6


SIZES = {
    "nano": ViTConfig(32, 8, num_layers=4, num_heads=8, embed_dim=128, mlp_dim=512, num_classes=10),
    "b16": ViTConfig(224, 16, num_layers=12, num_heads=12, embed_dim=768, mlp_dim=3072),
    "l16": ViTConfig(224, 16, num_layers=24, num_heads=16, embed_dim=1024, mlp_dim=4096),
    "h14": ViTConfig(224, 14, num_layers=32, num_heads=16, embed_dim=1280, mlp_dim=5120),
    "g14": ViTConfig(224, 14, num_layers=40, num_heads=16, embed_dim=1408, mlp_dim=6144),
}

INIT = nnx.initializers.xavier_uniform()
BIAS_INIT = nnx.initializers.normal(1e-6)
QKV_INIT = nnx.initializers.lecun_uniform()
"""For the concatenated query, key and value matrices: the distribution of `INIT` for one of them."""


class Attention(nnx.Module):
    """Bidirectional self-attention."""

    def __init__(self, config: ViTConfig, rngs: nnx.Rngs):
        D = config.embed_dim
        heads = (config.num_heads, config.embed_dim // config.num_heads)
        self.qkv = nnx.LinearGeneral(D, (3, *heads), kernel_init=QKV_INIT, rngs=rngs)
        self.out = nnx.LinearGeneral(heads, D, axis=(-2, -1), kernel_init=INIT, rngs=rngs)

    def __call__(self, x_BTD: jax.Array) -> jax.Array:
        qkv_BT3HK = self.qkv(x_BTD)
        q_BTHK, k_BTHK, v_BTHK = (qkv_BT3HK[:, :, i] for i in range(3))
        return self.out(jax.nn.dot_product_attention(q_BTHK, k_BTHK, v_BTHK))


class Block(nnx.Module):
    """A pre-norm transformer block: attention, then an MLP."""

    def __init__(self, config: ViTConfig, rngs: nnx.Rngs):
        D = config.embed_dim
        F = config.mlp_dim
        self.attention_norm = nnx.LayerNorm(D, epsilon=config.norm_epsilon, rngs=rngs)
        self.attention = Attention(config, rngs)
        self.mlp_norm = nnx.LayerNorm(D, epsilon=config.norm_epsilon, rngs=rngs)
        self.up = nnx.Linear(D, F, kernel_init=INIT, bias_init=BIAS_INIT, rngs=rngs)
        self.down = nnx.Linear(F, D, kernel_init=INIT, bias_init=BIAS_INIT, rngs=rngs)

    def __call__(self, x_BTD: jax.Array) -> jax.Array:
        x_BTD = x_BTD + self.attention(self.attention_norm(x_BTD))
        return x_BTD + self.down(jax.nn.gelu(self.up(self.mlp_norm(x_BTD)), approximate=False))


class ViT(nnx.Module):
    """Maps images (B, height, width, 3) to logits of the classes."""

    def __init__(self, config: ViTConfig, rngs: nnx.Rngs):
        self.config = config
        D = config.embed_dim
        patch = (config.patch_size, config.patch_size)
        num_tokens = (config.image_size // config.patch_size) ** 2 + 1
        self.patches = nnx.Conv(3, D, patch, strides=patch, padding="VALID", rngs=rngs)
        self.class_token = nnx.Param(jnp.zeros((1, 1, D)))
        self.positions = nnx.Param(nnx.initializers.normal(0.02)(rngs.params(), (1, num_tokens, D)))
        block = functools.partial(Block, config)
        remat = "full" if config.remat else None
        self.blocks = Stack(block, config.num_layers, rngs=rngs, remat=remat)
        self.norm = nnx.LayerNorm(D, epsilon=config.norm_epsilon, rngs=rngs)
        self.head = nnx.Linear(D, config.num_classes, kernel_init=nnx.initializers.zeros, rngs=rngs)

    def __call__(self, images: jax.Array) -> jax.Array:
        x_BYXD = self.patches(images)
        x_BTD = x_BYXD.reshape(x_BYXD.shape[0], -1, x_BYXD.shape[-1])
        class_B1D = jnp.broadcast_to(self.class_token[...], (x_BTD.shape[0], 1, x_BTD.shape[-1]))
        x_BTD = jnp.concatenate([class_B1D.astype(x_BTD.dtype), x_BTD], axis=1) + self.positions
        x_BTD = self.blocks(x_BTD)
        return self.head(self.norm(x_BTD[:, 0]))
