"""Dims of weights that are a concatenation of pieces: queries, keys and values of one kernel, gates of a cell."""

import math
from collections import Counter, defaultdict
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from fractions import Fraction

from spanax.trace.jaxpr.dim_maps.relations import Dim


@dataclass(frozen=True)
class Part:
    """A range of a dim, as fractions of its size, that is a dim of its own."""

    whole: Dim
    dim: Dim
    start: Fraction
    size: Fraction


@dataclass(frozen=True)
class Pieces:
    """A class of dims that are a concatenation.

    Attributes:
      sizes: the sizes of the pieces, without a common factor.
      main: the class of the largest part.
      others: the classes of other parts that no weight has and no matmul contracts.
      is_mixed: whether weights have other parts too: activations of several layers, next to each other.
    """

    sizes: tuple[int, ...]
    main: int
    others: tuple[int, ...] = ()
    is_mixed: bool = False

    def of(self, size: int) -> tuple[int, ...]:
        """Returns the sizes of the pieces of a dim; empty if they do not divide it.

        Example:
          >>> Pieces((2, 1, 1), main=0).of(32)
          (16, 8, 8)
        """
        unit, rest = divmod(size, sum(self.sizes))
        return () if rest else tuple(piece * unit for piece in self.sizes)


def cuts(parts: Sequence[tuple[int, int, Part]]) -> dict[int, set[Fraction]]:
    """Returns where the dims of each class are cut, as fractions; what cuts a part cuts the whole, and the reverse.

    Args:
      parts: the class of each whole, that of its part, and the part.
    """
    result = defaultdict[int, set[Fraction]](set)
    for label, _, part in parts:
        result[label] |= {part.start, part.start + part.size} - {0, 1}
    changed = True
    while changed:
        count = sum(map(len, result.values()))
        for label, of_part, part in parts:
            end = part.start + part.size
            result[of_part] |= {(cut - part.start) / part.size for cut in result[label] if part.start < cut < end}
            result[label] |= {part.start + cut * part.size for cut in result[of_part]}
        changed = sum(map(len, result.values())) != count
    return {label: found for label, found in result.items() if found}


def relative_sizes(found: Collection[Fraction]) -> tuple[int, ...]:
    """Returns the sizes of the pieces between cuts, without a common factor.

    Example:
      >>> relative_sizes({Fraction(1, 2), Fraction(3, 4)})
      (2, 1, 1)
    """
    ends = sorted({*found, Fraction(1)})
    pieces = [end - start for start, end in zip([Fraction(0), *ends], ends, strict=False)]
    common = math.lcm(*(piece.denominator for piece in pieces))
    sizes = [int(piece * common) for piece in pieces]
    return tuple(size // math.gcd(*sizes) for size in sizes)


def largest(parts: Collection[tuple[int, Fraction, Fraction]]) -> int:
    """Returns the class that most of a dim belongs to, of classes with the start and the size of each part."""
    total = Counter[int]()
    for label, _, size in sorted(set(parts)):
        total[label] += size  # type: ignore[assignment]
    return max(sorted(total), key=total.__getitem__)
