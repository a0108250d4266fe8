"""Mixture: several sources by weight, and which of them gives the example at each place.

Shape suffix: R rows of one batch.
"""

import math
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np

from spanax.errors import SpanaxError

MAX_WHOLE = 1 << 24
"""What whole weights may add up to: a place times that stays a number of 64 bits for 10**11 examples."""

_WEIGHTED = re.compile(r"(.+)=([0-9.]+(?:e-?[0-9]+)?)")


@dataclass(frozen=True)
class Mixture:
    """Sources that are read together, each with its weight; made by `mixture`.

    Example:
      >>> mixture({"code/": 3, "prose.jsonl": 1})
      Mixture(code/=3, prose.jsonl=1)
    """

    parts: tuple[tuple[Any, int], ...]

    @property
    def weights(self) -> tuple[int, ...]:
        """Whole numbers without a common divisor."""
        return tuple(weight for _, weight in self.parts)

    def __repr__(self) -> str:
        named = (f"{part if isinstance(part, str | Path) else type(part).__name__}={n}" for part, n in self.parts)
        return f"Mixture({', '.join(named)})"


def mixture(sources: Mapping[Any, float] | Iterable[tuple[Any, float]]) -> Mixture:
    """Several sources as one: of any long stretch of examples each gives the share that its weight says.

    Args:
      sources: weights by source, or pairs of both; a source is what `spanax.batches` takes, an iterable excepted.

    Raises:
      SpanaxError: there are fewer than two, or a weight is no number above zero.

    Example:
      >>> mixture({"a.jsonl": 0.7, "b.parquet": 0.3}).weights
      (7, 3)
    """
    pairs = list(sources.items() if isinstance(sources, Mapping) else sources)
    if len(pairs) < 2:
        raise SpanaxError("a mixture takes two sources or more.", fix='{"a.jsonl": 0.7, "b.parquet": 0.3}')
    for source, weight in pairs:
        if isinstance(weight, bool) or not isinstance(weight, int | float) or not 0 < weight < math.inf:
            raise SpanaxError(f"the weight of {str(source)[:80]} is {weight!r}; it takes a number above 0.")
    exact = [Fraction(repr(weight)) for _, weight in pairs]
    scale = math.lcm(*(each.denominator for each in exact))
    whole = [int(each * scale) for each in exact]
    whole = [each // math.gcd(*whole) for each in whole]
    if sum(whole) > MAX_WHOLE:
        told = ", ".join(str(weight) for _, weight in pairs)
        raise SpanaxError("the weights have too many digits to be kept exactly.", where=told, fix="rounded ones")
    return Mixture(tuple((source, n) for (source, _), n in zip(pairs, whole, strict=True)))


def named(source: Any) -> Any:
    """A source, or the mixture that a text such as `a.jsonl=0.7,b.parquet=0.3` names; a path that exists is a path.

    Example:
      >>> named("a.jsonl=0.7,b.parquet=0.3").weights, named("a.jsonl")
      ((7, 3), 'a.jsonl')
    """
    if not isinstance(source, str) or os.path.lexists(source):
        return source
    found = [_WEIGHTED.fullmatch(part.strip()) for part in source.split(",")]
    if not all(found):
        return source
    try:
        return mixture([(each[1], float(each[2])) for each in found if each])
    except ValueError as error:
        raise SpanaxError(
            str(error).splitlines()[0], where=f"--data {source}", fix="a.jsonl=0.7,b.parquet=0.3"
        ) from None


def picked(places_R: np.ndarray, weights: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
    """For places of the mixture: which part is there, and the place within that part; both of shape [R].

    One part after the other is dealt out as evenly as whole numbers can be: of the first k places the part has
    ceil(k w / W), and what is left goes to the parts behind it in the same way.

    Example:
      >>> [each.tolist() for each in picked(np.arange(8), (3, 1))]
      [[0, 0, 0, 1, 0, 0, 0, 1], [0, 1, 2, 0, 3, 4, 5, 1]]
    """
    part_R, inner_R = np.zeros(len(places_R), np.int64), np.zeros(len(places_R), np.int64)
    open_P, places_P, left = np.arange(len(places_R)), places_R.astype(np.int64), sum(weights)
    for part, weight in enumerate(weights):
        behind_P, next_P = (k * (left - weight) // left for k in (places_P, places_P + 1))
        here = behind_P == next_P
        part_R[open_P[here]], inner_R[open_P[here]] = part, (places_P - behind_P)[here]
        open_P, places_P, left = open_P[~here], behind_P[~here], left - weight
    return part_R, inner_R


def places_until(num_examples: Sequence[int], weights: Sequence[int]) -> int:
    """How many places there are before the first part is asked for more examples than it has.

    Example:
      >>> places_until([6, 9], (3, 1))
      8
    """
    low, high = 0, sum(weights) * (max(num_examples) + 1)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if _fits(middle, num_examples, weights) else (low, middle)
    return low


def _fits(num_places: int, num_examples: Sequence[int], weights: Sequence[int]) -> bool:
    left, rest = sum(weights), num_places
    for weight, most in zip(weights, num_examples, strict=True):
        behind = rest * (left - weight) // left
        if rest - behind > most:
            return False
        rest, left = behind, left - weight
    return True
