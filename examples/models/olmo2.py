"""OLMo 2 in plain Flax NNX: the norms follow attention and MLP, and queries and keys are normed across all heads.

Source: OLMo Team, "2 OLMo 2 Furious", 2024 (arXiv 2501.00656), section 3.
"""

from dataclasses import dataclass

import jax
from flax import nnx
from layers import INIT, GatedMLP, RMSNorm, attend, heads, merged, rotate


@dataclass(frozen=True)
class Olmo2Config:
    vocab_size: int
    seq_len: int
    num_layers: int
    num_heads: int
    embed_dim: int
    mlp_dim: int
    num_kv_heads: int | None = None
    rope_theta: float = 500_000.0
    norm_epsilon: float = 1e-6
    head_dim: int | None = None
    tied_embeddings: bool = False


class Attention(nnx.Module):
    def __init__(self, config: Olmo2Config, rngs: nnx.Rngs):
        self.theta = config.rope_theta
        head_dim = config.head_dim or config.embed_dim // config.num_heads
        num_kv_heads = config.num_kv_heads or config.num_heads
        self.q = heads(config.embed_dim, config.num_heads, head_dim, rngs)
        self.k = heads(config.embed_dim, num_kv_heads, head_dim, rngs)
        self.v = heads(config.embed_dim, num_kv_heads, head_dim, rngs)
        self.q_norm = RMSNorm(config.num_heads * head_dim, config.norm_epsilon, rngs)
        self.k_norm = RMSNorm(num_kv_heads * head_dim, config.norm_epsilon, rngs)
        self.out = merged(config.num_heads, head_dim, config.embed_dim, rngs)

    def __call__(self, x_BTD):
        q, k, v = self.q(x_BTD), self.k(x_BTD), self.v(x_BTD)
        q = self.q_norm(q.reshape(*q.shape[:2], -1)).reshape(q.shape)
        k = self.k_norm(k.reshape(*k.shape[:2], -1)).reshape(k.shape)
        return self.out(attend(rotate(q, self.theta), rotate(k, self.theta), v))


class Block(nnx.Module):
    def __init__(self, config: Olmo2Config, rngs: nnx.Rngs):
        self.attention = Attention(config, rngs)
        self.attention_norm = RMSNorm(config.embed_dim, config.norm_epsilon, rngs)
        self.mlp = GatedMLP(config.embed_dim, config.mlp_dim, jax.nn.silu, rngs)
        self.mlp_norm = RMSNorm(config.embed_dim, config.norm_epsilon, rngs)

    def __call__(self, x_BTD):
        x_BTD = x_BTD + self.attention_norm(self.attention(x_BTD))
        return x_BTD + self.mlp_norm(self.mlp(x_BTD))


class Olmo2(nnx.Module):
    """Maps tokens to logits."""

    def __init__(self, config: Olmo2Config, rngs: nnx.Rngs):
        self.embed = nnx.Param(INIT(rngs.params(), (config.vocab_size, config.embed_dim)))
        self.blocks = nnx.List([Block(config, rngs) for _ in range(config.num_layers)])
        self.norm = RMSNorm(config.embed_dim, config.norm_epsilon, rngs)
        is_tied = config.tied_embeddings
        head = (config.embed_dim, config.vocab_size)
        self.head = None if is_tied else nnx.Linear(*head, use_bias=False, kernel_init=INIT, rngs=rngs)

    def __call__(self, tokens_BT):
        x_BTD = self.embed[tokens_BT]
        for block in self.blocks:
            x_BTD = block(x_BTD)
        x_BTD = self.norm(x_BTD)
        return self.head(x_BTD) if self.head else x_BTD @ self.embed.T
