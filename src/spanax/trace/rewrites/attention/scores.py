"""The steps from q.k to the logits of an attention, which can be evaluated on any block.

Scales, biases and masks computed from positions are elementwise: a block of the scores needs only the same block of
their operands. Positions are generated per block, so the full score matrix is never materialized.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np
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
      same: for each external operand, the first that is the same array, under other labels.
      sink: the step of the logit of a sink of each row, a term of the softmax's sum without a weight, if there is one.
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
    same: tuple[int, ...] = ()
    sink: int | None = None

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
    last = len(form.steps) - 1
    return evaluated(form, [last], extras, sizes, score, offsets)[last]


def evaluated(
    form: Form,
    steps: Sequence[int],
    extras: Sequence[Any],
    sizes: Sequence[int],
    score: Any = None,
    offsets: Mapping[int, Any] | None = None,
) -> dict[int, Any]:
    """Returns the values of some steps for one block, of shape (batch, rows, queries, keys).

    A label along which a value does not vary may have size 1.
    """
    needed = set(steps)
    for index in range(len(form.steps) - 1, -1, -1):
        needed |= set(form.steps[index].args) if index in needed else set()
    results: dict[int, Any] = {}
    for index in sorted(needed):
        step = form.steps[index]
        shape = tuple(
            size if label == NONE else sizes[label] for size, label in zip(step.shape, step.labels, strict=True)
        )
        ins = [results[arg] for arg in step.args]
        results[index] = _run(form, step, ins, shape, score, extras, offsets or {})
    return {index: _in_order(form, results[index], form.steps[index].labels, sizes) for index in steps}


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
    if step.name == "gather":
        dims = step.param("dimension_numbers")
        sizes = [1 if dim in dims.collapsed_slice_dims else size for dim, size in enumerate(ins[0].shape)]
        return lax.gather(*ins, dims, sizes, mode=step.param("mode"))
    return step.primitive.bind(*ins, **dict(step.params))


def _in_order(form: Form, array: Any, labels: Sequence[int], sizes: Sequence[int]) -> Any:
    """Returns an array transposed and reshaped to (batch, rows, queries, keys), with size 1 for missing labels."""
    labeled = [dim for dim, label in enumerate(labels) if label != NONE]
    array = lax.reshape(array, tuple(array.shape[dim] for dim in labeled))
    array = lax.transpose(array, sorted(range(len(labeled)), key=lambda i: labels[labeled[i]]))
    present = {label for label in labels if label != NONE}
    return lax.reshape(array, tuple(size if label in present else 1 for label, size in enumerate(sizes)))


LARGEST_SCORE = 1e6
"""Assumed bound on |q.k|; in float32, softmax loses all precision well below it."""

MASKED = -1e8
"""A logit bounded above by this is masked: its softmax weight is exactly 0 next to any unmasked logit."""

VIEWS = frozenset("broadcast_in_dim transpose reshape squeeze expand_dims stop_gradient copy".split())
"""Steps whose values are those of their operand."""

Range = tuple[np.ndarray, np.ndarray]
"""Lower and upper bound of a value."""

FLAGS = frozenset({"not", "and", "or"})
"""Operations with interval rules for booleans only: on integers they are bitwise."""


def masked_blocks(form: Form, num_parts: int) -> np.ndarray:
    """Returns which blocks of scores are masked for every input, (parts of queries, parts of keys).

    If a query could have all keys masked with a finite value, no block counts as masked: its logits could be equal, and
    its softmax weights would not be 0. Every query attending to itself rules this out.
    """
    t = form.sizes[form.queries]
    s = form.sizes[form.keys]
    starts = [np.arange(num_parts, dtype=float) * (size // num_parts) for size in (t, s)]
    ends = [start + size // num_parts - 1 for start, size in zip(starts, (t, s), strict=True)]
    intervals = {form.queries: (starts[0][:, None], ends[0][:, None]), form.keys: (starts[1][None], ends[1][None])}
    _, high = bounds(form, intervals)
    is_masked = np.broadcast_to(high <= MASKED, (num_parts, num_parts))
    if not is_masked.any():
        return np.array(is_masked)
    is_exact = bool((np.broadcast_to(high, is_masked.shape)[is_masked] == -np.inf).all())
    return np.array(is_masked & (is_exact or sees_itself(form)))


def sees_itself(form: Form) -> bool:
    """Returns whether every query sees the key at its own position, for every input."""
    t = form.sizes[form.queries]
    s = form.sizes[form.keys]
    if t != s:
        return False
    positions = np.arange(t, dtype=float)
    at = {form.queries: (positions, positions), form.keys: (positions, positions)}
    low, _ = ranges(form, at, is_diagonal=True)[-1]
    return bool((low > MASKED).all())


def bounds(
    form: Form,
    at: Mapping[int, Range],
    score: tuple[float, float] = (-LARGEST_SCORE, LARGEST_SCORE),
) -> Range:
    """Returns bounds on the logits from intervals of positions and of q.k."""
    return ranges(form, at, score)[-1]


def ranges(
    form: Form,
    at: Mapping[int, Range],
    score: tuple[float, float] = (-LARGEST_SCORE, LARGEST_SCORE),
    *,
    is_diagonal: bool = False,
) -> list[Range]:
    """Returns bounds on the value of each step from intervals of positions and of q.k.

    With `is_diagonal`, queries and keys are at the same positions: what one function computes of both is equal there.
    """
    anything = np.asarray(-np.inf), np.asarray(np.inf)
    ranges: list[Range] = []
    for step in form.steps:
        operands = [ranges[arg] for arg in step.args]
        if step.name == "score":
            bound: Range = np.asarray(score[0]), np.asarray(score[1])
        elif step.name == "literal":
            bound = (np.asarray(float(step.param("value"))),) * 2
        elif step.name == "iota":
            dim = step.param("dimension")
            extent = np.asarray(0.0), np.asarray(step.shape[dim] - 1.0)
            bound = at.get(step.labels[dim], extent)
        elif is_diagonal and _is_reflexive(form, step):
            bound = (np.asarray(1.0), np.asarray(1.0))
        elif step.name in _OF_INTEGERS and jnp.issubdtype(step.dtype, jnp.integer):
            bound = _OF_INTEGERS[step.name](*operands)
        elif step.name in _RANGES and (step.name not in FLAGS or step.dtype == np.bool_):
            bound = _RANGES[step.name](*operands)
        else:
            bound = (np.asarray(0.0), np.asarray(1.0)) if step.dtype == np.bool_ else anything
        ranges.append(anything if any(np.isnan(arg).any() for arg in bound) else _rounded(bound, step))
    return ranges


def _is_alike(form: Form, step: int, other: int) -> bool:
    """Whether two steps compute one function of positions, one of the queries and the other of the keys."""
    a, b = (form.steps[before_views(form, each)] for each in (step, other))
    swapped = {form.queries: form.keys}
    labels = [tuple(swapped.get(label, label) for label in each.labels if label != NONE) for each in (a, b)]
    if a.name != b.name or labels[0] != labels[1] or len(a.args) != len(b.args):
        return False
    if a.name == "extra":
        return form.same[a.param("at")] == form.same[b.param("at")]
    is_equal = a.params == b.params or a.name == "iota"
    return is_equal and all(_is_alike(form, *pair) for pair in zip(a.args, b.args, strict=True))


def _is_reflexive(form: Form, step: Step) -> bool:
    """Whether a step compares equal functions of the positions of queries and of keys; floats may be NaN."""
    is_equality = step.name == "eq" and form.steps[step.args[0]].dtype.kind in "biu"
    return is_equality and _is_alike(form, *step.args)


def before_views(form: Form, step: int) -> int:
    """Returns the step whose values another one only arranges otherwise."""
    while form.steps[step].name in VIEWS:
        (step,) = form.steps[step].args
    return step


def _rounded(bound: Range, step: Step) -> Range:
    """Returns a range widened by the rounding error of the dtype."""
    low, high = bound
    if step.dtype == np.bool_:
        is_zero = (low == 0) & (high == 0)
        is_one = (low > 0) | (high < 0)
        return is_one.astype(float), (~is_zero).astype(float)
    if jnp.issubdtype(step.dtype, jnp.integer):
        return np.floor(low), np.ceil(high)
    if step.dtype.itemsize < 4 and step.name != "literal":
        epsilon = 2.0 ** -jnp.finfo(step.dtype).nmant
        return low - np.where(np.isfinite(low), epsilon * abs(low), 0), high + np.where(
            np.isfinite(high), epsilon * abs(high), 0
        )
    return low, high


def _corners(function: Callable[[np.ndarray, np.ndarray], np.ndarray]) -> Callable[[Range, Range], Range]:
    """Returns the interval rule of a function whose extrema are at the endpoints of both operands."""

    def interval_rule(a: Range, b: Range) -> Range:
        with np.errstate(all="ignore"):
            # Infinite bounds mean unknown, not infinite: 0 times an unknown value is 0.
            values = [np.nan_to_num(function(x, y), posinf=np.inf, neginf=-np.inf) for x in a for y in b]
        ends = np.broadcast_arrays(*values)
        return np.min(ends, axis=0), np.max(ends, axis=0)

    return interval_rule


def _divided(a: Range, b: Range) -> Range:
    if ((b[0] <= 0) & (b[1] >= 0)).any() or not all(np.isfinite(bound).all() for bound in (*a, *b)):
        return np.asarray(-np.inf), np.asarray(np.inf)
    return _corners(np.divide)(a, b)


def _quotient(a: Range, b: Range) -> Range:
    """Returns the range of a division of integers, which rounds toward zero."""
    low, high = _divided(a, b)
    return np.trunc(low), np.trunc(high)


def _remainder(a: Range, b: Range) -> Range:
    """Returns the range of a remainder: exact within one period of a known divisor."""
    divisor = b[0]
    if (b[0] != b[1]).any() or (divisor <= 0).any() or not all(np.isfinite(bound).all() for bound in a):
        return np.asarray(-np.inf), np.asarray(np.inf)
    low, high = (np.fmod(bound, divisor) for bound in a)
    is_one_period = np.trunc(a[0] / divisor) == np.trunc(a[1] / divisor)
    least = np.where(a[0] < 0, 1 - divisor, 0)
    return np.where(is_one_period, low, least), np.where(is_one_period, high, np.where(a[1] > 0, divisor - 1, 0))


def _shifted(a: Range, b: Range) -> Range:
    """Returns the range of a shift to the right of integers that are not negative."""
    if (b[0] != b[1]).any() or (b[0] < 0).any() or not np.isfinite(a[1]).all() or (a[0] < 0).any():
        return np.asarray(-np.inf), np.asarray(np.inf)
    return np.floor(a[0] / 2.0 ** b[0]), np.floor(a[1] / 2.0 ** b[0])


def _absolute(a: Range) -> Range:
    ends = np.abs(a[0]), np.abs(a[1])
    return np.where((a[0] <= 0) & (a[1] >= 0), 0.0, np.minimum(*ends)), np.maximum(*ends)


def _less(a: Range, b: Range) -> Range:
    """Returns whether a < b: always (1, 1), never (0, 0), or unknown (0, 1)."""
    return (a[1] < b[0]).astype(float), (a[0] < b[1]).astype(float)


def _equal(a: Range, b: Range) -> Range:
    is_one = (a[0] == a[1]) & (b[0] == b[1]) & (a[0] == b[0])
    return is_one.astype(float), ((a[0] <= b[1]) & (b[0] <= a[1])).astype(float)


def _not(a: Range) -> Range:
    is_flag = (a[0] >= 0).all() and (a[1] <= 1).all()
    return (1 - a[1], 1 - a[0]) if is_flag else (np.asarray(-np.inf), np.asarray(np.inf))


def _flags(function: Any) -> Callable[[Range, Range], Range]:
    """Returns the interval rule of `and` or `or` on booleans."""

    def interval_rule(a: Range, b: Range) -> Range:
        if not all(((low >= 0) & (high <= 1)).all() for low, high in (a, b)):
            return np.asarray(-np.inf), np.asarray(np.inf)
        return function(a[0], b[0]), function(a[1], b[1])

    return interval_rule


def _select(which: Range, *cases: Range) -> Range:
    if len(cases) != 2:
        return np.asarray(-np.inf), np.asarray(np.inf)
    low = np.where(which[1] < 1, cases[0][0], np.where(which[0] > 0, cases[1][0], np.minimum(cases[0][0], cases[1][0])))
    high = np.where(
        which[1] < 1, cases[0][1], np.where(which[0] > 0, cases[1][1], np.maximum(cases[0][1], cases[1][1]))
    )
    return low, high


def _same(a: Range) -> Range:
    return a


_RANGES: dict[str, Callable[..., Range]] = {
    "add": lambda a, b: (a[0] + b[0], a[1] + b[1]),
    "sub": lambda a, b: (a[0] - b[1], a[1] - b[0]),
    "mul": _corners(np.multiply),
    "div": _divided,
    "max": lambda a, b: (np.maximum(a[0], b[0]), np.maximum(a[1], b[1])),
    "min": lambda a, b: (np.minimum(a[0], b[0]), np.minimum(a[1], b[1])),
    "neg": lambda a: (-a[1], -a[0]),
    "abs": _absolute,
    "sign": lambda a: (np.sign(a[0]), np.sign(a[1])),
    "tanh": lambda a: (np.tanh(a[0]), np.tanh(a[1])),
    "lt": _less,
    "gt": lambda a, b: _less(b, a),
    "ge": lambda a, b: _not(_less(a, b)),
    "le": lambda a, b: _not(_less(b, a)),
    "eq": _equal,
    "ne": lambda a, b: _not(_equal(a, b)),
    "not": _not,
    "and": _flags(np.minimum),
    "or": _flags(np.maximum),
    "select_n": _select,
}
for _name in "broadcast_in_dim transpose reshape squeeze expand_dims stop_gradient copy convert_element_type".split():
    _RANGES[_name] = _same

_OF_INTEGERS: dict[str, Callable[..., Range]] = {
    "div": _quotient,
    "rem": _remainder,
    "shift_right_logical": _shifted,
    "shift_right_arithmetic": _shifted,
}


@dataclass(frozen=True, eq=False)
class Shares:
    """The assignment of sequence parts to the devices of a ring.

    Attributes:
      masked: whether a pair is fully masked, (parts of queries, parts of keys).
      owned: the parts of each device, the same number for all.
    """

    masked: np.ndarray
    owned: tuple[tuple[int, ...], ...]

    @property
    def num_devices(self) -> int:
        """Number of devices of the ring."""
        return len(self.owned)

    @property
    def is_moved(self) -> bool:
        """Whether the assignment differs from contiguous parts per device."""
        num_parts = len(self.owned[0])
        return any(
            parts != tuple(range(device * num_parts, device * num_parts + num_parts))
            for device, parts in enumerate(self.owned)
        )

    @property
    def work(self) -> np.ndarray:
        """Pairs of parts computed, (steps, devices); at step s device i has the keys of device i - s."""
        devices = np.arange(self.num_devices)
        order = np.ravel(self.owned)
        shape = 2 * (self.num_devices, len(self.owned[0]))
        pairs = (~self.masked)[np.ix_(order, order)].reshape(shape).sum((1, 3))
        return pairs[devices, (devices - devices[:, None]) % self.num_devices]

    @functools.cached_property
    def counts(self) -> tuple[int, int]:
        """Pairs computed by the slowest device, summed over steps, and the same without a mask."""
        return int(self.work.max(1).sum()), self.num_devices * len(self.owned[0]) ** 2

    @property
    def share(self) -> float:
        """Ratio of the two `counts`."""
        num, total = self.counts
        return num / total


@functools.lru_cache(maxsize=256)
def shares(form: Form, num_devices: int) -> Shares:
    """Returns the parts of each device: contiguous, or zigzag where that balances the work better.

    Example:
      >>> from spanax.trace.rewrites.attention.scores import Step
      >>> score = Step("score", None, (), (), (0, 1, 2), (2, 8, 8), np.dtype("float32"))
      >>> shares(Form(1, 0, (2, 8, 8), (score,), (), (None, None), np.dtype("float32")), 4).owned
      ((0,), (1,), (2,), (3,))
    """
    n = num_devices
    unsharded = Shares(np.zeros((n, n), bool), tuple((device,) for device in range(n)))
    t = form.sizes[form.queries]
    s = form.sizes[form.keys]
    if t % (2 * n) or s % (2 * n):
        return unsharded if t % n or s % n else Shares(masked_blocks(form, n), unsharded.owned)
    masked = masked_blocks(form, 2 * n)
    if not masked.any():
        return unsharded
    plain = Shares(masked, tuple((2 * device, 2 * device + 1) for device in range(n)))
    zigzag = Shares(masked, tuple((device, 2 * n - 1 - device) for device in range(n)))
    return zigzag if zigzag.share < plain.share else plain
