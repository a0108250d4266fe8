"""How a value of the loss depends on the examples of the batch."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import Enum, auto

from spanax.trace.jaxpr.graph import Op


class Kind(Enum):
    """What a microbatch computes of a value.

    `SAME`: the value itself, which does not depend on the examples. `ROWS`: its rows for the examples of the
    microbatch. `INDEX`: the index of each example within the microbatch. `PARTIAL`: a term; the terms of all
    microbatches add up to the value. `EXTREME`: the maximum or minimum over the microbatch. `TOTAL`: nothing; the value
    is a function of sums over the batch. `MIXED`: nothing; the value combines examples in an unsupported manner.
    """

    SAME = auto()
    ROWS = auto()
    INDEX = auto()
    PARTIAL = auto()
    EXTREME = auto()
    TOTAL = auto()
    MIXED = auto()


@dataclass(frozen=True)
class Dependence:
    """How one value depends on the examples.

    Attributes:
      kind: what a microbatch computes of it.
      dim: for `ROWS` and `INDEX`, the example dim.
      inner: consecutive elements along `dim` that belong to one example; None where all rows are equal.
      is_trained: whether it depends on trained parameters.
      is_zero: whether it is zero everywhere.
      is_shifted: for `INDEX`, whether the batch size was added.
      columns: for an array of indices, its columns along the last dim that are `INDEX`.
      cause: for `MIXED`, the equation that combines examples.
    """

    kind: Kind
    dim: int = -1
    inner: int | None = None
    is_trained: bool = False
    is_zero: bool = False
    is_shifted: bool = False
    columns: frozenset[int] = frozenset()
    cause: Op | None = None

    def trained(self, is_trained: bool) -> "Dependence":
        """Returns this dependence, marked as depending on trained parameters if `is_trained`."""
        return replace(self, is_trained=True) if is_trained and not self.is_trained else self


SUMMARIES = frozenset({Kind.PARTIAL, Kind.EXTREME, Kind.TOTAL})
"""Values reduced over the examples, available only after all microbatches."""

SAME = Dependence(Kind.SAME)


def rows(dim: int, inner: int | None = 1) -> Dependence:
    """Returns the dependence of a value with examples along a dim."""
    return Dependence(Kind.ROWS, dim, inner)


def mixed(cause: Op | None) -> Dependence:
    """Returns the dependence of a value in which an equation combines several examples."""
    return Dependence(Kind.MIXED, cause=cause)


def first_mixed(operands: Iterable[Dependence]) -> Dependence:
    """Returns a mixed operand, preferring one that depends on trained parameters."""
    return max((operand for operand in operands if operand.kind is Kind.MIXED), key=lambda operand: operand.is_trained)


def joined(first: Dependence, second: Dependence, cause: Op | None) -> Dependence:
    """Returns the dependence of a value that is either of two: a loop's carry, or the result of a `cond`."""
    is_trained = first.is_trained or second.is_trained
    is_zero = first.is_zero and second.is_zero
    kinds = {first.kind, second.kind}
    if Kind.MIXED in kinds:
        result = first if first.kind is Kind.MIXED else second
    elif kinds == {Kind.SAME} or kinds == {Kind.PARTIAL}:
        result = first
    elif kinds == {Kind.SAME, Kind.PARTIAL}:
        same, partial = (first, second) if first.kind is Kind.SAME else (second, first)
        result = partial if same.is_zero else mixed(cause)
    elif kinds == {Kind.ROWS}:
        result = agreed([first, second]) or mixed(cause)
    else:
        result = mixed(cause)
    return replace(result, is_zero=is_zero).trained(is_trained)


def agreed(operands: Iterable[Dependence]) -> Dependence | None:
    """Returns rows along the example dim that all operands share; None if they differ."""
    operands = list(operands)
    inners = {operand.inner for operand in operands} - {None}
    if len({operand.dim for operand in operands}) != 1 or len(inners) > 1:
        return None
    return rows(operands[0].dim, next(iter(inners), None))
