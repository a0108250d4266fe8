"""Matches softmax attention in a jaxpr by its structure.

Attention is two products with a softmax between them. The operations between the first product and the softmax become
the steps of a `Form`. Where an operation does not match, the jaxpr is left unchanged.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from spanax.trace.jaxpr.dim_rules import ELEMENTWISE
from spanax.trace.jaxpr.lines import Labels, Line, Lines, back
from spanax.trace.rewrites.attention.kernels import Kernel
from spanax.trace.rewrites.attention.scores import NONE, Form, Step

SAME = frozenset({"convert_element_type", "stop_gradient", "copy", "optimization_barrier"})
VIEWS = frozenset({"transpose", "reshape", "squeeze", "expand_dims", "broadcast_in_dim"})


@dataclass(frozen=True, eq=False)
class AttentionMatch:
    """An attention matched in a jaxpr.

    Attributes:
      form: the steps from q.k to its logits.
      operands: of q, k, v: the value and the permutation of its dims into the form.
      extras: the values of the form's extras.
      out: labels of the original result's dims; the label of the width is one more than that of the keys.
      kernel: the platform kernel that computes it, if any.
    """

    form: Form
    operands: tuple[tuple[int, Labels], ...]
    extras: tuple[int, ...]
    out: Labels
    kernel: Kernel | None = None

    @property
    def needs(self) -> tuple[int, ...]:
        """The values of its operands."""
        return (*(value for value, _ in self.operands), *self.extras)


@dataclass(frozen=True)
class Mismatch:
    """A softmax between two products that is not supported, and why."""

    why: str
    line: Line


def attentions(lines: Lines) -> dict[int, AttentionMatch | Mismatch]:
    """Returns matches and mismatches by the index of the line of the second product."""
    matches: dict[int, AttentionMatch | Mismatch] = {}
    for index, line in enumerate(lines.lines):
        if line.name != "dot_general":
            continue
        for side in (0, 1):
            match = _attention(lines, line, side)
            if match is not None:
                matches[index] = match
                break
    return matches


def _attention(lines: Lines, line: Line, side: int) -> AttentionMatch | Mismatch | None:
    """Matches the attention whose weights are operand `side` of its second product."""
    weights, values = line.ins[side], line.ins[1 - side]
    shape = lines.shape(weights)
    tags = tuple(dim if size > 1 else NONE for dim, size in enumerate(shape))
    (contract, batch) = line.eqn.params["dimension_numbers"]
    if len(contract[side]) != 1 or not jnp.issubdtype(lines.avals[weights].dtype, jnp.floating):
        return None
    keys = contract[side][0]
    if shape[keys] <= 1:
        return None
    soft = _softmax(lines, weights, tags, keys)
    if soft is None:
        weight_line = _softmax_behind(lines, weights)
        why = "dropout on its weights" if weight_line and weight_line.name in ("mul", "select_n", "div") else None
        return (
            Mismatch(f"{why} ('{weight_line.name}' between softmax and values)", line) if why and weight_line else None
        )
    steps = _Steps(lines, keys, {tag for tag in tags if tag != NONE})
    if steps.grow(*soft) is None or steps.score is None:
        return None
    return steps.found(line, side, values, dict(zip(batch[1 - side], batch[side], strict=True)))


def _softmax(lines: Lines, weights: int, tags: Labels, keys: int) -> tuple[int, Labels] | None:
    """Returns the logits of a softmax over the dim tagged `keys`, with their tags."""
    walked = _views(lines, weights, tags)
    line, tags = walked or (None, tags)
    if line is None or line.name != "div":
        return None
    numerator, denominator = line.ins
    exp = lines.behind(numerator, SAME)
    exp_line = lines.made_by(exp)
    operand_tags = back(lines, line, tags)
    if exp_line is None or exp_line.name != "exp" or operand_tags is None:
        return None
    total = _views(lines, denominator, operand_tags[1])
    if total is None or total[0] is None or total[0].name != "reduce_sum":
        return None
    (axis, *more_axes), (summed,) = total[0].eqn.params["axes"], total[0].ins
    if more_axes or lines.behind(summed, SAME) != exp or tags[axis] != keys:
        return None
    if total[1] != tuple(tag for dim, tag in enumerate(tags) if dim != axis):
        return None
    logits = exp_line.ins[0]
    # Softmax is invariant to a shift that is constant along keys, such as the largest logit.
    while (shift := lines.made_by(lines.behind(logits, SAME))) is not None and shift.name == "sub":
        operand_tags = back(lines, shift, tags)
        if operand_tags is None or not _is_of_row(lines, shift.ins[1], operand_tags[1], keys):
            break
        logits = shift.ins[0]
    return logits, tags


def _views(lines: Lines, value: int, tags: Labels) -> tuple[Line | None, Labels] | None:
    """Skips views; returns the line that produces the underlying value, and its tags."""
    while (line := lines.made_by(value)) is not None and line.name in SAME | VIEWS:
        operand_tags = back(lines, line, tags)
        if operand_tags is None:
            return None
        value, tags = line.ins[0], operand_tags[0]
    return line, tags


def _is_of_row(lines: Lines, value: int, tags: Labels, keys: int) -> bool:
    """Whether a value is constant along keys."""
    while keys in tags:
        line = lines.made_by(value)
        if line is None or line.name not in SAME | VIEWS:
            return False
        operand_tags = back(lines, line, tags)
        if operand_tags is None:
            return False
        value, tags = line.ins[0], operand_tags[0]
    return True


def _softmax_behind(lines: Lines, value: int) -> Line | None:
    """Returns the last `mul` or `select_n` between a softmax and a value computed elementwise from it, if any."""
    first: Line | None = None
    for line in _ancestors(lines, value):
        if line.name in ("mul", "select_n") and first is None:
            first = line
        if line.name == "div":
            exp, total = (lines.behind(operand, SAME | VIEWS) for operand in line.ins)
            makers = [lines.made_by(operand) for operand in (exp, total)]
            if [maker.name if maker else "" for maker in makers] == ["exp", "reduce_sum"] and first is not None:
                return first
    return None


def _ancestors(lines: Lines, value: int) -> Iterator[Line]:
    """Yields the elementwise lines and views that produce a value, nearest first, at most 64."""
    queue, seen = [value], set[int]()
    while queue and len(seen) < 64:
        line = lines.made_by(queue.pop(0))
        if line is not None and line.outs[0] not in seen and line.name in ELEMENTWISE | VIEWS:
            seen.add(line.outs[0])
            queue += line.ins
            yield line


class _Steps:
    """The steps between the first product and the logits, collected backward from the logits.

    A value with several labelings (positions of queries and of keys are often one array) becomes several steps. Inputs
    and results of other operations are extras.
    """

    def __init__(self, lines: Lines, keys: int, tags: set[int]):
        self._lines, self._keys, self._tags = lines, keys, tags
        self._steps: list[Step] = []
        self._known: dict[tuple[int, Labels], int] = {}
        self._extras: list[tuple[int, Labels]] = []
        self.score: Line | None = None
        self._score_tags: Labels = ()

    def grow(self, value: int, tags: Labels) -> int | None:
        """Returns the step that produces a value under some tags, after adding its operands; None if unsupported."""
        key = (value, tags)
        if key not in self._known:
            step = self._made(value, tags)
            if step is None:
                return None
            self._steps.append(step)
            self._known[key] = len(self._steps) - 1
        return self._known[key]

    def _made(self, value: int, tags: Labels) -> Step | None:
        lines = self._lines
        shape, dtype, line = lines.shape(value), np.dtype(lines.avals[value].dtype), lines.made_by(value)
        rest = (tags, shape, dtype)
        if value in lines.known and not shape and np.ndim(lines.known[value]) == 0:
            literal = np.asarray(lines.known[value]).item()
            return Step("literal", None, (("value", literal),), (), *rest)
        if line is not None and self._is_score(line, tags):
            self.score, self._score_tags = line, tags
            return Step("score", None, (), (), *rest)
        if line is not None and line.name == "iota":
            return Step("iota", None, (("dimension", int(line.eqn.params["dimension"])),), (), *rest)
        if line is not None and line.name in (ELEMENTWISE | VIEWS) - {"sharding_constraint"}:
            operand_tags = back(lines, line, tags)
            args = (
                [self.grow(*pair) for pair in zip(line.ins, operand_tags, strict=True)]
                if operand_tags is not None
                else [None]
            )
            if all(arg is not None for arg in args):
                params = {name: _plain(param) for name, param in line.eqn.params.items()}
                return Step(
                    line.name,
                    line.eqn.primitive,
                    tuple(sorted(params.items())),
                    tuple(step for step in args if step is not None),
                    *rest,
                )
        if self._comes_of_score(value):
            return None
        self._extras.append((value, tags))
        return Step("extra", None, (("at", len(self._extras) - 1),), (), *rest)

    def _is_score(self, line: Line, tags: Labels) -> bool:
        """Whether a line is q.k: a single product whose result has all dims of the logits."""
        is_known = self.score is None or self.score is line
        labeled = [tag for tag in tags if tag != NONE]
        return (
            line.name == "dot_general" and is_known and len(labeled) == len(set(labeled)) and set(labeled) == self._tags
        )

    def _comes_of_score(self, value: int) -> bool:
        """Whether a value depends on q.k."""
        stack, seen = [value], set[int]()
        lines = self._lines
        while stack:
            line = lines.made_by(stack.pop())
            if line is None or id(line) in seen:
                continue
            seen.add(id(line))
            if line is self.score:
                return True
            stack += line.ins
        return False

    def found(self, second: Line, side: int, values: int, batch: dict[int, int]) -> AttentionMatch | None:
        """Returns the attention if the dims of both products match."""
        lines, first = self._lines, self.score
        assert first is not None
        contract, batched = first.eqn.params["dimension_numbers"]
        free_dims = _sides(lines, first)
        keys_at = self._score_tags.index(self._keys)
        q_side = next((operand for operand in (0, 1) if keys_at not in free_dims[operand].values()), None)
        num_batch = len(batched[0])
        if q_side is None or keys_at < num_batch or len(free_dims[1 - q_side]) != 1:
            return None
        q_free = free_dims[q_side]
        shape = lines.shape(first.outs[0])
        if not q_free:
            return None
        queries = max(q_free, key=lambda dim: (shape[q_free[dim]] == shape[keys_at], shape[q_free[dim]], -dim))
        rows = [dim for dim in q_free if dim != queries]
        order = [*range(num_batch), *(q_free[dim] for dim in (*rows, queries)), keys_at]  # dims of q.k, by label
        label_of_tag = {self._score_tags[dim]: label for label, dim in enumerate(order) if shape[dim] > 1}
        label_of_tag[NONE] = NONE
        relabelled = lambda tags: tuple(label_of_tag[tag] for tag in tags)  # noqa: E731
        q_order = (*batched[q_side], *rows, queries, *contract[q_side])
        k_order = (*batched[1 - q_side], *free_dims[1 - q_side], *contract[1 - q_side])
        v = self._values(second, side, values, batch, label_of_tag, num_batch)
        if v is None or len(contract[0]) != 1:
            return None
        form = Form(
            num_batch=num_batch,
            num_rows=len(rows),
            sizes=tuple(shape[dim] for dim in order),
            steps=tuple(replace(step, labels=relabelled(step.labels)) for step in self._steps),
            extras=tuple(relabelled(tags) for _, tags in self._extras),
            precision=(_plain(first.eqn.params["precision"]), _plain(second.eqn.params["precision"])),
            dtype=np.dtype(lines.avals[first.outs[0]].dtype),
        )
        operands = ((first.ins[q_side], q_order), (first.ins[1 - q_side], k_order), (values, v))
        out = self._result(second, side, v[-1], label_of_tag, len(order))
        return AttentionMatch(form, operands, tuple(value for value, _ in self._extras), out)

    def _values(
        self, second: Line, side: int, values: int, batch: dict[int, int], label_of: dict[int, int], num_batch: int
    ) -> Labels | None:
        """Returns the values' dims in the order (batch, keys, width); -1 for a missing dim of size 1."""
        shape = self._lines.shape(values)
        tag = lambda dim: dim if self._lines.shape(second.ins[side])[dim] > 1 else NONE  # noqa: E731
        labels = {label_of[tag(weight_dim)]: dim for dim, weight_dim in batch.items() if tag(weight_dim) != NONE}
        (contract, batched) = second.eqn.params["dimension_numbers"]
        free = [dim for dim in range(len(shape)) if dim not in (*contract[1 - side], *batched[1 - side])]
        batch_labels = {label for label in label_of.values() if NONE < label < num_batch}
        if set(labels) != batch_labels or len(free) != 1:
            return None
        return (*(labels.get(label, -1) for label in range(num_batch)), contract[1 - side][0], free[0])

    def _result(self, second: Line, side: int, width: int, label_of: dict[int, int], width_label: int) -> Labels:
        """Returns the label of each dim of the second product's result."""
        lines = self._lines
        contract, batched = second.eqn.params["dimension_numbers"]
        weight_shape = lines.shape(second.ins[side])
        label = lambda dim: label_of[dim] if weight_shape[dim] > 1 else NONE  # noqa: E731
        free = [label(dim) for dim in range(len(weight_shape)) if dim not in (*contract[side], *batched[side])]
        dims = [free, [width_label]] if side == 0 else [[width_label], free]
        return tuple([label(dim) for dim in batched[side]] + dims[0] + dims[1])


def _sides(lines: Lines, dot: Line) -> tuple[dict[int, int], dict[int, int]]:
    """Returns, for each operand, its free dims with the corresponding dims of the result."""
    contract, batched = dot.eqn.params["dimension_numbers"]
    start, result_dims = len(batched[0]), []
    for side in (0, 1):
        rank = len(lines.shape(dot.ins[side]))
        free = [dim for dim in range(rank) if dim not in (*contract[side], *batched[side])]
        result_dims.append({dim: start + offset for offset, dim in enumerate(free)})
        start += len(free)
    return result_dims[0], result_dims[1]


def _plain(value: Any) -> Any:
    """Converts lists in a parameter to tuples, so that it is hashable."""
    return tuple(map(_plain, value)) if isinstance(value, list | tuple) else value


def canonical(array: Any, order: Labels) -> Any:
    """Returns an operand transposed to the layout of the form."""
    present = [dim for dim in order if dim >= 0]
    dropped = [dim for dim in range(array.ndim) if dim not in present]
    remaining = [dim for dim in range(array.ndim) if dim not in dropped]
    array = lax.transpose(lax.squeeze(array, dropped), [remaining.index(dim) for dim in present])
    return lax.expand_dims(array, [i for i, dim in enumerate(order) if dim < 0])


def as_written(array: Any, labels: Labels, shape: tuple[int, ...]) -> Any:
    """Returns a result of shape (batch, rows, queries, width) in its original layout."""
    present = [label for label in labels if label != NONE]
    width = array.ndim  # labels include the keys, which are not a dim of the result
    dims = [width - 1 if label == width else label for label in present]
    dropped = [dim for dim in range(array.ndim) if dim not in dims]
    remaining = [dim for dim in range(array.ndim) if dim in dims]
    array = lax.transpose(lax.squeeze(array, dropped), [remaining.index(dim) for dim in dims])
    return lax.reshape(array, shape)
