"""Rows of the table of primitives, and how they are added."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import lru_cache

from spanax.trace.jaxpr.dim_maps.relations import Dim, Equation, Family, Kind, Relation, Shape

Relations = Callable[[Equation], Iterable[Relation]]


@dataclass(frozen=True)
class Row:
    """One row of the table; without a family, an equation is elementwise if its relations are."""

    family: Family | None
    relations: Relations


TABLE: dict[str, Row] = {}

UNKNOWN = Row(Family.OTHER, lambda _: [Relation(Kind.UNKNOWN)])
"""The row of all other primitives: their dims stay replicated."""


def row(family: Family, primitives: str) -> Callable[[Relations], Relations]:
    """Adds a function that returns relations as the row of primitives, separated by spaces."""

    def register(relations: Relations) -> Relations:
        TABLE.update(dict.fromkeys(primitives.split(), Row(family, relations)))
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
