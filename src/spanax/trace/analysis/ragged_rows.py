"""The rows that ragged matmuls multiply, sorted by group, and what is computed of them row by row."""

from collections import defaultdict
from collections.abc import Iterator

from spanax.trace.jaxpr.dim_maps.relations import Family, Kind
from spanax.trace.jaxpr.graph import RAGGED, Graph, Op
from spanax.trace.jaxpr.provenance import reachable

Dim = tuple[int, int]
"""A value, and one of its dims."""

ROW_BY_ROW = frozenset(
    {Family.ELEMENTWISE, Family.VIEW, Family.REORDER, Family.REDUCTION, Family.GATHER, Family.SCATTER_ADD}
)
"""Operations that compute a row of their result of one row of their operands; a lookup, of one index."""


def ragged_rows(graph: Graph) -> set[Dim]:
    """Returns the dims of sorted rows: of ragged matmuls, of what is computed between them, and of its indices.

    A shard of the rows has any number of groups, and the partitioner replicates them for every ragged matmul. Where
    rows and indices are replicated, too, it gathers the rows once. Rows of the batch are not sorted: they stay sharded.
    """
    matmuls = [op for op in graph.ops() if op.name == RAGGED]
    if not matmuls:
        return set()
    neighbors = defaultdict[Dim, list[Dim]](list)
    for same in _equal(graph):
        for each in same:
            neighbors[each] += same
    result = set[Dim]()
    for op in matmuls:
        rows = [(0, dim) for dim in op.params["ragged_dot_dimension_numbers"].lhs_ragged_dimensions]
        values = (*op.inputs, *op.outputs)
        related = (relation.dims for relation in op.dim_map.relations if not set(rows).isdisjoint(relation.dims))
        for array, row in {each for dims in related for each in dims}:
            found = reachable((values[array], row), neighbors)
            if not {value for value, _ in found}.intersection(graph.body.inputs):
                result |= found
    return result


def _equal(graph: Graph) -> Iterator[list[Dim]]:
    """Yields dims with the same rows, also outside and inside of loops."""
    for op in graph.ops():
        if op.bodies:
            yield from across_bodies(graph, op)
        elif op.family in ROW_BY_ROW:
            yield from _rows(op)


def across_bodies(graph: Graph, op: Op) -> Iterator[list[Dim]]:
    """Yields dims with the same rows outside and inside of a loop, a branch or a remat, and in the next iteration.

    A value that a scan stacks has one dim more outside.
    """
    for outer, inner in graph.wires(op).pairs:
        rank = len(graph.shape(inner))
        extra = len(graph.shape(outer)) - rank
        yield from ([(outer, extra + dim), (inner, dim)] for dim in range(rank))


def _rows(op: Op) -> Iterator[list[Dim]]:
    values = (*op.inputs, *op.outputs)
    return ([(values[array], dim) for array, dim in relation.dims] for relation in op.dim_map.of_kind(Kind.SAME))
