"""Reductions over devices that a loop defers until after its last iteration.

A gradient is a sum over the batch, of which every device has a partial sum. Where a loop over microbatches only
accumulates such sums, each device can accumulate its own, with one reduction after the loop. The same applies to any
value that is linear in a sum and used only by a carry.
"""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace

from spanax.plan.pipeline.ticks import ticks_of
from spanax.plan.plan import Schedule
from spanax.plan.sharding.partition import union
from spanax.plan.sharding.sorted_rows import row_axes
from spanax.plan.spmd.sharded_program import ShardedProgram
from spanax.trace.analysis.accumulation import results_of, sums_of
from spanax.trace.jaxpr.dim_maps.relations import Family, Kind
from spanax.trace.jaxpr.graph import OWN_KERNEL, Graph, Op
from spanax.trace.jaxpr.loops import split_backward
from spanax.trace.pipeline.partition import pipeline_partition

Dims = tuple[tuple[int, tuple[str, ...]], ...]
"""Contracted dims of one operand, each with the mesh axes that shard it, outermost first."""


@dataclass(frozen=True, eq=False)
class DeferredReductions:
    """The deferred reductions of one traced function under one layout.

    Attributes:
      axes: values of which every device has a partial sum, each with the mesh axes of the pending reduction.
      sums: operations with deferred reductions: the contracted dims of each operand. None: an accumulator. None at
        all for a kernel of the user's own.
      ends: results of loops that are reduced right after the loop, each with the mesh axes.
      varying: the values among `axes` that are no sums: rows of the experts of each device.
      counts: the values among `axes` that count the rows of each device, and are reduced where all rows count.
    """

    axes: Mapping[int, tuple[str, ...]] = field(default_factory=dict)
    sums: Mapping[Op, tuple[Dims | None, ...]] = field(default_factory=dict)
    ends: Mapping[int, tuple[str, ...]] = field(default_factory=dict)
    counts: frozenset[int] = frozenset()
    varying: frozenset[int] = frozenset()

    def of(self, value: int) -> tuple[str, ...]:
        """Returns the mesh axes over which a value has yet to be reduced."""
        return self.axes.get(value, ())


def unreduced(sharded: ShardedProgram, schedule: Schedule) -> DeferredReductions:
    """Returns the reductions that the loops of a step can defer.

    Values that a pipeline stores or sends between stages are reduced before.
    """
    late = _deferrable(sharded, _sent_between_stages(sharded, schedule) if schedule.num_stages > 1 else ())
    counts = counts_by_device(sharded)
    return replace(counts, axes={**late.axes, **counts.axes}, sums=late.sums, ends=late.ends)


def counts_by_device(sharded: ShardedProgram) -> DeferredReductions:
    """Returns what differs between devices of the rows that each sorts: counts, and rows of experts that stay."""
    found = sharded.traced.sorted_rows
    graph = sharded.traced.graph
    axes = {}
    for value, dim in found.counts.items():
        if by := row_axes(dim, graph, sharded.constraints, sharded.resolver.mesh):
            axes[value] = by
    counts = frozenset(axes)
    staying = sharded.resolver.assignment.staying
    varying = found.varying if staying else frozenset()
    return DeferredReductions({**axes, **dict.fromkeys(varying, staying)}, counts=counts, varying=varying)


def deferred_reductions(sharded: ShardedProgram) -> DeferredReductions | None:
    """Returns the deferred reductions of one microbatch of a step; None if it has none under any layout."""
    has_any = sharded.resolver.program.loss_chunks > 1 or sharded.traced.accumulated
    return _deferrable(sharded, ()) if has_any else None


def _sent_between_stages(sharded: ShardedProgram, schedule: Schedule) -> set[int]:
    pieces = pipeline_partition(sharded.traced, schedule.microbatches)
    loops = (pieces.forward, pieces.backward)
    states = [value for state in (*pieces.states, *pieces.layer_states) for value in (state.before, state.after)]
    between = split_backward(pieces.backward).between if ticks_of(schedule).is_split else ()
    handed = {*pieces.payload_forward, *pieces.payload_backward, *pieces.prepared, *pieces.rows, *states, *between}
    # Values passed between layers are also sent between stages.
    loops_hand_on = ((*loop.scanned, *loop.results, *loop.body_carried) for loop in loops)
    return handed.union(*loops_hand_on, pieces.forward.stacked)


def _deferrable(sharded: ShardedProgram, reduced: Collection[int]) -> DeferredReductions:
    graph = sharded.traced.graph
    sums = {value: axes for op in _in_loops(graph) for value, axes in _summed_over(sharded, op).items() if axes}
    if not sums:
        return DeferredReductions()
    everything = (1 << len(sharded.resolver.mesh.names)) - 1
    taken = ((value, union(sharded.masks(value))) for value in range(len(graph.avals)))
    limits = {value: everything & ~mask for value, mask in taken if mask} | dict.fromkeys(reduced, 0)
    return _described(sharded, sums, sharded.traced.sum_flow.deferred(sums, limits, everything))


def _described(sharded: ShardedProgram, sums: Mapping[int, int], reached: Mapping[int, int]) -> DeferredReductions:
    graph = sharded.traced.graph
    names = sharded.resolver.mesh.names

    def named(mask: int) -> tuple[str, ...]:
        return tuple(name for index, name in enumerate(names) if mask >> index & 1)

    ends = {}
    for op in graph.ops():
        if op.name == "scan":
            for outer, first in results_of(graph.wires(op)):
                if pending := reached.get(first, 0) & ~reached.get(outer, 0):
                    ends[outer] = named(pending)
    dims: dict[Op, tuple[Dims | None, ...]] = {}
    for op in _in_loops(graph):
        pending = union([sums[value] & reached.get(value, 0) for value in op.outputs if value in sums])
        if pending:
            dims[op] = () if op.name == OWN_KERNEL else _dims(sharded, op, pending)
    return DeferredReductions({value: named(mask) for value, mask in reached.items() if mask}, dims, ends)


def _in_loops(graph: Graph) -> Iterator[Op]:
    for op in graph.body.ops:
        if op.name == "scan":
            for body in op.bodies:
                yield from Graph(body, graph.avals, graph.constants).ops()


def _summed_over(sharded: ShardedProgram, op: Op) -> dict[int, int]:
    """Returns the results of an operation that would be all-reduced at once, each with the mesh axes."""
    sums = sums_of(sharded.traced.graph, op)
    division = sharded.division(op) if sums else None
    if division is None or division.partition is None:
        return {}
    shifts = [shift for shift in division.partition.shifts if shift.kind == "all-reduce"]
    alike = dict(zip(op.outputs, sharded.traced.alike[op].outputs, strict=True))
    result = {value: union([shift.over for shift in shifts if shift.value == alike[value]]) for value in sums}
    if op.name == OWN_KERNEL:
        return result
    use = division.operands
    if use is not None and use.is_local and (use.parts or use.halos or op.name != "conv_general_dilated"):
        return {}
    for dims in _sharded_sums(sharded, op):
        if dims is not None:  # every operand must be sharded
            result = {value: mask & union([by for _, by in dims]) for value, mask in result.items()}
    return result


def _sharded_sums(sharded: ShardedProgram, op: Op) -> list[list[tuple[int, int]] | None]:
    """Returns the contracted dims of every operand, each with the axes that shard it; None for an accumulator."""
    partitioned = sharded.division(op).partition
    assert partitioned is not None
    masks = partitioned.operands
    relations = [dict(relation.dims) for relation in op.dim_map.of_kind(Kind.CONTRACTED, Kind.SAME)]
    summed = [dims for dims in relations if max(dims) < len(op.inputs)]
    return [
        None
        if op.family is Family.SCATTER_ADD and operand == 0
        else [(dims[operand], masks[operand][dims[operand]]) for dims in summed if operand in dims]
        for operand in range(len(op.inputs))
    ]


def _dims(sharded: ShardedProgram, op: Op, mask: int) -> tuple[Dims | None, ...]:
    """Returns the dims to shard: dims contracted together are sharded equally, in the axis order of one of them."""
    by_operand = _sharded_sums(sharded, op)
    use = sharded.division(op).operands
    names = sharded.resolver.mesh.names
    known: list[list[tuple[str, ...]]] = []
    for index, value in enumerate(op.inputs):
        constraint = (use.inputs[index] if use else None) or sharded.constraints[value]
        known.append([*constraint.spec] if constraint else [()] * len(sharded.traced.graph.shape(value)))
    result: list[list[tuple[int, tuple[str, ...]]] | None] = [None if dims is None else [] for dims in by_operand]
    sides = [index for index, dims in enumerate(by_operand) if dims is not None]
    for contracted in zip(*(by_operand[index] or () for index in sides), strict=True):
        mask_union = union([by for _, by in contracted])
        if not mask_union & mask:
            continue
        axes = tuple(name for index, name in enumerate(names) if mask_union >> index & 1)
        orders = [known[index][dim] for index, (dim, _) in zip(sides, contracted, strict=True)]
        order = next((by for by in orders if set(by) == set(axes)), axes)
        for index, (dim, _) in zip(sides, contracted, strict=True):
            result[index].append((dim, order))  # type: ignore[union-attr]
    return tuple(None if dims is None else tuple(dims) for dims in result)
