"""How rows sorted by expert are sharded: every device sorts the rows of its own tokens.

Where experts stay on their devices, it sorts those of its own experts first, of the tokens of all these devices. Rows
of tokens are sent there if they are fewer than all tokens, by a compiler that can, and otherwise tokens are gathered.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from spanax.hardware.mesh import MeshShape
from spanax.plan.sharding.partition import Masks, PartitionedOp, Reshard, as_masks, spmd_partition, union
from spanax.plan.sharding.resolve import Constraint, Resolver, axes_of
from spanax.trace.analysis.sorted_rows import Dim, RowOp
from spanax.trace.analysis.step_analysis import StepAnalysis
from spanax.trace.jaxpr.dim_maps.relations import Family
from spanax.trace.jaxpr.graph import RAGGED, Graph, Op


@dataclass(frozen=True)
class RowSharding:
    """How an operation on sorted rows is sharded.

    Attributes:
      op: which dims of its operands and results are sharded as rows.
      axes: the mesh axes that shard rows.
      staying: the mesh axes of the experts that stay on their devices.
      varying: whether each operand, then each result, differs between these devices.
      share: the largest share of a device's rows that are of its own experts, which come first.
      summed: the mesh axes over which the result is a sum, which is reduced afterwards.
      tokens: the operands and results with tokens that stay on their devices: rows are sent from or to these.
      inputs: the constraint of each operand; None for counts, of which each device has its own.
      outputs: the constraint of each result; None where it is a sum.
    """

    op: RowOp
    axes: tuple[str, ...]
    staying: tuple[str, ...]
    varying: tuple[bool, ...]
    summed: tuple[str, ...]
    tokens: tuple[int, ...]
    share: float
    inputs: tuple[Constraint | None, ...]
    outputs: tuple[Constraint | None, ...]


def row_axes(rows: Dim, graph: Graph, constraints: Sequence[Constraint | None], mesh: MeshShape) -> tuple[str, ...]:
    """Returns the mesh axes that shard sorted rows; none if they do not divide them."""
    value, dim = rows
    constraint = constraints[value]
    axes = () if constraint is None else constraint.computed[dim]
    return axes if mesh.ways(axes) > 1 and graph.shape(value)[dim] % mesh.ways(axes) == 0 else ()


def row_sharding(
    resolver: Resolver, traced: StepAnalysis, op: Op, constraints: Sequence[Constraint | None]
) -> RowSharding | None:
    """Returns how an operation on sorted rows is sharded; None for others, and where its rows are not sharded."""
    row_op = traced.sorted_rows.ops.get(op)
    graph = traced.graph
    staying = resolver.assignment.staying
    axes = () if row_op is None else row_axes(row_op.rows, graph, constraints, resolver.mesh)
    if row_op is None or not (axes or staying):
        return None
    pairs = [*zip(op.inputs, row_op.inputs, strict=True), *zip(op.outputs, row_op.outputs, strict=True)]
    if any(dim is not None and graph.shape(value)[dim] % resolver.mesh.ways(axes) for value, dim in pairs):
        return None
    found = traced.sorted_rows
    varying = tuple(bool(staying) and value in found.varying for value, _ in pairs)
    is_of_experts = op.name == RAGGED or op.outputs[0] in found.counts
    places = (*axes, *staying)
    known = [constraints[value] for value, _ in pairs]
    tokens = _tokens(resolver, traced, op, known, places)
    summed = axes if None in row_op.outputs else ()
    summed += () if tokens or is_of_experts or varying[-1] else staying
    others = axes if op.name == RAGGED else places
    by = [places if index in tokens else axes for index in range(len(pairs))]
    triples = zip(pairs, known, by, strict=True)
    specs = [_by_rows(graph, value, dim, constraint, axes, others) for (value, dim), constraint, axes in triples]
    inputs = tuple(None if index == row_op.counts else spec for index, spec in enumerate(specs[: len(op.inputs)]))
    outputs = tuple(None if summed else spec for spec in specs[len(op.inputs) :])
    share = float(found.share(resolver.mesh.ways(staying))) if staying else 1.0
    return RowSharding(row_op, axes, staying, varying, summed, tokens, share, inputs, outputs)


def _tokens(
    resolver: Resolver, traced: StepAnalysis, op: Op, known: Sequence[Constraint | None], places: tuple[str, ...]
) -> tuple[int, ...]:
    """Returns the operands and results with tokens, or choices, that need not be gathered for an operation.

    That is if sorted rows are sent from or to them, or if they are counted. Their parts on the devices of experts are
    one after another, and no other axis shards anything.
    """
    staying = resolver.assignment.staying
    if not staying:
        return ()
    is_read = op.family is Family.GATHER
    if op.outputs[0] in traced.sorted_rows.counts:
        dims = traced.sorted_rows.ops[op].inputs
        result = tuple(index for index, dim in enumerate(dims) if dim is not None)
    elif not traced.sorted_rows.ops[op].is_sent(resolver.mesh.ways(staying)):
        return ()
    elif _is_by_choice(traced, op):
        result = (len(op.inputs),) if is_read else (2,)
    else:
        result = (0,) if is_read else (0, len(op.inputs))
    specs = [each.computed if each else () for index, each in enumerate(known) if index != 1]
    is_plain = not any(axes_of(spec[1:]) for spec in specs)
    is_by_place = all((known[index] or Constraint(())).computed[:1] == (places,) for index in result)
    return result if is_plain and is_by_place else ()


def _is_by_choice(traced: StepAnalysis, op: Op) -> bool:
    """Returns whether the indices of a lookup are sorted rows, for each choice, and not tokens, for each row."""
    return (op.inputs if op.family is Family.GATHER else op.outputs)[0] in traced.sorted_rows.varying


def _by_rows(
    graph: Graph,
    value: int,
    dim: int | None,
    constraint: Constraint | None,
    axes: Sequence[str],
    others: Sequence[str],
) -> Constraint:
    """Returns the constraint of a value of which each device has the rows along a dim, and all of its other dims."""
    spec = [()] * len(graph.shape(value)) if constraint is None else constraint.computed
    left = [tuple(axis for axis in by if axis not in others) for by in spec]
    return Constraint(tuple(tuple(axes) if index == dim else by for index, by in enumerate(left)))


def row_partition(
    resolver: Resolver, traced: StepAnalysis, op: Op, rows: RowSharding, ins: Sequence[Masks], outs: Sequence[Masks]
) -> PartitionedOp:
    """Returns how an operation on sorted rows is partitioned: only sums over rows, or over experts, communicate.

    A sum is scattered over one dim after another, and then reduced over the mesh axes that shard none. Counts of rows
    are reduced if anything but the sizes of groups needs all rows.
    """
    bits = {axis: 1 << index for index, axis in enumerate(resolver.mesh.names)}
    over, staying, by_row = (union(as_masks([axes], bits)) for axes in (rows.summed, rows.staying, rows.axes))
    if op.name == RAGGED:
        without = [tuple(mask & ~staying for mask in masks) for masks in ins]
        parts = spmd_partition(traced.graph, traced.axes.classes, op, without, outs, by_row=True)
        parts = replace(parts, work=parts.work | staying, operands=tuple(ins))
    else:
        parts = PartitionedOp(union([union(masks) for masks in ins]), tuple(ins), outs[0], ())
    value = op.outputs[0]
    moved = list[Reshard]()
    if rows.tokens and value in traced.sorted_rows.counts:
        moved.append(Reshard("all-reduce", value, staying, 0, False))
    elif rows.tokens:
        moved.append(_sent(op, rows, staying, by_row, resolver.mesh.ways(rows.staying)))
    others = [shift for shift in parts.shifts if not shift.over & over or shift.is_operand]
    is_summed = value not in traced.sorted_rows.counts or value in traced.sorted_rows.added
    sums = _sums(value, over, outs[0]) if over and is_summed else []
    return replace(parts, shifts=(*others, *moved, *sums))


def _sent(op: Op, rows: RowSharding, over: int, unchanged: int, num_ways: int) -> Reshard:
    """Returns the gather of tokens, or the scattered sum of results, and what moves instead where rows are sent."""
    pair = (op.inputs[0], op.outputs[0]) if op.family is Family.GATHER else (op.outputs[0], op.inputs[2])
    tokens, sent = pair if 0 in rows.tokens else pair[::-1]
    kind = "all-gather" if tokens in op.inputs else "reduce-scatter"
    rows_sent = Reshard("all-to-all", sent, over, unchanged, False)
    addresses = Reshard("all-to-all", op.inputs[1], over, unchanged, True, share=num_ways)
    return Reshard(kind, tokens, over, unchanged, False, instead=(rows_sent, addresses))


def _sums(value: int, over: int, requested: Masks) -> Iterator[Reshard]:
    unchanged = union(requested) & ~over
    for mask in requested:
        if scattered := mask & over:
            yield Reshard("reduce-scatter", value, scattered, unchanged, False)
            unchanged |= scattered
    if remaining := over & ~union(requested):
        yield Reshard("all-reduce", value, remaining, unchanged, False)
