"""Attention under masks as models write them: by JAX's function, by Flax's, and by hand with additive biases."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

B, T, H, G, K = 2, 256, 4, 2, 16
Inputs = dict[str, Any]


def inputs(seed: int = 0, length: int = T, batch: int = B) -> Inputs:
    """Operands, documents of three lengths a row with padding as segment 0, and lengths of rows."""
    random = np.random.default_rng(seed)
    sizes = {"q": (batch, length, H, K), "k": (batch, length, G, K), "v": (batch, length, G, K)}
    operands = {name: random.normal(size=size).astype("float32") for name, size in sizes.items()}
    ends = np.sort(random.integers(1, length, (batch, 3)), axis=1)
    segments = 1 + (np.arange(length) >= ends[:, :2, None]).sum(1)
    segments = np.where(np.arange(length) < ends[:, 2:], segments, 0).astype("int32")
    lengths = ends[:, 2].astype("int32")
    return operands | {"segments": segments, "lengths": lengths}


def library(given: Inputs, **asked: Any) -> Any:
    return jax.nn.dot_product_attention(given["q"], given["k"], given["v"], **asked)


def flax(given: Inputs, mask: Any) -> Any:
    k, v = (jnp.repeat(given[name], H // G, axis=2) for name in "kv")
    return nnx.dot_product_attention(given["q"], k, v, mask=mask)


def by_hand(given: Inputs, change: Callable[[Any], Any], *, scale: float = 0.3) -> Any:
    """Attention of heads whose scores, (B, H, T, T), a function changes."""
    k, v = (jnp.repeat(given[name], H // G, axis=2) for name in "kv")
    scores = change(jnp.einsum("bqhk,bshk->bhqs", given["q"], k) * scale)
    return jnp.einsum("bhqs,bshk->bqhk", jax.nn.softmax(scores, axis=-1), v)


def at(given: Inputs) -> tuple[Any, Any]:
    positions = jnp.arange(given["q"].shape[1])
    return positions[:, None], positions[None, :]


def same(given: Inputs) -> Any:
    segments = given["segments"]
    return segments[:, :, None] == segments[:, None, :]


def documents(given: Inputs) -> Any:
    return library(given, mask=same(given)[:, None])


def causal_documents(given: Inputs) -> Any:
    return library(given, mask=same(given)[:, None], is_causal=True)


def padded_documents(given: Inputs) -> Any:
    real = given["segments"] != 0
    return library(given, mask=(same(given) & real[:, :, None] & real[:, None, :])[:, None], is_causal=True)


def flax_documents(given: Inputs) -> Any:
    segments = given["segments"]
    of_documents = nnx.make_attention_mask(segments, segments, jnp.equal)
    return flax(given, nnx.combine_masks(of_documents, nnx.make_causal_mask(segments)))


def flax_padding(given: Inputs) -> Any:
    real = given["segments"] > 0
    return flax(given, nnx.combine_masks(nnx.make_attention_mask(real, real), nnx.make_causal_mask(real)))


def key_padding(given: Inputs) -> Any:
    real = (given["segments"] > 0).astype(jnp.float32)[:, None, None, :]
    return by_hand(given, lambda scores: scores + (1.0 - real) * jnp.finfo(jnp.float32).min)


def lengths(given: Inputs) -> Any:
    return library(given, query_seq_lengths=given["lengths"], key_value_seq_lengths=given["lengths"])


def added_documents(given: Inputs) -> Any:
    q, k = at(given)
    bias = jnp.where(same(given) & (q >= k), 0.0, -1e9)[:, None]
    return by_hand(given, lambda scores: scores + bias)


def twice_added(given: Inputs) -> Any:
    q, k = at(given)
    causal = jnp.where(q >= k, 0.0, -jnp.inf)
    return by_hand(given, lambda scores: scores + causal + jnp.where(same(given), 0.0, -jnp.inf)[:, None])


def of_heads(given: Inputs) -> Any:
    """Each head sees the keys from one of its own on; the first queries see none."""
    q, k = at(given)
    heads = jnp.arange(H)[:, None, None]
    return by_hand(given, lambda scores: jnp.where((q >= k) & (k >= 9 * heads), scores, -1e30))


def prefix(given: Inputs) -> Any:
    q, k = at(given)
    return by_hand(given, lambda scores: jnp.where((q >= k) | (k < 50), scores, -1e30))


def stored(given: Inputs) -> Any:
    """A causal mask that NumPy computes."""
    length = given["q"].shape[1]
    return by_hand(given, lambda scores: jnp.where(np.tril(np.ones((1, 1, length, length), bool)), scores, -jnp.inf))


def stored_bias(given: Inputs) -> Any:
    """A window that is added, with documents."""
    length = given["q"].shape[1]
    distance = np.arange(length)[:, None] - np.arange(length)
    bias = np.where((distance >= 0) & (distance < 33), 0.0, np.finfo("float32").min).astype("float32")
    return by_hand(given, lambda scores: jnp.where(same(given)[:, None], scores + bias, -1e9))


def window(given: Inputs) -> Any:
    return library(given, is_causal=True, local_window_size=(40, 0))


def both_sides(given: Inputs) -> Any:
    return library(given, local_window_size=(20, 33))


def near(given: Inputs) -> Any:
    q, k = at(given)
    return by_hand(given, lambda scores: jnp.where(jnp.abs(q - k) < 17, scores, jnp.finfo(scores.dtype).min))


def chunked(given: Inputs) -> Any:
    q, k = at(given)
    return by_hand(given, lambda scores: jnp.where((q // 48 == k // 48) & (k <= q), scores, -jnp.inf))


def sinked_window(given: Inputs) -> Any:
    q, k = at(given)
    return by_hand(given, lambda scores: jnp.where((q >= k) & ((q - k < 30) | (k < 4)), scores, -jnp.inf))


def capped(given: Inputs) -> Any:
    q, k = at(given)
    return by_hand(given, lambda scores: jnp.where(q >= k, jnp.tanh(scores / 2.0) * 2.0, -1e9))


def capped_documents(given: Inputs) -> Any:
    q, k = at(given)
    seen = (same(given) & (q >= k) & (q - k < 60))[:, None]
    return by_hand(given, lambda scores: jnp.where(seen, 3.0 * jnp.tanh(scores / 3.0), -1e9))


def sinks(given: Inputs) -> Any:
    """A number for each head: a parameter, or a function of what a gradient can be taken of."""
    return given["sinks"] if "sinks" in given else given["q"][0, 0, :, 0] + 0.5


def with_sink(given: Inputs, change: Callable[[Any], Any]) -> Any:
    """As in gpt-oss: a further logit, whose weight is dropped."""
    k, v = (jnp.repeat(given[name], H // G, axis=2) for name in "kv")
    scores = change(jnp.einsum("bqhk,bshk->bhqs", given["q"], k) * 0.3)
    column = jnp.broadcast_to(sinks(given)[None, :, None, None], (*scores.shape[:3], 1))
    weights = jax.nn.softmax(jnp.concatenate([scores, column], axis=-1), axis=-1)[..., :-1]
    return jnp.einsum("bhqs,bshk->bqhk", weights, v)


def sink_of_window(given: Inputs) -> Any:
    q, k = at(given)
    return with_sink(given, lambda scores: jnp.where((q >= k) & (q - k < 64), scores, -1e9))


def sink_of_documents(given: Inputs) -> Any:
    q, k = at(given)
    return with_sink(given, lambda scores: jnp.where((same(given) & (q >= k))[:, None], scores, -jnp.inf))


def sink_in_sum(given: Inputs) -> Any:
    k, v = (jnp.repeat(given[name], H // G, axis=2) for name in "kv")
    q, at_k = at(given)
    scores = jnp.where(q >= at_k, jnp.einsum("bqhk,bshk->bhqs", given["q"], k), -jnp.inf)
    sink = sinks(given)[:, None, None]
    largest = jax.lax.stop_gradient(jnp.maximum(scores.max(-1, keepdims=True), sink))
    weights = jnp.exp(scores - largest)
    weights = weights / (weights.sum(-1, keepdims=True) + jnp.exp(sink - largest))
    return jnp.einsum("bhqs,bshk->bqhk", weights, v)


def off_by_one(given: Inputs) -> Any:
    k, v = (jnp.repeat(given[name], H // G, axis=2) for name in "kv")
    weights = jnp.exp(jnp.einsum("bqhk,bshk->bhqs", given["q"], k) * 0.3)
    return jnp.einsum("bhqs,bshk->bqhk", weights / (1 + weights.sum(-1, keepdims=True)), v)


def distances(given: Inputs) -> Any:
    """Relative biases as in T5: looked up in a table by the bucket of a distance."""
    q, k = at(given)
    table = given["table"]  # (buckets, heads)
    distance = jnp.maximum(q - k, 0)
    far = 16 + (jnp.log(jnp.maximum(distance, 1) / 16) / jnp.log(8.0) * 16).astype(jnp.int32)
    bucket = jnp.where(distance < 16, distance, jnp.minimum(far, 31))
    bias = jnp.transpose(jnp.take(table, bucket, axis=0), (2, 0, 1))
    return by_hand(given, lambda scores: jnp.where(q >= k, scores + bias, -1e9))


def slopes(given: Inputs) -> Any:
    """ALiBi, with slopes that are stored as an array."""
    q, k = at(given)
    slopes = np.asarray([2.0 ** -(head + 1) for head in range(H)], "float32")
    return by_hand(given, lambda scores: jnp.where(q >= k, scores - slopes[:, None, None] * (q - k), -1e9))


MASKS: dict[str, tuple[Callable[[Inputs], Any], str]] = {
    "documents": (documents, "segments"),
    "causal documents": (causal_documents, "causal, segments"),
    "padded documents": (padded_documents, "causal, segments"),
    "documents, Flax": (flax_documents, "causal, segments"),
    "padding, Flax": (flax_padding, "causal, segments"),
    "padding of keys": (key_padding, "segments"),
    "lengths": (lengths, "segments"),
    "documents, added": (added_documents, "causal, segments"),
    "two masks, added": (twice_added, "causal, segments"),
    "heads": (of_heads, "causal, segments"),
    "prefix": (prefix, "causal, prefix of 50"),
    "stored": (stored, "causal"),
    "stored bias": (stored_bias, "causal, window of 33, segments"),
    "window": (window, "causal, window of 41"),
    "window of both sides": (both_sides, "window of 20 before and 33 after"),
    "near": (near, "window of 16 before and 16 after"),
    "chunks": (chunked, "causal, chunks of 48"),
    "soft cap": (capped, "causal, soft cap"),
    "sink of a window": (sink_of_window, "causal, window of 64, sink"),
    "sink of documents": (sink_of_documents, "causal, segments, sink"),
    "sink in the sum": (sink_in_sum, "causal, sink"),
    "one in the sum": (off_by_one, "sink"),
    "soft cap of documents": (capped_documents, "causal, window of 60, segments, soft cap"),
}
"""The attention under each mask, and what a kernel that supports it is told."""

BIASES = {"distances": distances, "slopes": slopes}
"""Attention with biases, which no kernel takes: computed in blocks."""

ATTENTIONS = {name: function for name, (function, _) in MASKS.items()} | BIASES
