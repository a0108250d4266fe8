"""How an operation's operands are resharded before use, where that differs from their storage.

By default, XLA may move activations to a sharded weight instead of gathering the weight, and it gathers every operand
of a platform's kernel. Both are decided here, ahead of time.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from spanax.plan.sharding.assign import times_as_large
from spanax.plan.sharding.attention import AttentionSharding, attention_sharding
from spanax.plan.sharding.lookups import exchanged_first, lookup_of, strategies, without
from spanax.plan.sharding.own_kernels import axes_by_class, scattered_spec, specs_of
from spanax.plan.sharding.partition import PartitionedOp, as_masks, spmd_partition, union
from spanax.plan.sharding.pieces import between, piece_links
from spanax.plan.sharding.resolve import Constraint, Resolver, Spec, axes_of
from spanax.plan.sharding.sorted_rows import RowSharding, row_sharding
from spanax.plan.sharding.xla_workarounds import SCATTERS, padded, resized, writes_shards
from spanax.trace.analysis.step_analysis import StepAnalysis
from spanax.trace.jaxpr.dim_maps.relations import Dim, Equation, Family, Kind
from spanax.trace.jaxpr.dim_maps.table import OPAQUE_KERNELS
from spanax.trace.jaxpr.dim_maps.windows import POOL_GRADIENT, WINDOWED, Halo, Window, windows
from spanax.trace.jaxpr.graph import CONTRACTIONS, OWN_KERNEL, Op

REDUCING = frozenset({"conv_general_dilated"})
"""Operations whose partial results are reduced before they are sharded."""


@dataclass(frozen=True)
class ShardedWindow:
    """A dim that windows slide over, the mesh axes that shard it, and what a shard reads of its neighbors.

    `excess` is the arithmetic of all shards over that of the whole.
    """

    window: Window
    axes: tuple[str, ...]
    halo: Halo
    excess: float


@dataclass(frozen=True)
class OperandSharding:
    """How the operands and results of one operation are resharded.

    Attributes:
      inputs: the constraint of each operand during the operation; None: unchanged.
      first: an intermediate constraint for each operand; empty if no operand has any.
      outputs: the constraint of each result right after the operation; None: its own.
      is_local: whether it runs shard by shard, each device on its shard of `inputs`.
      summed: for each result, the mesh axes over which those of shards are then summed, and scattered over the ones
        that its constraint has; empty if there are none.
      parts: the mesh axes that shard the groups of a convolution.
      halos: the dims under windows that are sharded.
      attention: the sharding of a fused attention operation.
      rows: the sharding of an operation on rows that each device sorts for itself.
      is_isolated: whether an optimization barrier keeps the compiler from fusing the first operand's producer into it.
    """

    inputs: tuple[Constraint | None, ...]
    outputs: tuple[Constraint | None, ...]
    first: tuple[Constraint | None, ...] = ()
    is_local: bool = False
    summed: tuple[tuple[str, ...], ...] = ()
    parts: tuple[str, ...] = ()
    halos: tuple[ShardedWindow, ...] = ()
    attention: AttentionSharding | None = None
    rows: RowSharding | None = None
    is_isolated: bool = False


Known = Sequence[Constraint | None] | Mapping[int, Constraint | None]
"""The constraints of values, by number."""


def operand_shardings(
    resolver: Resolver, traced: StepAnalysis, constraints: Sequence[Constraint | None]
) -> dict[Op, OperandSharding]:
    """Returns the operations that reshard operands or results, each with its sharding."""
    shardings = {op: operand_sharding(resolver, traced, op, constraints) for op in traced.graph.ops() if not op.bodies}
    return {op: sharding for op, sharding in shardings.items() if sharding is not None}


def operand_sharding(
    resolver: Resolver, traced: StepAnalysis, op: Op, constraints: Sequence[Constraint | None]
) -> OperandSharding | None:
    """Returns how one operation reshards its operands and results; None if it does not."""
    attention = attention_sharding(resolver, traced.graph, op, constraints)
    if attention is not None:
        inputs, outputs = (tuple(map(Constraint, specs)) for specs in (attention.operands(op), attention.results(op)))
        return OperandSharding(inputs, outputs, is_local=True, attention=attention)
    if op.name == OWN_KERNEL:
        return _own_kernel(resolver, traced, op, constraints)
    rows = row_sharding(resolver, traced, op, constraints)
    if rows is not None:
        return OperandSharding(rows.inputs, rows.outputs, is_local=True, rows=rows)
    if op.name in CONTRACTIONS:
        middle = _between(constraints[op.outputs[0]])
        known = {value: constraints[value] for value in (*op.inputs, *op.outputs)}
        known |= {} if middle is None else {op.outputs[0]: middle}
        sharding = _by_shard(resolver, traced, op, known) or _kept(resolver, traced, op, known)
        return _exchanged_after(op, middle, sharding or _contracted(resolver, traced, op, known))
    if piece_links(op, traced.axes.classes, traced.axes.wholes):
        return _gathered(op, constraints)
    sharding = _by_shard(resolver, traced, op, constraints) or _reshaped(resolver, traced, op, constraints)
    sharding = sharding or _lookup(resolver, traced, op, constraints)
    sharding = sharding or _local(traced, op, constraints) or _padded(op, constraints)
    sharding = sharding or _resized(traced, op, constraints) or _gathered(op, constraints)
    return _isolated(traced, op, constraints, sharding)


def _own_kernel(
    resolver: Resolver, traced: StepAnalysis, op: Op, constraints: Sequence[Constraint | None]
) -> OperandSharding:
    """Shards a kernel of the user's own as its reference allows, and sums the results of which shards have terms."""
    graph = traced.graph
    mesh = resolver.mesh
    dims = op.params["classes"]
    axes = axes_by_class(graph, op, constraints, mesh)
    summed = tuple(tuple(axis for label in labels for axis in axes.get(label, ())) for labels in dims.sums)
    results = [
        scattered_spec(spec, over, constraints[value], graph.shape(value), mesh)
        for spec, over, value in zip(specs_of(dims.results, axes), summed, op.outputs, strict=True)
    ]
    inputs = specs_of(dims.operands, axes)
    return OperandSharding(
        tuple(map(Constraint, inputs)), tuple(map(Constraint, results)), is_local=True, summed=summed
    )


def _between(constraint: Constraint | None) -> Constraint | None:
    """Returns the sharding in which a gradient is computed before it is exchanged into storage; None: no exchange."""
    spec = None if constraint is None or constraint.used is None else between(constraint.spec, constraint.used)
    return None if spec is None or constraint is None else Constraint(spec, used=constraint.used)


def _exchanged_after(op: Op, middle: Constraint | None, sharding: OperandSharding | None) -> OperandSharding | None:
    """Returns how a contraction is resharded whose result is exchanged after it."""
    if middle is None:
        return sharding
    sharding = sharding or OperandSharding((None,) * len(op.inputs), (None,) * len(op.outputs))
    first = sharding.outputs[0] or Constraint(middle.spec)
    return replace(sharding, outputs=(first, *sharding.outputs[1:]))


def _by_shard(resolver: Resolver, traced: StepAnalysis, op: Op, constraints: Known) -> OperandSharding | None:
    """Shards a convolution or a pool under sharded windows, or a convolution in groups: each device has its shards.

    A shard reads a halo of its neighbors; where one neighbor does not have it, every device has the dim.
    XLA's partitioner gathers the operands of some gradients. Of a convolution in groups, it gathers the batch, sums the
    gradient of the kernel too often (`GROUPED_CONVOLUTIONS` in `xla_workarounds`), and crashes for sharded channels.
    A gradient that is scattered over only some axes of its sum would be all-reduced over all of them.
    """
    if op.name not in WINDOWED:
        return None
    values = (*op.inputs, *op.outputs)
    empty = [Constraint(((),) * len(traced.graph.shape(value))) for value in values]
    specs = [(constraints[value] or none).computed for value, none in zip(values, empty, strict=True)]
    spatial = [window for window in windows(Equation(op.eqn)) if _is_sharded(window, specs)]
    in_groups = list(op.dim_map.of_kind(Kind.GROUPS))
    by_compiler = not spatial and not in_groups
    if by_compiler and not _is_gradient(op, constraints):
        return None
    final: list[list[tuple[str, ...]]] = [[()] * len(spec) for spec in specs]
    summed: tuple[str, ...] = ()
    parts: tuple[str, ...] = ()
    for relation in (*op.dim_map.of_kind(Kind.SAME, Kind.CONTRACTED), *in_groups):
        axes = _shared(specs, final, relation.dims)
        if relation.factor is not None:
            axes = () if relation.factor % resolver.mesh.ways(axes) else axes
            parts = axes
        for array, dim in relation.dims:
            final[array][dim] = axes
        summed += axes if relation.kind is Kind.CONTRACTED else ()
    halos = list[ShardedWindow]()
    for window in spatial:
        for end, is_summed in ((window.rows, False), (window.kernel, True)):
            axes = () if end is None else _shared(specs, final, [window.read, end])
            ways = resolver.mesh.ways(axes)
            halo = window.halo(ways, is_summed) if axes else None
            if halo is not None and end is not None:
                halos.append(ShardedWindow(window, axes, halo, window.excess(ways, is_summed, halo)))
                summed += axes if is_summed else ()
                for array, dim in (window.read, end):
                    final[array][dim] = axes
    if op.name == POOL_GRADIENT:
        final[2] = final[1]
    shape = traced.graph.shape(values[-1])
    result = scattered_spec(tuple(final[-1]), summed, constraints[values[-1]], shape, resolver.mesh)
    is_one_sum = not {*summed} & axes_of(result) or {*summed} <= axes_of(result)
    if by_compiler and (is_one_sum or list(map(list, specs[:-1])) != final[:-1]):
        return None
    return OperandSharding(
        inputs=tuple(Constraint(tuple(spec)) for spec in final[:-1]),
        outputs=(Constraint(result),),
        is_local=any(map(any, final)),
        summed=(summed,) if summed else (),
        parts=parts,
        halos=tuple(halos),
    )


def _shared(specs: Sequence[Spec], final: Sequence[Sequence[tuple[str, ...]]], dims: Sequence[Dim]) -> tuple[str, ...]:
    """Returns the mesh axes that shard all of some dims, and no dim in the final specs."""
    used = {axis for spec in final for by in spec for axis in by}
    by_dim = [specs[array][dim] for array, dim in dims]
    return tuple(axis for axis in by_dim[0] if axis not in used and all(axis in by for by in by_dim))


def _is_sharded(window: Window, specs: Sequence[Spec]) -> bool:
    dims = (window.read, window.rows, window.kernel or window.rows)
    return any(specs[array][dim] for array, dim in dims)


def _reshaped(
    resolver: Resolver, traced: StepAnalysis, op: Op, constraints: Sequence[Constraint | None]
) -> OperandSharding | None:
    """Reshards around a reshape of a scanned dim: an all-to-all before or after the local reshape.

    By default, XLA may gather the operand on every device.
    """
    if op.family is not Family.VIEW:
        return None
    values = (op.inputs[0], op.outputs[0])
    shape = traced.graph.shape
    before, after = (constraints[value] for value in values)
    if before is None or after is None or before.used or after.used:
        return None
    results: list[Constraint | None] = [None, None]
    for relation in op.dim_map.of_kind(Kind.FACTORS):
        groups = [[dim for _, dim in run] for run in relation.runs]
        for position, dims in enumerate(groups):
            spec, opposite = ((before, after)[side].spec for side in (position, 1 - position))
            by = spec[dims[1]] if len(dims) > 1 else ()
            is_exchanged = by and not spec[dims[0]] and opposite[groups[1 - position][0]] == by
            if is_exchanged and shape(values[position])[dims[0]] % resolver.mesh.ways(by) == 0:
                moved = {dims[0]: by, dims[1]: ()}
                results[position] = Constraint(tuple(moved.get(dim, old) for dim, old in enumerate(spec)))
    return OperandSharding((results[0],), (results[1],)) if any(results) else None


def kept_specs(op: Op, constraints: Known) -> tuple[int, list[Spec]] | None:
    """Returns which of a matmul's operands and result may stay as it is stored, and the specs of all three then.

    That is a weight, or a gradient, which has mesh axes along one more dim than in computation. Activations with this
    dim are exchanged: their batch is gathered and that dim is sharded. The batch of the others is gathered, or summed
    and scattered. Then every device computes with the part that it stores, and no weight is gathered or reduced.
    """
    if op.name != "dot_general":
        return None
    known = [constraints[value] for value in (*op.inputs[:2], op.outputs[0])]
    stored = [(index, each) for index, each in enumerate(known) if each is not None and each.used is not None]
    if None in known or len(stored) != 1:
        return None
    ((kept, weight),) = stored
    pairs = enumerate(zip(weight.spec, weight.used or (), strict=True))
    changed = [(dim, {*by} - {*used}) for dim, (by, used) in pairs if {*by} - {*used}]
    if len(changed) != 1:
        return None
    ((stored_dim, axes),) = changed
    summed, passed = op.dim_map.contraction
    dims = [*((lhs, rhs, -1) for lhs, rhs in summed), *passed]
    along = next(each for each in dims if each[kept] == stored_dim)
    specs = [weight.spec] * 3
    for side in {0, 1, 2} - {kept}:
        spec = [*known[side].computed]  # type: ignore[union-attr]
        free = [each[side] for each in dims if each[kept] < 0 <= each[side]]
        if {axis for dim in free for axis in spec[dim] if axis in axes} != axes:
            return None
        for dim in free:
            spec[dim] = tuple(axis for axis in spec[dim] if axis not in axes)
        if along[side] >= 0:
            spec[along[side]] = weight.spec[stored_dim]
        specs[side] = tuple(spec)
    return kept, specs


def is_kept(
    resolver: Resolver,
    traced: StepAnalysis,
    op: Op,
    constraints: Known,
    found: tuple[int, list[Spec]],
    ways: Callable[[Sequence[str]], Any],
) -> Any:
    """Returns whether the activations of a matmul move instead of its weight: of one mesh, or an array for several.

    `found` are its `kept_specs`. Its gradient needs what the forward and the backward pass have moved. Accumulated over
    microbatches, gradients are reduced once, and the gathers of a weight overlap with the computation that moved
    activations are waited for in.
    """
    kept, specs = found
    values = (*op.inputs[:2], op.outputs[0])
    weight = constraints[values[kept]]
    num_bytes = [traced.graph.num_bytes(value) for value in values]
    moved = sum(num_bytes[side] / ways([*axes_of(specs[side])]) for side in {0, 1, 2} - {kept})
    times = times_as_large(resolver.program)
    return times * moved <= num_bytes[kept] / ways([*axes_of(weight.computed)])  # type: ignore[union-attr]


def kept_on_mesh(resolver: Resolver, traced: StepAnalysis, op: Op, constraints: Known) -> tuple[int, list[Spec]] | None:
    """Returns the `kept_specs` of a matmul whose activations move instead of its weight; None for others."""
    found = kept_specs(op, constraints)
    is_moved = found is not None and is_kept(resolver, traced, op, constraints, found, resolver.mesh.ways)
    return found if is_moved else None


def _kept(resolver: Resolver, traced: StepAnalysis, op: Op, constraints: Known) -> OperandSharding | None:
    """Moves the activations of a matmul where they are smaller than its weight, or than the gradient of one."""
    found = kept_on_mesh(resolver, traced, op, constraints)
    if found is None:
        return None
    kept, specs = found
    inputs = [None if side == kept else Constraint(specs[side]) for side in (0, 1)]
    weight = constraints[(*op.inputs[:2], op.outputs[0])[kept]]
    # A sum is scattered to its own sharding at once; what has the weight's dim is exchanged after the matmul.
    is_sum = axes_of(specs[2]).isdisjoint(axes_of(specs[kept]) - axes_of(weight.computed))  # type: ignore[union-attr]
    result = None if kept == 2 or is_sum else Constraint(specs[2])
    return OperandSharding((*inputs, *(None for _ in op.inputs[2:])), (result,))


def _contracted(resolver: Resolver, traced: StepAnalysis, op: Op, constraints: Known) -> OperandSharding | None:
    """Reshards a contraction's operands and result explicitly, as the cost model predicts.

    Where one mesh axis shards both operands along dims that are not contracted together, one operand is gathered.
    Where a contracted dim is sharded on one side, the other side is sliced: by default, XLA may gather the larger
    operand, or both. A reduction over an axis that then shards a dim together with others precedes that resharding:
    given both at once, XLA gathers the others. The same applies to an all-to-all of the result: given the final
    sharding, XLA may gather an operand.
    """
    use = _gathered(op, constraints) or OperandSharding((None,) * len(op.inputs), (None,) * len(op.outputs))
    values = (*op.inputs[:2], op.outputs[0])
    known = [c or constraints[value] for c, value in zip((*use.inputs[:2], use.outputs[0]), values, strict=True)]
    specs = [c.spec if c else ((),) * len(traced.graph.shape(value)) for c, value in zip(known, values, strict=True)]
    inputs = list(use.inputs)
    outputs = list(use.outputs)
    first = list[Constraint | None]([None] * len(op.inputs))
    if axes_of(specs[0]) & axes_of(specs[1]) or any(len(by) > 1 for by in specs[2]):
        bits = {axis: 1 << bit for bit, axis in enumerate(resolver.mesh.names)}
        masks = [as_masks(spec, bits) for spec in specs]
        parts = spmd_partition(traced.graph, traced.axes.classes, op, masks[:2], masks[2:])
        if parts.operands != tuple(masks[:2]):
            for side in (0, 1):
                spec = _taken(specs[side], parts.operands[side], bits)
                sizes = zip(traced.graph.shape(op.inputs[side]), spec, strict=True)
                # The channels of one group of a convolution are fewer than the contracted dim, and may not divide.
                if all(size % resolver.mesh.ways(by) == 0 for size, by in sizes):
                    inputs[side] = Constraint(spec)
                    gathered = _over(parts, "all-gather", op.inputs[side])
                    if gathered and _over(parts, "all-to-all", op.inputs[side]):  # XLA gathers first and exchanges more
                        pairs = zip(masks[side], parts.operands[side], strict=True)
                        first[side] = Constraint(_taken(specs[side], [was & gathered | to for was, to in pairs], bits))
        summed = _named(_over(parts, "reduce-scatter", op.outputs[0]), bits)
        if any(len(by) > 1 and summed.intersection(by) for by in specs[2]):
            outputs[0] = Constraint(without(specs[2], summed))
        elif exchanged := _over(parts, "all-to-all", op.outputs[0]):
            before = [was & exchanged | to & ~exchanged for was, to in zip(parts.result, masks[2], strict=True)]
            outputs[0] = Constraint(_taken(specs[2], before, bits))
    return (
        OperandSharding(tuple(inputs), tuple(outputs), tuple(first) if any(first) else ())
        if any((*inputs, *outputs))
        else None
    )


def _over(partitioned: PartitionedOp, kind: str, value: int) -> int:
    """Returns the mesh axes of the collectives of one kind on a value."""
    return union([shift.over for shift in partitioned.shifts if shift.kind == kind and shift.value == value])


def _gathered(op: Op, constraints: Known) -> OperandSharding | None:
    """Gathers stored operands to their computed sharding where the result is computed.

    A stored result of computed operands is a gradient: reduced first, then sharded. Given both at once, XLA may move
    the activations of a convolution instead.
    """
    results = [constraints[value] for value in op.outputs]
    if all(result is not None and result.used is None for result in results):
        inputs = tuple(_as_used(constraints[value]) for value in op.inputs)
        return OperandSharding(inputs, (None,) * len(results)) if any(inputs) else None
    if op.name in REDUCING and _is_gradient(op, constraints):
        return OperandSharding((None,) * len(op.inputs), tuple(map(_as_used, results)))
    return None


def _is_gradient(op: Op, constraints: Known) -> bool:
    """Returns whether an operation computes a stored result of computed operands."""
    *operands, result = (constraints[value] for value in (*op.inputs, op.outputs[0]))
    is_computed = all(operand is None or operand.used is None for operand in operands)
    return is_computed and result is not None and result.used is not None


def _as_used(constraint: Constraint | None) -> Constraint | None:
    return None if constraint is None or constraint.used is None else Constraint(constraint.used)


def _local(traced: StepAnalysis, op: Op, constraints: Sequence[Constraint | None]) -> OperandSharding | None:
    """Shards independent dims as the result has them and replicates all other dims.

    XLA runs these operations as kernels that it cannot partition. It rejects Mosaic kernels even where all operands are
    replicated, unless they run device by device.
    """
    known = [constraints[value] for value in (*op.inputs, *op.outputs)]
    is_opaque = op.name in OPAQUE_KERNELS
    if op.family is not Family.KERNEL or not (is_opaque or any(c and any(c.spec) for c in known)):
        return None
    classes = traced.axes.classes
    axes = dict[int | None, tuple[str, ...]]()
    values = op.inputs + op.outputs
    free = sorted((values[array], dim) for array, dim in op.dim_map.dims(Kind.SAME))
    for value, dim in free:
        constraint = constraints[value]
        if value in op.outputs and constraint:
            axes[classes[value][dim]] = constraint.spec[dim]
    # Only classes of both operands and results stay sharded.
    through = {classes[value][dim] for value, dim in free if value in op.inputs} - {None}
    axes = {label: by for label, by in axes.items() if label in through}

    def spec(value: int) -> Constraint:
        by = [axes.get(label, ()) if (value, dim) in free else () for dim, label in enumerate(classes[value])]
        return Constraint(tuple(by))

    return OperandSharding(
        tuple(map(spec, op.inputs)), tuple(map(spec, op.outputs)), is_local=is_opaque or any(axes.values())
    )


def _padded(op: Op, constraints: Sequence[Constraint | None]) -> OperandSharding | None:
    """Replicates a pad between elements, or a negative pad, along the dims that it changes."""
    placed = padded(op, constraints[op.inputs[0]], constraints[op.outputs[0]]) if op.name == "pad" else None
    return None if placed is None else OperandSharding(*placed)


def _resized(traced: StepAnalysis, op: Op, constraints: Sequence[Constraint | None]) -> OperandSharding | None:
    """Replicates operands and results of a slice, a pad or a concatenation along dims that do not divide."""
    stored = _gathered(op, constraints) or OperandSharding((None,) * len(op.inputs), (None,) * len(op.outputs))
    values = (*op.inputs, *op.outputs)
    before = [use or constraints[value] for use, value in zip((*stored.inputs, *stored.outputs), values, strict=True)]
    placed = resized(traced.graph, op, before)
    return None if placed is None else OperandSharding(*placed)


def _isolated(
    traced: StepAnalysis, op: Op, constraints: Sequence[Constraint | None], sharding: OperandSharding | None
) -> OperandSharding | None:
    """Adds an optimization barrier to an operation whose first operand needs one."""
    if op.family not in SCATTERS or op.inputs[0] in traced.uniform:
        return sharding
    sharding = sharding or OperandSharding((None,) * len(op.inputs), (None,) * len(op.outputs))
    return (
        replace(sharding, is_isolated=True)
        if writes_shards(op, sharding.inputs[0] or constraints[op.inputs[0]])
        else sharding
    )


def _lookup(
    resolver: Resolver, traced: StepAnalysis, op: Op, constraints: Sequence[Constraint | None]
) -> OperandSharding | None:
    """Shards a lookup in a table, or its gradient, by the strategy that moves the fewest bytes (`lookups`)."""
    lookup = lookup_of(op, constraints, traced)
    if lookup is None:
        return None
    used = lookup.sharding.computed
    result = lookup.result
    candidates = strategies(lookup, traced, resolver.mesh.ways)
    table_spec, rows_spec, _ = min(candidates, key=lambda candidate: candidate[2])
    is_local = lookup.sharding.used is None and table_spec == used and not lookup.moved
    if is_local and not lookup.summed & axes_of(result.spec):
        return None
    index_dims = [by for dim, by in enumerate(rows_spec) if dim not in lookup.columns]
    rank = len(traced.graph.shape(lookup.indices))
    indices = Constraint((*index_dims, *((),) * (rank - len(index_dims))))
    table = Constraint(table_spec)
    rows = Constraint(rows_spec)
    exchanged = exchanged_first(used, table_spec)
    if op.family is Family.GATHER:
        others = (None,) * (len(op.inputs) - 2)
        return OperandSharding((table, indices, *others), (rows,), (exchanged, None, *others) if exchanged else ())
    return OperandSharding((table, indices, rows), (exchanged or table,))


def _taken(spec: Spec, masks: Sequence[int], bits: Mapping[str, int]) -> Spec:
    """Returns a spec with the axes of the masks: those that it already has, then the others in mesh order."""
    named = [_named(mask, bits) for mask in masks]
    return tuple(
        (*(axis for axis in by if axis in names), *(axis for axis in bits if axis in names and axis not in by))
        for by, names in zip(spec, named, strict=True)
    )


def _named(mask: int, bits: Mapping[str, int]) -> set[str]:
    return {axis for axis, bit in bits.items() if bit & mask}
