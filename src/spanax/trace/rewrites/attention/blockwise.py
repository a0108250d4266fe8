"""Blockwise attention with a running softmax; the full score matrix is never materialized.

Source: Rabe and Staats, arXiv 2112.05682; Dao et al., FlashAttention, arXiv 2205.14135, algorithms 1 and 4.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from spanax.trace.rewrites.attention.scores import Form, evaluated, logits

BLOCK = 512
"""Most keys per block: the materialized scores are the queries of a part by this many keys."""

LEAST_BLOCK = 64
"""Fewest keys per block: below this the loop costs more than it saves, and a part is one block."""


@dataclass(frozen=True)
class Part:
    """Contiguous queries with their operands.

    `index` numbers parts over all devices; `extras` are sliced to these queries and contain all keys. `out` is the
    gradient of the result and `rows` the residuals of each row; in the forward pass they are None and empty.
    """

    q: Any
    extras: tuple[Any, ...]
    index: Any
    out: Any = None
    rows: tuple[Any, ...] = ()


@dataclass(frozen=True)
class Keys:
    """Contiguous keys with their values; `index` numbers parts over all devices."""

    k: Any
    v: Any
    index: Any


@dataclass(frozen=True)
class Blocks:
    """The blockwise computation of an attention on one device.

    Attributes:
      form: the attention.
      masked: whether a pair is fully masked, (parts of queries, parts of keys).
      starts: for labels sharded in addition to queries and keys, the start of this device's shard.
      grads: for each extra, whether its gradient is computed.
      scope: named scope of the conditional that skips masked pairs at run time.
    """

    form: Form
    masked: np.ndarray
    starts: Mapping[int, Any]
    grads: tuple[bool, ...] = ()
    scope: str = "meet"

    def attend(self, part: Part, keys: Keys, state: Any) -> Any:
        """Returns the state of a part's rows (sum of values, largest logit, sum of weights) updated with these keys."""
        return self._unless_masked(part, keys, state, lambda current: self._forward(part, keys, current))

    def turn_back(self, part: Part, keys: Keys, state: Any) -> Any:
        """Returns the gradients (of q, of the extras, of k, of v) plus the terms of these queries and keys."""
        return self._unless_masked(part, keys, state, lambda current: self._backward(part, keys, current))

    def _unless_masked(self, part: Part, keys: Keys, state: Any, function: Callable[[Any], Any]) -> Any:
        if not self.masked.any():
            return function(state)
        if isinstance(part.index, int) and isinstance(keys.index, int):
            return state if self.masked[part.index, keys.index] else function(state)
        is_masked = jnp.asarray(self.masked)[part.index, keys.index]
        with jax.named_scope(self.scope):
            return lax.cond(is_masked, lambda current: current, function, state)

    def _forward(self, part: Part, keys: Keys, state: Any) -> Any:
        form = self.form
        block = block_size(keys.k.shape[self.form.num_batch])
        value_dims = (((form.keys,), (form.num_batch,)), (_batch(form), _batch(form)))

        def body(state: Any, index: Any) -> tuple[Any, None]:
            total, largest, weight = state
            k, v, extras, offsets = self._block(part, keys, index, block)
            scores = self._logits(self._score(part.q, k), part, extras, offsets, block).astype(jnp.float32)
            maximum = jnp.maximum(largest, scores.max(-1))
            finite = jnp.where(jnp.isneginf(maximum), 0.0, maximum)
            p = jnp.exp(scores - finite[..., None])
            scale = jnp.exp(largest - finite)
            added = lax.dot_general(
                p.astype(v.dtype), v, value_dims, precision=form.precision[1], preferred_element_type=jnp.float32
            )
            return (total * scale[..., None] + added, maximum, weight * scale + p.sum(-1)), None

        return _each(body, state, keys.k.shape[form.num_batch] // block)[0]

    def _backward(self, part: Part, keys: Keys, state: Any) -> Any:
        form = self.form
        block = block_size(keys.k.shape[self.form.num_batch])
        largest, weight, delta = part.rows
        out = part.out.astype(keys.v.dtype)
        batch = (_batch(form), _batch(form))
        value_dims = (((form.keys,), (form.num_batch,)), batch)
        rows = tuple(range(form.num_batch, form.keys))
        product = dict(preferred_element_type=jnp.float32)

        def body(state: Any, index: Any) -> tuple[Any, None]:
            of_q, of_extras, of_k, of_v = state
            k, v, extras, offsets = self._block(part, keys, index, block)
            smooth = [extra for extra, is_smooth in zip(extras, self.grads, strict=True) if is_smooth]

            def score_logits(score: Any, smooth: Sequence[Any]) -> Any:
                remaining = iter(smooth)
                pairs = zip(extras, self.grads, strict=True)
                merged = [next(remaining) if is_smooth else extra for extra, is_smooth in pairs]
                return self._logits(score, part, merged, offsets, block)

            scores, pullback = jax.vjp(score_logits, self._score(part.q, k), smooth)
            p = jnp.exp(scores.astype(jnp.float32) - largest[..., None]) / weight[..., None]
            of_p = lax.dot_general(
                out, v, (((form.keys,), (form.num_batch + 1,)), batch), precision=form.precision[1], **product
            )
            of_score, added = pullback((p * (of_p - delta[..., None])).astype(scores.dtype))
            of_score = of_score.astype(part.q.dtype)
            of_q = of_q + lax.dot_general(of_score, k, value_dims, precision=form.precision[0], **product)
            dims = ((rows, rows), batch)
            k_added = lax.dot_general(of_score, part.q, dims, precision=form.precision[0], **product)
            v_added = lax.dot_general(p.astype(out.dtype), out, dims, precision=form.precision[1], **product)
            of_k, of_v = (
                _add_at(total, term, {form.num_batch: index * block})
                for total, term in ((of_k, k_added), (of_v, v_added))
            )
            return (of_q, self._added(of_extras, added, offsets), of_k, of_v), None

        return _each(body, state, keys.k.shape[form.num_batch] // block)[0]

    def _added(self, totals: Sequence[Any], added: Sequence[Any], offsets: Mapping[int, Any]) -> tuple[Any, ...]:
        """Adds the gradients of extras, each at the offset of its keys."""
        labels = [labels for labels, is_smooth in zip(self.form.extras, self.grads, strict=True) if is_smooth]
        return tuple(
            _add_at(total, term, {dim: offsets[label] for dim, label in enumerate(dims) if label == self.form.keys})
            for total, term, dims in zip(totals, added, labels, strict=True)
        )

    def _block(self, part: Part, keys: Keys, index: Any, block: int) -> tuple[Any, Any, list[Any], dict[int, Any]]:
        """Slices one block of keys and values and the matching extras; also returns the offset of each label."""
        form = self.form
        start = index * block
        k, v = (lax.dynamic_slice_in_dim(array, start, block, form.num_batch) for array in (keys.k, keys.v))
        offsets = dict(self.starts)
        offsets[form.queries] = offsets.get(form.queries, 0) + part.index * part.q.shape[form.queries]
        offsets[form.keys] = keys.index * keys.k.shape[form.num_batch] + start
        extras = []
        for extra, labels in zip(part.extras, form.extras, strict=True):
            if form.keys in labels:
                extra = lax.dynamic_slice_in_dim(extra, offsets[form.keys], block, labels.index(form.keys))
            extras.append(extra)
        return k, v, extras, offsets

    def _score(self, q: Any, k: Any) -> Any:
        form = self.form
        dims = (((form.keys,), (form.num_batch + 1,)), (_batch(form), _batch(form)))
        return lax.dot_general(q, k, dims, precision=form.precision[0], preferred_element_type=jnp.float32)

    def _logits(self, score: Any, part: Part, extras: Sequence[Any], offsets: Mapping[int, Any], block: int) -> Any:
        return logits(self.form, score, extras, (*part.q.shape[:-1], block), offsets)


def fresh(form: Form, part: Part, width: int, starts: Mapping[int, Any]) -> Any:
    """Returns the state of a part's rows before any keys but a sink: sum of values, largest logit, sum of weights."""
    rows = part.q.shape[:-1]
    total = jnp.zeros((*rows, width), jnp.float32)
    if form.sink is None:
        return total, jnp.full(rows, -jnp.inf, jnp.float32), jnp.zeros(rows, jnp.float32)
    return total, _sinks(form, part, starts, part.extras), jnp.ones(rows, jnp.float32)


def _sinks(form: Form, part: Part, starts: Mapping[int, Any], extras: Sequence[Any]) -> Any:
    """Returns the logit of the sink of each row of a part."""
    assert form.sink is not None
    rows = part.q.shape[:-1]
    offsets = dict(starts)
    offsets[form.queries] = offsets.get(form.queries, 0) + part.index * part.q.shape[form.queries]
    values = evaluated(form, [form.sink], extras, (*rows, 1), offsets=offsets)[form.sink]
    return jnp.broadcast_to(values[..., 0].astype(jnp.float32), rows)


def of_sinks(form: Form, part: Part, starts: Mapping[int, Any], grads: Sequence[bool], of_extras: Any) -> Any:
    """Returns the gradients of a part's extras plus those of its sinks, which have no value: -weight times delta."""
    if form.sink is None or not any(grads):
        return of_extras
    largest, weight, delta = part.rows
    smooth = [extra for extra, is_smooth in zip(part.extras, grads, strict=True) if is_smooth]

    def sinks(smooth: Sequence[Any]) -> Any:
        remaining = iter(smooth)
        merged = [next(remaining) if yes else extra for extra, yes in zip(part.extras, grads, strict=True)]
        return _sinks(form, part, starts, merged)

    values, pullback = jax.vjp(sinks, smooth)
    (added,) = pullback(-jnp.exp(values - largest) / weight * delta)
    return tuple(total + term.astype(total.dtype) for total, term in zip(of_extras, added, strict=True))


def finished(state: Any, dtype: Any) -> tuple[Any, Any, Any]:
    """Returns the normalized result of rows after all keys, and their residuals for the backward pass."""
    total, largest, weight = state
    return (total / weight[..., None]).astype(dtype), largest, weight


def parted(form: Form, part: Part, num: int) -> list[Part]:
    """Splits a device's queries into `num` parts, numbered from `part.index`."""
    cut = lambda array, dim: jnp.split(array, num, dim)  # noqa: E731
    q = cut(part.q, form.queries)
    out = [None] * num if part.out is None else cut(part.out, form.queries)
    rows = [cut(row, form.queries) for row in part.rows]
    extras = [
        cut(extra, labels.index(form.queries)) if form.queries in labels else [extra] * num
        for extra, labels in zip(part.extras, form.extras, strict=True)
    ]
    return [
        replace(
            part,
            q=q[i],
            out=out[i],
            rows=tuple(row[i] for row in rows),
            extras=tuple(extra[i] for extra in extras),
            index=part.index + i,
        )
        for i in range(num)
    ]


def _each(body: Callable[[Any, Any], tuple[Any, None]], state: Any, count: int) -> tuple[Any, Any]:
    return body(state, 0) if count == 1 else lax.scan(body, state, jnp.arange(count))


def block_size(size: int) -> int:
    """Returns the keys in a block of a number of keys: all, where no size of a block divides them."""
    fitting = [block for block in range(min(BLOCK, size), 0, -1) if size % block == 0]
    return fitting[0] if fitting[0] >= LEAST_BLOCK else size


def _batch(form: Form) -> tuple[int, ...]:
    return tuple(range(form.num_batch))


def _add_at(total: Any, added: Any, starts: Mapping[int, Any]) -> Any:
    """Adds an array to the slice of a total that begins at `starts`."""
    added = added.astype(total.dtype)
    if added.shape == total.shape:
        return total + added
    indices = [starts.get(dim, 0) for dim in range(total.ndim)]
    current = lax.dynamic_slice(total, indices, added.shape)
    return lax.dynamic_update_slice(total, current + added, indices)
