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
    """An attention in some lines.

    Attributes:
      form: how its logits come of q.k.
      operands: q, k, v: the value and the order of its dims in the form.
      extras: the values of the form's extras.
      out: the labels of the result's dims as it was written; the width's is one more than the keys'.
      kernel: the platform's that computes it, if one is to.
    """

    form: Form
    operands: tuple[tuple[int, Labels], ...]
    extras: tuple[int, ...]
    out: Labels
    kernel: Kernel | None = None

    @property
    def needs(self) -> tuple[int, ...]:
        """The values that it takes."""
        return (*(value for value, _ in self.operands), *self.extras)


@dataclass(frozen=True)
class Mismatch:
    """A softmax between two products that no ring can take as it is, and why."""

    why: str
    line: Line


def attentions(lines: Lines) -> dict[int, AttentionMatch | Mismatch]:
    """What was found, by the place of the line of its second product."""
    found: dict[int, AttentionMatch | Mismatch] = {}
    for at, line in enumerate(lines.lines):
        if line.name != "dot_general":
            continue
        for side in (0, 1):
            one = _attention(lines, line, side)
            if one is not None:
                found[at] = one
                break
    return found


def _attention(lines: Lines, line: Line, side: int) -> AttentionMatch | Mismatch | None:
    """The attention whose second product has its weights on one side."""
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
        passed = _softmax_behind(lines, weights)
        why = "dropout on its weights" if passed and passed.name in ("mul", "select_n", "div") else None
        return Mismatch(f"{why} ('{passed.name}' between softmax and values)", line) if why and passed else None
    made = _Steps(lines, keys, {tag for tag in tags if tag != NONE})
    if made.grow(*soft) is None or made.score is None:
        return None
    return made.found(line, side, values, dict(zip(batch[1 - side], batch[side], strict=True)))


def _softmax(lines: Lines, weights: int, tags: Labels, keys: int) -> tuple[int, Labels] | None:
    """The logits of a softmax over the dim tagged `keys`, with their tags."""
    walked = _views(lines, weights, tags)
    line, tags = walked or (None, tags)
    if line is None or line.name != "div":
        return None
    numerator, denominator = line.ins
    exp = lines.behind(numerator, SAME)
    maker = lines.made_by(exp)
    under = back(lines, line, tags)
    if maker is None or maker.name != "exp" or under is None:
        return None
    total = _views(lines, denominator, under[1])
    if total is None or total[0] is None or total[0].name != "reduce_sum":
        return None
    (axis, *more), (summed,) = total[0].eqn.params["axes"], total[0].ins
    if more or lines.behind(summed, SAME) != exp or tags[axis] != keys:
        return None
    if total[1] != tuple(tag for dim, tag in enumerate(tags) if dim != axis):
        return None
    logits = maker.ins[0]
    # What is the same for all keys of a row changes nothing of a softmax: the largest logit above all.
    while (shift := lines.made_by(lines.behind(logits, SAME))) is not None and shift.name == "sub":
        under = back(lines, shift, tags)
        if under is None or not _is_of_row(lines, shift.ins[1], under[1], keys):
            break
        logits = shift.ins[0]
    return logits, tags


def _views(lines: Lines, value: int, tags: Labels) -> tuple[Line | None, Labels] | None:
    """The first line behind a value that is no view of another, and the tags of its result."""
    while (line := lines.made_by(value)) is not None and line.name in SAME | VIEWS:
        under = back(lines, line, tags)
        if under is None:
            return None
        value, tags = line.ins[0], under[0]
    return line, tags


def _is_of_row(lines: Lines, value: int, tags: Labels, keys: int) -> bool:
    """Whether a value is the same for all keys."""
    while keys in tags:
        line = lines.made_by(value)
        if line is None or line.name not in SAME | VIEWS:
            return False
        under = back(lines, line, tags)
        if under is None:
            return False
        value, tags = line.ins[0], under[0]
    return True


def _softmax_behind(lines: Lines, value: int) -> Line | None:
    """The last line with several operands between a softmax and a value, if number by number it comes of one."""
    first: Line | None = None
    for line in _ancestors(lines, value):
        if line.name in ("mul", "select_n") and first is None:
            first = line
        if line.name == "div":
            exp, total = (lines.behind(one, SAME | VIEWS) for one in line.ins)
            makers = [lines.made_by(one) for one in (exp, total)]
            if [made.name if made else "" for made in makers] == ["exp", "reduce_sum"] and first is not None:
                return first
    return None


def _ancestors(lines: Lines, value: int) -> Iterator[Line]:
    """The lines behind a value as far as they are elementwise, or views: nearest first, a few of them."""
    left, seen = [value], set[int]()
    while left and len(seen) < 64:
        line = lines.made_by(left.pop(0))
        if line is not None and line.outs[0] not in seen and line.name in ELEMENTWISE | VIEWS:
            seen.add(line.outs[0])
            left += line.ins
            yield line


class _Steps:
    """The steps between the first product and the logits, grown back from the logits.

    A value may be needed under several labels (positions of queries and of keys are often one array), and is then
    several steps. Values that only come in, or are made in another way, are extras.
    """

    def __init__(self, lines: Lines, keys: int, tags: set[int]):
        self._lines, self._keys, self._tags = lines, keys, tags
        self._steps: list[Step] = []
        self._known: dict[tuple[int, Labels], int] = {}
        self._extras: list[tuple[int, Labels]] = []
        self.score: Line | None = None
        self._score_tags: Labels = ()

    def grow(self, value: int, tags: Labels) -> int | None:
        """The step that makes a value under some tags, with all those before it."""
        key = (value, tags)
        if key not in self._known:
            made = self._made(value, tags)
            if made is None:
                return None
            self._steps.append(made)
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
            under = back(lines, line, tags)
            args = [self.grow(*pair) for pair in zip(line.ins, under, strict=True)] if under is not None else [None]
            if all(arg is not None for arg in args):
                params = {name: _plain(given) for name, given in line.eqn.params.items()}
                return Step(
                    line.name,
                    line.eqn.primitive,
                    tuple(sorted(params.items())),
                    tuple(a for a in args if a is not None),
                    *rest,
                )
        if self._comes_of_score(value):
            return None
        self._extras.append((value, tags))
        return Step("extra", None, (("at", len(self._extras) - 1),), (), *rest)

    def _is_score(self, line: Line, tags: Labels) -> bool:
        """Whether a line is q.k: one product, with every dim of the logits in it."""
        is_known = self.score is None or self.score is line
        own = [tag for tag in tags if tag != NONE]
        return line.name == "dot_general" and is_known and len(own) == len(set(own)) and set(own) == self._tags

    def _comes_of_score(self, value: int) -> bool:
        """Whether a value depends on q.k in a way that is not number by number."""
        left, seen = [value], set[int]()
        lines = self._lines
        while left:
            line = lines.made_by(left.pop())
            if line is None or id(line) in seen:
                continue
            seen.add(id(line))
            if line is self.score:
                return True
            left += line.ins
        return False

    def found(self, second: Line, side: int, values: int, batch: dict[int, int]) -> AttentionMatch | None:
        """The attention, if both products go together."""
        lines, first = self._lines, self.score
        assert first is not None
        contract, batched = first.eqn.params["dimension_numbers"]
        at_side = _sides(lines, first)
        keys_at = self._score_tags.index(self._keys)
        of_q = next((one for one in (0, 1) if keys_at not in at_side[one].values()), None)
        num_batch = len(batched[0])
        if of_q is None or keys_at < num_batch or len(at_side[1 - of_q]) != 1:
            return None
        q_free = at_side[of_q]
        shape = lines.shape(first.outs[0])
        if not q_free:
            return None
        queries = max(q_free, key=lambda dim: (shape[q_free[dim]] == shape[keys_at], shape[q_free[dim]], -dim))
        rows = [dim for dim in q_free if dim != queries]
        order = [*range(num_batch), *(q_free[dim] for dim in (*rows, queries)), keys_at]  # dims of q.k, by label
        label_of_tag = {self._score_tags[dim]: label for label, dim in enumerate(order) if shape[dim] > 1}
        label_of_tag[NONE] = NONE
        relabelled = lambda tags: tuple(label_of_tag[tag] for tag in tags)  # noqa: E731
        q_order = (*batched[of_q], *rows, queries, *contract[of_q])
        k_order = (*batched[1 - of_q], *at_side[1 - of_q], *contract[1 - of_q])
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
        operands = ((first.ins[of_q], q_order), (first.ins[1 - of_q], k_order), (values, v))
        out = self._result(second, side, v[-1], label_of_tag, len(order))
        return AttentionMatch(form, operands, tuple(value for value, _ in self._extras), out)

    def _values(
        self, second: Line, side: int, values: int, batch: dict[int, int], label_of: dict[int, int], num_batch: int
    ) -> Labels | None:
        """The order of the values' dims as (batch, keys, width); -1 stands for a dim of one number they lack."""
        shape = self._lines.shape(values)
        tag = lambda dim: dim if self._lines.shape(second.ins[side])[dim] > 1 else NONE  # noqa: E731
        labels = {label_of[tag(at)]: dim for dim, at in batch.items() if tag(at) != NONE}
        (contract, batched) = second.eqn.params["dimension_numbers"]
        free = [dim for dim in range(len(shape)) if dim not in (*contract[1 - side], *batched[1 - side])]
        wanted = {label for label in label_of.values() if NONE < label < num_batch}
        if set(labels) != wanted or len(free) != 1:
            return None
        return (*(labels.get(label, -1) for label in range(num_batch)), contract[1 - side][0], free[0])

    def _result(self, second: Line, side: int, width: int, label_of: dict[int, int], width_label: int) -> Labels:
        """The label of each dim of the second product's result."""
        lines = self._lines
        contract, batched = second.eqn.params["dimension_numbers"]
        of_weights = lines.shape(second.ins[side])
        label = lambda dim: label_of[dim] if of_weights[dim] > 1 else NONE  # noqa: E731
        free = [label(dim) for dim in range(len(of_weights)) if dim not in (*contract[side], *batched[side])]
        both = [free, [width_label]] if side == 0 else [[width_label], free]
        return tuple([label(dim) for dim in batched[side]] + both[0] + both[1])


def _sides(lines: Lines, dot: Line) -> tuple[dict[int, int], dict[int, int]]:
    """The dims of either operand that go through, with the dim of the result that each becomes."""
    contract, batched = dot.eqn.params["dimension_numbers"]
    at, found = len(batched[0]), []
    for side in (0, 1):
        rank = len(lines.shape(dot.ins[side]))
        free = [dim for dim in range(rank) if dim not in (*contract[side], *batched[side])]
        found.append({dim: at + place for place, dim in enumerate(free)})
        at += len(free)
    return found[0], found[1]


def _plain(value: Any) -> Any:
    """A parameter as one that can be compared."""
    return tuple(map(_plain, value)) if isinstance(value, list | tuple) else value


def canonical(array: Any, order: Labels) -> Any:
    """An operand in the order of its form."""
    there = [dim for dim in order if dim >= 0]
    dropped = [dim for dim in range(array.ndim) if dim not in there]
    kept = [dim for dim in range(array.ndim) if dim not in dropped]
    array = lax.transpose(lax.squeeze(array, dropped), [kept.index(dim) for dim in there])
    return lax.expand_dims(array, [at for at, dim in enumerate(order) if dim < 0])


def as_written(array: Any, labels: Labels, shape: tuple[int, ...]) -> Any:
    """A result laid out (batch, rows, queries, width) in the order in which it was written."""
    there = [label for label in labels if label != NONE]
    width = array.ndim  # labels count the keys too, which the result has no more
    kept = [width - 1 if label == width else label for label in there]
    dropped = [dim for dim in range(array.ndim) if dim not in kept]
    left = [dim for dim in range(array.ndim) if dim in kept]
    array = lax.transpose(lax.squeeze(array, dropped), [left.index(dim) for dim in kept])
    return lax.reshape(array, shape)
