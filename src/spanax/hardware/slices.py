"""The shapes of TPU slices: the default shape for a number of chips, and validation of a shape."""

import itertools
import math
from collections.abc import Iterator

from spanax.errors import ClusterError
from spanax.hardware.chip import Chip


def shape_text(shape: tuple[int, ...]) -> str:
    """Formats a shape.

    Example:
      >>> shape_text((4, 4, 8))
      '4x4x8'
    """
    return "x".join(map(str, shape))


def default_shape(chip: Chip, num_chips: int, name: str) -> tuple[int, ...]:
    """Returns the default shape of a slice: the most cubic one, preferring shapes that wrap around.

    Raises:
      SpanaxError: no slice has that number of chips.

    Example:
      >>> from spanax.hardware.chips import chip_named
      >>> [default_shape(chip_named(name), 128, "") for name in ("v5p", "v5e")]
      [(4, 4, 8), (8, 16)]
    """
    shapes = _shapes(chip, num_chips)
    if shapes is None:
        count = range(1, math.prod(_largest(chip)) + 1)
        near = [n for n in sorted(count, key=lambda n: abs(n - num_chips))[:64] if _shapes(chip, n)][:2]
        devices = " or ".join(f"{chip.name}:{n * chip.devices_per_chip}" for n in sorted(near))
        parts = (k for k in range(2, 65) if num_chips % k == 0 and _shapes(chip, num_chips // k))
        if several := next(parts, 0):
            devices += (
                f", or {several} slices: {chip.name}:{shape_text(_shapes(chip, num_chips // several) or ())}:{several}"
            )
        raise ClusterError(
            f"{chip.name} has no slice of {num_chips} chips.",
            where=f"cluster '{name}'; a slice has at most {shape_text(_largest(chip))} chips",
            fix=devices,
        )
    return shapes


def check_shape(chip: Chip, shape: tuple[int, ...], name: str) -> None:
    """Checks that a slice of the chip can have this shape.

    Raises:
      SpanaxError: the number of dims is wrong, a dim is too large, or the chips do not fill hosts.
    """
    largest = _largest(chip)
    if len(shape) != len(largest):
        padded = (*shape, *(1,) * len(largest))[: len(largest)]
        fixed = padded if len(shape) < len(largest) and _possible(chip, padded) else _an_example(chip)
        raise ClusterError(
            f"a slice of {chip.name} has {len(largest)} dims, and {shape_text(shape)} has {len(shape)}.",
            where=f"cluster '{name}'",
            fix=f"{chip.name}:{shape_text(fixed)}",
        )
    if any(size > limit for size, limit in zip(sorted(shape), sorted(largest), strict=True)):
        raise ClusterError(
            f"a slice of {chip.name} has at most {shape_text(largest)} chips, and {shape_text(shape)} is larger.",
            where=f"cluster '{name}'",
            fix=f"{chip.name}:{shape_text(largest)}, or several slices: {chip.name}:{shape_text(_an_example(chip))}:2",
        )
    if not _possible(chip, shape):
        hosts = (chip.devices_per_host or 1) // chip.devices_per_chip
        near = tuple(size + size % 2 if size > 1 else 1 for size in shape)
        raise ClusterError(
            f"the {math.prod(shape)} chips of {shape_text(shape)} do not fill hosts of {hosts}.",
            where=f"cluster '{name}'",
            fix=f"{chip.name}:{shape_text(near if _possible(chip, near) else _an_example(chip))}",
        )


def _shapes(chip: Chip, num_chips: int) -> tuple[int, ...] | None:
    shapes = [shape for shape in _factors(num_chips, sorted(_largest(chip))) if _possible(chip, shape)]
    link = chip.inside if chip.inside and chip.inside.wrap_multiple else None
    return min(shapes, key=lambda shape: (link is not None and not all(link.wraps(shape)), sum(shape)), default=None)


def _factors(number: int, limits: list[int]) -> Iterator[tuple[int, ...]]:
    """Yields the factorizations of a number into ascending factors within the limits."""
    options = ([size for size in range(1, limit + 1) if number % size == 0] for limit in limits)
    for shape in itertools.product(*options):
        if math.prod(shape) == number and list(shape) == sorted(shape):
            yield shape


def _possible(chip: Chip, shape: tuple[int, ...]) -> bool:
    """Whether the chips fill hosts of 2x2 chips: libtpu rejects v5p:3x2x1, and accepts parts of one host."""
    num_chips = math.prod(shape)
    in_host = (chip.devices_per_host or 1) // chip.devices_per_chip
    if num_chips < in_host:
        return in_host % num_chips == 0 and all(size <= in_host // 2 for size in shape)
    return num_chips % min(in_host, 4) == 0 and sum(size % 2 == 0 for size in shape) >= 2


def _largest(chip: Chip) -> tuple[int, ...]:
    return chip.inside.max_shape if chip.inside else ()


def _an_example(chip: Chip) -> tuple[int, ...]:
    return tuple(min(size, 4) for size in _largest(chip))
