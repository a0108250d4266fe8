"""Weighted mixtures of sources, and the assignment of positions in the mixture to its parts.

It is not `grain.MapDataset.mix`, which rounds weights: 0.7 and 0.3 become 233 and 100 (Grain 0.2.18).

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

from spanax.errors import FormatError, RangeError, first_line

MAX_WEIGHT_SUM = 1 << 24
"""The maximum sum of integer weights: its product with a position fits 64 bits for 10**11 examples."""

_WEIGHTED = re.compile(r"(.+)=([0-9.]+(?:e-?[0-9]+)?)")


@dataclass(frozen=True)
class Mixture:
    """Sources that are read together in proportion to their weights, created by `mixture`.

    Example:
      >>> mixture({"code/": 3, "prose.jsonl": 1})
      Mixture(code/=3, prose.jsonl=1)
    """

    parts: tuple[tuple[Any, int], ...]

    @property
    def weights(self) -> tuple[int, ...]:
        """The weights as integers without a common divisor."""
        return tuple(weight for _, weight in self.parts)

    def __repr__(self) -> str:
        named = (f"{part if isinstance(part, str | Path) else type(part).__name__}={n}" for part, n in self.parts)
        return f"Mixture({', '.join(named)})"


def mixture(sources: Mapping[Any, float] | Iterable[tuple[Any, float]]) -> Mixture:
    """Returns a mixture: every long range of examples contains each source in proportion to its weight.

    Args:
      sources: a mapping from source to weight, or such pairs; a source is any that `spanax.batches` accepts except an
        iterable.

    Raises:
      SpanaxError: there are fewer than two sources, or a weight is not a positive number.

    Example:
      >>> mixture({"a.jsonl": 0.7, "b.parquet": 0.3}).weights
      (7, 3)
    """
    pairs = list(sources.items() if isinstance(sources, Mapping) else sources)
    if len(pairs) < 2:
        raise RangeError("a mixture needs at least two sources.", fix='{"a.jsonl": 0.7, "b.parquet": 0.3}')
    for source, weight in pairs:
        if isinstance(weight, bool) or not isinstance(weight, int | float) or not 0 < weight < math.inf:
            raise RangeError(f"the weight of {str(source)[:80]} must be a number > 0, not {weight!r}.")
    exact = [Fraction(repr(weight)) for _, weight in pairs]
    scale = math.lcm(*(fraction.denominator for fraction in exact))
    integers = [int(fraction * scale) for fraction in exact]
    integers = [number // math.gcd(*integers) for number in integers]
    if sum(integers) > MAX_WEIGHT_SUM:
        listed = ", ".join(str(weight) for _, weight in pairs)
        raise RangeError("the weights have too many digits.", where=listed, fix="round them")
    return Mixture(tuple((source, n) for (source, _), n in zip(pairs, integers, strict=True)))


def named(source: Any) -> Any:
    """Returns the mixture that a text such as `a.jsonl=0.7,b.parquet=0.3` specifies; other sources are unchanged.

    A text that is an existing path is a path.
    """
    if not isinstance(source, str) or os.path.lexists(source):
        return source
    matches = [_WEIGHTED.fullmatch(part.strip()) for part in source.split(",")]
    if not all(matches):
        return source
    try:
        return mixture([(match[1], float(match[2])) for match in matches if match])
    except ValueError as error:
        raise FormatError(first_line(error), where=f"--data {source}", fix="a.jsonl=0.7,b.parquet=0.3") from None


def picked(places_R: np.ndarray, weights: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
    """Returns the part at each position of the mixture, and the index in that part; both of shape [R].

    Parts are spaced as evenly as integers allow: the first part has ceil(k w / W) of the first k positions, where w is
    its weight and W the sum of weights, and the remaining positions are divided over the following parts likewise.

    Example:
      >>> [array.tolist() for array in picked(np.arange(8), (3, 1))]
      [[0, 0, 0, 1, 0, 0, 0, 1], [0, 1, 2, 0, 3, 4, 5, 1]]
    """
    part_R = np.zeros(len(places_R), np.int64)
    inner_R = np.zeros(len(places_R), np.int64)
    open_P = np.arange(len(places_R))
    places_P = places_R.astype(np.int64)
    remaining = sum(weights)
    for part, weight in enumerate(weights):
        later_P, next_P = (k * (remaining - weight) // remaining for k in (places_P, places_P + 1))
        mask_P = later_P == next_P
        part_R[open_P[mask_P]] = part
        inner_R[open_P[mask_P]] = (places_P - later_P)[mask_P]
        open_P, places_P, remaining = open_P[~mask_P], later_P[~mask_P], remaining - weight
    return part_R, inner_R


def places_until(num_examples: Sequence[int], weights: Sequence[int]) -> int:
    """Returns the number of positions before any part runs out of examples.

    It inverts `picked` from the last part to the first: of all positions of a part and the following ones, example j of
    the part is at floor(j W / w), and position k of the following parts at ceil((k + 1) W / (W - w)) - 1.

    Example:
      >>> places_until([6, 9], (3, 1))
      8
    """
    total = weights[-1]
    places = num_examples[-1]
    for size, weight in reversed(list(zip(num_examples[:-1], weights[:-1], strict=True))):
        later = total
        total += weight
        places = min(size * total // weight, -(-(places + 1) * total // later) - 1)
    return places
