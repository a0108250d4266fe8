"""Rows of the table of primitives, and how they are added."""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from spanax.trace.jaxpr.dim_maps.relations import Dim, Equation, Family, Kind, Relation, Shape

Relations = Callable[[Equation], Iterable[Relation]]

Resized = Callable[[Equation, Sequence[Shape]], Mapping[str, Any]]
"""Returns the parameters that differ where operands and results, in this order, have other shapes."""


def unchanged(equation: Equation, shapes: Sequence[Shape]) -> Mapping[str, Any]:
    """Returns no parameters: none of the primitive depends on the sizes of its dims."""
    return {}


@dataclass(frozen=True)
class Padding:
    """How a primitive computes with padding at the end of dims that correspond.

    Attributes:
      resized: its parameters for padded shapes.
      fill: returns what replaces padding along contracted dims, so that it does not count; None where nothing does.
      dims: returns the dims that may be padded, where rows of others do not only depend on equal rows; None: all.
    """

    resized: Resized = unchanged
    fill: Callable[[Equation], Any] | None = None
    dims: Callable[[Equation], Collection[Dim]] | None = None


@dataclass(frozen=True)
class Row:
    """One row of the table.

    Without a family, an equation is elementwise if its relations are. Without `padding`, padded dims are cut before.
    """

    family: Family | None
    relations: Relations
    padding: Padding | None = None


TABLE: dict[str, Row] = {}

UNKNOWN = Row(Family.OTHER, lambda _: [Relation(Kind.UNKNOWN)])
"""The row of all other primitives: their dims stay replicated."""


def row(family: Family, primitives: str, padding: Padding | None = None) -> Callable[[Relations], Relations]:
    """Adds a function that returns relations as the row of primitives, separated by spaces."""

    def register(relations: Relations) -> Relations:
        TABLE.update(dict.fromkeys(primitives.split(), Row(family, relations, padding)))
        return relations

    return register


def same(*dims: Dim) -> Relation:
    """Returns the relation of dims whose rows correspond."""
    return Relation(Kind.SAME, dims)


@lru_cache(maxsize=4096)
def aligned(shapes: tuple[Shape, ...], arrays: tuple[int, ...]) -> tuple[Relation, ...]:
    """Returns the relations of arrays that correspond dim by dim; scalars and dims of size 1 are broadcast."""
    rank = max((len(shapes[array]) for array in arrays), default=0)
    full = [array for array in arrays if len(shapes[array]) == rank]
    sizes = [max(shapes[array][dim] for array in full) for dim in range(rank)]
    return tuple(
        same(*((array, dim) for array in full if shapes[array][dim] == size)) for dim, size in enumerate(sizes)
    )
