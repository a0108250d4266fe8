"""GPT-2 (Radford et al., 2019) in plain Flax NNX: pre-norm blocks, learned positions, tied output embedding.

Shape suffixes: B batch, T and S positions of queries and keys, V vocab, D embed, F mlp, H heads, K head_dim.

Source: Radford et al., "Language Models are Unsupervised Multitask Learners", 2019, section 2.3 and table 2, with the
head_dim, GELU, epsilon and initial values of openai/gpt-2, src/model.py; Brown et al., "Language Models are Few-Shot
Learners", 2020 (arXiv 2005.14165), table 2.1.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from spanax.stack.stack import Stack


@dataclasses.dataclass(frozen=True)
class GPTConfig:
    """The configuration of a GPT; with `scan_layers`, layers are stacked and compile time does not grow with depth."""

    vocab_size: int
    seq_len: int
    num_layers: int
    num_heads: int
    embed_dim: int
    dropout: float = 0.0
    scan_layers: bool = True
    remat: bool = False


SIZES = {
    "nano": GPTConfig(256, seq_len=64, num_layers=4, num_heads=8, embed_dim=128),
    "gpt2": GPTConfig(50257, seq_len=1024, num_layers=12, num_heads=12, embed_dim=768),
    "gpt2-medium": GPTConfig(50257, seq_len=1024, num_layers=24, num_heads=16, embed_dim=1024),
    "gpt2-large": GPTConfig(50257, seq_len=1024, num_layers=36, num_heads=20, embed_dim=1280),
    "gpt2-xl": GPTConfig(50257, seq_len=1024, num_layers=48, num_heads=25, embed_dim=1600),
    "gpt3-175b": GPTConfig(50257, seq_len=2048, num_layers=96, num_heads=96, embed_dim=12288),
}

INIT = nnx.initializers.normal(0.02)
POSITIONS_INIT = nnx.initializers.normal(0.01)


def residual_init(num_layers: int) -> nnx.Initializer:
    """Returns the initializer of a block's two residual projections, scaled so that variance does not grow in depth."""
    return nnx.initializers.normal(0.02 / (2 * num_layers) ** 0.5)


def make_dropout(config: GPTConfig, rngs: nnx.Rngs) -> nnx.Dropout:
    """Returns a dropout layer, without random state if the rate is 0."""
    return nnx.Dropout(config.dropout, rngs=rngs if config.dropout else None)


def of_documents(segments_BT: jax.Array) -> jax.Array:
    """Returns the mask of attention, of shape [B, 1, T, S], where each position sees those of its own document."""
    return segments_BT[:, None, :, None] == segments_BT[:, None, None, :]


class Attention(nnx.Module):
    """Causal self-attention; heads are a separate dim of every parameter and activation."""

    def __init__(self, config: GPTConfig, rngs: nnx.Rngs):
        D = config.embed_dim
        heads = (config.num_heads, config.embed_dim // config.num_heads)
        self.qkv = nnx.LinearGeneral(D, (3, *heads), kernel_init=INIT, rngs=rngs)
        self.out = nnx.LinearGeneral(heads, D, axis=(-2, -1), kernel_init=residual_init(config.num_layers), rngs=rngs)
        self.drop = make_dropout(config, rngs)

    def __call__(self, x_BTD: jax.Array, segments_BT: jax.Array | None = None) -> jax.Array:
        qkv_BT3HK = self.qkv(x_BTD)
        q_BTHK, k_BSHK, v_BSHK = (qkv_BT3HK[:, :, i] for i in range(3))
        scores_BHTS = jnp.einsum("BTHK,BSHK->BHTS", q_BTHK, k_BSHK) / q_BTHK.shape[-1] ** 0.5
        causal_TS = jnp.tril(jnp.ones(scores_BHTS.shape[-2:], bool))
        mask = causal_TS if segments_BT is None else causal_TS & of_documents(segments_BT)
        weights_BHTS = jax.nn.softmax(jnp.where(mask, scores_BHTS.astype(jnp.float32), -jnp.inf))
        weights_BHTS = self.drop(weights_BHTS.astype(x_BTD.dtype))
        return self.out(jnp.einsum("BHTS,BSHK->BTHK", weights_BHTS, v_BSHK))


class Block(nnx.Module):
    """A pre-norm transformer block: attention, then an MLP four times as wide."""

    def __init__(self, config: GPTConfig, rngs: nnx.Rngs):
        D = config.embed_dim
        F = 4 * config.embed_dim
        self.attention_norm = nnx.LayerNorm(D, epsilon=1e-5, rngs=rngs)
        self.attention = Attention(config, rngs)
        self.mlp_norm = nnx.LayerNorm(D, epsilon=1e-5, rngs=rngs)
        self.up = nnx.Linear(D, F, kernel_init=INIT, rngs=rngs)
        self.down = nnx.Linear(F, D, kernel_init=residual_init(config.num_layers), rngs=rngs)
        self.drop = make_dropout(config, rngs)

    def __call__(self, x_BTD: jax.Array, segments_BT: jax.Array | None = None) -> jax.Array:
        x_BTD = x_BTD + self.drop(self.attention(self.attention_norm(x_BTD), segments_BT))
        h_BTF = jax.nn.gelu(self.up(self.mlp_norm(x_BTD)), approximate=True)
        return x_BTD + self.drop(self.down(h_BTF))


class GPT(nnx.Module):
    """Maps tokens to logits; documents that share a row have numbers, in `segments`, and positions of their own."""

    def __init__(self, config: GPTConfig, rngs: nnx.Rngs):
        self.config = config
        self.embed = nnx.Param(INIT(rngs.params(), (config.vocab_size, config.embed_dim)))
        self.positions = nnx.Param(POSITIONS_INIT(rngs.params(), (config.seq_len, config.embed_dim)))
        self.drop = make_dropout(config, rngs)
        if config.scan_layers:
            block = functools.partial(Block, config)
            remat = "full" if config.remat else None
            self.blocks = Stack(block, config.num_layers, rngs=rngs, remat=remat)
        else:
            self.blocks = nnx.List([Block(config, rngs) for _ in range(config.num_layers)])
        self.norm = nnx.LayerNorm(config.embed_dim, epsilon=1e-5, rngs=rngs)

    def __call__(
        self, tokens_BT: jax.Array, segments_BT: jax.Array | None = None, positions_BT: jax.Array | None = None
    ) -> jax.Array:
        positions = self.positions[: tokens_BT.shape[1]] if positions_BT is None else self.positions[positions_BT]
        x_BTD = self.drop(self.embed[tokens_BT] + positions)
        x_BTD = self.blocks(x_BTD, segments_BT) if self.config.scan_layers else self._loop(x_BTD, segments_BT)
        return self.norm(x_BTD) @ self.embed.T

    def _loop(self, x_BTD: jax.Array, segments_BT: jax.Array | None) -> jax.Array:
        apply = nnx.remat(Block.__call__) if self.config.remat else Block.__call__
        return functools.reduce(lambda x_BTD, block: apply(block, x_BTD, segments_BT), self.blocks, x_BTD)


def loss(model: GPT, batch: dict[str, jax.Array]) -> jax.Array:
    """Returns the mean next-token cross-entropy in float32; `batch` is as in `example_batch`."""
    documents = [batch[name] for name in ("segments", "positions") if name in batch]
    logits_BTV = model(batch["inputs"], *documents)
    return cross_entropy(logits_BTV, batch)


def cross_entropy(logits_BTV: jax.Array, batch: dict[str, jax.Array]) -> jax.Array:
    """Returns the mean cross-entropy of the targets, weighted by `weights` if the batch has them."""
    logits_BTV = logits_BTV.astype(jnp.float32)
    losses_BT = optax.softmax_cross_entropy_with_integer_labels(logits_BTV, batch["targets"])
    if "weights" not in batch:
        return losses_BT.mean()
    return (batch["weights"] * losses_BT).sum() / batch["weights"].sum()


def example_batch(batch_size: int, seq_len: int, is_chat: bool = False) -> dict[str, jax.ShapeDtypeStruct]:
    """Returns the shapes and dtypes of a batch for `loss`: of text, or of conversations that share rows.

    `inputs`, `targets`, `segments` and `positions` are int32 (B, T), and `weights` is float32.
    """
    tokens_BT = jax.ShapeDtypeStruct((batch_size, seq_len), jnp.int32)
    batch = {"inputs": tokens_BT, "targets": tokens_BT}
    if is_chat:
        weights_BT = jax.ShapeDtypeStruct((batch_size, seq_len), jnp.float32)
        batch |= {"weights": weights_BT, "segments": tokens_BT, "positions": tokens_BT}
    return batch
