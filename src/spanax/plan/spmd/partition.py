"""What one operation computes and communicates per device, given the shardings of its values.

A model of XLA's SPMD partitioner: contracting a sharded dim leaves partial sums, an operand stored otherwise than it is
used is resharded, everything else follows its operands. A set of mesh axes is a bit mask.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from spanax.trace.analysis.fusion import REDUCTIONS
from spanax.trace.analysis.op_groups import contraction_dims
from spanax.trace.jaxpr.graph import CONTRACTIONS, Graph, Op

Labels = tuple[int | None, ...]
Masks = tuple[int, ...]
"""For each dim of a value, the mesh axes that split it."""

SUMMED = REDUCTIONS | {"gather", "scatter-add", "scatter_add", "scatter", "reduce_window_sum", "argmax", "argmin"}
"""Operations whose results over a split dim are partial, and are combined rather than gathered before."""


@dataclass(frozen=True, slots=True)
class Reshard:
    """Bytes between devices, for one value.

    Attributes:
      kind: `all-gather`, `all-reduce`, `reduce-scatter` or `all-to-all`; around a ring, `round` or
        `collective-permute`.
      value: which.
      over: the mesh axes it goes over.
      kept: the mesh axes that split the value before and after alike: each of their groups moves its own part.
      is_operand: it happens to an operand on its way in, and is shared by those who read it so.
      times: how often.
    """

    kind: str
    value: int
    over: int
    kept: int
    is_operand: bool
    times: int = 1


@dataclass(frozen=True, slots=True)
class PartitionedOp:
    """How one operation is divided: the mesh axes that divide its arithmetic, and what moves for it.

    `operands` and `result` are the splits of the contraction's operands and result as computed with.
    """

    work: int
    operands: tuple[Masks, ...]
    result: Masks
    shifts: tuple[Reshard, ...]


def union(masks: Sequence[int]) -> int:
    """All mesh axes of a value's dims together."""
    found = 0
    for mask in masks:
        found |= mask
    return found


def transition(value: int, before: Masks, after: Masks, *, is_operand: bool) -> list[Reshard]:
    """What it takes to bring a value from one split to another; to split it further takes nothing.

    Dims are gathered one after the other, the last first.
    """
    if before == after:
        return []
    had, wanted = union(before), union(after)
    kept, exchanged = 0, 0
    for old, new in zip(before, after, strict=True):
        kept |= old & new
        exchanged |= old & wanted & ~new
    shifts, left = [], had & ~wanted
    if exchanged:
        shifts.append(Reshard("all-to-all", value, exchanged, (kept | left) & had, is_operand))
    for old in reversed(before):
        if gathered := old & ~wanted:
            left &= ~gathered
            shifts.append(Reshard("all-gather", value, gathered, kept | exchanged | left, is_operand))
    return shifts


def spmd_partition(
    graph: Graph, classes: Sequence[Labels], op: Op, ins: Sequence[Masks], outs: Sequence[Masks]
) -> PartitionedOp:
    """Divide one operation.

    Args:
      graph: the program.
      classes: the labels of every value's dims.
      op: an operation without bodies.
      ins: how each operand comes in.
      outs: how each result is wanted.
    """
    if op.name in CONTRACTIONS:
        return _contraction(graph, op, ins, outs[0])
    return _other(graph, classes, op, ins, outs)


def _contraction(graph: Graph, op: Op, ins: Sequence[Masks], wanted: Masks) -> PartitionedOp:
    summed, passed = contraction_dims(op)
    operands = [list(masks) for masks in ins[:2]]
    sizes = [_size(graph, value) for value in (*op.inputs[:2], op.outputs[0])]
    goes: list[dict[int, int]] = [{lhs: out for lhs, _, out in passed if lhs >= 0}]
    goes.append({rhs: out for _, rhs, out in passed if rhs >= 0})
    pairs = [{lhs for lhs, _ in summed}, {rhs for _, rhs in summed}]
    work, partial, result = 0, [0] * len(summed), [0] * len(wanted)
    shifts: list[Reshard] = []
    for axis in _bits(union([*operands[0], *operands[1], *wanted])):
        at = [next((dim for dim, mask in enumerate(masks) if mask & axis), None) for masks in operands]
        target = next((dim for dim, mask in enumerate(wanted) if mask & axis), None)
        sums = [dim is not None and dim in pairs[side] for side, dim in enumerate(at)]
        ends = [None if dim is None else goes[side].get(dim) for side, dim in enumerate(at)]
        gathered: set[int] = set()
        # Split along a dim that both have, they meet as they lie, and what comes of it is exchanged.
        is_shared = ends[0] is not None and ends[0] == ends[1]
        for side in () if is_shared else (0, 1):
            other = 1 - side
            if at[side] is None or sums[side]:
                # A summed dim gives way only to a free dim of the other side that the result wants split.
                if sums[side] and not sums[other] and ends[other] is not None and ends[other] == target:
                    gathered.add(side)
            elif ends[side] is None:
                gathered.add(side)
            elif sums[other] and ends[side] != target:
                gathered.add(side)
            elif ends[side] != target and (target is not None or sizes[side] <= sizes[2]):
                gathered.add(side)
            elif ends[other] not in (None, ends[side]) and ends[other] == target:
                gathered.add(side)
        for side in gathered:
            kept = union(operands[side]) & ~axis
            operands[side][at[side]] &= ~axis  # type: ignore[index]
            # Of a dim that both have, it needs what the other has of it alone.
            meets = None if 1 - side in gathered else _dim_to(goes[side], ends[1 - side])
            shifts.append(Reshard("all-gather" if meets is None else "all-to-all", op.inputs[side], axis, kept, True))
            if meets is not None:
                operands[side][meets] |= axis
        left = [side for side in (0, 1) if at[side] is not None and side not in gathered]
        if any(sums[side] for side in left):
            work |= axis
            partial[_slice_partner(summed, operands, at, sums, left, axis)] |= axis
        elif left:
            work |= axis
            result[ends[left[0]]] |= axis  # type: ignore[index]
        elif target is not None:
            work |= axis
            result[target] |= axis
    shifts = _merged(shifts) + _finished(op.outputs[0], partial, tuple(result), wanted, is_eager=True)
    return PartitionedOp(work, tuple(tuple(masks) for masks in operands), tuple(result), tuple(shifts))


def _dim_to(goes: Mapping[int, int], end: int | None) -> int | None:
    """The dim of an operand that goes to a dim of the result."""
    return next((dim for dim, out in goes.items() if out == end), None)


def _slice_partner(
    summed: Sequence[tuple[int, int]],
    operands: list[list[int]],
    at: Sequence[int | None],
    sums: Sequence[bool],
    left: Sequence[int],
    axis: int,
) -> int:
    """The other side of a split sum takes its own part, which costs nothing. Returns which of the sums it is."""
    side = next(side for side in left if sums[side])
    which = next(which for which, pair in enumerate(summed) if pair[side] == at[side])
    operands[1 - side][summed[which][1 - side]] |= axis
    return which


def _other(
    graph: Graph, classes: Sequence[Labels], op: Op, ins: Sequence[Masks], outs: Sequence[Masks]
) -> PartitionedOp:
    """By the classes of the dims: what goes through stays split, what is summed is partial, the rest is gathered."""
    if not op.outputs:
        return PartitionedOp(0, tuple(ins), (), ())
    labels, wanted = classes[op.outputs[0]], outs[0]
    is_summed = op.name in SUMMED
    partials: dict[int, int] = defaultdict(int)
    result = [0] * len(wanted)
    shifts: list[Reshard] = []
    for value, masks in zip(op.inputs, ins, strict=True):
        gathered = 0
        for along, (label, mask) in enumerate(zip(classes[value], masks, strict=True)):
            if not mask:
                continue
            dim = None if label is None else _same_dim(op, along, label, mask, labels, wanted)
            if dim is None:
                partials[along] |= mask if is_summed else 0
                gathered |= 0 if is_summed else mask
            else:
                # Split elsewhere in the result: the smaller of both goes; here the operand, exchanged.
                moved = mask & union(wanted) & ~wanted[dim]
                gathered |= moved
                result[dim] |= mask & ~moved
        if gathered:
            shifts.append(Reshard("all-gather", value, gathered, union(masks) & ~gathered, True))
    if op.name.startswith("scatter"):  # what is scattered into gives way: each device adds to its own zeros
        result = [mask & ~union([*partials.values()]) for mask in result]
    summed = [partials[along] & ~union(result) for along in sorted(partials)]
    partial = union(summed)
    result = [mask | (want & ~partial) for mask, want in zip(result, wanted, strict=True)]
    shifts += _finished(op.outputs[0], summed, tuple(result), wanted)
    return PartitionedOp(union(result) | partial, tuple(ins), tuple(result), tuple(shifts))


def _same_dim(op: Op, along: int, label: int, mask: int, labels: Labels, wanted: Masks) -> int | None:
    """Where a dim of an operand is in the result; of several of its class, where it is named or wanted split alike."""
    if op.name == "broadcast_in_dim":
        dim = op.params["broadcast_dimensions"][along]
        return dim if labels[dim] == label else None
    dims = [dim for dim, other in enumerate(labels) if other == label]
    if along in dims and len(labels) == len(op.eqn.invars[0].aval.shape):
        return along
    return next((dim for dim in dims if wanted[dim] & mask), dims[-1] if dims else None)


def _finished(
    value: int, partials: Sequence[int], result: Masks, wanted: Masks, *, is_eager: bool = False
) -> list[Reshard]:
    """Partial sums are summed, split further at once where that is wanted; then the rest of the way.

    The compiler sums over one dim after the other, the last first. A contraction's sum over some axes that is then
    split over others is `is_eager`: it is split before the rest is summed.
    """
    shifts, done = [], list(result)
    for partial in reversed(partials):
        scattered = partial & union(wanted)
        reduced = partial & ~scattered
        if scattered and (is_eager or not reduced):
            shifts.append(Reshard("reduce-scatter", value, scattered, union(done), False))
        elif scattered:
            reduced = partial
        after = [mask | (want & scattered) for mask, want in zip(done, wanted, strict=True)]
        if reduced:
            kept = union(after if reduced != partial else done)
            shifts.append(Reshard("all-reduce", value, reduced, kept, False))
        done = after
    return shifts + transition(value, tuple(done), wanted, is_operand=False)


def _merged(shifts: Sequence[Reshard]) -> list[Reshard]:
    """Gathers of one operand over several axes are one gather, and so are exchanges."""
    found: dict[tuple[str, int], Reshard] = {}
    for shift in shifts:
        old = found.get((shift.kind, shift.value))
        over = shift.over | (old.over if old else 0)
        kept = (shift.kept & old.kept if old else shift.kept) & ~over
        found[shift.kind, shift.value] = Reshard(shift.kind, shift.value, over, kept, True)
    return list(found.values())


def _bits(mask: int) -> list[int]:
    return [1 << at for at in range(mask.bit_length()) if mask >> at & 1]


def _size(graph: Graph, value: int) -> int:
    size = 1
    for dim in graph.shape(value):
        size *= dim
    return size


def as_masks(spec: Sequence[Sequence[str]], bits: Mapping[str, int]) -> Masks:
    """A resolver's spec as masks."""
    return tuple(sum(bits[axis] for axis in axes) for axes in spec)
