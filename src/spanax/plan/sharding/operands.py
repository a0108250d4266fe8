"""How an operation's operands are resharded before use, where that differs from their storage.

Left to its defaults, XLA may move activations to a sharded weight instead of gathering the weight, and it gathers every
operand of a platform's kernel. Both are decided here, ahead of time.
"""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from spanax.plan.sharding.attention import AttentionSharding, attention_sharding
from spanax.plan.sharding.resolve import Constraint, Resolver, Spec
from spanax.plan.sharding.xla_workarounds import SCATTERS, resized, writes_shards
from spanax.plan.spmd.partition import PartitionedOp, as_masks, spmd_partition, union
from spanax.trace.jaxpr.dim_rules import independent_dims, reshape_groups
from spanax.trace.jaxpr.graph import CONTRACTIONS, Op
from spanax.trace.traced import Traced

LOCAL = frozenset(
    "top_k approx_top_k fft cholesky eig eigh lu qr householder_product geqrf svd schur triangular_solve "
    "tridiagonal tridiagonal_solve".split()
)
"""Operations that XLA runs as kernels it cannot split, and whose leading dims are independent of each other."""


LOOKUPS = frozenset({"gather", "scatter-add", "scatter_add"})
"""Operations that read rows of a table, or add to them: how depends on the sizes of the mesh too."""

REDUCING = frozenset({"conv_general_dilated"})
"""Operations whose partial results are reduced before they are split."""


@dataclass(frozen=True)
class OperandSharding:
    """What happens around one operation.

    Attributes:
      inputs: the constraint each operand is brought to for it; None: as it lies.
      first: the constraint by way of which; none for any if empty.
      outputs: the constraint each result is in right after it; None: its own.
      is_local: whether it runs shard by shard, each device on its part of what `inputs` split.
      summed: the mesh axes over which the results of shards are then added up.
      parts: into how many the groups of a convolution are divided.
      around: how an attention that is one operation is divided.
      is_isolated: whether an optimization barrier keeps the compiler from computing its first operand inside of it.
    """

    inputs: tuple[Constraint | None, ...]
    outputs: tuple[Constraint | None, ...]
    first: tuple[Constraint | None, ...] = ()
    is_local: bool = False
    summed: tuple[str, ...] = ()
    parts: int = 1
    around: AttentionSharding | None = None
    is_isolated: bool = False


def uses(resolver: Resolver, traced: Traced, constraints: Sequence[Constraint | None]) -> dict[Op, OperandSharding]:
    """The operations that take operands otherwise than they lie, each with how."""
    found = {op: operand_sharding(resolver, traced, op, constraints) for op in traced.graph.ops() if not op.bodies}
    return {op: use for op, use in found.items() if use is not None}


def operand_sharding(
    resolver: Resolver, traced: Traced, op: Op, constraints: Sequence[Constraint | None]
) -> OperandSharding | None:
    """How one operation takes its operands, if otherwise than they lie."""
    attended = attention_sharding(traced.graph, op, constraints)
    if attended is not None:
        inputs, outputs = (tuple(map(Constraint, specs)) for specs in (attended.operands(op), attended.results(op)))
        return OperandSharding(inputs, outputs, is_local=True, around=attended)
    if op.name in CONTRACTIONS:
        return _in_groups(resolver, traced, op, constraints) or _contracted(resolver, traced, op, constraints)
    if op.name == "reshape":
        return _turned(resolver, traced, op, constraints) or _gathered(op, constraints)
    found = _lookup(resolver, traced, op, constraints) or _local(traced, op, constraints) or _spread(op, constraints)
    found = found or _resized(traced, op, constraints) or _gathered(op, constraints)
    return _isolated(traced, op, constraints, found)


def _in_groups(
    resolver: Resolver, traced: Traced, op: Op, constraints: Sequence[Constraint | None]
) -> OperandSharding | None:
    """A convolution in groups: every device computes its part of the batch and of the groups, and nothing moves.

    XLA's partitioner gathers the batch for it. The gradient of its kernel it adds up too often where the mesh has more
    axes than those of the batch, without a word, and it dies where channels are split (jaxlib 0.10.2 and 0.12.0.1:
    tests/run/step/test_grouped.py).
    """
    dims = _group_dims(op)
    if dims is None:
        return None
    batch_dims, channel_dims, num_groups = dims
    values = (*op.inputs[:2], op.outputs[0])
    whole = [((),) * len(traced.graph.shape(value)) for value in values]
    lies = [constraints[value] or Constraint(spec) for value, spec in zip(values, whole, strict=True)]
    specs = [one.computed for one in lies]
    batch = _shared(specs, batch_dims)
    split = tuple(axis for axis in _shared(specs, channel_dims) if axis not in batch)
    if num_groups % resolver.mesh.ways(split):
        split = ()
    by_dim = [{at: batch, of: split} for at, of in zip(batch_dims, channel_dims, strict=True)]
    taken = [
        Constraint(tuple(by.get(dim, ()) for dim in range(len(spec)))) for by, spec in zip(by_dim, whole, strict=True)
    ]
    return OperandSharding(
        inputs=tuple(taken[:2]),
        outputs=(taken[2],),
        is_local=bool(batch or split),
        summed=batch if batch_dims[2] < 0 else (),
        parts=resolver.mesh.ways(split),
    )


def _turned(
    resolver: Resolver, traced: Traced, op: Op, constraints: Sequence[Constraint | None]
) -> OperandSharding | None:
    """Where what a loop goes along is taken apart, or put together: an exchange before or after the numbers' own order.

    Left to itself, XLA may gather all of it on every device.
    """
    values, shape = (op.inputs[0], op.outputs[0]), traced.graph.shape
    one, other = (constraints[value] for value in values)
    if one is None or other is None or one.used or other.used:
        return None
    taken: list[Constraint | None] = [None, None]
    for groups in reshape_groups(shape(values[0]), shape(values[1])):
        for at, dims in enumerate(groups):
            spec, whole = ((one, other)[side].spec for side in (at, 1 - at))
            by = spec[dims[1]] if len(dims) > 1 else ()
            is_turned = by and not spec[dims[0]] and whole[groups[1 - at][0]] == by
            if is_turned and shape(values[at])[dims[0]] % resolver.mesh.ways(by) == 0:
                moved = {dims[0]: by, dims[1]: ()}
                taken[at] = Constraint(tuple(moved.get(dim, old) for dim, old in enumerate(spec)))
    return OperandSharding((taken[0],), (taken[1],)) if any(taken) else None


def _shared(specs: Sequence[Spec], dims: Sequence[int]) -> tuple[str, ...]:
    """The axes that split a dim of every spec; -1 is no dim of one."""
    split = [spec[dim] for spec, dim in zip(specs, dims, strict=True) if dim >= 0]
    return tuple(axis for axis in split[0] if all(axis in by for by in split))


def _group_dims(op: Op) -> tuple[tuple[int, ...], tuple[int, ...], int] | None:
    """The dims of the batch (-1: none) and of the channels in groups, of operands and result; and how many groups."""
    if op.name != "conv_general_dilated":
        return None
    (lhs_n, lhs_c, *_), (rhs_o, rhs_i, *_), (out_n, out_c, *_) = op.params["dimension_numbers"]
    if op.params["feature_group_count"] > 1:
        return (lhs_n, -1, out_n), (lhs_c, rhs_o, out_c), op.params["feature_group_count"]
    if op.params["batch_group_count"] > 1:
        return (lhs_c, rhs_i, -1), (lhs_n, rhs_o, out_c), op.params["batch_group_count"]
    return None


def _contracted(
    resolver: Resolver, traced: Traced, op: Op, constraints: Sequence[Constraint | None]
) -> OperandSharding | None:
    """What moves around a contraction, said to the compiler as it is priced.

    Of operands that one mesh axis splits along dims that do not meet, one is gathered, and where a dim that is summed
    is split on one side, the other takes its part: left to itself, XLA may gather the larger, or both. A sum over an
    axis that is to split a dim together with others comes before the split: asked for both at once, XLA gathers the
    others. So does a result that is exchanged: asked for it as it is wanted, XLA may gather an operand.
    """
    use = _gathered(op, constraints) or OperandSharding((None,) * len(op.inputs), (None,) * len(op.outputs))
    values = (*op.inputs[:2], op.outputs[0])
    lies = [one or constraints[value] for one, value in zip((*use.inputs[:2], use.outputs[0]), values, strict=True)]
    specs = [one.spec if one else ((),) * len(traced.graph.shape(at)) for one, at in zip(lies, values, strict=True)]
    taken, given, first = list(use.inputs), list(use.outputs), list[Constraint | None]([None] * len(op.inputs))
    if _axes(specs[0]) & _axes(specs[1]) or any(len(by) > 1 for by in specs[2]):
        bits = {axis: 1 << at for at, axis in enumerate(resolver.mesh.names)}
        masks = [as_masks(spec, bits) for spec in specs]
        split = spmd_partition(traced.graph, traced.axes.classes, op, masks[:2], masks[2:])
        if split.operands != tuple(masks[:2]):
            for side in (0, 1):
                spec = _taken(specs[side], split.operands[side], bits)
                sizes = zip(traced.graph.shape(op.inputs[side]), spec, strict=True)
                # The channels of a convolution's group are fewer than those that it meets, and may not divide.
                if all(size % resolver.mesh.ways(by) == 0 for size, by in sizes):
                    taken[side] = Constraint(spec)
                    gathered = _over(split, "all-gather", op.inputs[side])
                    if gathered and _over(split, "all-to-all", op.inputs[side]):  # XLA gathers first, exchanging more
                        by_way = zip(masks[side], split.operands[side], strict=True)
                        first[side] = Constraint(_taken(specs[side], [was & gathered | to for was, to in by_way], bits))
        summed = _named(_over(split, "reduce-scatter", op.outputs[0]), bits)
        if any(len(by) > 1 and summed.intersection(by) for by in specs[2]):
            given[0] = Constraint(_without(specs[2], summed))
        elif exchanged := _over(split, "all-to-all", op.outputs[0]):
            before = [was & exchanged | to & ~exchanged for was, to in zip(split.result, masks[2], strict=True)]
            given[0] = Constraint(_taken(specs[2], before, bits))
    return (
        OperandSharding(tuple(taken), tuple(given), tuple(first) if any(first) else ())
        if any((*taken, *given))
        else None
    )


def _over(split: PartitionedOp, kind: str, value: int) -> int:
    """The mesh axes over which a value moves so."""
    return union([shift.over for shift in split.shifts if shift.kind == kind and shift.value == value])


def _gathered(op: Op, constraints: Sequence[Constraint | None]) -> OperandSharding | None:
    """Stored operands come in their computed layout where the result is computed.

    A result that is stored, of operands that are not, is a gradient: reduced first, and split then. Asked for both
    at once, XLA may move the activations of a convolution instead.
    """
    results = [constraints[value] for value in op.outputs]
    if all(result is not None and result.used is None for result in results):
        inputs = tuple(_as_used(constraints[value]) for value in op.inputs)
        return OperandSharding(inputs, (None,) * len(results)) if any(inputs) else None
    operands = [constraints[value] for value in op.inputs]
    if op.name in REDUCING and all(operand is None or operand.used is None for operand in operands):
        return OperandSharding((None,) * len(operands), tuple(map(_as_used, results)))
    return None


def _as_used(constraint: Constraint | None) -> Constraint | None:
    return None if constraint is None or constraint.used is None else Constraint(constraint.used)


def _local(traced: Traced, op: Op, constraints: Sequence[Constraint | None]) -> OperandSharding | None:
    """The leading dims as the result has them, everything else whole."""
    lies = [constraints[value] for value in (*op.inputs, *op.outputs)]
    if op.name not in LOCAL or not any(one and any(one.spec) for one in lies):
        return None
    classes, split = traced.axes.classes, dict[int | None, tuple[str, ...]]()
    free = [(value, dim) for value in op.inputs + op.outputs for dim in independent_dims(traced.graph, op, value)]
    for value, dim in free:
        constraint = constraints[value]
        if value in op.outputs and constraint:
            split[classes[value][dim]] = constraint.spec[dim]
    # Only classes that go through it stay split.
    through = {classes[value][dim] for value, dim in free if value in op.inputs} - {None}
    split = {label: by for label, by in split.items() if label in through}

    def spec(value: int) -> Constraint:
        by = [split.get(label, ()) if (value, dim) in free else () for dim, label in enumerate(classes[value])]
        return Constraint(tuple(by))

    return OperandSharding(tuple(map(spec, op.inputs)), tuple(map(spec, op.outputs)), is_local=any(split.values()))


def _spread(op: Op, constraints: Sequence[Constraint | None]) -> OperandSharding | None:
    """A pad between elements or by fewer than none, replicated along the dims that it spreads or cuts.

    XLA's partitioner dies where elements are spread along a sharded dim (`associative_scan`, the gradient of a strided
    slice: tests/run/test_parity.py), and computes wrong numbers for a negative pad of a replicated operand into a
    sharded result (tests/run/step/test_parts_of_sharded_dims.py); both in jaxlib 0.10.2 and 0.12.0.1.
    """
    config = op.params.get("padding_config", ())
    dims = [dim for dim, (low, high, between) in enumerate(config) if between or low < 0 or high < 0]
    lies = [constraints[value] for value in (op.inputs[0], op.outputs[0])] if dims else []
    if not any(one is not None and (one.spec[dim] or one.computed[dim]) for one in lies for dim in dims):
        return None
    whole = [None if one is None else _whole_along(one, dims) for one in lies]
    return OperandSharding((whole[0], None), (whole[1],))


def _resized(traced: Traced, op: Op, constraints: Sequence[Constraint | None]) -> OperandSharding | None:
    """Operands and results of a slice, a pad or a concatenation, replicated along what does not divide."""
    stored = _gathered(op, constraints) or OperandSharding((None,) * len(op.inputs), (None,) * len(op.outputs))
    values = (*op.inputs, *op.outputs)
    lies = [use or constraints[value] for use, value in zip((*stored.inputs, *stored.outputs), values, strict=True)]
    placed = resized(traced.graph, op, lies)
    return None if placed is None else OperandSharding(*placed)


def _isolated(
    traced: Traced, op: Op, constraints: Sequence[Constraint | None], use: OperandSharding | None
) -> OperandSharding | None:
    """The use of an operation whose first operand needs an optimization barrier."""
    if op.name not in SCATTERS or op.inputs[0] in traced.uniform:
        return use
    use = use or OperandSharding((None,) * len(op.inputs), (None,) * len(op.outputs))
    return replace(use, is_isolated=True) if writes_shards(op, use.inputs[0] or constraints[op.inputs[0]]) else use


def _whole_along(constraint: Constraint, dims: Collection[int]) -> Constraint:
    return Constraint(tuple(() if dim in dims else by for dim, by in enumerate(constraint.computed)))


@dataclass(frozen=True)
class _Lookup:
    """A lookup in a table, or the gradient of one: `columns` are dims of the rows, `looked_up` of the table."""

    table: int
    indices: int
    rows: int
    columns: Sequence[int]
    looked_up: Sequence[int]


def _lookup_of(op: Op) -> _Lookup | None:
    numbers: Any = op.params.get("dimension_numbers")
    if op.name == "gather":
        return _Lookup(op.inputs[0], op.inputs[1], op.outputs[0], numbers.offset_dims, numbers.start_index_map)
    if op.name in LOOKUPS:
        dims = numbers.update_window_dims, numbers.scatter_dims_to_operand_dims
        return _Lookup(op.outputs[0], op.inputs[1], op.inputs[2], *dims)
    return None


def _lookup(
    resolver: Resolver, traced: Traced, op: Op, constraints: Sequence[Constraint | None]
) -> OperandSharding | None:
    """A lookup in a table, or the gradient of one, in whichever of three ways moves least.

    Computed, the table comes as the layout computes with it; if that splits its rows, all who keep some of them are
    asked the same, and their partial results are summed. Whole, it comes whole. Stored, every device answers for the
    columns it keeps what all those that keep others of the same rows are asked, and the result moves instead.
    """
    found = _lookup_of(op)
    lies, result = (constraints[found.table], constraints[found.rows]) if found else (None, None)
    if found is None or lies is None or result is None:
        return None
    used = lies.computed
    summed = {axis for dim in found.looked_up for axis in used[dim]}
    if lies.used is None and not summed:
        return None
    ways = _ways_to_look_up(resolver, traced, found, lies, result, summed)
    table_spec, rows_spec, _ = min(ways, key=lambda way: way[2])
    if lies.used is None and table_spec == used and not summed & _axes(result.spec):
        return None
    asked = [by for dim, by in enumerate(rows_spec) if dim not in found.columns]
    rank = len(traced.graph.shape(found.indices))
    asks = Constraint((*asked, *((),) * (rank - len(asked))))
    table, rows = Constraint(table_spec), Constraint(rows_spec)
    if op.name == "gather":
        return OperandSharding((table, asks, *(None,) * (len(op.inputs) - 2)), (rows,))
    return OperandSharding((table, asks, rows), (table,))


def _ways_to_look_up(
    resolver: Resolver, traced: Traced, found: _Lookup, lies: Constraint, result: Constraint, summed: set[str]
) -> list[tuple[Spec, Spec, float]]:
    """How the table is split and how the rows, and how many numbers move there and back a device."""
    shape, classes, ways = traced.graph.shape, traced.axes.classes, resolver.mesh.ways
    used = lies.computed
    row_size, table_size = math.prod(shape(found.rows)), math.prod(shape(found.table))
    is_split = ways([*summed]) > 1
    computed = _without(result.spec, summed)
    sums = is_split * (1 + (computed != result.spec)) * row_size / ways([*_axes(computed)])
    tables = 2 * table_size / ways([*_axes(used)]) if lies.used is not None else 0
    known: list[tuple[Spec, Spec, float]] = [(used, computed, tables + sums)]
    if not traced.batch_labels.intersection(classes[found.table]):
        known.append((((),) * len(used), result.spec, 2 * table_size))
    else:  # a table for each example, exchanged for one that lies as its rows do, or gathered
        left = _without(used, _axes(result.spec) | summed)
        asked = dict(zip(classes[found.rows], result.spec, strict=True))
        own = tuple(
            () if dim in found.looked_up else asked[label] if label in traced.batch_labels & asked.keys() else by
            for dim, (label, by) in enumerate(zip(classes[found.table], left, strict=True))
        )
        known.append((own, result.spec, table_size / ways([*_axes(own)])))
    by_label = dict(zip(classes[found.table], lies.spec, strict=True))
    columns = {dim: by_label.get(classes[found.rows][dim], ()) for dim in found.columns}
    parts = {axis for by in columns.values() for axis in by}
    if lies.used is not None and ways([*parts]) > 1:
        # What splits the batch and no column stays: only those that share the batch's part answer each other.
        kept = _without(result.spec, parts | summed)
        stored = tuple(columns.get(dim, by) for dim, by in enumerate(kept))
        batch = _axes(kept) - parts
        moved = (2 + is_split) * row_size / ways([*parts, *batch])
        known.append((lies.spec, stored, moved + (ways([*batch]) > 1) * table_size / ways([*parts])))
    return known


def _taken(spec: Spec, masks: Sequence[int], bits: Mapping[str, int]) -> Spec:
    """A spec with the axes that masks say: those that it has in its order, and then the others in the mesh's."""
    named = [_named(mask, bits) for mask in masks]
    return tuple(
        (*(axis for axis in by if axis in names), *(axis for axis in bits if axis in names and axis not in by))
        for by, names in zip(spec, named, strict=True)
    )


def _named(mask: int, bits: Mapping[str, int]) -> set[str]:
    return {axis for axis, bit in bits.items() if bit & mask}


def _axes(spec: Spec) -> set[str]:
    return {axis for by in spec for axis in by}


def _without(spec: Spec, axes: Collection[str]) -> Spec:
    return tuple(tuple(axis for axis in by if axis not in axes) for by in spec)
