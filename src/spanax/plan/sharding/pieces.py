"""Dims that are a concatenation of pieces, of which every device has its shard of each piece.

Such a dim is computed interleaved: for each device in turn, its shards of the pieces. Contiguous shards of the
interleaved dim are then what each device needs, and taking a piece moves nothing.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from spanax.hardware.mesh import MeshShape
from spanax.plan.sharding.resolve import Constraint, Spec
from spanax.trace.axes.axes import Axes
from spanax.trace.axes.pieces import Pieces
from spanax.trace.jaxpr.dim_maps.relations import Dim, Kind
from spanax.trace.jaxpr.graph import Graph, Op

Labels = Sequence[int | None]


@dataclass(frozen=True)
class Interleaved:
    """A dim that is interleaved.

    Attributes:
      dim: the dim.
      sizes: the sizes of the pieces.
      ways: the number of devices.
    """

    dim: int
    sizes: tuple[int, ...]
    ways: int


Form = tuple[Interleaved, ...]
"""The interleaved dims of a value."""


@dataclass(frozen=True, eq=False)
class Forms:
    """The interleaved dims of the values of a function.

    Attributes:
      graph: the function.
      axes: its classes.
      constraints: the sharding of each value.
      mesh: the mesh.
      exclusive: the mesh axes over which pieces are sharded.
    """

    graph: Graph
    axes: Axes
    constraints: Sequence[Constraint | None]
    mesh: MeshShape
    exclusive: Sequence[str]

    @cached_property
    def is_empty(self) -> bool:
        """Whether no value has interleaved dims."""
        return not self.axes.wholes or self.mesh.ways(self.exclusive) == 1

    def of(self, value: int) -> Form:
        """Returns the interleaved dims of a value."""
        if value not in self._known:
            self._known[value] = self.under(value, self.constraints[value])
        return self._known[value]

    @cached_property
    def _known(self) -> dict[int, Form]:
        return {}

    def under(self, value: int, constraint: Constraint | None) -> Form:
        """Returns the interleaved dims of a value under a constraint: those that only exclusive axes shard."""
        if constraint is None or self.is_empty:
            return ()
        dims = list[Interleaved]()
        for dim, label in enumerate(self.axes.classes[value]):
            by = constraint.spec[dim]
            whole = None if label is None else self.axes.wholes.get(label)
            if whole is not None and by and {*by} <= {*self.exclusive}:
                sizes = whole.of(self.graph.shape(value)[dim])
                ways = self.mesh.ways(by)
                if sizes and all(size % ways == 0 for size in sizes):
                    dims.append(Interleaved(dim, sizes, ways))
        return tuple(dims)


def between(stored: Spec, used: Spec) -> Spec | None:
    """Returns the sharding in which an array is exchanged between storage and computation; None if it is not.

    An axis that shards one dim in storage and another one in computation shards the latter, further than the axes that
    only shard storage.

    Example:
      >>> between((("fsdp", "model"), ()), ((), ("model",)))
      (('fsdp',), ('model',))
    """
    moved = {
        axis
        for dim, by in enumerate(used)
        for axis in by
        if axis not in stored[dim] and any(axis in other for other in stored)
    }
    if not moved:
        return None
    pairs = zip(stored, used, strict=True)
    return tuple(
        (*(axis for axis in by if axis not in moved), *(axis for axis in after if axis in moved)) for by, after in pairs
    )


def piece_links(op: Op, classes: Sequence[Labels], wholes: Mapping[int, Pieces]) -> dict[Dim, Dim]:
    """Returns the dim of a result, by position, for dims of operands of which it is a piece, or that are a piece of it.

    Both have their own class.
    """
    values = (*op.inputs, *op.outputs)
    count = len(op.inputs)
    links = dict[Dim, Dim]()

    def label(dim: Dim) -> int | None:
        return classes[values[dim[0]]][dim[1]]

    for first, second, major in _pairs(op) if wholes else ():
        if label(first) in wholes and label(first) not in (label(second), label(major)):
            for source, target in ((first, second), (second, first)):
                if source[0] < count <= target[0]:
                    links[source] = target
    return links


def _pairs(op: Op) -> Iterator[tuple[Dim, Dim, Dim]]:
    """Yields dims with their parts, and with the dims by whose rows a reshape takes them apart."""
    for relation in op.dim_map.of_kind(Kind.PARTS, Kind.FACTORS):
        if relation.kind is Kind.PARTS:
            yield from ((relation.dims[0], part, part) for part in relation.dims[1:])
        else:
            for run, other in (relation.runs, relation.runs[::-1]):
                if len(run) == 1 and len(other) > 1:
                    yield run[0], other[1], other[0]
