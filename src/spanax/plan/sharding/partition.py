"""What one operation computes and communicates per device, given the shardings of its values.

A model of XLA's SPMD partitioner: contracting a sharded dim leaves partial sums, an operand stored with another
sharding than it is used with is resharded, everything else follows its operands. Sets of mesh axes are bit masks.
"""

import functools
import math
import operator
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from spanax.trace.jaxpr.dim_maps.relations import Dim, Family, Kind
from spanax.trace.jaxpr.graph import CONTRACTIONS, RAGGED, Graph, Op

Dims = Sequence[int | None]
Labels = tuple[int | None, ...]
Masks = tuple[int, ...]
"""For each dim of a value, the mesh axes that shard it."""

SUMMED = frozenset({Family.REDUCTION, Family.GATHER, Family.SCATTER, Family.SCATTER_ADD, Family.WINDOW})
"""Operations whose results over a sharded dim are partial, and are reduced instead of gathering the operand."""


@dataclass(frozen=True, slots=True)
class Reshard:
    """A collective on one value.

    Attributes:
      kind: `all-gather`, `all-reduce`, `reduce-scatter` or `all-to-all`; around a ring, `round` or
        `collective-permute`.
      value: the index of the value.
      over: the mesh axes of the collective.
      unchanged: the mesh axes that shard the value both before and after: each of their groups moves its own shard.
      is_operand: whether it reshards an operand before use, shared by all operations that use it so.
      times: how often it runs.
      share: the bytes that move over those of the value.
      instead: what moves instead where the compiler sends rows of any number.
    """

    kind: str
    value: int
    over: int
    unchanged: int
    is_operand: bool
    times: int = 1
    share: float = 1.0
    instead: tuple["Reshard", ...] = ()


@dataclass(frozen=True, slots=True)
class PartitionedOp:
    """How one operation is partitioned: the mesh axes that divide its arithmetic, and its collectives.

    `operands` and `result` are the shardings of a contraction's operands and result in computation.
    """

    work: int
    operands: tuple[Masks, ...]
    result: Masks
    shifts: tuple[Reshard, ...]


def union(masks: Sequence[int]) -> int:
    """Returns the mesh axes of all dims of a value."""
    return functools.reduce(operator.or_, masks, 0)


def transition(value: int, before: Masks, after: Masks, *, is_operand: bool) -> list[Reshard]:
    """Returns the collectives that reshard a value; sharding a replicated dim needs none.

    Dims are gathered one by one, the last first.
    """
    if before == after:
        return []
    source = union(before)
    target = union(after)
    common = 0
    exchanged = 0
    for old, new in zip(before, after, strict=True):
        common |= old & new
        exchanged |= old & target & ~new
    shifts = []
    remaining = source & ~target
    if exchanged:
        shifts.append(Reshard("all-to-all", value, exchanged, (common | remaining) & source, is_operand))
    for old in reversed(before):
        if gathered := old & ~target:
            remaining &= ~gathered
            shifts.append(Reshard("all-gather", value, gathered, common | exchanged | remaining, is_operand))
    return shifts


def spmd_partition(
    graph: Graph,
    classes: Sequence[Labels],
    op: Op,
    ins: Sequence[Masks],
    outs: Sequence[Masks],
    pieces: Mapping[Dim, Dim] = MappingProxyType({}),
    *,
    by_row: bool = False,
) -> PartitionedOp:
    """Returns how one operation is partitioned.

    Args:
      graph: the program.
      classes: the labels of every value's dims.
      op: an operation without bodies.
      ins: the sharding of each operand.
      outs: the requested sharding of each result.
      pieces: the dim of a result for each dim of an operand of which it is a piece, or the reverse.
      by_row: whether each device has its own rows of a ragged matmul, and the sizes of their groups.
    """
    if op.name in CONTRACTIONS:
        return _contraction(graph, op, ins, outs[0], by_row)
    return _in_pieces(op, ins, outs, pieces) if pieces else _other(graph, classes, op, ins, outs)


def _contraction(graph: Graph, op: Op, ins: Sequence[Masks], requested: Masks, by_row: bool = False) -> PartitionedOp:
    summed, passed = op.dim_map.contraction
    operands = [list(masks) for masks in ins[:2]]
    sizes = [math.prod(graph.shape(value)) for value in (*op.inputs[:2], op.outputs[0])]
    out_dims: list[dict[int, int]] = [{lhs: out for lhs, _, out in passed if lhs >= 0}]
    out_dims.append({rhs: out for _, rhs, out in passed if rhs >= 0})
    pairs = [{lhs for lhs, _ in summed}, {rhs for _, rhs in summed}]
    partial = [0] * len(summed)
    result = [0] * len(requested)
    shifts, divisible = ([], requested) if by_row else _with_all_groups(op, operands, requested)
    for axis in _bits(union([*operands[0], *operands[1], *divisible])):
        dims = [next((dim for dim, mask in enumerate(masks) if mask & axis), None) for masks in operands]
        target = next((dim for dim, mask in enumerate(divisible) if mask & axis), None)
        sums = [dim is not None and dim in pairs[side] for side, dim in enumerate(dims)]
        ends = [None if dim is None else out_dims[side].get(dim) for side, dim in enumerate(dims)]
        gathered = [side for side in (0, 1) if _is_gathered(side, dims, sums, ends, target, sizes)]
        for side in gathered:
            common = union(operands[side]) & ~axis
            operands[side][dims[side]] &= ~axis  # type: ignore[index]
            # Of a common batch dim, it needs only the other side's shard.
            common_dim = None if 1 - side in gathered else _dim_to(out_dims[side], ends[1 - side])
            shifts.append(
                Reshard("all-gather" if common_dim is None else "all-to-all", op.inputs[side], axis, common, True)
            )
            if common_dim is not None:
                operands[side][common_dim] |= axis
        sharded = [side for side in (0, 1) if dims[side] is not None and side not in gathered]
        end = ends[sharded[0]] if sharded else target
        if any(sums[side] for side in sharded):
            partial[_slice_partner(summed, operands, dims, sums, sharded, axis)] |= axis
        elif end is not None:
            result[end] |= axis
    shifts = _merged(shifts) + reductions(op.outputs[0], partial, tuple(result), requested, is_eager=True)
    work = union([*partial, *result])
    return PartitionedOp(work, tuple(tuple(masks) for masks in operands), tuple(result), tuple(shifts))


def _is_gathered(
    side: int, dims: Dims, sums: Sequence[bool], ends: Dims, target: int | None, sizes: Sequence[int]
) -> bool:
    """Returns whether a contraction gathers one operand over an axis.

    A contracted dim is gathered only for a free dim of the other side that the result shards. A free dim is not if the
    result shards it, or only an operand that is larger than the result. A common batch dim that both sides shard is
    computed as it is, and the result is exchanged.
    """
    other = 1 - side
    if sums[side]:
        return target is not None and ends[other] == target
    if ends[side] is None:
        return dims[side] is not None
    return ends[side] not in (target, ends[other]) and (sums[other] or target is not None or sizes[side] <= sizes[2])


def _with_all_groups(op: Op, operands: list[list[int]], requested: Masks) -> tuple[list[Reshard], Masks]:
    """Gathers the rows and groups of a ragged matmul in place; returns that, and what remains of `requested`.

    A shard of the rows has any number of groups, and the partitioner replicates both; it shards the result only as an
    operand is. Source: libtpu 0.0.52 for v5e under data, FSDP, expert and tensor parallelism (`check --level 3`).
    """
    if op.name != RAGGED:
        return [], requested
    numbers = op.params["ragged_dot_dimension_numbers"]
    summed, passed = op.dim_map.contraction
    rows = tuple(numbers.lhs_ragged_dimensions)
    replicated = {*rows}, {*numbers.rhs_group_dimensions, *(rhs for lhs, rhs in summed if lhs in rows)}
    shifts = []
    for side, dims in enumerate(replicated):
        over = union([operands[side][dim] for dim in dims])
        for dim in dims:
            operands[side][dim] = 0
        if over:
            shifts.append(Reshard("all-gather", op.inputs[side], over, union(operands[side]), True))
    # The result has a dim of rows, or of groups where the rows are contracted.
    ends = [out for lhs, _, out in passed if lhs in rows] or [0]
    sharding = union([*operands[0], *operands[1]])
    return shifts, tuple(0 if dim in ends else mask & sharding for dim, mask in enumerate(requested))


def _dim_to(out_dims: Mapping[int, int], end: int | None) -> int | None:
    """Returns the dim of an operand that maps to a dim of the result."""
    return next((dim for dim, out in out_dims.items() if out == end), None)


def _slice_partner(
    summed: Sequence[tuple[int, int]],
    operands: list[list[int]],
    dims: Dims,
    sums: Sequence[bool],
    sharded: Sequence[int],
    axis: int,
) -> int:
    """Slices the other side of a sharded contraction, without communication; returns the contracted dim's index."""
    side = next(side for side in sharded if sums[side])
    index = next(index for index, pair in enumerate(summed) if pair[side] == dims[side])
    operands[1 - side][summed[index][1 - side]] |= axis
    return index


def _in_pieces(op: Op, ins: Sequence[Masks], outs: Sequence[Masks], pieces: Mapping[Dim, Dim]) -> PartitionedOp:
    """Partitions an operation on pieces of a dim: each device takes its shards of them, or joins its shards."""
    first = len(op.inputs)
    related = dict(pieces)
    for relation in op.dim_map.of_kind(Kind.SAME):
        results = [dim for dim in relation.dims if dim[0] >= first]
        related |= dict.fromkeys((dim for dim in relation.dims if dim[0] < first), results[0])
    by_result = [[0] * len(masks) for masks in outs]
    for (operand, dim), (_, result_dim) in related.items():
        for result, masks in enumerate(by_result):
            is_here = op.name == "split" or related[operand, dim][0] == first + result
            masks[result_dim] |= ins[operand][dim] if is_here else 0
    shifts = [
        shift
        for value, masks, requested in zip(op.outputs, by_result, outs, strict=True)
        for shift in transition(value, tuple(masks), requested, is_operand=False)
    ]
    return PartitionedOp(union(by_result[0]), tuple(ins), tuple(by_result[0]), tuple(shifts))


def _other(
    graph: Graph, classes: Sequence[Labels], op: Op, ins: Sequence[Masks], outs: Sequence[Masks]
) -> PartitionedOp:
    """Partitions by classes: dims of the result stay sharded, reduced dims are partial, others are gathered."""
    if not op.outputs:
        return PartitionedOp(0, tuple(ins), (), ())
    labels = classes[op.outputs[0]]
    requested = outs[0]
    is_summed = op.family in SUMMED
    partials: dict[int, int] = defaultdict(int)
    result = [0] * len(requested)
    shifts: list[Reshard] = []
    for operand, (value, masks) in enumerate(zip(op.inputs, ins, strict=True)):
        gathered = 0
        by_dim = enumerate(zip(classes[value], masks, strict=True))
        for operand_dim, label, mask in ((dim, label, axis) for dim, (label, axes) in by_dim for axis in _bits(axes)):
            dim = None if label is None else _same_dim(op, operand, operand_dim, label, mask, labels, requested)
            if dim is None:
                partials[operand_dim] |= mask if is_summed else 0
                gathered |= 0 if is_summed else mask
            else:
                # Sharded on another dim of the result: gather the operand. A transpose exchanges its result instead.
                is_exchanged = op.name == "transpose" and labels.count(label) > 1
                moved = 0 if is_exchanged else mask & union(requested) & ~requested[dim]
                gathered |= moved
                result[dim] |= mask & ~moved
        if gathered:
            shifts.append(Reshard("all-gather", value, gathered, union(masks) & ~gathered, True))
    if op.family in (Family.SCATTER, Family.SCATTER_ADD):
        # These axes do not shard the first operand: each device adds to its own zeros.
        result = [mask & ~union([*partials.values()]) for mask in result]
    summed = [partials[operand_dim] & ~union(result) for operand_dim in sorted(partials)]
    partial = union(summed)
    used = partial | union(result)
    result = [mask | (target & ~used) for mask, target in zip(result, requested, strict=True)]
    shifts += reductions(op.outputs[0], summed, tuple(result), requested)
    return PartitionedOp(union(result) | partial, tuple(ins), tuple(result), tuple(shifts))


def _same_dim(
    op: Op, operand: int, operand_dim: int, label: int, mask: int, labels: Labels, requested: Masks
) -> int | None:
    """Returns the dim of the result that an operand's dim maps to; of several of its class, the one sharded equally."""
    dims = [dim for dim, result_label in enumerate(labels) if result_label == label]
    if op.name == "transpose" or any(op.dim_map.of_kind(Kind.REPEATED)):
        related = op.dim_map.result_dims(operand, operand_dim).get(len(op.inputs))
        return related if related in dims else None
    if operand_dim in dims and len(labels) == len(op.eqn.invars[0].aval.shape):
        return operand_dim
    return next((dim for dim in dims if requested[dim] & mask), dims[-1] if dims else None)


def reductions(
    value: int, partials: Sequence[int], result: Masks, requested: Masks, *, is_eager: bool = False
) -> list[Reshard]:
    """Returns the reductions of partial sums, by reduce-scatter where the result is sharded so, and its reshards.

    The compiler reduces over one dim after another, the last first. A contraction's sum is `is_eager`: where axes shard
    the result, it is scattered over them before the rest is reduced, at once.
    """
    scattered = union(partials) & union(requested)
    if is_eager and scattered:
        partials = [union(partials) & ~scattered, *(partial & scattered for partial in partials)]
    shifts = []
    done = list(result)
    for partial in filter(None, reversed(partials)):
        kind = "all-reduce" if partial & ~scattered else "reduce-scatter"
        shifts.append(Reshard(kind, value, partial, union(done), False))
        done = [mask | (target & partial & scattered) for mask, target in zip(done, requested, strict=True)]
    return shifts + transition(value, tuple(done), requested, is_operand=False)


def words_of_sum(graph: Graph, value: int) -> int:
    """Returns the bytes of a value's 32-bit sum over the value's own bytes."""
    return max(1, 4 // graph.avals[value].dtype.itemsize)


def summed_shards(
    graph: Graph, op: Op, ins: Sequence[Masks], outs: Sequence[Masks], summed: Sequence[int]
) -> PartitionedOp:
    """Returns how an operation on shards is partitioned, whose results are sums over mesh axes.

    A sum is reduce-scattered over the axes that then shard it, and all-reduced over the others; in float32 at least.
    """
    shifts = []
    for value, masks, over in zip(op.outputs, outs, summed, strict=True):
        words = words_of_sum(graph, value)
        before = union(masks) & ~over
        for mask in masks:
            if scattered := mask & over:
                shifts.append(Reshard("reduce-scatter", value, scattered, before, False, share=words))
                before |= scattered
        if remaining := over & ~union(masks):
            shifts.append(Reshard("all-reduce", value, remaining, before, False, share=words))
    result = tuple(mask & ~summed[0] for mask in outs[0])
    return PartitionedOp(union([*summed, *map(union, ins)]), tuple(ins), result, tuple(shifts))


def _merged(shifts: Sequence[Reshard]) -> list[Reshard]:
    """Merges the all-gathers of one operand over several axes into one, and likewise its all-to-alls."""
    merged: dict[tuple[str, int], Reshard] = {}
    for shift in shifts:
        old = merged.get((shift.kind, shift.value))
        over = shift.over | (old.over if old else 0)
        common = (shift.unchanged & old.unchanged if old else shift.unchanged) & ~over
        merged[shift.kind, shift.value] = Reshard(shift.kind, shift.value, over, common, True)
    return list(merged.values())


def _bits(mask: int) -> list[int]:
    return [1 << index for index in range(mask.bit_length()) if mask >> index & 1]


def as_masks(spec: Sequence[Sequence[str]], bits: Mapping[str, int]) -> Masks:
    """Returns a resolver's spec as masks."""
    return tuple(sum(bits[axis] for axis in axes) for axes in spec)
