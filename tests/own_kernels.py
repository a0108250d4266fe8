"""Five Pallas kernels with their plain references, and a language model that calls all of them."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.experimental import pallas
from jax.experimental.pallas import tpu as pallas_tpu

import spanax

ROWS = 8
Array = Any


def call(kernel: Any, interpret: bool, **specs: Any) -> Any:
    return pallas.pallas_call(kernel, interpret=interpret, **specs)


def with_gradient(forward: Any, backward: Any) -> Any:
    """A function with residuals: `forward` returns its result and those."""
    function = jax.custom_vjp(lambda *args: forward(*args)[0])
    function.defvjp(forward, backward)
    return function


# ---- RMSNorm


def plain_norm(x: Array, weight: Array) -> Array:
    return x * jax.lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-6) * weight


def norm_kernel(x_ref: Any, weight_ref: Any, out_ref: Any, scale_ref: Any) -> None:
    x = x_ref[...]
    scale = jax.lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-6)
    scale_ref[...] = scale
    out_ref[...] = x * scale * weight_ref[...]


def norm(interpret: bool) -> Any:
    def forward(x: Array, weight: Array) -> Any:
        num, width = x.shape
        rows = pallas.BlockSpec((ROWS, width), lambda row: (row, 0))
        scales = pallas.BlockSpec((ROWS, 1), lambda row: (row, 0))
        out, scale = call(
            norm_kernel, interpret, grid=(num // ROWS,), out_specs=[rows, scales],
            in_specs=[rows, pallas.BlockSpec((1, width), lambda row: (0, 0))],
            out_shape=[jax.ShapeDtypeStruct(x.shape, x.dtype), jax.ShapeDtypeStruct((num, 1), x.dtype)],
        )(x, weight[None])  # fmt: skip
        return out, (x, weight, scale)

    def backward(saved: Any, grad: Array) -> Any:
        x, weight, scale = saved
        of_normed = grad * weight
        along = (of_normed * x).mean(-1, keepdims=True)
        return scale * (of_normed - x * scale**2 * along), (grad * x * scale).sum(0)

    return with_gradient(forward, backward)


# ---- cross-entropy of a projection, whose logits stay on the chip


def plain_loss(hidden: Array, table: Array, labels: Array) -> Array:
    logits = hidden @ table
    return jax.nn.logsumexp(logits, -1) - jnp.take_along_axis(logits, labels[:, None], 1)[:, 0]


def loss_kernel(hidden_ref: Any, table_ref: Any, labels_ref: Any, loss_ref: Any, sum_ref: Any) -> None:
    logits = jnp.dot(hidden_ref[...], table_ref[...], preferred_element_type=jnp.float32)
    top = logits.max(-1, keepdims=True)
    log_sum = top + jnp.log(jnp.exp(logits - top).sum(-1, keepdims=True))
    is_label = jax.lax.broadcasted_iota(jnp.int32, logits.shape, 1) == labels_ref[...]
    loss_ref[...] = log_sum - jnp.where(is_label, logits, 0.0).sum(-1, keepdims=True)
    sum_ref[...] = log_sum


def cross_entropy(interpret: bool) -> Any:
    def forward(hidden: Array, table: Array, labels: Array) -> Any:
        num, width = hidden.shape
        column = pallas.BlockSpec((ROWS, 1), lambda row: (row, 0))
        loss, log_sum = call(
            loss_kernel, interpret, grid=(num // ROWS,), out_specs=[column, column],
            in_specs=[
                pallas.BlockSpec((ROWS, width), lambda row: (row, 0)),
                pallas.BlockSpec(table.shape, lambda row: (0, 0)),
                column,
            ],
            out_shape=[jax.ShapeDtypeStruct((num, 1), jnp.float32)] * 2,
        )(hidden, table, labels[:, None])  # fmt: skip
        return loss[:, 0], (hidden, table, labels, log_sum)

    def backward(saved: Any, grad: Array) -> Any:
        hidden, table, labels, log_sum = saved
        of_logits = (jnp.exp(hidden @ table - log_sum) - jax.nn.one_hot(labels, table.shape[1])) * grad[:, None]
        return of_logits @ table.T, hidden.T @ of_logits, None

    return with_gradient(forward, backward)


# ---- causal attention


def plain_attention(q: Array, k: Array, v: Array) -> Array:
    scores = jnp.einsum("bhqd,bhkd->bhqk", q, k) / np.sqrt(q.shape[-1])
    return jnp.einsum("bhqk,bhkd->bhqd", jax.nn.softmax(masked(scores)), v)


def masked(scores: Array) -> Array:
    rank = scores.ndim
    queries, keys = (jax.lax.broadcasted_iota(jnp.int32, scores.shape, dim) for dim in (rank - 2, rank - 1))
    return jnp.where(queries >= keys, scores, -1e30)


def attention_kernel(q_ref: Any, k_ref: Any, v_ref: Any, out_ref: Any, sum_ref: Any) -> None:
    q, k, v = (ref[0, 0] for ref in (q_ref, k_ref, v_ref))
    scores = masked(jnp.dot(q, k.T, preferred_element_type=jnp.float32) / np.sqrt(q.shape[-1]))
    top = scores.max(-1, keepdims=True)
    weights = jnp.exp(scores - top)
    total = weights.sum(-1, keepdims=True)
    out_ref[0, 0] = jnp.dot(weights / total, v, preferred_element_type=jnp.float32)
    sum_ref[0, 0] = top + jnp.log(total)


def attention(interpret: bool) -> Any:
    def forward(q: Array, k: Array, v: Array) -> Any:
        batch, heads, length, _ = q.shape
        specs = [pallas.BlockSpec((1, 1, *array.shape[2:]), lambda b, h: (b, h, 0, 0)) for array in (q, k, v)]
        sums = pallas.BlockSpec((1, 1, length, 1), lambda b, h: (b, h, 0, 0))
        out, log_sum = call(
            attention_kernel, interpret, grid=(batch, heads), in_specs=specs, out_specs=[specs[2], sums],
            out_shape=[
                jax.ShapeDtypeStruct((*q.shape[:3], v.shape[3]), q.dtype),
                jax.ShapeDtypeStruct((*q.shape[:3], 1), q.dtype),
            ],
        )(q, k, v)  # fmt: skip
        return out, (q, k, v, out, log_sum)

    def backward(saved: Any, grad: Array) -> Any:
        q, k, v, out, log_sum = saved
        scale = 1 / np.sqrt(q.shape[-1])
        weights = jnp.exp(masked(jnp.einsum("bhqd,bhkd->bhqk", q, k) * scale) - log_sum)
        of_weights = jnp.einsum("bhqd,bhkd->bhqk", grad, v) - (grad * out).sum(-1, keepdims=True)
        of_scores = weights * of_weights * scale
        return (
            jnp.einsum("bhqk,bhkd->bhqd", of_scores, k),
            jnp.einsum("bhqk,bhqd->bhkd", of_scores, q),
            jnp.einsum("bhqk,bhqd->bhkd", weights, grad),
        )

    return with_gradient(forward, backward)


# ---- grouped matmul: each block of rows with the matrix of its expert


def plain_grouped(x: Array, weights: Array, experts: Array) -> Array:
    blocks = x.reshape(-1, ROWS, x.shape[1])
    return jnp.einsum("brk,bkn->brn", blocks, weights[experts]).reshape(x.shape[0], -1)


def grouped_kernel(experts_ref: Any, x_ref: Any, weights_ref: Any, out_ref: Any) -> None:
    out_ref[...] = jnp.dot(x_ref[...], weights_ref[0], preferred_element_type=jnp.float32)


def grouped(interpret: bool) -> Any:
    def product(x: Array, weights: Array, experts: Array) -> Array:
        num, width = x.shape
        out = weights.shape[2]
        return call(
            grouped_kernel, interpret,
            grid_spec=pallas_tpu.PrefetchScalarGridSpec(
                num_scalar_prefetch=1, grid=(num // ROWS,),
                in_specs=[
                    pallas.BlockSpec((ROWS, width), lambda row, experts: (row, 0)),
                    pallas.BlockSpec((1, width, out), lambda row, experts: (experts[row], 0, 0)),
                ],
                out_specs=pallas.BlockSpec((ROWS, out), lambda row, experts: (row, 0)),
            ),
            out_shape=jax.ShapeDtypeStruct((num, out), x.dtype),
        )(experts, x, weights)  # fmt: skip

    def backward(saved: Any, grad: Array) -> Any:
        x, weights, experts = saved
        blocks = [array.reshape(-1, ROWS, array.shape[1]) for array in (x, grad)]
        terms = jnp.einsum("brk,brn->bkn", *blocks)
        of_weights = jax.ops.segment_sum(terms, experts, weights.shape[0])
        return product(grad, weights.transpose(0, 2, 1), experts), of_weights, None

    return with_gradient(lambda *args: (product(*args), args), backward)


# ---- rotary embedding


def plain_rotary(x: Array, cos: Array, sin: Array) -> Array:
    cos, sin = map(jax.lax.stop_gradient, (cos, sin))
    first, second = jnp.split(x, 2, -1)
    cos, sin = cos[:, None], sin[:, None]
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], -1)


def rotary_kernel(x_ref: Any, cos_ref: Any, sin_ref: Any, out_ref: Any) -> None:
    out_ref[0] = plain_rotary(x_ref[0], cos_ref[...], sin_ref[...])


def rotary(interpret: bool) -> Any:
    def turned(x: Array, cos: Array, sin: Array) -> Array:
        batch, length, heads, width = x.shape
        rows = pallas.BlockSpec((1, ROWS, heads, width), lambda b, t: (b, t, 0, 0))
        angles = pallas.BlockSpec((ROWS, width // 2), lambda b, t: (t, 0))
        return call(
            rotary_kernel, interpret, grid=(batch, length // ROWS), in_specs=[rows, angles, angles], out_specs=rows,
            out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype),
        )(x, cos, sin)  # fmt: skip

    def backward(saved: Any, grad: Array) -> Any:
        return turned(grad, saved[0], -saved[1]), *map(jnp.zeros_like, saved)

    return with_gradient(lambda x, *angles: (turned(x, *map(jax.lax.stop_gradient, angles)), angles), backward)


PAIRS = {
    "norm": (norm, plain_norm),
    "cross_entropy": (cross_entropy, plain_loss),
    "attention": (attention, plain_attention),
    "grouped": (grouped, plain_grouped),
    "rotary": (rotary, plain_rotary),
}


@functools.cache
def kernels(kind: str) -> dict[str, Any]:
    """By name, `plain` references; `bare` or `compiled` kernels; with references, `own` or `tpu` ones."""
    if kind == "plain":
        return {name: plain for name, (_, plain) in PAIRS.items()}
    own = {name: make(kind in ("bare", "own")) for name, (make, _) in PAIRS.items()}
    if kind in ("bare", "compiled"):
        return own
    return {name: spanax.partition_like(own[name], plain) for name, (_, plain) in PAIRS.items()}


class Block(nnx.Module):
    def __init__(self, embed: int, heads: int, rngs: nnx.Rngs, kind: str) -> None:
        linear = functools.partial(nnx.Linear, use_bias=False, rngs=rngs)
        self.norms = nnx.Param(jnp.ones((2, embed)))
        self.q, self.k, self.v, self.out = (linear(embed, embed) for _ in range(4))
        self.up, self.down = (
            nnx.Param(jax.random.normal(rngs.params(), shape) / np.sqrt(embed))
            for shape in ((2, embed, 2 * embed), (2, 2 * embed, embed))
        )
        self.heads, self.kind = heads, kind

    def __call__(self, x: Array) -> Array:
        run = kernels(self.kind)
        batch, length, embed = x.shape
        width = embed // self.heads
        rows = lambda x, weight: run["norm"](x.reshape(-1, embed), weight)  # noqa: E731
        hidden = rows(x, self.norms[0])
        q, k, v = (layer(hidden).reshape(batch, length, self.heads, width) for layer in (self.q, self.k, self.v))
        angles = jnp.arange(length)[:, None] / 100.0 ** jnp.linspace(0, 1, width // 2)
        q, k = (run["rotary"](each, jnp.cos(angles), jnp.sin(angles)) for each in (q, k))
        mixed = run["attention"](*(each.swapaxes(1, 2) for each in (q, k, v))).swapaxes(1, 2)
        x = x + self.out(mixed.reshape(x.shape))
        hidden = rows(x, self.norms[1])
        experts = jnp.broadcast_to(jnp.arange(length // ROWS) % 2, (batch, length // ROWS)).reshape(-1)
        hidden = nnx.gelu(run["grouped"](hidden, self.up[...], experts))
        return x + run["grouped"](hidden, self.down[...], experts).reshape(x.shape)


class Model(nnx.Module):
    """A language model whose loss is computed by its kernels."""

    def __init__(self, vocab: int, embed: int, heads: int, layers: int, rngs: nnx.Rngs, kind: str = "own") -> None:
        # A product: XLA for CPUs all-reduces the gradient of a lookup where others are scattered.
        self.embed = nnx.Linear(vocab, embed, use_bias=False, rngs=rngs)
        self.blocks = nnx.List([Block(embed, heads, rngs, kind) for _ in range(layers)])
        self.norm = nnx.Param(jnp.ones(embed))
        self.head = nnx.Param(jax.random.normal(rngs.params(), (embed, vocab)) / np.sqrt(embed))
        self.kind = kind

    def __call__(self, tokens: Array) -> Array:
        run = kernels(self.kind)
        x = self.embed(jax.nn.one_hot(tokens[:, :-1], self.head.shape[1]))
        for block in self.blocks:
            x = block(x)
        x = run["norm"](x.reshape(-1, x.shape[-1]), self.norm[...])
        return run["cross_entropy"](x, self.head[...], tokens[:, 1:].reshape(-1)).mean()
