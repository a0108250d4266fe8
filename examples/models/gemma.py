"""Gemma 2 and 3 (text) in plain Flax NNX: norms before and after, windows by layer, soft caps or normed queries.

Source: Gemma Team, "Gemma 2", 2024 (arXiv 2408.00118), table 1; "Gemma 3", 2025 (arXiv 2503.19786), section 2.
"""

from dataclasses import dataclass

import jax.numpy as jnp
from flax import nnx
from layers import INIT, GatedMLP, RMSNorm, attend, gelu, heads, merged, rotate


@dataclass(frozen=True)
class GemmaConfig:
    """Every `full_every`-th layer attends to all positions, and the others to `window`; or `layer_types` lists them."""

    vocab_size: int
    seq_len: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    embed_dim: int
    mlp_dim: int
    head_dim: int = 256
    window: int = 4096
    full_every: int = 2
    layer_types: tuple[str, ...] | None = None
    query_scale: float = 256.0
    attention_cap: float | None = None
    logit_cap: float | None = None
    qk_norm: bool = False
    rope_theta: float = 10_000.0
    window_rope_theta: float = 10_000.0
    norm_epsilon: float = 1e-6


class Attention(nnx.Module):
    def __init__(self, config: GemmaConfig, is_full: bool, rngs: nnx.Rngs):
        c = config
        self.scale = c.query_scale**-0.5
        self.cap = c.attention_cap
        self.window = None if is_full else c.window
        self.theta = c.rope_theta if is_full else c.window_rope_theta
        self.q = heads(c.embed_dim, c.num_heads, c.head_dim, rngs)
        self.k = heads(c.embed_dim, c.num_kv_heads, c.head_dim, rngs)
        self.v = heads(c.embed_dim, c.num_kv_heads, c.head_dim, rngs)
        self.q_norm = RMSNorm(c.head_dim, c.norm_epsilon, rngs, offset=1) if c.qk_norm else None
        self.k_norm = RMSNorm(c.head_dim, c.norm_epsilon, rngs, offset=1) if c.qk_norm else None
        self.out = merged(c.num_heads, c.head_dim, c.embed_dim, rngs)

    def __call__(self, x_BTD):
        q, k, v = self.q(x_BTD), self.k(x_BTD), self.v(x_BTD)
        if self.q_norm:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k = rotate(q, self.theta), rotate(k, self.theta)
        return self.out(attend(q, k, v, scale=self.scale, window=self.window, cap=self.cap))


class Block(nnx.Module):
    def __init__(self, config: GemmaConfig, is_full: bool, rngs: nnx.Rngs):
        norm = [config.embed_dim, config.norm_epsilon, rngs, 1.0]
        self.attention_norm = RMSNorm(*norm)
        self.attention = Attention(config, is_full, rngs)
        self.attention_post_norm = RMSNorm(*norm)
        self.mlp_norm = RMSNorm(*norm)
        self.mlp = GatedMLP(config.embed_dim, config.mlp_dim, gelu, rngs)
        self.mlp_post_norm = RMSNorm(*norm)

    def __call__(self, x_BTD):
        x_BTD = x_BTD + self.attention_post_norm(self.attention(self.attention_norm(x_BTD)))
        return x_BTD + self.mlp_post_norm(self.mlp(self.mlp_norm(x_BTD)))


class Gemma(nnx.Module):
    """Maps tokens to logits."""

    def __init__(self, config: GemmaConfig, rngs: nnx.Rngs):
        self.config = config
        self.embed = nnx.Param(INIT(rngs.params(), (config.vocab_size, config.embed_dim)))
        is_full = [(number + 1) % config.full_every == 0 for number in range(config.num_layers)]
        if config.layer_types is not None:
            is_full = [kind == "full_attention" for kind in config.layer_types]
        assert len(is_full) == config.num_layers, f"{len(is_full)} layer_types for {config.num_layers} layers"
        self.blocks = nnx.List([Block(config, each, rngs) for each in is_full])
        self.norm = RMSNorm(config.embed_dim, config.norm_epsilon, rngs, offset=1)

    def __call__(self, tokens_BT):
        x_BTD = self.embed[tokens_BT]
        x_BTD = x_BTD * jnp.asarray(self.config.embed_dim**0.5, x_BTD.dtype)
        for block in self.blocks:
            x_BTD = block(x_BTD)
        logits_BTV = self.norm(x_BTD) @ self.embed.T
        cap = self.config.logit_cap
        return logits_BTV if cap is None else cap * jnp.tanh(logits_BTV / cap)
