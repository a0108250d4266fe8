"""Llama 3, and Qwen2 and Qwen3 by its options, in plain Flax NNX: RMSNorm, rotary positions, grouped queries, SwiGLU.

Shape suffixes: B batch, T positions, V vocab, D embed, F mlp, H heads, K head_dim.

Source: Grattafiori et al., "The Llama 3 Herd of Models", 2024 (arXiv 2407.21783), section 3.2 and table 3; Yang et
al., "Qwen2 Technical Report", 2024 (arXiv 2407.10671), section 2.2 and table 1; Yang et al., "Qwen3 Technical
Report", 2025 (arXiv 2505.09388), section 2 and table 1. Values that the papers omit (Llama 3.2, head_dim, MLP widths,
epsilon) are those of the published config.json; `seq_len` is the context length of most of the pretraining.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from spanax.stack.stack import Stack


@dataclasses.dataclass(frozen=True)
class RopeScaling:
    """How Llama 3.1 stretches rotary positions to contexts longer than `original_len`.

    Channels that rotate fewer than `low` times in `original_len` positions rotate `factor` times slower, those that
    rotate more than `high` times are unchanged, and those between are interpolated.

    Source: `apply_scaling` of meta-llama/llama-models, models/llama3/model.py; Llama 3.2's factor is 32.
    """

    factor: float = 8.0
    low: float = 1.0
    high: float = 4.0
    original_len: int = 8192


@dataclasses.dataclass(frozen=True)
class LlamaConfig:
    """The configuration of a Llama; `num_heads / num_kv_heads` queries share one key and value.

    `head_dim` defaults to `embed_dim / num_heads`. Qwen2 sets `qkv_bias`; Qwen3 sets `qk_norm`, an RMSNorm of queries
    and keys; small models set `tied_embeddings`, which reuses the embedding as the output matrix.
    """

    vocab_size: int
    seq_len: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    embed_dim: int
    mlp_dim: int
    rope_theta: float = 500_000.0
    remat: bool = False
    head_dim: int | None = None
    rope_scaling: RopeScaling | None = None
    qkv_bias: bool = False
    qk_norm: bool = False
    tied_embeddings: bool = False
    norm_epsilon: float = 1e-5


_llama_3_2 = functools.partial(LlamaConfig, 128_256, 8192, rope_scaling=RopeScaling(32.0), tied_embeddings=True)
_qwen2 = functools.partial(LlamaConfig, rope_theta=1e6, qkv_bias=True, norm_epsilon=1e-6)
_qwen3 = functools.partial(LlamaConfig, 151_936, 4096, rope_theta=1e6, qk_norm=True, norm_epsilon=1e-6, head_dim=128)

SIZES = {
    "nano": LlamaConfig(256, 64, num_layers=4, num_heads=8, num_kv_heads=4, embed_dim=128, mlp_dim=384),
    "8b": LlamaConfig(128_256, 8192, num_layers=32, num_heads=32, num_kv_heads=8, embed_dim=4096, mlp_dim=14336),
    "70b": LlamaConfig(128_256, 8192, num_layers=80, num_heads=64, num_kv_heads=8, embed_dim=8192, mlp_dim=28672),
    "405b": LlamaConfig(128_256, 8192, num_layers=126, num_heads=128, num_kv_heads=8, embed_dim=16384, mlp_dim=53248),
    "3.1-8b": LlamaConfig(128_256, 8192, 32, 32, 8, embed_dim=4096, mlp_dim=14336, rope_scaling=RopeScaling()),
    "3.2-1b": _llama_3_2(num_layers=16, num_heads=32, num_kv_heads=8, embed_dim=2048, mlp_dim=8192),
    "3.2-3b": _llama_3_2(num_layers=28, num_heads=24, num_kv_heads=8, embed_dim=3072, mlp_dim=8192),
    "qwen2-0.5b": _qwen2(151_936, 4096, 24, 14, 2, embed_dim=896, mlp_dim=4864, tied_embeddings=True),
    "qwen2-7b": _qwen2(152_064, 4096, 28, 28, 4, embed_dim=3584, mlp_dim=18944),
    "qwen3-0.6b": _qwen3(28, 16, 8, embed_dim=1024, mlp_dim=3072, tied_embeddings=True),
    "qwen3-8b": _qwen3(36, 32, 8, embed_dim=4096, mlp_dim=12288),
    "qwen3-32b": _qwen3(64, 64, 8, embed_dim=5120, mlp_dim=25600),
}

INIT = nnx.initializers.normal(0.02)


def residual_init(num_layers: int) -> nnx.Initializer:
    """Returns the initializer of a block's two residual projections, scaled so that variance does not grow in depth."""
    return nnx.initializers.normal(0.02 / (2 * num_layers) ** 0.5)


def rotate(x_BTHK: jax.Array, theta: float, scaling: RopeScaling | None = None) -> jax.Array:
    """Rotates pairs of channels, `i` and `i + K/2`, by an angle proportional to the position.

    Source: Su et al., "RoFormer", 2021 (arXiv 2104.09864), with Hugging Face's order of channels.
    """
    half = x_BTHK.shape[-1] // 2
    speed_K = theta ** (-jnp.arange(half) / half)
    if scaling is not None:
        turns_K = speed_K * scaling.original_len / (2 * jnp.pi)
        share_K = jnp.clip((turns_K - scaling.low) / (scaling.high - scaling.low), 0, 1)
        speed_K = speed_K * (share_K + (1 - share_K) / scaling.factor)
    angles_TK = jnp.arange(x_BTHK.shape[1])[:, None] * speed_K
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
        *,
        head_dim: int | None = None,
        rope_scaling: RopeScaling | None = None,
        qkv_bias: bool = False,
        qk_norm: bool = False,
        norm_epsilon: float = 1e-5,
    ):
        head_dim = head_dim or embed_dim // num_heads
        project = functools.partial(nnx.LinearGeneral, embed_dim, use_bias=qkv_bias, kernel_init=INIT, rngs=rngs)
        self.theta, self.scaling = rope_theta, rope_scaling
        self.q = project((num_heads, head_dim))
        self.k, self.v = (project((num_kv_heads, head_dim)) for _ in range(2))
        self.q_norm, self.k_norm = (
            nnx.RMSNorm(head_dim, epsilon=norm_epsilon, rngs=rngs) if qk_norm else None for _ in range(2)
        )
        self.out = nnx.LinearGeneral(
            (num_heads, head_dim), embed_dim, axis=(-2, -1), use_bias=False, kernel_init=out_init, rngs=rngs
        )

    def __call__(self, x_BTD: jax.Array) -> jax.Array:
        q_BTHK, k_BTHK = self.q(x_BTD), self.k(x_BTD)
        if self.q_norm and self.k_norm:
            q_BTHK, k_BTHK = self.q_norm(q_BTHK), self.k_norm(k_BTHK)
        q_BTHK, k_BTHK = (rotate(x_BTHK, self.theta, self.scaling) for x_BTHK in (q_BTHK, k_BTHK))
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
    """A pre-norm transformer block: attention, then the gated MLP."""

    def __init__(self, config: LlamaConfig, rngs: nnx.Rngs):
        D, out_init = config.embed_dim, residual_init(config.num_layers)
        self.attention_norm = nnx.RMSNorm(D, epsilon=config.norm_epsilon, rngs=rngs)
        self.attention = Attention(
            D,
            config.num_heads,
            config.num_kv_heads,
            config.rope_theta,
            out_init,
            rngs,
            head_dim=config.head_dim,
            rope_scaling=config.rope_scaling,
            qkv_bias=config.qkv_bias,
            qk_norm=config.qk_norm,
            norm_epsilon=config.norm_epsilon,
        )
        self.mlp_norm = nnx.RMSNorm(D, epsilon=config.norm_epsilon, rngs=rngs)
        self.mlp = SwiGLU(config, rngs)

    def __call__(self, x_BTD: jax.Array) -> jax.Array:
        x_BTD = x_BTD + self.attention(self.attention_norm(x_BTD))
        return x_BTD + self.mlp(self.mlp_norm(x_BTD))


class Llama(nnx.Module):
    """Maps tokens to logits."""

    def __init__(self, config: LlamaConfig, rngs: nnx.Rngs):
        self.config = config
        self.embed = nnx.Param(INIT(rngs.params(), (config.vocab_size, config.embed_dim)))
        block, remat = functools.partial(Block, config), "full" if config.remat else None
        self.blocks = Stack(block, config.num_layers, rngs=rngs, remat=remat)
        self.norm = nnx.RMSNorm(config.embed_dim, epsilon=config.norm_epsilon, rngs=rngs)
        is_tied, head = config.tied_embeddings, (config.embed_dim, config.vocab_size)
        self.head = None if is_tied else nnx.Linear(*head, use_bias=False, kernel_init=INIT, rngs=rngs)

    def __call__(self, tokens_BT: jax.Array) -> jax.Array:
        x_BTD = self.norm(self.blocks(self.embed[tokens_BT]))
        return self.head(x_BTD) if self.head else x_BTD @ self.embed.T


def loss(model: Llama, batch: dict[str, jax.Array]) -> jax.Array:
    """Returns the mean next-token cross-entropy in float32; `batch` has `inputs` and `targets`, int32 (B, T)."""
    logits_BTV = model(batch["inputs"]).astype(jnp.float32)
    return optax.softmax_cross_entropy_with_integer_labels(logits_BTV, batch["targets"]).mean()
