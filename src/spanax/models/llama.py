"""Llama 3 in plain Flax NNX: RMSNorm, rotary positions, grouped queries, SwiGLU, an output matrix of its own.

Shape suffixes: B batch, T positions, V vocab, D embed, F mlp, H heads, K head_dim.

Source: Grattafiori et al., "The Llama 3 Herd of Models", 2024 (arXiv 2407.21783), section 3.2 and table 3.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from spanax.models.stack import Stack


@dataclasses.dataclass(frozen=True)
class LlamaConfig:
    """The shape of a Llama; `num_heads / num_kv_heads` queries share one key and value."""

    vocab_size: int
    seq_len: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    embed_dim: int
    mlp_dim: int
    rope_theta: float = 500_000.0
    remat: bool = False


SIZES = {
    "nano": LlamaConfig(256, 64, num_layers=4, num_heads=8, num_kv_heads=4, embed_dim=128, mlp_dim=384),
    "8b": LlamaConfig(128_256, 8192, num_layers=32, num_heads=32, num_kv_heads=8, embed_dim=4096, mlp_dim=14336),
    "70b": LlamaConfig(128_256, 8192, num_layers=80, num_heads=64, num_kv_heads=8, embed_dim=8192, mlp_dim=28672),
    "405b": LlamaConfig(128_256, 8192, num_layers=126, num_heads=128, num_kv_heads=8, embed_dim=16384, mlp_dim=53248),
}

INIT = nnx.initializers.normal(0.02)


def residual_init(num_layers: int) -> nnx.Initializer:
    """Two projections a block add to the residual stream: shrink each so that its variance stays flat in depth."""
    return nnx.initializers.normal(0.02 / (2 * num_layers) ** 0.5)


def rotate(x_BTHK: jax.Array, theta: float) -> jax.Array:
    """Turns pairs of channels, `i` and `i + K/2`, by an angle that grows with the position.

    Source: Su et al., "RoFormer", 2021 (arXiv 2104.09864), in the order of channels that Hugging Face keeps them in.
    """
    half = x_BTHK.shape[-1] // 2
    angles_TK = jnp.arange(x_BTHK.shape[1])[:, None] * theta ** (-jnp.arange(half) / half)
    cos_T1K, sin_T1K = jnp.cos(angles_TK)[:, None], jnp.sin(angles_TK)[:, None]
    left_BTHK, right_BTHK = jnp.split(x_BTHK, 2, axis=-1)
    turned = [left_BTHK * cos_T1K - right_BTHK * sin_T1K, right_BTHK * cos_T1K + left_BTHK * sin_T1K]
    return jnp.concatenate(turned, axis=-1).astype(x_BTHK.dtype)


class Attention(nnx.Module):
    """Causal self-attention with rotary positions; several heads of queries share one key and value.

    Source: Ainslie et al., "GQA", 2023 (arXiv 2305.13245).
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        num_kv_heads: int,
        rope_theta: float,
        out_init: nnx.Initializer,
        rngs: nnx.Rngs,
    ):
        head_dim = embed_dim // num_heads
        project = functools.partial(nnx.LinearGeneral, use_bias=False, rngs=rngs)
        self.theta = rope_theta
        self.q = project(embed_dim, (num_heads, head_dim), kernel_init=INIT)
        self.k, self.v = (project(embed_dim, (num_kv_heads, head_dim), kernel_init=INIT) for _ in range(2))
        self.out = project((num_heads, head_dim), embed_dim, axis=(-2, -1), kernel_init=out_init)

    def __call__(self, x_BTD: jax.Array) -> jax.Array:
        q_BTHK, k_BTHK = rotate(self.q(x_BTD), self.theta), rotate(self.k(x_BTD), self.theta)
        return self.out(jax.nn.dot_product_attention(q_BTHK, k_BTHK, self.v(x_BTD), is_causal=True))


class SwiGLU(nnx.Module):
    """The gated MLP (Shazeer, 2020, arXiv 2002.05202)."""

    def __init__(self, config: LlamaConfig, rngs: nnx.Rngs):
        D, F = config.embed_dim, config.mlp_dim
        self.gate, self.up = (nnx.Linear(D, F, use_bias=False, kernel_init=INIT, rngs=rngs) for _ in range(2))
        self.down = nnx.Linear(F, D, use_bias=False, kernel_init=residual_init(config.num_layers), rngs=rngs)

    def __call__(self, x_BTD: jax.Array) -> jax.Array:
        return self.down(jax.nn.silu(self.gate(x_BTD)) * self.up(x_BTD))


class Block(nnx.Module):
    """One pre-norm transformer block: attention, then the gated MLP."""

    def __init__(self, config: LlamaConfig, rngs: nnx.Rngs):
        D, out_init = config.embed_dim, residual_init(config.num_layers)
        self.attention_norm = nnx.RMSNorm(D, epsilon=1e-5, rngs=rngs)
        self.attention = Attention(D, config.num_heads, config.num_kv_heads, config.rope_theta, out_init, rngs)
        self.mlp_norm = nnx.RMSNorm(D, epsilon=1e-5, rngs=rngs)
        self.mlp = SwiGLU(config, rngs)

    def __call__(self, x_BTD: jax.Array) -> jax.Array:
        x_BTD = x_BTD + self.attention(self.attention_norm(x_BTD))
        return x_BTD + self.mlp(self.mlp_norm(x_BTD))


class Llama(nnx.Module):
    """Tokens in, logits out."""

    def __init__(self, config: LlamaConfig, rngs: nnx.Rngs):
        self.config = config
        self.embed = nnx.Param(INIT(rngs.params(), (config.vocab_size, config.embed_dim)))
        block, remat = functools.partial(Block, config), "full" if config.remat else None
        self.blocks = Stack(block, config.num_layers, rngs=rngs, remat=remat)
        self.norm = nnx.RMSNorm(config.embed_dim, epsilon=1e-5, rngs=rngs)
        self.head = nnx.Linear(config.embed_dim, config.vocab_size, use_bias=False, kernel_init=INIT, rngs=rngs)

    def __call__(self, tokens_BT: jax.Array) -> jax.Array:
        x_BTD = self.blocks(self.embed[tokens_BT])
        return self.head(self.norm(x_BTD))


def loss(model: Llama, batch: dict[str, jax.Array]) -> jax.Array:
    """Mean next-token cross-entropy in float32; `batch` holds `inputs` and `targets`, int32 (B, T)."""
    logits_BTV = model(batch["inputs"]).astype(jnp.float32)
    return optax.softmax_cross_entropy_with_integer_labels(logits_BTV, batch["targets"]).mean()
