"""Lowers attention to the kernel of a platform where the plan chose one.

TPUs use splash attention, NVIDIA GPUs cuDNN. On any other platform, such as simulated devices, the step runs the same
attention block by block (`trace/rewrites/attention/operation.py`). Batch and heads are sharded as
`plan/sharding/attention.py` decides.
"""

import functools
import inspect
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.interpreters import mlir

from spanax.compat import cudnn_attention
from spanax.trace.jaxpr.remat_policies import CUDNN, SPLASH
from spanax.trace.rewrites.attention.kernels import Kernel
from spanax.trace.rewrites.attention.operation import (
    attention_grad_p,
    attention_p,
    backward_here,
    forward_here,
    row_products,
)
from spanax.trace.rewrites.attention.patterns import Pattern
from spanax.trace.rewrites.attention.scores import MASKED, Form

BLOCKS = (512, 384, 256, 128)
"""Block sizes of splash attention for queries and keys; the largest divisor applies, as in MaxText."""


def splash_forward(kernel: Kernel, form: Form, dtype: Any, operands: Any, interpret: bool = False) -> list[Any]:
    """Computes the output and the log-sum-exp of each row."""
    q, k, v, *extras = operands
    splash = _splash(kernel, _flat_q(form, q).shape, k.shape[-2], interpret)
    flat = _scaled(kernel, _flat_q(form, q)), _flat_k(form, k), _flat_k(form, v)
    sinks = _sinks(form, q, extras[-1]) if kernel.has_sink else None
    out, (log_sum,) = jax.vmap(splash)(*flat, _segments(kernel, form, q, extras), sinks)
    out = out.reshape(*q.shape[:-1], -1)
    log_sum = log_sum.reshape(q.shape[:-1])
    if kernel.masked is not None:  # the softmax of equal logits; of infinite ones it is undefined
        mean = v.astype(jnp.float32).mean(form.num_batch, keepdims=True) if np.isfinite(kernel.masked) else jnp.nan
        sees_none = log_sum <= MASKED
        mean = jnp.reshape(mean, _per_group(form, jnp.shape(mean)))
        out = jnp.where(sees_none[..., None], mean, out)
        log_sum = jnp.where(sees_none, kernel.masked, log_sum)
    return [out.astype(dtype), log_sum]


def _per_group(form: Form, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Returns the shape of a value of each key head beside those of the query heads that share it."""
    return (*shape[: form.num_batch], *[1] * form.num_rows, *shape[form.num_batch :]) if shape else ()


def splash_backward(kernel: Kernel, form: Form, operands: Any, interpret: bool = False) -> list[Any]:
    """Computes the gradients of q, k, v and a sink."""
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel

    q, k, v, grad_out, out, log_sum, *extras = operands
    splash = _splash(kernel, _flat_q(form, q).shape, k.shape[-2], interpret)
    flat_q = _flat_q(form, q)
    sees_none = log_sum <= MASKED
    if kernel.masked is not None:
        log_sum = jnp.where(sees_none, jnp.inf, log_sum)  # such rows have no part in the gradients of the kernel
    rows = _flat_q(form, log_sum[..., None])[..., 0]

    def back(q: Any, k: Any, v: Any, segments: Any, grad_out: Any, out: Any, log_sum: Any) -> Any:
        residuals = (q, k, v, segments, None, out, log_sum, splash.dq_mask_info, splash.dkv_mask_info)
        kwargs = splash.kwargs | {"save_residuals": False}
        names = [*inspect.signature(splash_attention_kernel._splash_attention_bwd).parameters][:-2]
        return splash_attention_kernel._splash_attention_bwd(*(kwargs[name] for name in names), residuals, grad_out)[
            3:6
        ]

    flat = _scaled(kernel, flat_q), _flat_k(form, k), _flat_k(form, v), _segments(kernel, form, q, extras)
    grad_q, grad_k, grad_v = jax.vmap(back)(*flat, _flat_q(form, grad_out), _flat_q(form, out), rows)
    grad_q, grad_k, grad_v = (
        grad.reshape(operand.shape)
        for grad, operand in zip((_scaled(kernel, grad_q), grad_k, grad_v), (q, k, v), strict=True)
    )
    if kernel.masked is not None:
        of_means = jnp.where(sees_none[..., None], grad_out.astype(jnp.float32), 0.0)
        of_mean = of_means.sum(tuple(range(form.num_batch, form.keys)))
        grad_v = grad_v + jnp.expand_dims(of_mean, form.num_batch) / form.sizes[form.keys]
    grads = [grad.astype(operand.dtype) for grad, operand in zip((grad_q, grad_k, grad_v), (q, k, v), strict=True)]
    if not kernel.has_sink:
        return grads
    of_rows = -jnp.exp(_by_row(form, q, extras[-1]) - log_sum) * row_products(out, grad_out)
    return [*grads, of_rows.sum([dim for dim in range(of_rows.ndim) if dim not in form.extras[-1]])]


def _by_row(form: Form, q: Any, sink: Any) -> Any:
    """Returns a sink with size 1 for the dims of rows that it lacks."""
    return jnp.expand_dims(sink, [dim for dim in range(q.ndim - 1) if dim not in form.extras[-1]])


def _sinks(form: Form, q: Any, sink: Any) -> Any:
    """Returns the sink of each query head, (batch, rows)."""
    heads = q.shape[: form.queries]
    sinks = jnp.broadcast_to(_by_row(form, q, sink)[..., 0], heads)
    return sinks.reshape(math.prod(heads[: form.num_batch]), -1)


def _segments(kernel: Kernel, form: Form, q: Any, extras: Any) -> Any:
    """Returns the ids of queries and keys, (batch, queries or keys); None without ids."""
    from jax.experimental.pallas.ops.tpu.splash_attention import SegmentIds

    if not kernel.has_ids:
        return None
    batch = q.shape[: form.num_batch]
    flat = []
    for array, labels in zip(extras[:2], form.extras[:2], strict=True):
        missing = [dim for dim in range(form.num_batch) if dim not in labels]
        array = jnp.broadcast_to(jnp.expand_dims(array, missing), (*batch, array.shape[-1]))
        flat.append(array.reshape(math.prod(batch), -1))
    return SegmentIds(*flat)


def _splash(kernel: Kernel, q_shape: tuple[int, ...], num_keys: int, interpret: bool) -> Any:
    """Returns the kernel for the query heads that share one key head."""
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel, splash_attention_mask

    _, rows, queries, _ = q_shape
    mask = splash_attention_mask.MultiHeadMask([_mask(kernel.pattern, queries, num_keys)] * rows)
    q_block, k_block = (next(block for block in BLOCKS if size % block == 0) for size in (queries, num_keys))
    sizes = splash_attention_kernel.BlockSizes(
        block_q=q_block,
        block_kv=k_block,
        block_kv_compute=k_block,
        block_q_dkv=q_block,
        block_kv_dkv=k_block,
        block_kv_dkv_compute=k_block,
        block_q_dq=q_block,
        block_kv_dq=k_block,
    )
    return splash_attention_kernel.make_splash_mqa_single_device(
        mask, block_sizes=sizes, save_residuals=True, interpret=interpret, attn_logits_soft_cap=kernel.cap
    )


def _mask(pattern: Pattern, queries: int, keys: int) -> Any:
    """Returns a pattern as a mask of splash attention, which computes it from positions."""
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask

    if pattern.is_full or pattern.is_causal:
        kind = splash_attention_mask.FullMask if pattern.is_full else splash_attention_mask.CausalMask
        return kind((queries, keys))

    class PatternMask(splash_attention_mask.Mask):  # type: ignore[misc, name-defined]
        """A mask that the kernel computes, as it does those of the module, because of these two attributes."""

        shape = (queries, keys)
        q_sequence = np.arange(queries, dtype=np.int32)
        mask_function = staticmethod(pattern.sees)

        def __getitem__(self, at: Any) -> np.ndarray:
            rows, columns = (slice_.indices(size) for slice_, size in zip(at, self.shape, strict=True))
            is_hidden, is_clear = pattern.known(np.asarray([rows[0], rows[1] - 1, columns[0], columns[1] - 1])[:, None])
            size = (rows[1] - rows[0], columns[1] - columns[0])
            if is_hidden[0] or is_clear[0]:
                return np.full(size, is_clear[0])
            return np.asarray(pattern.sees(np.arange(*rows)[:, None], np.arange(*columns)[None]))

        def __eq__(self, other: object) -> bool:
            return isinstance(other, splash_attention_mask.Mask) and hash(self) == hash(other)

        def __hash__(self) -> int:
            return hash((pattern, self.shape))

    return PatternMask()


def _scaled(kernel: Kernel, q: Any) -> Any:
    return (q.astype(jnp.float32) * kernel.scale).astype(q.dtype) if kernel.scale != 1.0 else q


def _flat_q(form: Form, q: Any) -> Any:
    """Reshapes to (batch, rows, queries, width)."""
    batch = q.shape[: form.num_batch]
    rows = q.shape[form.num_batch : form.queries]
    return q.reshape(math.prod(batch), math.prod(rows), *q.shape[form.queries :])


def _flat_k(form: Form, k: Any) -> Any:
    """Reshapes to (batch, keys, width)."""
    return k.reshape(math.prod(k.shape[: form.num_batch]), *k.shape[form.num_batch :])


# ---- cuDNN: operands have shape (batch, heads, length, width), with several query heads for each key head. Not through
# `jax.nn`, which queries a local GPU and adds a custom partitioner; here the operands are already partitioned.


def cudnn_forward(kernel: Kernel, form: Form, dtype: Any, operands: Any) -> list[Any]:
    """Computes the output and the log-sum-exp of each row."""
    cudnn = cudnn_attention()
    q, k, v = operands
    flat = [_heads(form, operand) for operand in (q, k, v)]
    out, log_sum = cudnn._dot_product_attention_fwd_impl(*flat, *_unused(q.dtype), **_kwargs(kernel), is_training=True)
    return [out.reshape(*q.shape[:-1], -1).astype(dtype), log_sum.reshape(q.shape[:-1])]


def cudnn_backward(kernel: Kernel, form: Form, operands: Any) -> list[Any]:
    """Computes the gradients of q, k and v."""
    cudnn = cudnn_attention()
    q, k, v, grad_out, out, log_sum = operands
    flat_q, flat_k, flat_v, grad_out, out = (_heads(form, grad) for grad in (q, k, v, grad_out, out))
    rows = log_sum.reshape(flat_q.shape[:-1])
    grads = cudnn._dot_product_attention_bwd_impl(
        flat_q, flat_k, flat_v, *_unused(q.dtype), rows, out, grad_out.astype(q.dtype), **_kwargs(kernel)
    )
    return [grad.reshape(operand.shape).astype(operand.dtype) for grad, operand in zip(grads, (q, k, v), strict=True)]


def _heads(form: Form, array: Any) -> Any:
    """Reshapes to (batch, heads, length, width); query heads that share a key head are contiguous."""
    examples = array.shape[0] if form.num_batch > 1 else 1
    return array.reshape(examples, -1, *array.shape[-2:])


def _unused(dtype: Any) -> list[Any]:
    """Returns empty bias, lengths, offsets and page tables."""
    return [jnp.zeros(0, dtype)] * 7


@functools.cache
def _has_score_mod() -> bool:
    cudnn = cudnn_attention()
    return "score_mod" in inspect.signature(cudnn.dot_product_attention).parameters


def _kwargs(kernel: Kernel) -> dict[str, Any]:
    cudnn = cudnn_attention()
    masks = cudnn.MaskType
    return {
        "scale": kernel.scale,
        "seed": 0,
        "dropout_rate": 0.0,
        "variadic_args": (False, False),
        "mask_type": masks.NO_MASK if kernel.pattern.is_full else masks.CAUSAL,
        "layout": cudnn.AttentionLayout.BNTH.value,
        "sliding_window_length": None if kernel.pattern.before is None else kernel.pattern.before + 1,
        **({"score_mod": None, "score_mod_args": ()} if _has_score_mod() else {}),
    }


# ---- lowering rules


def _lower(name: str, platform: str, forward: Any, backward: Any) -> None:
    """Registers lowering rules of both attention primitives on a platform, for operations that use kernel `name`."""

    def run_forward(q: Any, k: Any, v: Any, *extras: Any, form: Form, dtype: Any, kernel: Kernel | None) -> list[Any]:
        if kernel is None or kernel.name != name:
            return forward_here(q, k, v, *extras, form=form, dtype=dtype, kernel=kernel)
        return forward(kernel, form, dtype, (q, k, v, *extras))

    def run_backward(*operands: Any, form: Form, grads: tuple[bool, ...], kernel: Kernel | None) -> list[Any]:
        if kernel is None or kernel.name != name:
            return backward_here(*operands, form=form, grads=grads, kernel=kernel)
        return backward(kernel, form, operands)[: 3 + sum(grads)]  # a sink without a gradient is a constant

    for primitive, run in ((attention_p, run_forward), (attention_grad_p, run_backward)):
        mlir.register_lowering(primitive, mlir.lower_fun(run, multiple_results=True), platform=platform)


_lower(SPLASH, "tpu", splash_forward, splash_backward)
_lower(CUDNN, "cuda", cudnn_forward, cudnn_backward)
