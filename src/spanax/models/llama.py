"""Llama 3, and Qwen2, Qwen3 and Gemma by its options, in plain Flax NNX: RMSNorm, rotary positions, grouped queries.

Shape suffixes: B batch, T positions, V vocab, D embed, F mlp, H heads, K head_dim.

Source: Grattafiori et al., "The Llama 3 Herd of Models", 2024 (arXiv 2407.21783), section 3.2 and table 3; Yang et
al., "Qwen2 Technical Report", 2024 (arXiv 2407.10671), section 2.2 and table 1; Yang et al., "Qwen3 Technical
Report", 2025 (arXiv 2505.09388), section 2 and table 1; Gemma Team, "Gemma", 2024 (arXiv 2403.08295), section 2, with
the norm and the scale of embeddings of google-deepmind/gemma. Values that the papers omit (Llama 3.2, head_dim, MLP
widths, epsilon) are those of the published config.json; `seq_len` is the context length of most of the pretraining.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from spanax.models import gpt
from spanax.models.gpt import INIT, of_documents, residual_init
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
    and keys; small models set `tied_embeddings`, which reuses the embedding as the output matrix. Gemma sets
    `activation` to `gelu`, `norm_offset`, and `scaled_embeddings`, which multiplies them by `embed_dim ** 0.5`.
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
    activation: str = "silu"
    norm_offset: bool = False
    scaled_embeddings: bool = False


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

Documents = tuple[jax.Array | None, jax.Array | None]
"""The segments and the positions of documents that share rows, each (B, T)."""

NO_DOCUMENTS: Documents = (None, None)

ACTIVATIONS = {"silu": jax.nn.silu, "gelu": functools.partial(jax.nn.gelu, approximate=True)}


def rotate(
    x_BTHK: jax.Array, theta: float, scaling: RopeScaling | None = None, positions_BT: jax.Array | None = None
) -> jax.Array:
    """Rotates pairs of channels, `i` and `i + K/2`, by an angle proportional to the position.

    Positions are counted along T unless they are given.

    Source: Su et al., "RoFormer", 2021 (arXiv 2104.09864), with Hugging Face's order of channels.
    """
    half = x_BTHK.shape[-1] // 2
    speed_K = theta ** (-jnp.arange(half) / half)
    if scaling is not None:
        turns_K = speed_K * scaling.original_len / (2 * jnp.pi)
        share_K = jnp.clip((turns_K - scaling.low) / (scaling.high - scaling.low), 0, 1)
        speed_K = speed_K * (share_K + (1 - share_K) / scaling.factor)
    positions = jnp.arange(x_BTHK.shape[1]) if positions_BT is None else positions_BT
    angles = positions[..., None] * speed_K
    cos_T1K = jnp.cos(angles)[..., None, :]
    sin_T1K = jnp.sin(angles)[..., None, :]
    left_BTHK, right_BTHK = jnp.split(x_BTHK, 2, axis=-1)
    turned = [left_BTHK * cos_T1K - right_BTHK * sin_T1K, right_BTHK * cos_T1K + left_BTHK * sin_T1K]
    return jnp.concatenate(turned, axis=-1).astype(x_BTHK.dtype)


class OffsetRMSNorm(nnx.Module):
    """Gemma's norm, in float32: it multiplies by one plus the scale, which starts at zero."""

    def __init__(self, dim: int, epsilon: float, rngs: nnx.Rngs):
        self.scale = nnx.Param(nnx.initializers.zeros(rngs.params(), (dim,)))
        self.epsilon = epsilon

    def __call__(self, x: jax.Array) -> jax.Array:
        wide = x.astype(jnp.float32)
        normed = wide * jax.lax.rsqrt(jnp.mean(wide**2, axis=-1, keepdims=True) + self.epsilon)
        return (normed * (1 + self.scale.astype(jnp.float32))).astype(x.dtype)


def make_norm(config: LlamaConfig, dim: int, rngs: nnx.Rngs) -> nnx.RMSNorm | OffsetRMSNorm:
    """Returns a norm of the last dim."""
    norm = OffsetRMSNorm if config.norm_offset else nnx.RMSNorm
    return norm(dim, epsilon=config.norm_epsilon, rngs=rngs)


class Attention(nnx.Module):
    """Causal self-attention with rotary positions; several heads of queries share one key and value.

    Source: Ainslie et al., "GQA", 2023 (arXiv 2305.13245).
    """

    def __init__(self, config: LlamaConfig, rngs: nnx.Rngs):
        D = config.embed_dim
        head_dim = config.head_dim or config.embed_dim // config.num_heads
        heads = (config.num_heads, head_dim)
        kv_heads = (config.num_kv_heads, head_dim)
        project = functools.partial(nnx.LinearGeneral, D, use_bias=config.qkv_bias, kernel_init=INIT, rngs=rngs)
        self.theta = config.rope_theta
        self.scaling = config.rope_scaling
        self.q = project(heads)
        self.k = project(kv_heads)
        self.v = project(kv_heads)
        self.q_norm, self.k_norm = (make_norm(config, head_dim, rngs) if config.qk_norm else None for _ in range(2))
        self.out = nnx.LinearGeneral(
            heads, D, axis=(-2, -1), use_bias=False, kernel_init=residual_init(config.num_layers), rngs=rngs
        )

    def __call__(self, x_BTD: jax.Array, documents: Documents = NO_DOCUMENTS) -> jax.Array:
        q_BTHK = self.q(x_BTD)
        k_BTHK = self.k(x_BTD)
        if self.q_norm and self.k_norm:
            q_BTHK, k_BTHK = self.q_norm(q_BTHK), self.k_norm(k_BTHK)
        segments_BT, positions_BT = documents
        q_BTHK, k_BTHK = (rotate(x_BTHK, self.theta, self.scaling, positions_BT) for x_BTHK in (q_BTHK, k_BTHK))
        mask = None if segments_BT is None else of_documents(segments_BT)
        return self.out(jax.nn.dot_product_attention(q_BTHK, k_BTHK, self.v(x_BTD), mask=mask, is_causal=True))


class GatedMLP(nnx.Module):
    """The gated MLP (Shazeer, 2020, arXiv 2002.05202): SwiGLU, or Gemma's GeGLU with the tanh approximation."""

    def __init__(self, config: LlamaConfig, rngs: nnx.Rngs):
        D = config.embed_dim
        F = config.mlp_dim
        self.activation = ACTIVATIONS[config.activation]
        self.gate, self.up = (nnx.Linear(D, F, use_bias=False, kernel_init=INIT, rngs=rngs) for _ in range(2))
        self.down = nnx.Linear(F, D, use_bias=False, kernel_init=residual_init(config.num_layers), rngs=rngs)

    def __call__(self, x_BTD: jax.Array) -> jax.Array:
        return self.down(self.activation(self.gate(x_BTD)) * self.up(x_BTD))


class Block(nnx.Module):
    """A pre-norm transformer block: attention, then the gated MLP."""

    def __init__(self, config: LlamaConfig, rngs: nnx.Rngs):
        self.attention_norm = make_norm(config, config.embed_dim, rngs)
        self.attention = Attention(config, rngs)
        self.mlp_norm = make_norm(config, config.embed_dim, rngs)
        self.mlp = GatedMLP(config, rngs)

    def __call__(self, x_BTD: jax.Array, documents: Documents = NO_DOCUMENTS) -> jax.Array:
        x_BTD = x_BTD + self.attention(self.attention_norm(x_BTD), documents)
        return x_BTD + self.mlp(self.mlp_norm(x_BTD))


class Llama(nnx.Module):
    """Maps tokens to logits; documents that share a row have numbers, in `segments`, and positions of their own."""

    block: Callable[..., Any] = Block

    def __init__(self, config: LlamaConfig, rngs: nnx.Rngs):
        self.config = config
        self.embed = nnx.Param(INIT(rngs.params(), (config.vocab_size, config.embed_dim)))
        block = functools.partial(self.block, config)
        remat = "full" if config.remat else None
        self.blocks = Stack(block, config.num_layers, rngs=rngs, remat=remat)
        self.norm = make_norm(config, config.embed_dim, rngs)
        is_tied = config.tied_embeddings
        head = (config.embed_dim, config.vocab_size)
        self.head = None if is_tied else nnx.Linear(*head, use_bias=False, kernel_init=INIT, rngs=rngs)

    def __call__(
        self, tokens_BT: jax.Array, segments_BT: jax.Array | None = None, positions_BT: jax.Array | None = None
    ) -> jax.Array:
        return self.logits(self.blocks(self.embedded(tokens_BT), (segments_BT, positions_BT)))

    def embedded(self, tokens_BT: jax.Array) -> jax.Array:
        """Returns the embeddings of tokens."""
        x_BTD = self.embed[tokens_BT]
        if self.config.scaled_embeddings:
            x_BTD = x_BTD * jnp.asarray(self.config.embed_dim**0.5, x_BTD.dtype)
        return x_BTD

    def logits(self, x_BTD: jax.Array) -> jax.Array:
        """Returns the logits of the last block's output."""
        x_BTD = self.norm(x_BTD)
        return self.head(x_BTD) if self.head else x_BTD @ self.embed.T


loss = gpt.loss
