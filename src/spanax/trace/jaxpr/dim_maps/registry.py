"""Rows of the table of primitives, and how they are added."""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import jax.numpy as jnp
import numpy as np

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


def shape_of(name: str) -> Resized:
    """Returns a function that sets a parameter to the shape of the result.

    Example:
      >>> shape_of("new_sizes")(None, [(2, 4), (8,)])
      {'new_sizes': (8,)}
    """
    return lambda equation, shapes: {name: tuple(shapes[-1])}


def limits_of(equation: Equation, shapes: Sequence[Shape]) -> Mapping[str, Any]:
    """Returns the ends of a slice; those of dims that are cut remain."""
    old = equation.shapes[0]
    cut = equation.shapes[-1]
    rows = zip(old, cut, shapes[0], equation.params["limit_indices"], strict=True)
    return {"limit_indices": tuple(new if size == part else end for size, part, new, end in rows)}


def slice_sizes_of(equation: Equation, shapes: Sequence[Shape]) -> Mapping[str, Any]:
    """Returns the sizes of the slices of a lookup; of dims that slices contain completely, the padded sizes."""
    rows = zip(equation.shapes[0], shapes[0], equation.params["slice_sizes"], strict=True)
    return {"slice_sizes": tuple(new if size == part else part for size, new, part in rows)}


def neutral_element(equation: Equation) -> Any:
    """Returns the result of a reduction, or of a cumulative operation, of no elements.

    Example:
      >>> import jax
      >>> (eqn,) = jax.make_jaxpr(lambda x: jax.lax.reduce_max(x, (0,)))(jax.ShapeDtypeStruct((3,), "float32")).eqns
      >>> float(neutral_element(Equation(eqn)))
      -inf
    """
    dtype = np.dtype(equation.eqn.invars[0].aval.dtype)
    is_bool = dtype.kind == "b"
    name = equation.name.removeprefix("reduce_").removeprefix("cum").replace("logsumexp", "max")
    if name in ("sum", "or", "xor"):
        return np.zeros((), dtype)
    if name in ("prod", "and"):
        return np.ones((), dtype) if is_bool or name == "prod" else np.invert(np.zeros((), dtype))
    if is_bool:
        return np.asarray(name == "min")
    if jnp.issubdtype(dtype, np.integer):
        return np.asarray(jnp.iinfo(dtype).min if name == "max" else jnp.iinfo(dtype).max, dtype)
    infinity = np.asarray(-np.inf if name == "max" else np.inf, dtype)
    if np.isinf(infinity.astype(np.float32)):
        return infinity
    return np.asarray(jnp.finfo(dtype).min if name == "max" else jnp.finfo(dtype).max, dtype)
