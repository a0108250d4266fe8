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

from spanax.trace.rewrites.attention.scores import Form, logits

BLOCK = 512
"""Keys that are met at once: what is held of the scores is the queries of a part by so many."""

LEAST_BLOCK = 64
"""Below this many keys a block is not worth its loop: a part that divides into no larger ones is one block."""


@dataclass(frozen=True)
class Part:
    """Queries that lie next to each other, with what belongs to them.

    `index` counts parts over all devices; `extras` are cut to these queries, and hold all keys. The rest is None or
    empty where it is not needed: `out` is the gradient of the result, `rows` what the forward pass kept of each row.
    """

    q: Any
    extras: tuple[Any, ...]
    index: Any
    out: Any = None
    rows: tuple[Any, ...] = ()


@dataclass(frozen=True)
class Keys:
    """Keys that lie next to each other, with their values; `index` counts parts over all devices."""

    k: Any
    v: Any
    index: Any


@dataclass(frozen=True)
class Blocks:
    """How one device goes through an attention.

    Attributes:
      form: the attention.
      masked: which parts of queries meet which parts of keys for nothing, (parts, parts).
      starts: of labels that are divided among devices beside queries and keys, where this device's part starts.
      grads: for every extra whether its gradient is wanted.
      scope: the name under which parts meet where that is decided on the device.
    """

    form: Form
    masked: np.ndarray
    starts: Mapping[int, Any]
    grads: tuple[bool, ...] = ()
    scope: str = "meet"

    def attend(self, part: Part, keys: Keys, state: Any) -> Any:
        """The state of a part's rows (sum of values, largest logit, sum of weights) after these keys too."""
        return self._unless_masked(part, keys, state, lambda one: self._forward(part, keys, one))

    def turn_back(self, part: Part, keys: Keys, state: Any) -> Any:
        """The gradients (of q, of the extras, of k, of v) with what these queries and keys add to them."""
        return self._unless_masked(part, keys, state, lambda one: self._backward(part, keys, one))

    def _unless_masked(self, part: Part, keys: Keys, state: Any, function: Callable[[Any], Any]) -> Any:
        if not self.masked.any():
            return function(state)
        if isinstance(part.index, int) and isinstance(keys.index, int):
            return state if self.masked[part.index, keys.index] else function(state)
        is_masked = jnp.asarray(self.masked)[part.index, keys.index]
        with jax.named_scope(self.scope):
            return lax.cond(is_masked, lambda one: one, function, state)

    def fresh(self, part: Part, width: int) -> Any:
        """The state of rows that have met no keys."""
        rows = part.q.shape[:-1]
        return (
            jnp.zeros((*rows, width), jnp.float32),
            jnp.full(rows, -jnp.inf, jnp.float32),
            jnp.zeros(rows, jnp.float32),
        )

    def _forward(self, part: Part, keys: Keys, state: Any) -> Any:
        form, block = self.form, _block_size(keys.k.shape[self.form.num_batch])
        value_dims = (((form.keys,), (form.num_batch,)), (_batch(form), _batch(form)))

        def one(state: Any, at: Any) -> tuple[Any, None]:
            total, largest, weight = state
            k, v, extras, offsets = self._cut(part, keys, at, block)
            found = self._logits(self._score(part.q, k), part, extras, offsets, block).astype(jnp.float32)
            new = jnp.maximum(largest, found.max(-1))
            finite = jnp.where(jnp.isneginf(new), 0.0, new)
            p = jnp.exp(found - finite[..., None])
            scale = jnp.exp(largest - finite)
            added = lax.dot_general(
                p.astype(v.dtype), v, value_dims, precision=form.precision[1], preferred_element_type=jnp.float32
            )
            return (total * scale[..., None] + added, new, weight * scale + p.sum(-1)), None

        return _each(one, state, keys.k.shape[form.num_batch] // block)[0]

    def _backward(self, part: Part, keys: Keys, state: Any) -> Any:
        form, block = self.form, _block_size(keys.k.shape[self.form.num_batch])
        largest, weight, delta = part.rows
        out = part.out.astype(keys.v.dtype)
        batch = (_batch(form), _batch(form))
        value_dims = (((form.keys,), (form.num_batch,)), batch)
        rows = tuple(range(form.num_batch, form.keys))
        product = dict(preferred_element_type=jnp.float32)

        def one(state: Any, at: Any) -> tuple[Any, None]:
            of_q, of_extras, of_k, of_v = state
            k, v, extras, offsets = self._cut(part, keys, at, block)
            wanted = [extra for extra, is_wanted in zip(extras, self.grads, strict=True) if is_wanted]

            def of(score: Any, wanted: Sequence[Any]) -> Any:
                given = iter(wanted)
                both = zip(extras, self.grads, strict=True)
                mixed = [next(given) if is_wanted else extra for extra, is_wanted in both]
                return self._logits(score, part, mixed, offsets, block)

            found, back = jax.vjp(of, self._score(part.q, k), wanted)
            p = jnp.exp(found.astype(jnp.float32) - largest[..., None]) / weight[..., None]
            of_p = lax.dot_general(
                out, v, (((form.keys,), (form.num_batch + 1,)), batch), precision=form.precision[1], **product
            )
            of_score, added = back((p * (of_p - delta[..., None])).astype(found.dtype))
            of_score = of_score.astype(part.q.dtype)
            of_q = of_q + lax.dot_general(of_score, k, value_dims, precision=form.precision[0], **product)
            dims = ((rows, rows), batch)
            k_added = lax.dot_general(of_score, part.q, dims, precision=form.precision[0], **product)
            v_added = lax.dot_general(p.astype(out.dtype), out, dims, precision=form.precision[1], **product)
            of_k, of_v = (
                _add_at(total, more, {form.num_batch: at * block}) for total, more in ((of_k, k_added), (of_v, v_added))
            )
            return (of_q, self._added(of_extras, added, offsets), of_k, of_v), None

        return _each(one, state, keys.k.shape[form.num_batch] // block)[0]

    def _added(self, totals: Sequence[Any], added: Sequence[Any], offsets: Mapping[int, Any]) -> tuple[Any, ...]:
        """Gradients of extras, each where its keys are."""
        labels = [labels for labels, is_wanted in zip(self.form.extras, self.grads, strict=True) if is_wanted]
        return tuple(
            _add_at(total, more, {dim: offsets[label] for dim, label in enumerate(of) if label == self.form.keys})
            for total, more, of in zip(totals, added, labels, strict=True)
        )

    def _cut(self, part: Part, keys: Keys, at: Any, block: int) -> tuple[Any, Any, list[Any], dict[int, Any]]:
        """One block of keys, with the extras that meet it, and where it starts."""
        form = self.form
        start = at * block
        k, v = (lax.dynamic_slice_in_dim(one, start, block, form.num_batch) for one in (keys.k, keys.v))
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


def finished(state: Any, dtype: Any) -> tuple[Any, Any, Any]:
    """The result of rows that have met all keys, and what the way back needs of each."""
    total, largest, weight = state
    return (total / weight[..., None]).astype(dtype), largest, weight


def parted(form: Form, part: Part, num: int) -> list[Part]:
    """A device's queries as so many parts; `index` of all is that of the first, and counts such parts."""
    cut = lambda one, dim: jnp.split(one, num, dim)  # noqa: E731
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
            q=q[at],
            out=out[at],
            rows=tuple(row[at] for row in rows),
            extras=tuple(extra[at] for extra in extras),
            index=part.index + at,
        )
        for at in range(num)
    ]


def _each(one: Callable[[Any, Any], tuple[Any, None]], state: Any, count: int) -> tuple[Any, Any]:
    return one(state, 0) if count == 1 else lax.scan(one, state, jnp.arange(count))


def _block_size(size: int) -> int:
    fitting = [block for block in range(min(BLOCK, size), 0, -1) if size % block == 0]
    return fitting[0] if fitting[0] >= LEAST_BLOCK else size


def _batch(form: Form) -> tuple[int, ...]:
    return tuple(range(form.num_batch))


def _add_at(total: Any, added: Any, starts: Mapping[int, Any]) -> Any:
    """A total with something added to the part of it that starts there."""
    added = added.astype(total.dtype)
    if added.shape == total.shape:
        return total + added
    at = [starts.get(dim, 0) for dim in range(total.ndim)]
    there = lax.dynamic_slice(total, at, added.shape)
    return lax.dynamic_update_slice(total, there + added, at)
