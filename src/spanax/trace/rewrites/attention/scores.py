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
"""Label of a dim of size 1, and of a dim that is not a dim of the scores."""


@dataclass(frozen=True)
class Step:
    """One operation between q.k and the logits.

    Attributes:
      name: the name of the primitive, or `score` (q.k itself), `extra` (an external operand), `literal`, `iota`.
      primitive: the primitive to bind; None for the four special names.
      params: parameters of the primitive, as pairs; the value of a literal, the index of an extra.
      args: indices of the steps that produce its operands.
      labels: for each dim of the result, the corresponding dim of the scores.
      shape: traced shape of the result.
      dtype: dtype of the result.
    """

    name: str
    primitive: Any
    params: tuple[tuple[str, Any], ...]
    args: tuple[int, ...]
    labels: tuple[int, ...]
    shape: tuple[int, ...]
    dtype: Any

    def param(self, name: str) -> Any:
        """Returns the parameter of that name."""
        return dict(self.params)[name]


@dataclass(frozen=True)
class Form:
    """One attention: the sizes of its dims and the steps from q.k to its logits.

    Labels number the dims of the scores: batch dims (`num_batch`), dims that only queries have (`num_rows`, such as
    the queries of a group of heads), then queries and keys. `q` has shape (batch, rows, queries, width), `k` and `v`
    have shape (batch, keys, width).

    Attributes:
      num_batch: number of dims that q, k and v share.
      num_rows: number of dims that only q has, excluding the queries.
      sizes: size of each label.
      steps: in order; the last step produces the logits.
      extras: for each external operand, the labels of its dims.
      precision: precision of each of the two products.
      dtype: traced dtype of q.k.
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
    """Returns the logits of one block, of shape (batch, rows, queries, keys).

    Args:
      form: the attention.
      score: q.k of the block, of the same shape.
      extras: the matching block of each extra.
      sizes: size of each label in this block.
      offsets: start of the block along each label; 0 for missing labels.
    """
    results: list[Any] = []
    for step in form.steps:
        shape = tuple(
            size if label == NONE else sizes[label] for size, label in zip(step.shape, step.labels, strict=True)
        )
        ins = [results[index] for index in step.args]
        results.append(_run(form, step, ins, shape, score, extras, offsets))
    last = form.steps[-1]
    return _in_order(form, results[-1], last.labels, sizes)


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
        present = [label for label, size in enumerate(form.sizes) if size > 1]
        score = lax.reshape(score.astype(form.dtype), tuple(score.shape[label] for label in present))
        order = [present.index(label) for label in step.labels if label != NONE]
        return lax.reshape(lax.transpose(score, order), shape)
    if step.name == "extra":
        return extras[step.param("at")]
    if step.name == "literal":
        return lax.full((), step.param("value"), step.dtype)
    if step.name == "iota":
        dim = step.param("dimension")
        positions = lax.broadcasted_iota(step.dtype, shape, dim)
        return positions + jnp.asarray(offsets.get(step.labels[dim], 0), step.dtype)
    if step.name == "broadcast_in_dim":
        return lax.broadcast_in_dim(ins[0], shape, step.param("broadcast_dimensions"))
    if step.name in ("reshape", "squeeze", "expand_dims"):
        return lax.reshape(ins[0], shape)
    return step.primitive.bind(*ins, **dict(step.params))


def _in_order(form: Form, array: Any, labels: Sequence[int], sizes: Sequence[int]) -> Any:
    """Returns an array transposed and reshaped to (batch, rows, queries, keys)."""
    labeled = [dim for dim, label in enumerate(labels) if label != NONE]
    array = lax.reshape(array, tuple(array.shape[dim] for dim in labeled))
    array = lax.transpose(array, sorted(range(len(labeled)), key=lambda i: labels[labeled[i]]))
    return lax.reshape(array, tuple(sizes))
