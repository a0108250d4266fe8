"""Kernels: attention that a platform's kernel supports is distinguished from other attention, with a reason."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest

from spanax.errors import SpanaxError
from spanax.models import gpt
from spanax.trace.jaxpr.graph import from_jaxpr
from spanax.trace.rewrites.attention.fuse import FusedAttention, fuse_attention
from spanax.trace.rewrites.attention.kernels import Kernel
from spanax.trace.rewrites.attention.operation import FORWARD


def shape(*sizes: int, dtype: str) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(sizes, dtype)


def kernels_in(function: Any, operands: Any, name: str) -> tuple[list[Kernel], list[str]]:
    outcomes: list[FusedAttention] = []
    jaxpr = jax.make_jaxpr(fuse_attention(function, name, outcomes))(*operands)
    return [op.params["kernel"] for op in from_jaxpr(jaxpr).ops() if op.name == FORWARD], [
        str(each) for each in outcomes
    ]


def causal(q: Any, k: Any, v: Any) -> Any:
    return jax.nn.dot_product_attention(q, k, v, is_causal=True)


def shifted(q: Any, k: Any, v: Any) -> Any:
    at = jnp.arange(q.shape[1])
    scores = jnp.einsum("bqhk,bshk->bhqs", q, k)
    return jnp.einsum("bhqs,bshk->bqhk", jax.nn.softmax(jnp.where(at[:, None] > at - 1 - (at == 37), scores, -1e9)), v)


def windowed(q: Any, k: Any, v: Any) -> Any:
    return jax.nn.dot_product_attention(q, k, v, is_causal=True, local_window_size=(16, 0))


def of_documents(q: Any, k: Any, v: Any) -> Any:
    segments = (q[..., 0, 0] > 0).astype("int32")
    return jax.nn.dot_product_attention(q, k, v, mask=gpt.of_documents(segments), is_causal=True)


def exact(q: Any, k: Any, v: Any) -> Any:
    scores = jnp.einsum("bqhk,bshk->bhqs", q, k, precision="highest")
    return jnp.einsum("bhqs,bshk->bqhk", jax.nn.softmax(scores), v)


@pytest.mark.parametrize(
    ("function", "kernel", "length", "width", "dtype", "why"),
    [
        (causal, "splash", 256, 64, "float32", None),
        (causal, "splash", 200, 64, "bfloat16", "200 queries and 200 keys, where splash supports multiples of 128"),
        (causal, "splash", 256, 512, "bfloat16", "heads of 512 and 512 channels"),
        (causal, "splash", 256, 64, "float16", "float16, where splash supports float32 or bfloat16"),
        (causal, "cudnn", 200, 64, "bfloat16", None),
        (causal, "cudnn", 256, 64, "float32", "float32, where cudnn supports float16 or bfloat16"),
        (causal, "cudnn", 256, 12, "bfloat16", "heads of 12 and 12 channels"),
        (shifted, "splash", 128, 64, "float32", "query 36 sees key 37, which a mask 'causal' hides"),
        (windowed, "splash", 128, 64, "float32", None),
        (windowed, "cudnn", 128, 64, "bfloat16", None),
        (of_documents, "splash", 128, 64, "float32", None),
        (of_documents, "cudnn", 128, 64, "bfloat16", "a mask of segments, which cudnn does not support"),
        (exact, "splash", 128, 64, "float32", "a precision that splash does not support"),
    ],
)
def test_limits_of_the_kernels(
    function: Any, kernel: str, length: int, width: int, dtype: str, why: str | None
) -> None:
    result, outcomes = kernels_in(function, [shape(2, length, 2, width, dtype=dtype)] * 3, kernel)
    assert len(result) == (why is None)
    assert (why or kernel) in outcomes[0]


def test_a_long_mask_is_evaluated_by_ranges() -> None:
    result, _ = kernels_in(causal, [shape(1, 131_072, 1, 128, dtype="bfloat16")] * 3, "splash")
    assert result[0].is_causal


def test_an_unknown_kernel_raises() -> None:
    from spanax.trace.jaxpr.remat_policies import known_attention, known_context

    with pytest.raises(SpanaxError, match="unknown context form 'spalsh'"):
        known_context("spalsh")
    with pytest.raises(SpanaxError, match="unknown attention 'fast'"):
        known_attention("fast")
