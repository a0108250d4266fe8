"""How a value of the loss depends on the examples of the batch."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import Enum, auto

from spanax.trace.jaxpr.lines import Line


class Kind(Enum):
    """What a microbatch computes of a value.

    `SAME`: the value itself, which does not depend on the examples. `ROWS`: its rows for the examples of the
    microbatch. `INDEX`: the number of each example within the microbatch. `PARTIAL`: a term; the terms of all
    microbatches add up to the value. `EXTREME`: the largest or smallest element of the microbatch. `TOTAL`: nothing; it
    is a function of sums over the batch. `MIXED`: nothing; it combines examples in another manner.
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
      dim: of `ROWS` and `INDEX`, the dim that has the examples.
      inner: consecutive elements along `dim` that belong to one example; None where all rows are equal.
      is_trained: it depends on the trained parameters.
      is_zero: it is zero everywhere.
      is_shifted: of `INDEX`, the batch size was added to it.
      columns: of an array of indices, its columns along the last dim that are `INDEX`.
      cause: of `MIXED`, the equation that combines examples.
    """

    kind: Kind
    dim: int = -1
    inner: int | None = None
    is_trained: bool = False
    is_zero: bool = False
    is_shifted: bool = False
    columns: frozenset[int] = frozenset()
    cause: Line | None = None

    def trained(self, is_trained: bool) -> "Dependence":
        """The same dependence of a value that also depends on trained parameters, if `is_trained`."""
        return replace(self, is_trained=True) if is_trained and not self.is_trained else self


SUMMARIES = frozenset({Kind.PARTIAL, Kind.EXTREME, Kind.TOTAL})
"""What has no examples any more, and is known once all microbatches are done."""

SAME = Dependence(Kind.SAME)


def rows(dim: int, inner: int | None = 1) -> Dependence:
    """The dependence of a value with examples along a dim."""
    return Dependence(Kind.ROWS, dim, inner)


def mixed(cause: Line | None) -> Dependence:
    """The dependence of a value that an equation makes of several examples."""
    return Dependence(Kind.MIXED, cause=cause)


def first_mixed(operands: Iterable[Dependence]) -> Dependence:
    """Of operands, the mixed one that tells most: one that depends on trained parameters, if there is any."""
    return max((each for each in operands if each.kind is Kind.MIXED), key=lambda each: each.is_trained)


def joined(first: Dependence, second: Dependence, cause: Line | None) -> Dependence:
    """The dependence of a value that is either of two: of a loop's carry, or of the branches of a condition."""
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
    """Rows along the one dim that all operands have their examples along; None where they differ."""
    operands = list(operands)
    inners = {operand.inner for operand in operands} - {None}
    if len({operand.dim for operand in operands}) != 1 or len(inners) > 1:
        return None
    return rows(operands[0].dim, next(iter(inners), None))
