"""The steps from q.k to the logits of an attention, which can be evaluated on any block.

Scales, biases and masks computed from positions are elementwise: a block of the scores needs only the same block of
their operands. Positions are generated per block, so the full score matrix is never materialized.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jax import lax

NONE = -1
"""The label of a dim of one number, and of one that is no dim of the scores."""


@dataclass(frozen=True)
class Step:
    """One operation on the way from q.k to the logits.

    Attributes:
      name: the primitive's; or `score` (q.k itself), `extra` (what comes from elsewhere), `literal`, `iota`.
      primitive: what is bound; None of the four others.
      params: of the primitive, as pairs; a literal's value, an extra's number.
      args: the steps whose results it takes.
      labels: for every dim of the result, which dim of the scores it is.
      shape: of the result, as it was traced.
      dtype: of the result.
    """

    name: str
    primitive: Any
    params: tuple[tuple[str, Any], ...]
    args: tuple[int, ...]
    labels: tuple[int, ...]
    shape: tuple[int, ...]
    dtype: Any

    def param(self, name: str) -> Any:
        """One of the parameters."""
        return dict(self.params)[name]


@dataclass(frozen=True)
class Form:
    """One attention: the sizes of its dims, and how its logits come of q.k.

    Labels number the dims of the scores: those of the batch first (`num_batch`), then those that only queries have
    (`num_rows`: the queries of a group of heads), then queries and keys. `q` is laid out (batch, rows, queries, width),
    `k` and `v` (batch, keys, width).

    Attributes:
      num_batch: dims that q, k and v share.
      num_rows: dims that only q has, beside the queries.
      sizes: of every label.
      steps: in order; the last one makes the logits.
      extras: for every array from elsewhere the labels of its dims.
      precision: of both products.
      dtype: of q.k as it was traced.
    """

    num_batch: int
    num_rows: int
    sizes: tuple[int, ...]
    steps: tuple[Step, ...]
    extras: tuple[tuple[int, ...], ...]
    precision: tuple[Any, Any]
    dtype: Any

    @property
    def queries(self) -> int:
        """The label of the queries."""
        return self.num_batch + self.num_rows

    @property
    def keys(self) -> int:
        """The label of the keys."""
        return self.queries + 1


def logits(form: Form, score: Any, extras: Sequence[Any], sizes: Sequence[int], offsets: Mapping[int, Any]) -> Any:
    """The logits of one block, laid out (batch, rows, queries, keys).

    Args:
      form: the attention.
      score: q.k of the block, laid out so.
      extras: of each the block that meets it.
      sizes: of every label, in this block.
      offsets: of labels whose block does not start at 0, where it starts.
    """
    done: list[Any] = []
    for step in form.steps:
        shape = tuple(
            size if label == NONE else sizes[label] for size, label in zip(step.shape, step.labels, strict=True)
        )
        ins = [done[at] for at in step.args]
        done.append(_run(form, step, ins, shape, score, extras, offsets))
    last = form.steps[-1]
    return _in_order(form, done[-1], last.labels, sizes)


def _run(
    form: Form,
    step: Step,
    ins: Sequence[Any],
    shape: tuple[int, ...],
    score: Any,
    extras: Sequence[Any],
    offsets: Mapping[int, Any],
) -> Any:
    if step.name == "score":
        there = [label for label, size in enumerate(form.sizes) if size > 1]
        score = lax.reshape(score.astype(form.dtype), tuple(score.shape[label] for label in there))
        order = [there.index(label) for label in step.labels if label != NONE]
        return lax.reshape(lax.transpose(score, order), shape)
    if step.name == "extra":
        return extras[step.param("at")]
    if step.name == "literal":
        return lax.full((), step.param("value"), step.dtype)
    if step.name == "iota":
        dim = step.param("dimension")
        counted = lax.broadcasted_iota(step.dtype, shape, dim)
        return counted + jnp.asarray(offsets.get(step.labels[dim], 0), step.dtype)
    if step.name == "broadcast_in_dim":
        return lax.broadcast_in_dim(ins[0], shape, step.param("broadcast_dimensions"))
    if step.name in ("reshape", "squeeze", "expand_dims"):
        return lax.reshape(ins[0], shape)
    return step.primitive.bind(*ins, **dict(step.params))


def _in_order(form: Form, array: Any, labels: Sequence[int], sizes: Sequence[int]) -> Any:
    """A result as (batch, rows, queries, keys)."""
    kept = [dim for dim, label in enumerate(labels) if label != NONE]
    array = lax.reshape(array, tuple(array.shape[dim] for dim in kept))
    array = lax.transpose(array, sorted(range(len(kept)), key=lambda at: labels[kept[at]]))
    return lax.reshape(array, tuple(sizes))
