"""The model of a published run: plain Flax NNX of its shape, traced without a device.

`spanax.models.gpt` where it has that shape, else `Decoder`, which has any widths, and one matmul where several read the
same operand, as the frameworks that were measured do. What the columns do not state (a gated MLP, the width of a head,
an output matrix of its own) follows from the number of parameters where it is stated, else from the name.
"""

import functools
import math
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

import spanax
from published.rows import Row, Skipped, whole
from spanax.models import gpt
from spanax.stack.stack import Stack
from spanax.trace.program import Program

GATED = ("llama", "mistral", "qwen", "gemma", "default-", "yi-", "deepseek", "palm", "olmo")
EXPERTS = (r"\bmoe\b", "mixtral", "deepseek", r"\d+x\d+b", r"-a\d+b", "gpt-oss", "experts", "kimi", "llama-?4", "grok")
NEAR = 0.03
"""How far the parameters of a shape may be from those stated."""


@dataclass(frozen=True)
class Shape:
    """Widths and depth of a decoder; `head_dim` times `num_heads` need not be `embed_dim`."""

    num_layers: int
    embed_dim: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    mlp_dim: int
    vocab_size: int
    seq_len: int
    gated: bool
    num_experts: int = 0
    experts_per_token: int = 0
    expert_dim: int = 0
    shared_dim: int = 0

    @property
    def is_mixture(self) -> bool:
        """Returns whether each token is routed to some of several experts."""
        return self.num_experts > 0

    @property
    def active_mlp_dim(self) -> int:
        """Returns the width of the MLPs that a token passes in a layer."""
        return self.experts_per_token * self.expert_dim + self.shared_dim if self.is_mixture else self.mlp_dim

    @property
    def layer_params(self) -> float:
        """Returns the parameters of the matmuls in all layers; of experts, those that a token passes."""
        attention = 2 * self.embed_dim * self.head_dim * (self.num_heads + self.num_kv_heads)
        return self.num_layers * (attention + (3 if self.gated else 2) * self.embed_dim * self.active_mlp_dim)

    @property
    def matmul_params(self) -> float:
        """Returns the same with the output matrix."""
        return self.layer_params + self.embed_dim * self.vocab_size


def shape_of(row: Row) -> Shape:
    """Returns the shape of a row's model.

    Raises:
      Skipped: its experts are not stated, or it has another number of parameters.
    """
    if row.states(r"deepseek-?_?v[23]", "kimi"):
        raise Skipped("latent attention")
    if row.embed_dim % (2 * row.num_heads) and not whole(row.text, "head_dim"):
        raise Skipped("the heads do not divide the width")
    if (whole(row.text, "head_dim") or 2) % 2:
        raise Skipped("a head of odd width")
    experts = [whole(row.text, key) for key in ("num_experts", "top_k", "expert_d_ff")]
    if all(experts):
        return _mixture(row, *(size or 0 for size in experts))
    if row.states(*EXPERTS) or (row.text.get("ep") or "1") not in ("1", "1.0"):
        raise Skipped("a mixture of experts, of which no column tells the experts")
    usual = Shape(
        num_layers=row.num_layers,
        embed_dim=row.embed_dim,
        num_heads=row.num_heads,
        num_kv_heads=row.num_kv_heads,
        head_dim=whole(row.text, "head_dim") or row.embed_dim // row.num_heads,
        mlp_dim=row.mlp_dim,
        vocab_size=row.vocab_size,
        seq_len=row.seq_len,
        gated=row.states(*GATED) or row.num_kv_heads < row.num_heads or row.mlp_dim != 4 * row.embed_dim,
    )
    if row.params is None:
        return usual
    candidates = [
        replace(usual, gated=gated, head_dim=head_dim)
        for gated in (usual.gated, not usual.gated)
        for head_dim in (usual.head_dim, 128, 256)
    ]
    # Whether embeddings are counted, of positions too, or an output matrix beside them, is the source's choice.
    for shape in candidates:
        tables = [k * shape.vocab_size + positions for k in (1, 2, 0) for positions in (0, shape.seq_len)]
        if any(abs((shape.layer_params + shape.embed_dim * size) / row.params - 1) <= NEAR for size in tables):
            return shape
    raise Skipped("not the parameters of a dense decoder of that shape")


def _mixture(row: Row, num_experts: int, experts_per_token: int, expert_dim: int) -> Shape:
    if row.seq_len * experts_per_token % num_experts:
        raise Skipped("the experts do not divide the routed tokens of a sequence")
    return Shape(
        row.num_layers, row.embed_dim, row.num_heads, row.num_kv_heads,
        head_dim=whole(row.text, "head_dim") or row.embed_dim // row.num_heads,
        mlp_dim=row.mlp_dim, vocab_size=row.vocab_size, seq_len=row.seq_len, gated=True, num_experts=num_experts,
        experts_per_token=experts_per_token, expert_dim=expert_dim, shared_dim=whole(row.text, "shared_d_ff") or 0,
    )  # fmt: skip


class Attention(nnx.Module):
    """Causal attention with rotary positions and one matmul for queries, keys and values.

    N keys and values are each shared by G queries: `qkv` is (D, N, G + 2, K), as Megatron-LM lays it out.
    """

    def __init__(self, shape: Shape, rngs: nnx.Rngs):
        N, G, K = shape.num_kv_heads, shape.num_heads // shape.num_kv_heads, shape.head_dim
        project = functools.partial(nnx.LinearGeneral, use_bias=False, rngs=rngs)
        self.qkv = project(shape.embed_dim, (N, G + 2, K))
        self.out = project((N, G, K), shape.embed_dim, axis=(-3, -2, -1))

    def __call__(self, x_BTD: jax.Array) -> jax.Array:
        qkv_BTNGK = self.qkv(x_BTD)
        q_BTNGK, k_BSNK, v_BSNK = qkv_BTNGK[..., :-2, :], qkv_BTNGK[..., -2, :], qkv_BTNGK[..., -1, :]
        q_BTNGK, k_BSNK = rotate(q_BTNGK), rotate(k_BSNK)
        scores_BNTGS = jnp.einsum("BTNGK,BSNK->BNTGS", q_BTNGK, k_BSNK) / q_BTNGK.shape[-1] ** 0.5
        causal_T1S = jnp.tril(jnp.ones((x_BTD.shape[1],) * 2, bool))[:, None]
        weights_BNTGS = jax.nn.softmax(jnp.where(causal_T1S, scores_BNTGS.astype(jnp.float32), -jnp.inf))
        return self.out(jnp.einsum("BNTGS,BSNK->BTNGK", weights_BNTGS.astype(x_BTD.dtype), v_BSNK))


def rotate(x: jax.Array) -> jax.Array:
    """Rotary positions: (B, T, ..., K) turned by an angle that grows with T (`spanax.models.llama`)."""
    half = x.shape[-1] // 2
    angles_TK = jnp.arange(x.shape[1])[:, None] * 10_000.0 ** (-jnp.arange(half) / half)
    angles = angles_TK.reshape(x.shape[1], *(1,) * (x.ndim - 3), half)
    left, right = jnp.split(x, 2, axis=-1)
    turned = [left * jnp.cos(angles) - right * jnp.sin(angles), right * jnp.cos(angles) + left * jnp.sin(angles)]
    return jnp.concatenate(turned, axis=-1).astype(x.dtype)


class MLP(nnx.Module):
    """Up and down with a GELU between; or up twice in one matmul, the one gating the other."""

    def __init__(self, shape: Shape, rngs: nnx.Rngs):
        D, F = shape.embed_dim, shape.mlp_dim
        self.up = nnx.LinearGeneral(D, (2 if shape.gated else 1, F), use_bias=False, rngs=rngs)
        self.down = nnx.Linear(F, D, use_bias=False, rngs=rngs)
        self.gated = shape.gated

    def __call__(self, x_BTD: jax.Array) -> jax.Array:
        up_BT2F = self.up(x_BTD)
        h_BTF = jax.nn.silu(up_BT2F[:, :, 0]) * up_BT2F[:, :, 1] if self.gated else jax.nn.gelu(up_BT2F[:, :, 0])
        return self.down(h_BTF)


class Experts(nnx.Module):
    """Gated MLPs with a load that is even: every expert computes its share of each sequence, and no token is dropped.

    Shape suffixes: E experts, C tokens of a sequence that an expert computes, K experts of a token, S tokens times K.
    Sorted by expert, the S routed tokens are C for each; a run with an uneven load waits for the busiest expert.
    """

    def __init__(self, shape: Shape, rngs: nnx.Rngs):
        E, D, F = shape.num_experts, shape.embed_dim, shape.expert_dim
        self.num_chosen = shape.experts_per_token
        self.router = nnx.Linear(D, E, use_bias=False, rngs=rngs)
        self.up = nnx.Param(gpt.INIT(rngs.params(), (E, D, 2, F)))
        self.down = nnx.Param(gpt.INIT(rngs.params(), (E, F, D)))
        self.shared = MLP(replace(shape, mlp_dim=shape.shared_dim), rngs) if shape.shared_dim else None

    def __call__(self, x_BTD: jax.Array) -> jax.Array:
        (B, T, D), E, K = x_BTD.shape, self.down.shape[0], self.num_chosen
        gates_BTK, chosen_BTK = jax.lax.top_k(jax.nn.softmax(self.router(x_BTD).astype(jnp.float32)), K)
        C = T * K // E
        # Slot c E + e is the c-th of expert e; sorted by expert, that routed token is number e C + c.
        order_BS = jnp.argsort(chosen_BTK.reshape(B, T * K), axis=1)
        number_S = jnp.arange(T * K) % E * C + jnp.arange(T * K) // E
        take = jax.vmap(lambda rows, indices: rows[indices])
        x_BCED = take(x_BTD, order_BS[:, number_S] // K).reshape(B, C, E, D)
        up_BCE2F = jnp.einsum("BCED,EDGF->BCEGF", x_BCED, self.up[...].astype(x_BTD.dtype))
        h_BCEF = jax.nn.silu(up_BCE2F[..., 0, :]) * up_BCE2F[..., 1, :]
        y_BSD = jnp.einsum("BCEF,EFD->BCED", h_BCEF, self.down[...].astype(x_BTD.dtype)).reshape(B, T * K, D)
        number_BTK = jnp.argsort(order_BS, axis=1).reshape(B, T, K)
        y_BTKD = take(y_BSD, number_BTK % C * E + number_BTK // C)
        y_BTD = (y_BTKD * gates_BTK[..., None].astype(x_BTD.dtype)).sum(2)
        return y_BTD if self.shared is None else y_BTD + self.shared(x_BTD)


class Block(nnx.Module):
    """One pre-norm block."""

    def __init__(self, shape: Shape, rngs: nnx.Rngs):
        self.norms = nnx.List([nnx.RMSNorm(shape.embed_dim, rngs=rngs) for _ in range(2)])
        self.attention = Attention(shape, rngs)
        self.mlp = Experts(shape, rngs) if shape.is_mixture else MLP(shape, rngs)

    def __call__(self, x_BTD: jax.Array) -> jax.Array:
        x_BTD = x_BTD + self.attention(self.norms[0](x_BTD))
        return x_BTD + self.mlp(self.norms[1](x_BTD))


class Decoder(nnx.Module):
    """Tokens in, logits out."""

    def __init__(self, shape: Shape, rngs: nnx.Rngs):
        self.embed = nnx.Param(gpt.INIT(rngs.params(), (shape.vocab_size, shape.embed_dim)))
        self.blocks = Stack(functools.partial(Block, shape), shape.num_layers, rngs=rngs)
        self.norm = nnx.RMSNorm(shape.embed_dim, rngs=rngs)
        self.head = nnx.Linear(shape.embed_dim, shape.vocab_size, use_bias=False, rngs=rngs)

    def __call__(self, tokens_BT: jax.Array) -> jax.Array:
        return self.head(self.norm(self.blocks(self.embed[tokens_BT])))


def builder(shape: Shape) -> tuple[Any, Any]:
    """What builds a shape's model, and its loss."""
    is_square = shape.head_dim * shape.num_heads == shape.embed_dim
    if (
        is_square
        and not shape.is_mixture
        and not shape.gated
        and shape.mlp_dim == 4 * shape.embed_dim
        and shape.num_kv_heads == shape.num_heads
    ):
        config = gpt.GPTConfig(shape.vocab_size, shape.seq_len, shape.num_layers, shape.num_heads, shape.embed_dim)
        return functools.partial(gpt.GPT, config), gpt.loss
    return functools.partial(Decoder, shape), gpt.loss


@functools.lru_cache(maxsize=8)
def program_of(shape: Shape, batch: int, remat: str) -> Program:
    """The train step of a shape, in bf16 with float32 state; `remat` as in `spanax.trace`."""
    build, loss = builder(shape)
    workload = spanax.Workload(build=build, batch=gpt.example_batch(batch, shape.seq_len), loss=loss)
    return workload.trace(learning_rate=1e-4, num_steps=100, compute_dtype=jax.numpy.bfloat16, remat=remat)


def padded(vocab_size: int, tensor: int) -> int:
    """A vocabulary as Megatron pads it: to a multiple of 128 for each device of the tensor axis."""
    return math.ceil(vocab_size / (128 * tensor)) * 128 * tensor
