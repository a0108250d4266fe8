"""How rows sorted by expert are sharded: every device sorts the rows of its own tokens."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from spanax.hardware.mesh import MeshShape
from spanax.plan.sharding.partition import Masks, PartitionedOp, Reshard, spmd_partition, union
from spanax.plan.sharding.resolve import Constraint
from spanax.trace.analysis.sorted_rows import Dim, RowOp
from spanax.trace.analysis.step_analysis import StepAnalysis
from spanax.trace.jaxpr.graph import RAGGED, Graph, Op


@dataclass(frozen=True)
class RowSharding:
    """How an operation on sorted rows is sharded.

    Attributes:
      op: which dims of its operands and results are sharded as rows.
      axes: the mesh axes that shard rows.
      inputs: the constraint of each operand; None for counts, of which each device has its own.
      outputs: the constraint of each result; None where it is a sum over rows, which is reduced afterwards.
    """

    op: RowOp
    axes: tuple[str, ...]
    inputs: tuple[Constraint | None, ...]
    outputs: tuple[Constraint | None, ...]


def row_axes(
    rows: Dim, graph: Graph, constraints: Sequence[Constraint | None], mesh: MeshShape
) -> tuple[str, ...]:
    """Returns the mesh axes that shard sorted rows; none if they do not divide them."""
    value, dim = rows
    constraint = constraints[value]
    axes = () if constraint is None else constraint.computed[dim]
    return axes if mesh.ways(axes) > 1 and graph.shape(value)[dim] % mesh.ways(axes) == 0 else ()


def row_sharding(
    traced: StepAnalysis, op: Op, constraints: Sequence[Constraint | None], mesh: MeshShape
) -> RowSharding | None:
    """Returns how an operation on sorted rows is sharded; None for others, and where its rows are not sharded."""
    row_op = traced.sorted_rows.ops.get(op)
    graph = traced.graph
    axes = () if row_op is None else row_axes(row_op.rows, graph, constraints, mesh)
    if row_op is None or not axes:
        return None
    pairs = [*zip(op.inputs, row_op.inputs, strict=True), *zip(op.outputs, row_op.outputs, strict=True)]
    if any(dim is not None and graph.shape(value)[dim] % mesh.ways(axes) for value, dim in pairs):
        return None
    specs = [_by_rows(graph, value, dim, constraints[value], axes) for value, dim in pairs]
    inputs = tuple(None if index == row_op.counts else spec for index, spec in enumerate(specs[: len(op.inputs)]))
    outputs = zip(specs[len(op.inputs) :], row_op.outputs, strict=True)
    return RowSharding(row_op, axes, inputs, tuple(None if dim is None else spec for spec, dim in outputs))


def _by_rows(
    graph: Graph, value: int, dim: int | None, constraint: Constraint | None, axes: Sequence[str]
) -> Constraint:
    """Returns the constraint of a value of which each device has the rows along a dim; all of it for None."""
    spec = [()] * len(graph.shape(value)) if constraint is None else constraint.computed
    others = [tuple(axis for axis in by if axis not in axes) for by in spec]
    return Constraint(tuple(tuple(axes) if index == dim else by for index, by in enumerate(others)))


def row_partition(
    traced: StepAnalysis, op: Op, rows: RowSharding, ins: Sequence[Masks], outs: Sequence[Masks]
) -> PartitionedOp:
    """Returns how an operation on sorted rows is partitioned: only sums over rows communicate.

    A sum is scattered over one dim after another, and then reduced over the mesh axes that shard none. Counts of rows
    are reduced if anything but the sizes of groups needs all rows.
    """
    of_rows = [masks[dim] for masks, dim in zip(ins, rows.op.inputs, strict=True) if dim is not None]
    over = union(of_rows) if None in rows.op.outputs else 0
    if op.name == RAGGED:
        parts = spmd_partition(traced.graph, traced.axes.classes, op, ins, outs, by_row=True)
    else:
        parts = PartitionedOp(union([union(masks) for masks in ins]), tuple(ins), outs[0], ())
    others = [shift for shift in parts.shifts if not shift.over & over or shift.is_operand]
    value = op.outputs[0]
    is_summed = value not in traced.sorted_rows.counts or value in traced.sorted_rows.added
    sums = _sums(value, over, outs[0]) if over and is_summed else []
    return replace(parts, shifts=(*others, *sums))


def _sums(value: int, over: int, requested: Masks) -> Iterator[Reshard]:
    unchanged = union(requested) & ~over
    for mask in requested:
        if scattered := mask & over:
            yield Reshard("reduce-scatter", value, scattered, unchanged, False)
            unchanged |= scattered
    if remaining := over & ~union(requested):
        yield Reshard("all-reduce", value, remaining, unchanged, False)
