"""What an attention computes between q.k and the softmax: a scale, a soft cap, and which keys each query sees.

Each step of a form is a choice between few values, each under a condition. The conditions under which the logits are
not masked are parts that all hold: one of positions, and those of the batch, such as equal documents.
"""

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np

from spanax.trace.rewrites.attention.patterns import Counterexample, Pattern, pattern_of
from spanax.trace.rewrites.attention.scores import (
    LARGEST_SCORE,
    MASKED,
    NONE,
    VIEWS,
    Form,
    Step,
    before_views,
    ranges,
    sees_itself,
)

Condition = bool | tuple[Any, ...]
"""True, False, ("step", index), ("not", condition) or ("and" | "or", *conditions); `not` only of steps."""


@dataclass(frozen=True)
class Number:
    """A number that is known while tracing."""

    value: float


@dataclass(frozen=True)
class Logit:
    """`scale` times q.k, or with a cap `outer` times the tanh of it, plus `shift`."""

    scale: float = 1.0
    outer: float | None = None
    shift: float = 0.0


@dataclass(frozen=True)
class Other:
    """A value that is not decomposed: that of a step, which depends on q.k if `why` states what is unsupported."""

    step: int
    why: str = ""


Leaf = Number | Logit | Other
Cases = dict[Leaf, Condition]
"""The values that a step can have, each under its condition; exactly one of these holds."""

MOST_CASES = 16

COMPARED: dict[str, Callable[[Any, Any], Any]] = {
    "eq": np.equal, "ne": np.not_equal, "lt": np.less, "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal,
}  # fmt: skip

COMPUTED: dict[str, Callable[..., Any]] = {
    "add": np.add, "sub": np.subtract, "mul": np.multiply, "div": np.divide, "neg": np.negative, "max": np.maximum,
    "min": np.minimum,
}  # fmt: skip


@dataclass(frozen=True)
class Ids:
    """Equal ids of queries and keys: the steps that compute both, and the conditions under which each has an id.

    Steps are None where all queries and keys have one id.
    """

    queries: int | None
    keys: int | None
    if_query: Condition = True
    if_key: Condition = True


@dataclass(frozen=True)
class Plain:
    """An attention that a kernel may compute.

    Attributes:
      scale: the factor of q.k.
      cap: the bound of its soft cap, if any.
      pattern: the keys that a query sees by positions.
      ids: the ids that must be equal for a query to see a key, if any.
      masked: the logit of hidden keys; None if every query sees a key, whatever the batch, or there is a sink.
      has_sink: whether there is a sink, of each query head.
    """

    scale: float
    cap: float | None
    pattern: Pattern
    ids: Ids | None
    masked: float | None
    has_sink: bool = False


@functools.lru_cache(maxsize=256)
def plain(form: Form) -> Plain | str:
    """Returns what an attention computes if a kernel may compute it, else what else it contains."""
    cases = _Steps(form).cases()
    by_kind = [(leaf, condition) for leaf, condition in cases.items() if condition is not False]
    unsupported = [leaf.why for leaf, _ in by_kind if isinstance(leaf, Other)]
    if unsupported:
        return unsupported[0] or "logits that do not depend on q.k"
    seen = [(leaf, condition) for leaf, condition in by_kind if isinstance(leaf, Logit) and not _is_masked(leaf)]
    hidden = [leaf for leaf, _ in by_kind if _is_masked(leaf)]
    if len(seen) != 1 or len(seen) + len(hidden) != len(by_kind):
        return "a mask whose logits of hidden keys are too high"
    ((logit, visible),) = seen
    parts = _parts(form, visible)
    if isinstance(parts, str):
        return parts
    pattern, ids = parts
    has_sink = form.sink is not None
    if form.sink is not None and not reads_of(form)[form.sink][0] <= {*range(form.queries)}:
        return "a sink that is not one of each head"
    if has_sink and logit.shift != 0:
        return "a sink, and a number that is added to the other logits"
    masked = _masked_value(form, hidden) if hidden and not has_sink and not sees_itself(form) else None
    if isinstance(masked, str):
        return masked
    if logit.outer is None:
        return Plain(logit.scale, None, pattern, ids, masked, has_sink)
    return Plain(logit.scale * logit.outer, abs(logit.outer), pattern, ids, masked, has_sink)


def _is_masked(leaf: Leaf) -> bool:
    if isinstance(leaf, Number):
        return leaf.value <= MASKED
    return isinstance(leaf, Logit) and leaf.shift + _largest(leaf) <= MASKED


def _largest(logit: Logit) -> float:
    return abs(logit.scale) * LARGEST_SCORE if logit.outer is None else abs(logit.outer)


def _masked_value(form: Form, hidden: Sequence[Leaf]) -> float | str:
    """Returns the logit of hidden keys of a query that may see none; or why its softmax is not their mean."""
    numbers = {leaf.value for leaf in hidden if isinstance(leaf, Number)}
    added = [leaf for leaf in hidden if isinstance(leaf, Logit)]
    values = numbers | {leaf.shift for leaf in added}
    spacing = float(jnp.finfo(form.steps[-1].dtype).eps) / 4
    absorbs = all(abs(leaf.shift) * spacing > _largest(leaf) for leaf in added)
    if len(values) > 1 or not absorbs:
        return "queries that may see no key, and hidden logits that are not one number"
    return values.pop()


# ---- the values of each step


class _Steps:
    """The values that each step of a form can have, under their conditions."""

    def __init__(self, form: Form):
        self._form = form
        self._reads = reads_of(form)
        self._steps = form.steps
        self._cases: list[Cases] = []
        self._conditions: list[Condition] = []  # of steps of booleans

    def cases(self) -> Cases:
        """Returns those of the last step, the logits."""
        for index, step in enumerate(self._steps):
            is_flag = step.dtype == np.bool_
            condition = self._condition(index, step) if is_flag else False
            self._conditions.append(condition)
            self._cases.append(_flag(condition) if is_flag else self._values(index, step))
        return self._cases[-1]

    def _condition(self, index: int, step: Step) -> Condition:
        conditions = [self._conditions[arg] for arg in step.args]
        if step.name == "literal":
            return bool(step.param("value"))
        if step.name in VIEWS:
            return conditions[0]
        if step.name in ("and", "or"):
            return _all(conditions) if step.name == "and" else _any(conditions)
        if step.name == "not":
            return negated(conditions[0])
        if step.name == "select_n" and len(conditions) == 3 and self._steps[step.args[0]].dtype == np.bool_:
            which, no, yes = conditions
            return _any([_all([negated(which), no]), _all([which, yes])])
        cases = [self._cases[arg] for arg in step.args]
        is_known = all(isinstance(leaf, Number) for options in cases for leaf in options)
        if step.name == "convert_element_type" and is_known:
            return _any([condition for leaf, condition in cases[0].items() if leaf.value != 0])  # type: ignore[union-attr]
        if self._reads[index][1] and _equal_ids(self._form, ("step", index), self._reads):
            return ("step", index)
        if step.name in COMPARED and is_known:
            compare = COMPARED[step.name]
            pairs = _products(cases)
            return _any([condition for leaves, condition in pairs if compare(*(leaf.value for leaf in leaves))])  # type: ignore[union-attr]
        return ("step", index)

    def _values(self, index: int, step: Step) -> Cases:
        cases = [self._cases[arg] for arg in step.args]
        if step.name == "score":
            return {Logit(): True}
        if step.name == "literal":
            return {Number(float(step.param("value"))): True}
        if step.name in VIEWS:
            return cases[0]
        if step.name == "select_n" and len(cases) == 3 and self._steps[step.args[0]].dtype == np.bool_:
            which = self._conditions[step.args[0]]
            no, yes = cases[1:]
            chosen = [*((leaf, _all([negated(which), condition])) for leaf, condition in no.items()),
                      *((leaf, _all([which, condition])) for leaf, condition in yes.items())]  # fmt: skip
            return self._joined(index, chosen)
        pairs = _products(cases) if cases else []
        return self._joined(index, [(self._applied(index, step, leaves), condition) for leaves, condition in pairs])

    def _applied(self, index: int, step: Step, leaves: Sequence[Leaf]) -> Leaf:
        """Returns the value of an operation of given values."""
        if step.name == "convert_element_type" and isinstance(leaves[0], Logit):
            return leaves[0]
        if all(isinstance(leaf, Number) for leaf in leaves):
            values = [leaf.value for leaf in leaves]  # type: ignore[union-attr]
            function = (lambda value: value) if step.name == "convert_element_type" else COMPUTED.get(step.name)
            if function is not None:
                with np.errstate(all="ignore"):
                    return Number(float(np.asarray(function(*values)).astype(step.dtype)))
        logits = [position for position, leaf in enumerate(leaves) if isinstance(leaf, Logit)]
        if not logits:
            return Other(index, next((leaf.why for leaf in leaves if isinstance(leaf, Other) and leaf.why), ""))
        result = _of_logit(step.name, leaves, logits[0]) if len(logits) == 1 else None
        if result is not None:
            return result
        of_others = [leaf for leaf in leaves if isinstance(leaf, Other)]
        if of_others and of_others[0].why:
            return Other(index, of_others[0].why)
        if of_others and step.name in ("add", "sub"):
            return Other(index, "a bias of logits")
        return Other(index, f"'{step.name}' between q.k and the softmax")

    def _joined(self, index: int, pairs: Sequence[tuple[Leaf, Condition]]) -> Cases:
        """Returns values with their conditions, without those that cannot be."""
        cases: Cases = {}
        for leaf, condition in pairs:
            if condition is not False:
                cases[leaf] = _any([cases.get(leaf, False), condition])
        if len(cases) > MOST_CASES or not cases:
            depends = any(not isinstance(leaf, Number) for leaf in cases)
            return {Other(index, "a mask of too many cases" if depends else ""): True}
        return {Other(index): True} if all(isinstance(leaf, Other) and not leaf.why for leaf in cases) else cases


def _of_logit(name: str, leaves: Sequence[Leaf], at: int) -> Leaf | None:
    """Returns the result of an operation on a logit and numbers; None if it is none of a kernel."""
    logit = leaves[at]
    assert isinstance(logit, Logit)
    numbers = [leaf.value for leaf in leaves if isinstance(leaf, Number)]
    if len(numbers) + 1 != len(leaves):
        return None
    if name == "tanh" and logit.outer is None and logit.shift == 0:
        return Logit(logit.scale, 1.0)
    if name == "neg":
        return _times(logit, -1.0)
    if name == "mul":
        return Number(0.0) if numbers[0] == 0 else _times(logit, numbers[0])
    if name == "div" and at == 0 and numbers[0] != 0:
        return _times(logit, 1 / numbers[0])
    if name in ("add", "sub"):
        first = _times(logit, -1.0) if name == "sub" and at == 1 else logit
        other = -numbers[0] if name == "sub" and at == 0 else numbers[0]
        return Number(other) if np.isinf(other) else Logit(first.scale, first.outer, first.shift + other)
    return None


def _times(logit: Logit, factor: float) -> Logit:
    if logit.outer is None:
        return Logit(logit.scale * factor, None, logit.shift * factor)
    return Logit(logit.scale, logit.outer * factor, logit.shift * factor)


def _products(cases: Sequence[Cases]) -> list[tuple[tuple[Leaf, ...], Condition]]:
    """Returns every combination of the values of operands, with its condition."""
    result: list[tuple[tuple[Leaf, ...], Condition]] = [((), True)]
    for options in cases:
        result = [
            ((*leaves, leaf), both)
            for leaves, condition in result
            for leaf, other in options.items()
            if (both := _all([condition, other])) is not False
        ]
    return result


def _flag(condition: Condition) -> Cases:
    """Returns the values 0 and 1 of a boolean."""
    cases: Cases = {Number(1.0): condition, Number(0.0): negated(condition)}
    return {leaf: each for leaf, each in cases.items() if each is not False}


# ---- conditions


def negated(condition: Condition) -> Condition:
    """Returns the opposite of a condition."""
    if isinstance(condition, bool):
        return not condition
    kind, *rest = condition
    if kind == "not":
        return rest[0]  # type: ignore[no-any-return]
    if kind == "step":
        return ("not", condition)
    return _any(map(negated, rest)) if kind == "and" else _all(map(negated, rest))


def _all(conditions: Any) -> Condition:
    return _joint("and", conditions, neutral=True)


def _any(conditions: Any) -> Condition:
    return _joint("or", conditions, neutral=False)


def _joint(kind: str, conditions: Any, *, neutral: bool) -> Condition:
    """Returns conditions joined by `and` or `or`, flat, without repetition; a condition and its opposite decide it."""
    flat: dict[Condition, None] = {}
    for condition in conditions:
        if isinstance(condition, bool):
            if condition is not neutral:
                return not neutral
            continue
        parts = condition[1:] if condition[0] == kind else (condition,)
        flat |= dict.fromkeys(parts)
    if any(negated(each) in flat for each in flat):
        return not neutral
    if not flat:
        return neutral
    return next(iter(flat)) if len(flat) == 1 else (kind, *flat)


def steps_of(condition: Condition) -> Iterator[int]:
    """Yields the steps that a condition reads."""
    if isinstance(condition, tuple):
        if condition[0] == "step":
            yield condition[1]
        else:
            for part in condition[1:]:
                yield from steps_of(part)


# ---- the parts of the condition under which a key is seen


def _parts(form: Form, visible: Condition) -> tuple[Pattern, Ids | None] | str:
    """Returns the pattern and the ids of a mask, or what else it is."""
    reads = reads_of(form)
    conjuncts = visible[1:] if isinstance(visible, tuple) and visible[0] == "and" else (visible,)
    of_positions: list[Condition] = []
    of_queries: list[Condition] = []
    of_keys: list[Condition] = []
    pairs: list[tuple[int, int]] = []
    for conjunct in conjuncts:
        labels = set().union(*(reads[step][0] for step in steps_of(conjunct)))
        has_extras = any(reads[step][1] for step in steps_of(conjunct))
        sides = labels - set(range(form.num_batch))
        if not has_extras and labels <= {form.queries, form.keys}:
            of_positions.append(conjunct)
        elif sides <= {form.queries}:
            of_queries.append(conjunct)
        elif sides <= {form.keys}:
            of_keys.append(conjunct)
        elif pair := _equal_ids(form, conjunct, reads):
            pairs.append(pair)
        else:
            return f"a condition of queries and keys other than equal ids{_named(form, conjunct)}"
    if len(pairs) > 1:
        return "several conditions of equal ids"
    pattern = _pattern(form, _all(of_positions))
    if not isinstance(pattern, Pattern):
        return f"a mask of no known pattern: {pattern}" if pattern else "a mask of too many blocks"
    if not pairs and not of_queries and not of_keys:
        return pattern, None
    queries, keys = pairs[0] if pairs else (None, None)
    return pattern, Ids(queries, keys, _all(of_queries), _all(of_keys))


def _named(form: Form, condition: Condition) -> str:
    names = sorted({form.steps[step].name for step in steps_of(condition)})
    return f" ({', '.join(repr(name) for name in names)})" if names else ""


def reads_of(form: Form) -> list[tuple[frozenset[int], frozenset[int]]]:
    """Returns for each step the labels along which its value varies, and the extras that it reads."""
    result: list[tuple[frozenset[int], frozenset[int]]] = []
    for step in form.steps:
        labels = frozenset[int]().union(*(result[arg][0] for arg in step.args))
        extras = frozenset[int]().union(*(result[arg][1] for arg in step.args))
        if step.name == "score":
            labels = frozenset(range(form.keys + 1))
        elif step.name == "extra":
            labels = frozenset(step.labels) - {NONE}
            extras = frozenset({step.param("at")})
        elif step.name == "iota":
            labels = frozenset({step.labels[step.param("dimension")]}) - {NONE}
        result.append((labels, extras))
    return result


def _equal_ids(form: Form, condition: Condition, reads: Sequence[Any]) -> tuple[int, int] | None:
    """Returns the steps of the ids of queries and keys if a condition is that integers of both are equal."""
    if not isinstance(condition, tuple) or condition[0] != "step":
        return None
    step = form.steps[condition[1]]
    if step.name != "eq":
        return None
    sides = [before_views(form, arg) for arg in step.args]
    if not all(form.steps[side].dtype.kind in "biu" for side in sides):
        return None
    batch = set(range(form.num_batch))
    labels = [reads[side][0] - batch for side in sides]
    if labels == [{form.keys}, {form.queries}]:
        sides.reverse()
    return (sides[0], sides[1]) if sorted(labels, key=sorted) == [{form.queries}, {form.keys}] else None


def _pattern(form: Form, condition: Condition) -> Pattern | Counterexample | None:
    """Returns the pattern of a condition of positions."""
    if condition is True:
        return Pattern()

    def known(blocks: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        of_steps = ranges(form, {form.queries: (blocks[0], blocks[1]), form.keys: (blocks[2], blocks[3])})
        low, high = _bounds(condition, of_steps)
        size = blocks.shape[1:]
        return np.broadcast_to(high == 0, size), np.broadcast_to(low == 1, size)

    return pattern_of(form.sizes[form.queries], form.sizes[form.keys], known)


def _bounds(condition: Condition, of_steps: Sequence[Any]) -> tuple[Any, Any]:
    """Returns whether a condition holds at some positions: always (1, 1), never (0, 0), or unknown (0, 1)."""
    if isinstance(condition, bool):
        return np.asarray(float(condition)), np.asarray(float(condition))
    kind, *rest = condition
    if kind == "step":
        low, high = of_steps[rest[0]]
        return np.asarray(low, float), np.asarray(high, float)
    parts = [_bounds(part, of_steps) for part in rest]
    if kind == "not":
        low, high = parts[0]
        return 1 - high, 1 - low
    join = np.minimum if kind == "and" else np.maximum
    return functools.reduce(join, [low for low, _ in parts]), functools.reduce(join, [high for _, high in parts])
