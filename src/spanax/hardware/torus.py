"""The assignment of the dims of a torus to mesh axes."""

import functools
import math
from collections.abc import Iterator
from dataclasses import dataclass

ON_CHIP = -1
"""The index of the dim of the devices within a chip."""


@dataclass(frozen=True)
class Part:
    """`size` devices along one dim of a torus, `stride` apart; `wraps` if they form a ring.

    Example:
      >>> Part(0, 1, 8, wraps=True).hops, Part(0, 1, 4, wraps=False).hops
      (4, 3)
    """

    dim: int
    stride: int
    size: int
    wraps: bool

    @property
    def hops(self) -> int:
        """The number of hops to the farthest device."""
        return (self.size // 2 if self.wraps else self.size - 1) * self.stride


def place(
    sizes: tuple[int, ...], shape: tuple[int, ...], wraps: tuple[bool, ...], devices_per_chip: int = 1
) -> tuple[tuple[Part, ...], ...]:
    """Assigns parts of the dims of a torus to each mesh axis, beginning with the last axis.

    An axis is assigned full dims if their product is its size, otherwise the fewest partial dims, preferring those
    with the most links.

    Example:
      >>> [[(part.dim, part.size) for part in parts] for parts in place((16, 4), (4, 4, 4), (True,) * 3)]
      [[(1, 4), (2, 4)], [(0, 4)]]
    """
    used = {dim: 1 for dim in range(len(shape))}
    length = dict(enumerate(shape))
    if devices_per_chip > 1:
        used, length = {ON_CHIP: 1} | used, {ON_CHIP: devices_per_chip} | length
    placed: list[tuple[Part, ...]] = []
    for size in reversed(sizes):
        if size == 1:
            placed.append(())
            continue
        available = [(dim, length[dim] // used[dim]) for dim in used if used[dim] < length[dim]]
        full_dims = [option for option in _full_dims(size, available) if all(used[dim] == 1 for dim in option)]
        options = (_parts(option, used, length, wraps) for option in full_dims or _options(size, available))
        parts = min(options, key=lambda parts: _rank(parts, length))
        for part in parts:
            used[part.dim] *= part.size
        placed.append(parts)
    return tuple(reversed(placed))


def joined(parts: list[Part], shape: tuple[int, ...], wraps: tuple[bool, ...]) -> list[Part]:
    """Merges adjacent parts of the same dim: two halves of a ring form the ring."""
    merged: list[Part] = []
    for part in sorted(parts, key=lambda part: (part.dim, part.stride)):
        last = merged[-1] if merged else None
        if last and last.dim == part.dim and last.stride * last.size == part.stride:
            size = last.size * part.size
            closes = part.dim >= 0 and wraps[part.dim] and last.stride * size == shape[part.dim]
            merged[-1] = Part(part.dim, last.stride, size, closes)
        else:
            merged.append(part)
    return merged


def _full_dims(size: int, available: list[tuple[int, int]]) -> list[dict[int, int]]:
    """Returns the subsets of dims whose remaining lengths multiply to `size`."""
    options: list[dict[int, int]] = [{}]
    for dim, length in available:
        options += [option | {dim: length} for option in options]
    return [option for option in options if math.prod(option.values()) == size]


def _options(size: int, available: list[tuple[int, int]]) -> Iterator[dict[int, int]]:
    """Yields the factorizations of `size` into factors of the remaining lengths of the dims."""
    if size == 1:
        yield {}
    elif available:
        dim, length = available[0]
        later = available[1:]
        for factor in divisors(math.gcd(size, length)):
            for option in _options(size // factor, later):
                yield {dim: factor} | option if factor > 1 else option


@functools.cache
def divisors(number: int) -> tuple[int, ...]:
    """Returns the divisors of a number in ascending order.

    Example:
      >>> divisors(12)
      (1, 2, 3, 4, 6, 12)
    """
    return tuple(factor for factor in range(1, number + 1) if number % factor == 0)


def _parts(
    option: dict[int, int], used: dict[int, int], length: dict[int, int], wraps: tuple[bool, ...]
) -> tuple[Part, ...]:
    return tuple(
        Part(dim, used[dim], size, dim >= 0 and wraps[dim] and used[dim] * size == length[dim])
        for dim, size in option.items()
    )


def _rank(parts: tuple[Part, ...], length: dict[int, int]) -> tuple[int, float, int]:
    partial = sum(part.size < length[part.dim] for part in parts)
    lines = sum((2 if part.wraps else 1) / part.stride for part in parts)
    return partial, -lines, math.prod(part.stride for part in parts)
