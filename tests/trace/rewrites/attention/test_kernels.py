"""Kernels: attention that a platform's kernel supports is distinguished from other attention, with a reason."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest

import masks
from spanax.errors import SpanaxError
from spanax.models import gpt
from spanax.trace.jaxpr.graph import from_jaxpr
from spanax.trace.rewrites.attention.fuse import FusedAttention, fuse_attention
from spanax.trace.rewrites.attention.kernels import Kernel
from spanax.trace.rewrites.attention.operation import FORWARD


def given(dtype: str, length: int = masks.T) -> masks.Inputs:
    """The inputs of `masks` as shapes, with operands of a dtype and one key head for each query head."""
    return {
        name: shape(masks.B, length, *array.shape[2:-1], 64, dtype=dtype)
        if array.ndim == 4
        else jax.ShapeDtypeStruct((*array.shape[:1], *[length] * (array.ndim - 1)), array.dtype)
        for name, array in masks.inputs().items()
    }


@pytest.mark.parametrize("name", masks.MASKS)
def test_a_mask_is_recognized_however_it_is_written(name: str) -> None:
    function, told = masks.MASKS[name]
    outcomes: list[FusedAttention] = []
    graph = from_jaxpr(jax.make_jaxpr(fuse_attention(function, "splash", outcomes))(given("float32")))
    assert str(outcomes[0]) == f"splash for 256 x 256 {told}"
    assert not [value for op in graph.ops() for value in op.outputs if graph.shape(value)[-2:] == (masks.T, masks.T)]


def one_element(given: masks.Inputs) -> Any:
    """A causal mask of documents in which query 9 sees key 77, too."""
    q, k = masks.at(given)
    seen = ((q >= k) | ((q == 9) & (k == 77))) & masks.same(given)
    return masks.by_hand(given, lambda scores: jnp.where(seen[:, None], scores, -1e9))


def one_hole(given: masks.Inputs) -> Any:
    q, k = masks.at(given)
    seen = (q - k < 40) & (q >= k) & ~((q == 200) & (k == 170))
    return masks.by_hand(given, lambda scores: jnp.where(seen, scores, -jnp.inf))


def later_documents(given: masks.Inputs) -> Any:
    segments = given["segments"]
    seen = segments[:, :, None] >= segments[:, None, :]
    return masks.library(given, mask=seen[:, None])


def documents_or_near(given: masks.Inputs) -> Any:
    q, k = masks.at(given)
    return masks.library(given, mask=(masks.same(given) | (abs(q - k) < 3))[:, None])


def too_weak(given: masks.Inputs) -> Any:
    q, k = masks.at(given)
    return masks.by_hand(given, lambda scores: jnp.where(q >= k, scores, -1e3))


def unequal_rows(given: masks.Inputs) -> Any:
    """Padding with -1e9 twice: of a query that sees no key, the weights depend on which are masked twice."""
    q, k = masks.at(given)
    real = (given["segments"] > 0)[:, None, None, :]
    return masks.by_hand(given, lambda scores: scores + jnp.where(q >= k, 0.0, -1e9) + jnp.where(real, 0.0, -1e9))


def sloped(given: masks.Inputs) -> Any:
    q, k = masks.at(given)
    slopes = 2.0 ** -(jnp.arange(masks.H)[:, None, None] + 1.0)
    return masks.by_hand(given, lambda scores: jnp.where(q >= k, scores - slopes * (q - k), -1e9))


def shifted_sink(given: masks.Inputs) -> Any:
    return masks.with_sink(given, lambda scores: scores + 1.0)


LOOKALIKES = {
    shifted_sink: "a sink, and a number that is added to the other logits",
    one_element: "a mask of no known pattern: query 9 sees key 77, which a mask 'causal' hides",
    one_hole: "a mask of no known pattern: query 200 does not see key 170, which a mask 'causal, window of 40' shows",
    masks.sinked_window: "query 192 does not see key 64, which a mask 'causal' shows",
    later_documents: "a condition of queries and keys other than equal ids ('ge')",
    documents_or_near: "a condition of queries and keys other than equal ids",
    too_weak: "a mask whose logits of hidden keys are too high",
    unequal_rows: "queries that may see no key, and hidden logits that are not one number",
    sloped: "a bias of logits",
}


@pytest.mark.parametrize("function", LOOKALIKES, ids=lambda function: function.__name__)
def test_what_only_looks_like_a_mask_is_computed_in_blocks_with_the_reason(function: Any) -> None:
    for length, kind in ((256, "plain"), (1024, "blockwise")):
        outcomes: list[FusedAttention] = []
        graph = from_jaxpr(jax.make_jaxpr(fuse_attention(function, "splash", outcomes))(given("float32", length)))
        kernels = [op.params["kernel"] for op in graph.ops() if op.name == FORWARD]
        reason = LOOKALIKES[function]
        assert reason in str(outcomes[0]) or (length == 1024 and "which a mask 'causal' shows" in str(outcomes[0]))
        assert str(outcomes[0]).startswith(kind) and kernels == [None] * (kind == "blockwise")


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
