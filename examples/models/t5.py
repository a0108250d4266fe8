"""T5 in plain Flax NNX: an encoder and a decoder with relative positions; 1.0 has a ReLU, and 1.1 and Flan a gate.

Shape suffixes: B batch, T and S positions of queries and keys, H heads.

Source: Raffel et al., "T5", 2019 (arXiv 1910.10683), sections 2.1 and 3.2; Shazeer, 2020 (arXiv 2002.05202).
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from layers import INIT, RMSNorm, gelu, heads, merged


@dataclass(frozen=True)
class T5Config:
    """`mlp` is `relu` or `gated-gelu`; the outputs of 1.0 are scaled, and those of 1.1 have a matrix of their own."""

    vocab_size: int
    num_layers: int
    num_heads: int
    embed_dim: int
    head_dim: int
    mlp_dim: int
    seq_len: int = 512
    num_decoder_layers: int | None = None
    num_buckets: int = 32
    max_distance: int = 128
    mlp: str = "relu"
    scaled_outputs: bool = True
    tied_embeddings: bool = True
    norm_epsilon: float = 1e-6


def buckets(ago, num: int, most: int):
    """Returns the bucket of each distance: half of them for small distances, and half growing as the logarithm."""
    exact = num // 2
    larger = jnp.log(jnp.maximum(ago, 1) / exact) / jnp.log(most / exact) * (num - exact)
    return jnp.where(ago < exact, ago, jnp.minimum(exact + larger.astype(jnp.int32), num - 1))


class Positions(nnx.Module):
    """What is added to the scores of all layers, by distance; the decoder sees no later positions."""

    def __init__(self, config: T5Config, is_causal: bool, rngs: nnx.Rngs):
        self.is_causal = is_causal
        self.max_distance = config.max_distance
        self.embedding = nnx.Param(INIT(rngs.params(), (config.num_buckets, config.num_heads)))

    def __call__(self, length: int):
        ago_TS = jnp.arange(length)[:, None] - jnp.arange(length)
        num = self.embedding.shape[0]
        if self.is_causal:
            bucket_TS = buckets(jnp.maximum(ago_TS, 0), num, self.max_distance)
        else:
            bucket_TS = buckets(jnp.abs(ago_TS), num // 2, self.max_distance) + jnp.where(ago_TS < 0, num // 2, 0)
        bias_HTS = jnp.moveaxis(self.embedding[bucket_TS], -1, 0)
        return jnp.where(ago_TS >= 0, bias_HTS, -jnp.inf) if self.is_causal else bias_HTS


class Attention(nnx.Module):
    """Attention of normed inputs, without a scale, added to them."""

    def __init__(self, config: T5Config, rngs: nnx.Rngs):
        self.norm = RMSNorm(config.embed_dim, config.norm_epsilon, rngs)
        self.q, self.k, self.v = (heads(config.embed_dim, config.num_heads, config.head_dim, rngs) for _ in range(3))
        self.out = merged(config.num_heads, config.head_dim, config.embed_dim, rngs)

    def __call__(self, x_BTD, bias_HTS=0.0, encoded_BSD=None):
        h_BTD = self.norm(x_BTD)
        source_BSD = h_BTD if encoded_BSD is None else encoded_BSD
        scores_BHTS = jnp.einsum("BTHK,BSHK->BHTS", self.q(h_BTD), self.k(source_BSD)) + bias_HTS
        weights_BHTS = jax.nn.softmax(scores_BHTS.astype(jnp.float32)).astype(x_BTD.dtype)
        return x_BTD + self.out(jnp.einsum("BHTS,BSHK->BTHK", weights_BHTS, self.v(source_BSD)))


class MLP(nnx.Module):
    def __init__(self, config: T5Config, rngs: nnx.Rngs):
        assert config.mlp in ("relu", "gated-gelu"), f"mlp is {config.mlp}, not relu or gated-gelu"
        D, F = config.embed_dim, config.mlp_dim
        self.norm = RMSNorm(D, config.norm_epsilon, rngs)
        wide = ["up"] if config.mlp == "relu" else ["gate", "linear"]
        for name in wide:
            setattr(self, name, nnx.Linear(D, F, use_bias=False, kernel_init=INIT, rngs=rngs))
        self.is_gated = config.mlp != "relu"
        self.down = nnx.Linear(F, D, use_bias=False, kernel_init=INIT, rngs=rngs)

    def __call__(self, x_BTD):
        h_BTD = self.norm(x_BTD)
        h_BTF = gelu(self.gate(h_BTD)) * self.linear(h_BTD) if self.is_gated else jax.nn.relu(self.up(h_BTD))
        return x_BTD + self.down(h_BTF)


class EncoderBlock(nnx.Module):
    def __init__(self, config: T5Config, rngs: nnx.Rngs):
        self.attention = Attention(config, rngs)
        self.mlp = MLP(config, rngs)

    def __call__(self, x_BTD, bias_HTS):
        return self.mlp(self.attention(x_BTD, bias_HTS))


class DecoderBlock(nnx.Module):
    def __init__(self, config: T5Config, rngs: nnx.Rngs):
        self.attention = Attention(config, rngs)
        self.cross = Attention(config, rngs)
        self.mlp = MLP(config, rngs)

    def __call__(self, x_BTD, bias_HTS, encoded_BSD):
        return self.mlp(self.cross(self.attention(x_BTD, bias_HTS), encoded_BSD=encoded_BSD))


class T5(nnx.Module):
    """Maps the tokens of a text, and those before each token of the answer, to the logits of the answer."""

    def __init__(self, config: T5Config, rngs: nnx.Rngs):
        self.config = config
        D, V = config.embed_dim, config.vocab_size
        num_decoder_layers = config.num_decoder_layers or config.num_layers
        self.embed = nnx.Param(INIT(rngs.params(), (V, D)))
        self.encoder_positions = Positions(config, False, rngs)
        self.encoder = nnx.List([EncoderBlock(config, rngs) for _ in range(config.num_layers)])
        self.encoder_norm = RMSNorm(D, config.norm_epsilon, rngs)
        self.decoder_positions = Positions(config, True, rngs)
        self.decoder = nnx.List([DecoderBlock(config, rngs) for _ in range(num_decoder_layers)])
        self.decoder_norm = RMSNorm(D, config.norm_epsilon, rngs)
        is_tied = config.tied_embeddings
        self.head = None if is_tied else nnx.Linear(D, V, use_bias=False, kernel_init=INIT, rngs=rngs)

    def __call__(self, tokens_BS, answer_BT):
        x_BSD = self.embed[tokens_BS]
        bias_HSS = self.encoder_positions(tokens_BS.shape[1])
        for block in self.encoder:
            x_BSD = block(x_BSD, bias_HSS)
        encoded_BSD = self.encoder_norm(x_BSD)
        x_BTD = self.embed[answer_BT]
        bias_HTT = self.decoder_positions(answer_BT.shape[1])
        for block in self.decoder:
            x_BTD = block(x_BTD, bias_HTT, encoded_BSD)
        x_BTD = self.decoder_norm(x_BTD)
        if self.config.scaled_outputs:
            x_BTD = x_BTD * self.config.embed_dim**-0.5
        return self.head(x_BTD) if self.head else x_BTD @ self.embed.T


def loss(model: T5, batch):
    """Returns the mean cross-entropy of the second half of each text, given the first (section 3.2.1, prefix LM)."""
    half = batch["inputs"].shape[1] // 2
    logits_BTV = model(batch["inputs"][:, :half], batch["inputs"][:, half:]).astype(jnp.float32)
    return optax.softmax_cross_entropy_with_integer_labels(logits_BTV, batch["targets"][:, half:]).mean()
