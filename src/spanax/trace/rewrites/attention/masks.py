"""Finds score blocks that are masked for every input, without evaluating them.

Each step from positions to logits is evaluated on intervals: the smallest and largest value within a block.
"""

from collections.abc import Callable, Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np

from spanax.trace.rewrites.attention.scores import Form, Step

LARGEST_SCORE = 1e6
"""Assumed bound on |q.k|; in float32, softmax loses all precision well below it."""

MASKED = -1e8
"""A logit bounded above by this is masked: its softmax weight is exactly 0 next to any unmasked logit."""

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
    return np.array(is_masked & (is_exact or _sees_itself(form)))


def _sees_itself(form: Form) -> bool:
    t = form.sizes[form.queries]
    s = form.sizes[form.keys]
    if t != s:
        return False
    positions = np.arange(t, dtype=float)
    low, _ = bounds(form, {form.queries: (positions, positions), form.keys: (positions, positions)})
    return bool((low > MASKED).all())


def bounds(
    form: Form,
    at: Mapping[int, Range],
    score: tuple[float, float] = (-LARGEST_SCORE, LARGEST_SCORE),
    *,
    is_exact: bool = False,
) -> Range:
    """Returns bounds on the logits from intervals of positions and of q.k; `is_exact` ignores rounding."""
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
        elif step.name in _RANGES and (step.name not in FLAGS or step.dtype == np.bool_):
            bound = _RANGES[step.name](*operands)
        else:
            bound = (np.asarray(0.0), np.asarray(1.0)) if step.dtype == np.bool_ else anything
        ranges.append(anything if any(np.isnan(arg).any() for arg in bound) else _rounded(bound, step, is_exact))
    return ranges[-1]


def _rounded(bound: Range, step: Step, is_exact: bool) -> Range:
    """Returns a range widened by the rounding error of the dtype."""
    low, high = bound
    if step.dtype == np.bool_:
        is_zero = (low == 0) & (high == 0)
        is_one = (low > 0) | (high < 0)
        return is_one.astype(float), (~is_zero).astype(float)
    if jnp.issubdtype(step.dtype, jnp.integer):
        return np.floor(low), np.ceil(high)
    if step.dtype.itemsize < 4 and not is_exact and step.name != "literal":
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
