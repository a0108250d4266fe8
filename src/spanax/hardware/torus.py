"""Torus: which dims of it each mesh axis takes."""

import functools
import math
from collections.abc import Iterator
from dataclasses import dataclass

ON_CHIP = -1
"""The dim of the devices of one chip."""


@dataclass(frozen=True)
class Part:
    """`size` of the devices along one dim of a torus, each `stride` from the next; `wraps` if they close a ring.

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
        """Lines on the way to the farthest device."""
        return (self.size // 2 if self.wraps else self.size - 1) * self.stride


def place(
    sizes: tuple[int, ...], shape: tuple[int, ...], wraps: tuple[bool, ...], devices_per_chip: int = 1
) -> tuple[tuple[Part, ...], ...]:
    """The parts that each mesh axis takes of a torus; the last axis chooses first.

    An axis takes whole dims if it can, as many as make it up; then as few parts of dims as it can, those with the
    most lines.

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
        left = [(dim, length[dim] // used[dim]) for dim in used if used[dim] < length[dim]]
        whole = [option for option in _whole(size, left) if all(used[dim] == 1 for dim in option)]
        options = (_parts(option, used, length, wraps) for option in whole or _options(size, left))
        parts = min(options, key=lambda parts: _rank(parts, length))
        for part in parts:
            used[part.dim] *= part.size
        placed.append(parts)
    return tuple(reversed(placed))


def joined(parts: list[Part], shape: tuple[int, ...], wraps: tuple[bool, ...]) -> list[Part]:
    """Parts of one dim that continue each other, as one: two halves of a ring are the ring."""
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


def _whole(size: int, left: list[tuple[int, int]]) -> list[dict[int, int]]:
    """Every way to make up a size from all that is left of some dims."""
    options: list[dict[int, int]] = [{}]
    for dim, length in left:
        options += [option | {dim: length} for option in options]
    return [option for option in options if math.prod(option.values()) == size]


def _options(size: int, left: list[tuple[int, int]]) -> Iterator[dict[int, int]]:
    """Every way to make up a size from factors of what is left of each dim."""
    if size == 1:
        yield {}
    elif left:
        (dim, length), rest = left[0], left[1:]
        for factor in divisors(math.gcd(size, length)):
            for option in _options(size // factor, rest):
                yield {dim: factor} | option if factor > 1 else option


@functools.cache
def divisors(number: int) -> tuple[int, ...]:
    """The whole numbers that divide a number, the smallest first.

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
