"""The dim map of an equation: how the dims of its operands and results are related.

A map depends only on the primitive, its parameters and the shapes. Union-find joins, per-row independence, contracted
dims and backward labels are all derived from it.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum, auto
from functools import cached_property
from typing import Any

from jax.extend import core

Dim = tuple[int, int]
"""An array, by its position among the operands followed by the results, and one of its dims."""

Shape = tuple[int, ...]


class Kind(Enum):
    """How the dims of one relation correspond.

    SAME: row i of a result is computed from row i of the operands, and from no other row.
    REORDERED: equal rows in another order, or at positions known only at run time.
    CONTRACTED: multiplied and summed.
    GROUPS: divided into `factor` groups each, which correspond.
    FACTORS: two runs of dims with the same elements in row-major order.
    PARTS: the first dim is the concatenation of the others.
    SELECTED: the second dim is a selection along the first, by indices known only at run time.
    ALONG: the operation works along the dim: row i depends on other rows.
    REPEATED: the rows of a result along the dim are equal.
    NEW: a result's dim that no operand has.
    OPAQUE: the operation cannot be inspected; its other dims stay replicated.
    UNKNOWN: the primitive has no row in the table.
    """

    SAME = auto()
    REORDERED = auto()
    CONTRACTED = auto()
    GROUPS = auto()
    FACTORS = auto()
    PARTS = auto()
    SELECTED = auto()
    ALONG = auto()
    REPEATED = auto()
    NEW = auto()
    OPAQUE = auto()
    UNKNOWN = auto()


class Family(Enum):
    """Primitives that are fused, partitioned and replayed alike."""

    ELEMENTWISE = auto()
    VIEW = auto()
    REORDER = auto()
    RESIZE = auto()
    DYNAMIC_SLICE = auto()
    DYNAMIC_UPDATE = auto()
    IOTA = auto()
    FRESH = auto()
    REDUCTION = auto()
    CONTRACTION = auto()
    GATHER = auto()
    SCATTER = auto()
    SCATTER_ADD = auto()
    WINDOW = auto()
    CUMULATIVE = auto()
    KERNEL = auto()
    OTHER = auto()


@dataclass(frozen=True, slots=True)
class Relation:
    """Dims that correspond: at most one of each array, except for FACTORS, whose second run of dims is `other`.

    `starts` has the position of each part in the whole.
    """

    kind: Kind
    dims: tuple[Dim, ...] = ()
    other: tuple[Dim, ...] = ()
    factor: int | None = None
    starts: tuple[int, ...] = ()

    @property
    def runs(self) -> tuple[tuple[Dim, ...], tuple[Dim, ...]]:
        """Both runs of dims."""
        return self.dims, self.other


@dataclass(frozen=True)
class Equation:
    """What a dim map is computed from: an equation whose operands and results are numbered by position."""

    eqn: core.JaxprEqn

    @property
    def name(self) -> str:
        """The primitive's name."""
        return self.eqn.primitive.name

    @property
    def params(self) -> dict[str, Any]:
        """The primitive's parameters."""
        return self.eqn.params

    @cached_property
    def shapes(self) -> tuple[Shape, ...]:
        """The shapes of the operands, then those of the results."""
        return tuple(getattr(var.aval, "shape", ()) for var in (*self.eqn.invars, *self.eqn.outvars))

    @property
    def inputs(self) -> tuple[int, ...]:
        """The positions of the operands."""
        return tuple(range(len(self.eqn.invars)))

    @property
    def outputs(self) -> tuple[int, ...]:
        """The positions of the results."""
        return tuple(range(len(self.eqn.invars), len(self.shapes)))

    def others(self, array: int, dims: Any) -> list[int]:
        """Returns the dims of an array that are not among `dims`."""
        return [dim for dim in range(len(self.shapes[array])) if dim not in dims]


@dataclass(frozen=True)
class DimMap:
    """The relations of one equation between the dims of its operands, whose ranks are `ranks`, and results."""

    family: Family
    relations: tuple[Relation, ...]
    ranks: tuple[int, ...]

    @property
    def num_inputs(self) -> int:
        """The number of operands."""
        return len(self.ranks)

    def of_kind(self, *kinds: Kind) -> Iterator[Relation]:
        """Yields the relations of some kinds."""
        return (relation for relation in self.relations if relation.kind in kinds)

    def dims(self, *kinds: Kind) -> set[Dim]:
        """Returns the dims in relations of some kinds."""
        return {dim for relation in self.of_kind(*kinds) for dim in relation.dims}

    def result_dims(self, operand: int, dim: int) -> dict[int, int]:
        """Returns the dim of each result, by position, that is related to an operand's dim; a reshape has none."""
        relations = self.of_kind(Kind.SAME, Kind.GROUPS, Kind.REORDERED, Kind.PARTS, Kind.SELECTED)
        return {a: d for each in relations if (operand, dim) in each.dims for a, d in each.dims if a >= self.num_inputs}

    def operand_dims(self, dim: int, result: int = 0) -> tuple[int | None, ...] | None:
        """Returns the dim of each operand that a result is computed from row by row; None if it is not.

        The entry of an operand that all rows share is None.

        Example:
          >>> import jax, jax.numpy as jnp
          >>> from spanax.trace.jaxpr.dim_maps.table import dim_map
          >>> x = jax.ShapeDtypeStruct((2, 3, 4), "float32")
          >>> (eqn,) = jax.make_jaxpr(lambda x: jnp.moveaxis(x, 0, 2))(x).eqns
          >>> dim_map(eqn).operand_dims(0)
          (1,)
        """
        out = self.num_inputs + result, dim
        if out in self.dims(Kind.ALONG):
            return None
        if out in self.dims(Kind.REPEATED):
            return (None,) * self.num_inputs
        for relation in self.of_kind(Kind.SAME):
            if out in relation.dims:
                dims = dict(relation.dims)
                return tuple(dims.get(operand) for operand in range(self.num_inputs))
        return None

    def operand_labels(self, labels: tuple[int, ...], none: int) -> list[tuple[int, ...]] | None:
        """Returns the labels of the operands' dims, given those of the result's dims.

        Args:
          labels: a label for each dim of the result.
          none: the label of a dim without one.

        Returns:
          None if a label would be divided among several dims, or if rows do not correspond.
        """
        by_dim = {(array, dim): none for array, rank in enumerate(self.ranks) for dim in range(rank)}
        for relation in self.relations:
            of_result = [labels[dim] for array, dim in (*relation.dims, *relation.other) if array >= self.num_inputs]
            if relation.kind is Kind.SAME and of_result:
                by_dim.update((dim, of_result[0]) for dim in relation.dims if dim in by_dim)
            elif relation.kind is not Kind.REPEATED and any(label != none for label in of_result):
                return None
        return [tuple(by_dim[array, dim] for dim in range(rank)) for array, rank in enumerate(self.ranks)]

    @cached_property
    def free_dims(self) -> tuple[dict[int, int], dict[int, int]]:
        """For each operand of a matmul, its free dims, each with the corresponding dim of the result."""
        _, triples = self.contraction
        return {lhs: out for lhs, rhs, out in triples if rhs < 0}, {rhs: out for lhs, rhs, out in triples if lhs < 0}

    @cached_property
    def contraction(self) -> tuple[tuple[tuple[int, int], ...], tuple[tuple[int, int, int], ...]]:
        """The contracted pairs (lhs, rhs) and the result triples (lhs, rhs, out) of a matmul or convolution.

        In a triple, -1 stands for an operand without that dim. The window dims of a convolution are in neither.
        """
        pairs = [dict(relation.dims) for relation in self.of_kind(Kind.CONTRACTED)]
        triples = [dict(relation.dims) for relation in self.of_kind(Kind.SAME, Kind.GROUPS)]
        out = self.num_inputs
        triples = [dims for dims in triples if out in dims and {0, 1} & {*dims}]
        return (
            tuple((dims[0], dims[1]) for dims in pairs),
            tuple((dims.get(0, -1), dims.get(1, -1), dims[out]) for dims in triples),
        )
