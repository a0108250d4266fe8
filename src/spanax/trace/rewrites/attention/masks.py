"""Finds score blocks that are masked for every input, without evaluating them.

Each step from positions to logits is evaluated on intervals: the smallest and largest value within a block.
"""

from collections.abc import Callable, Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np

from spanax.trace.rewrites.attention.scores import Form, Step

LARGEST_SCORE = 1e6
"""No q.k is taken to be larger than this: with 32 bits its softmax would be meaningless long before."""

MASKED = -1e8
"""A score that is surely below this is no score but a mask: its softmax is exactly 0 beside any real one."""

Range = tuple[np.ndarray, np.ndarray]
"""The smallest and the largest that a value can be."""

FLAGS = frozenset({"not", "and", "or"})
"""What is known of these is known of flags: of whole numbers they work bit by bit."""


def masked_blocks(form: Form, num_parts: int) -> np.ndarray:
    """Which blocks of the scores are masked whatever the numbers: an array (parts of queries, parts of keys).

    None is said to be where a row of queries could be masked altogether: its softmax would not be 0 there, as all of
    its logits are equal. That every query sees itself is proof enough that none is.
    """
    t, s = form.sizes[form.queries], form.sizes[form.keys]
    starts = [np.arange(num_parts, dtype=float) * (size // num_parts) for size in (t, s)]
    ends = [start + size // num_parts - 1 for start, size in zip(starts, (t, s), strict=True)]
    at = {form.queries: (starts[0][:, None], ends[0][:, None]), form.keys: (starts[1][None], ends[1][None])}
    _, high = bounds(form, at)
    found = np.broadcast_to(high <= MASKED, (num_parts, num_parts))
    if not found.any():
        return np.array(found)
    is_exact = bool((np.broadcast_to(high, found.shape)[found] == -np.inf).all())
    return np.array(found & (is_exact or _sees_itself(form)))


def _sees_itself(form: Form) -> bool:
    t, s = form.sizes[form.queries], form.sizes[form.keys]
    if t != s:
        return False
    alike = np.arange(t, dtype=float)
    low, _ = bounds(form, {form.queries: (alike, alike), form.keys: (alike, alike)})
    return bool((low > MASKED).all())


def bounds(
    form: Form,
    at: Mapping[int, Range],
    score: tuple[float, float] = (-LARGEST_SCORE, LARGEST_SCORE),
    *,
    is_exact: bool = False,
) -> Range:
    """Between what the logits lie, given where queries and keys are, and q.k; `is_exact` as if no dtype rounded."""
    anything = np.asarray(-np.inf), np.asarray(np.inf)
    done: list[Range] = []
    for step in form.steps:
        known = [done[one] for one in step.args]
        if step.name == "score":
            found: Range = np.asarray(score[0]), np.asarray(score[1])
        elif step.name == "literal":
            found = (np.asarray(float(step.param("value"))),) * 2
        elif step.name == "iota":
            dim = step.param("dimension")
            whole = np.asarray(0.0), np.asarray(step.shape[dim] - 1.0)
            found = at.get(step.labels[dim], whole)
        elif step.name in _RANGES and (step.name not in FLAGS or step.dtype == np.bool_):
            found = _RANGES[step.name](*known)
        else:
            found = (np.asarray(0.0), np.asarray(1.0)) if step.dtype == np.bool_ else anything
        done.append(anything if any(np.isnan(one).any() for one in found) else _rounded(found, step, is_exact))
    return done[-1]


def _rounded(found: Range, step: Step, is_exact: bool) -> Range:
    """A range with room for what the dtype rounds."""
    low, high = found
    if step.dtype == np.bool_:
        is_zero, is_one = (low == 0) & (high == 0), (low > 0) | (high < 0)
        return is_one.astype(float), (~is_zero).astype(float)
    if jnp.issubdtype(step.dtype, jnp.integer):
        return np.floor(low), np.ceil(high)
    if step.dtype.itemsize < 4 and not is_exact and step.name != "literal":
        share = 2.0 ** -jnp.finfo(step.dtype).nmant
        return low - np.where(np.isfinite(low), share * abs(low), 0), high + np.where(
            np.isfinite(high), share * abs(high), 0
        )
    return low, high


def _corners(function: Callable[[np.ndarray, np.ndarray], np.ndarray]) -> Callable[[Range, Range], Range]:
    """The range of what is largest and smallest at the ends of both operands."""

    def of(a: Range, b: Range) -> Range:
        with np.errstate(all="ignore"):
            # Nothing is infinite, only unknown: 0 times what is not known is 0.
            found = [np.nan_to_num(function(x, y), posinf=np.inf, neginf=-np.inf) for x in a for y in b]
        ends = np.broadcast_arrays(*found)
        return np.min(ends, axis=0), np.max(ends, axis=0)

    return of


def _divided(a: Range, b: Range) -> Range:
    if ((b[0] <= 0) & (b[1] >= 0)).any() or not all(np.isfinite(one).all() for one in (*a, *b)):
        return np.asarray(-np.inf), np.asarray(np.inf)
    return _corners(np.divide)(a, b)


def _less(a: Range, b: Range) -> Range:
    """Whether a < b: surely (1, 1), surely not (0, 0), or not known (0, 1)."""
    return (a[1] < b[0]).astype(float), (a[0] < b[1]).astype(float)


def _equal(a: Range, b: Range) -> Range:
    is_one = (a[0] == a[1]) & (b[0] == b[1]) & (a[0] == b[0])
    return is_one.astype(float), ((a[0] <= b[1]) & (b[0] <= a[1])).astype(float)


def _not(a: Range) -> Range:
    is_flag = (a[0] >= 0).all() and (a[1] <= 1).all()
    return (1 - a[1], 1 - a[0]) if is_flag else (np.asarray(-np.inf), np.asarray(np.inf))


def _flags(function: Any) -> Callable[[Range, Range], Range]:
    """Of `and` and `or`, where both operands are flags."""

    def of(a: Range, b: Range) -> Range:
        if not all(((low >= 0) & (high <= 1)).all() for low, high in (a, b)):
            return np.asarray(-np.inf), np.asarray(np.inf)
        return function(a[0], b[0]), function(a[1], b[1])

    return of


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
