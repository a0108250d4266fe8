"""Phi 1 to 2, and Phi 3 and 4, in plain Flax NNX.

`Phi` adds attention and MLP of the same normed input, and has biases. `Phi3` is a Llama whose queries, keys and values
are one matrix, and so are the gate and the input of its MLP.

Source: Gunasekar et al., "Textbooks Are All You Need", 2023 (arXiv 2306.11644), section 2.3; Abdin et al., "Phi-3",
2024 (arXiv 2404.14219), section 2; with modeling_phi.py and modeling_phi3.py of transformers.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from flax import nnx
from layers import INIT, RMSNorm, attend, gelu, heads, merged, rotate


@dataclass(frozen=True)
class PhiConfig:
    """`rotary_share` of the channels of a head are rotated; only `Phi3` has a `window` and tied embeddings."""

    vocab_size: int
    seq_len: int
    num_layers: int
    num_heads: int
    embed_dim: int
    mlp_dim: int
    num_kv_heads: int | None = None
    rotary_share: float = 0.5
    rope_theta: float = 10_000.0
    norm_epsilon: float = 1e-5
    window: int | None = None
    tied_embeddings: bool = False


class Attention(nnx.Module):
    def __init__(self, config: PhiConfig, rngs: nnx.Rngs):
        self.theta = config.rope_theta
        self.share = config.rotary_share
        head_dim = config.embed_dim // config.num_heads
        num_kv_heads = config.num_kv_heads or config.num_heads
        self.q = heads(config.embed_dim, config.num_heads, head_dim, rngs, use_bias=True)
        self.k = heads(config.embed_dim, num_kv_heads, head_dim, rngs, use_bias=True)
        self.v = heads(config.embed_dim, num_kv_heads, head_dim, rngs, use_bias=True)
        self.out = merged(config.num_heads, head_dim, config.embed_dim, rngs, use_bias=True)

    def __call__(self, x_BTD):
        q, k = (rotate(item(x_BTD), self.theta, self.share) for item in (self.q, self.k))
        return self.out(attend(q, k, self.v(x_BTD)))


class Block(nnx.Module):
    def __init__(self, config: PhiConfig, rngs: nnx.Rngs):
        self.norm = nnx.LayerNorm(config.embed_dim, epsilon=config.norm_epsilon, rngs=rngs)
        self.attention = Attention(config, rngs)
        self.up = nnx.Linear(config.embed_dim, config.mlp_dim, kernel_init=INIT, rngs=rngs)
        self.down = nnx.Linear(config.mlp_dim, config.embed_dim, kernel_init=INIT, rngs=rngs)

    def __call__(self, x_BTD):
        h_BTD = self.norm(x_BTD)
        return x_BTD + self.attention(h_BTD) + self.down(gelu(self.up(h_BTD)))


class FusedAttention(nnx.Module):
    def __init__(self, config: PhiConfig, rngs: nnx.Rngs):
        self.config = config
        self.head_dim = config.embed_dim // config.num_heads
        self.num_kv_heads = config.num_kv_heads or config.num_heads
        width = config.num_heads + 2 * self.num_kv_heads
        self.qkv = heads(config.embed_dim, width, self.head_dim, rngs)
        self.out = merged(config.num_heads, self.head_dim, config.embed_dim, rngs)

    def __call__(self, x_BTD):
        c = self.config
        q, k, v = jnp.split(self.qkv(x_BTD), [c.num_heads, c.num_heads + self.num_kv_heads], axis=2)
        q, k = (rotate(item, c.rope_theta, c.rotary_share) for item in (q, k))
        return self.out(attend(q, k, v, window=c.window))


class FusedBlock(nnx.Module):
    def __init__(self, config: PhiConfig, rngs: nnx.Rngs):
        D = config.embed_dim
        self.attention_norm = RMSNorm(D, config.norm_epsilon, rngs)
        self.attention = FusedAttention(config, rngs)
        self.mlp_norm = RMSNorm(D, config.norm_epsilon, rngs)
        self.gate_up = nnx.LinearGeneral(D, (2, config.mlp_dim), use_bias=False, kernel_init=INIT, rngs=rngs)
        self.down = nnx.Linear(config.mlp_dim, D, use_bias=False, kernel_init=INIT, rngs=rngs)

    def __call__(self, x_BTD):
        x_BTD = x_BTD + self.attention(self.attention_norm(x_BTD))
        both_BT2F = self.gate_up(self.mlp_norm(x_BTD))
        return x_BTD + self.down(jax.nn.silu(both_BT2F[:, :, 0]) * both_BT2F[:, :, 1])


class Phi(nnx.Module):
    """Maps tokens to logits."""

    def __init__(self, config: PhiConfig, rngs: nnx.Rngs):
        self.embed = nnx.Param(INIT(rngs.params(), (config.vocab_size, config.embed_dim)))
        self.blocks = nnx.List([Block(config, rngs) for _ in range(config.num_layers)])
        self.norm = nnx.LayerNorm(config.embed_dim, epsilon=config.norm_epsilon, rngs=rngs)
        self.head = nnx.Linear(config.embed_dim, config.vocab_size, kernel_init=INIT, rngs=rngs)

    def __call__(self, tokens_BT):
        x_BTD = self.embed[tokens_BT]
        for block in self.blocks:
            x_BTD = block(x_BTD)
        return self.head(self.norm(x_BTD))


class Phi3(nnx.Module):
    """Maps tokens to logits."""

    def __init__(self, config: PhiConfig, rngs: nnx.Rngs):
        D, V = config.embed_dim, config.vocab_size
        self.embed = nnx.Param(INIT(rngs.params(), (V, D)))
        self.blocks = nnx.List([FusedBlock(config, rngs) for _ in range(config.num_layers)])
        self.norm = RMSNorm(D, config.norm_epsilon, rngs)
        is_tied = config.tied_embeddings
        self.head = None if is_tied else nnx.Linear(D, V, use_bias=False, kernel_init=INIT, rngs=rngs)

    def __call__(self, tokens_BT):
        x_BTD = self.embed[tokens_BT]
        for block in self.blocks:
            x_BTD = block(x_BTD)
        x_BTD = self.norm(x_BTD)
        return self.head(x_BTD) if self.head else x_BTD @ self.embed.T
