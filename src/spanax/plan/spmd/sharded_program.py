"""A traced function under one layout: shardings of values, resharding of operands, collectives."""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from spanax.hardware.mesh import MeshShape
from spanax.plan.sharding.attention import kernel_labels
from spanax.plan.sharding.lookups import LOOKUPS
from spanax.plan.sharding.operands import OperandSharding, kept_on_mesh, operand_sharding
from spanax.plan.sharding.partition import (
    Masks,
    PartitionedOp,
    Reshard,
    as_masks,
    spmd_partition,
    summed_shards,
    transition,
    union,
)
from spanax.plan.sharding.pieces import piece_links
from spanax.plan.sharding.resolve import Constraint, Resolver
from spanax.plan.sharding.sorted_rows import row_partition
from spanax.plan.spmd.ring_attention import ring_partition
from spanax.plan.spmd.terms import HOP
from spanax.trace.analysis.labels import Labels
from spanax.trace.analysis.step_analysis import StepAnalysis
from spanax.trace.jaxpr.dim_maps.windows import POOL_GRADIENT, WINDOWED
from spanax.trace.jaxpr.graph import OWN_KERNEL, RAGGED, Op
from spanax.trace.program import Program
from spanax.trace.rewrites.attention.operation import RING

SIZED = LOOKUPS | RING | WINDOWED | {OWN_KERNEL, RAGGED}
"""Operations whose division also depends on the sizes of the mesh."""


@dataclass(frozen=True, eq=False, slots=True)
class Division:
    """How one operation is executed: how it reshards its operands, and how it is partitioned, with all its collectives.

    `operands` is None where no operand is resharded, `partition` where the operation needs no collective.
    """

    operands: OperandSharding | None
    partition: PartitionedOp | None


@dataclass(frozen=True, eq=False)
class ShardingCache:
    """A cache shared by the layouts of one function over the same mesh axes.

    `numbers` enumerates the shardings of values; `divisions` are keyed by the operation and its values' shardings,
    `equal` by the operation and its division: equal divisions are one object. `counted` has what `count_terms` counts
    for a group of operations, `columns` those of `peak_memory`. `kernel_labels` has one entry.
    """

    numbers: dict[Constraint | None, int] = field(default_factory=dict)
    divisions: dict[tuple[object, ...], Division] = field(default_factory=dict)
    equal: dict[tuple[object, ...], Division] = field(default_factory=dict)
    counted: dict[tuple[object, ...], Any] = field(default_factory=dict)
    columns: dict[tuple[object, ...], Any] = field(default_factory=dict)
    kernel_labels: list[frozenset[Labels]] = field(default_factory=list)


class ShardedProgram:
    """A traced function under one layout, computed on access and cached per sharding key and per group of operations.

    Args:
      resolver: the layout, applied to the program on a mesh.
      traced: the program's step, or its evaluation.
      cache: the cache of other layouts of the same function over the same mesh axes; new results are added.
    """

    def __init__(self, resolver: Resolver, traced: StepAnalysis, cache: ShardingCache | None = None):
        self.resolver = resolver
        self.traced = traced
        self.constraints = resolver.constraints(traced)
        self.cache = cache or ShardingCache()
        self._bits = {axis: 1 << index for index, axis in enumerate(resolver.mesh.names)}
        self._masks: dict[int, Masks] = {}
        self._divisions: dict[Op, Division] = {}
        self._kept: dict[Op, bool] = {}

    @cached_property
    def numbers(self) -> list[int]:
        """Returns the number of the sharding of every sharding key in the cache; equal shardings have equal numbers."""
        known = self.cache.numbers
        constraints = self.constraints
        shardings = [constraints[value] for value in self.traced.first_values]
        return [known.setdefault(each, len(known)) for each in shardings]

    @cached_property
    def signature(self) -> tuple[object, ...]:
        """Returns what the costs depend on: equal for layouts with equal shardings and equal divisions."""
        sized = (op for name in SIZED for op in self.traced.first_ops.get(name, ()))
        kept = map(self._is_kept, self.traced.first_ops.get("dot_general", ()))
        return (*self.numbers, *map(self.division, sized), *kept)

    def on(self, mesh: MeshShape) -> "ShardedProgram":
        """Returns the program on a mesh on which the layout resolves equally: only rings are divided differently."""
        result = ShardedProgram(replace(self.resolver, mesh=mesh), self.traced, self.cache)
        result.constraints = self.constraints
        result.numbers = self.numbers
        result._masks = self._masks
        result._kept = self._kept
        resized = RING | WINDOWED | {OWN_KERNEL}
        result._divisions = {op: division for op, division in self._divisions.items() if op.name not in resized}
        return result

    def masks(self, value: int) -> Masks:
        """Returns the sharding of a value."""
        number = self.traced.sharding_keys[value].number
        if number not in self._masks:
            self._masks[number] = self.masks_of(value, self.constraints[value])
        return self._masks[number]

    def axes_of(self, number: int) -> int:
        """Returns the mesh axes that shard any dim of the values with a sharding key, by the number of the key."""
        return union(self.masks(self.traced.first_values[number]))

    def masks_of(self, value: int, constraint: Constraint | None) -> Masks:
        """Returns the sharding of a value under a constraint; replicated without one."""
        if constraint is None:
            return (0,) * len(self.traced.graph.shape(value))
        return as_masks(constraint.spec, self._bits)

    def mask(self, axes: Sequence[str]) -> int:
        """Returns mesh axes as a mask."""
        return sum(self._bits[axis] for axis in axes)

    def ways(self, mask: int) -> int:
        """Returns the number of devices along mesh axes."""
        mesh = self.resolver.mesh
        return mesh.ways([axis for bit, axis in enumerate(mesh.names) if mask >> bit & 1])

    def is_batched(self, value: int) -> bool:
        """Returns whether a value grows with the batch."""
        return not self.traced.batch_labels.isdisjoint(self.traced.sharding_keys[value].labels)

    def num_bytes(self, value: int) -> int:
        """Returns the global bytes of a value."""
        return self.traced.graph.num_bytes(value)

    @property
    def kernel_labels(self) -> frozenset[Labels]:
        """Returns the labels of the values that fused attention reads and writes, also with stacked layers."""
        if not self.cache.kernel_labels:
            self.cache.kernel_labels.append(kernel_labels(self.traced))
        return self.cache.kernel_labels[0]

    def division(self, op: Op) -> Division:
        """Returns how an operation is executed; its reshards name the values of its group's representative."""
        op = self.traced.alike[op]
        known = self._divisions.get(op)
        if known is None:
            numbers = self.numbers
            sized = self.resolver.mesh if op.name in SIZED else self._is_kept(op)
            viewed = [self._viewed(value) for value in op.outputs if value in self.traced.views]
            key = (op, sized, *viewed, *[numbers[each] for each in self.traced.keys_of[op]])
            known = self.cache.divisions.get(key)
            if known is None:
                known = self._divide(op)
                known = self.cache.equal.setdefault(
                    (op, self._sized(op, known), known.operands, known.partition), known
                )
                self.cache.divisions[key] = known
            self._divisions[op] = known
        return known

    def _is_kept(self, op: Op) -> bool:
        """Returns whether the activations of an operation move instead of its weight."""
        if op not in self._kept:
            self._kept[op] = kept_on_mesh(self.resolver, self.traced, op, self.constraints) is not None
        return self._kept[op]

    def _sized(self, op: Op, division: Division) -> object:
        """Returns what the costs of an operation depend on in addition to its division."""
        if op.name in RING:  # blocks of a ring depend on the mesh, those of a kernel on one device do not
            use = division.operands and division.operands.attention
            return self.resolver.mesh if op.params["kernel"] is None or (use and use.ring) else None
        return self.masks(op.outputs[0]) if op.name == RAGGED else None

    def _viewed(self, value: int) -> Masks:
        """Returns the sharding of the only view of a value: the compiler sums no more than the shards of the view."""
        return self.masks(self.traced.views[value]) if value in self.traced.views else ()

    @cached_property
    def _merged(self) -> Sequence[Labels]:
        """The classes of dims as reshapes merge and split them: the queries of a key are a part of the heads."""
        groups = self.traced.axes.groups
        heads: dict[int | None, int | None] = {group: label for label, found in groups.items() for group in found}
        classes = self.traced.axes.classes
        return [tuple(heads.get(each, each) for each in labels) for labels in classes] if heads else classes

    def _divide(self, op: Op) -> Division:
        ins = [self.masks(value) for value in op.inputs]
        outs = [self.masks(value) for value in op.outputs]
        if op.is_elementwise and all(masks == outs[0] or not any(masks) for masks in ins):
            return Division(None, None)
        use = operand_sharding(self.resolver, self.traced, op, self.constraints)
        requested = list(outs)
        shifts = list[Reshard]()
        for index, constraint in enumerate(use.inputs if use else ()):
            if constraint is not None:
                resharded = self.masks_of(op.inputs[index], constraint)
                shifts += transition(op.inputs[index], ins[index], resharded, is_operand=True)
                ins[index] = resharded
        for index, constraint in enumerate(use.outputs if use else ()):
            if constraint is not None:
                requested[index] = self.masks_of(op.outputs[index], constraint)
        if use is not None and use.attention is not None:
            partitioned = ring_partition(self.traced.graph, op, use.attention, self.resolver.mesh)
        elif use is not None and (op.name == OWN_KERNEL or (use.is_local and op.name in WINDOWED)):
            summed = list(map(self.mask, use.summed)) or [0] * len(op.outputs)
            partitioned = summed_shards(self.traced.graph, op, ins, requested, summed)
            shifts += self._halos(op, use, ins)
        elif use is not None and use.rows is not None:
            partitioned = row_partition(self.resolver, self.traced, op, use.rows, ins, requested)
        else:
            classes = self.traced.axes.classes
            pieces = piece_links(op, classes, self.traced.axes.wholes)
            classes = self._merged if op.name == "reshape" else classes
            partitioned = spmd_partition(self.traced.graph, classes, op, ins, requested, pieces)
        shifts += partitioned.shifts
        for value, before, after in zip(op.outputs, requested, outs, strict=True):
            further = union((*after, *self._viewed(value))) & ~union(before)
            shifts = [scattered(shift, further) if shift.value == value else shift for shift in shifts]
            shifts += transition(value, before, after, is_operand=False)
        return Division(use, replace(partitioned, shifts=tuple(shifts)))

    def _halos(self, op: Op, use: OperandSharding, ins: Sequence[Masks]) -> Iterator[Reshard]:
        """Yields the exchanges of halos: rows of the neighbors, which the gradient of a pool also returns to them."""
        extended = 1.0
        for each in use.halos:
            array, _ = each.window.read
            over = self.mask(each.axes)
            size = each.window.sizes[0] / self.ways(over)
            for value in (op.inputs[array], *(op.outputs if op.name == POOL_GRADIENT else ())):
                for num_rows in filter(None, (each.halo.before, each.halo.after)):
                    share = extended * num_rows / size
                    yield Reshard(HOP, value, over, union(ins[array]) & ~over, False, share=share)
            extended *= 1 + each.halo.size / size


def joined_step(program: Program, resolvers: Collection[Resolver]) -> StepAnalysis:
    """Returns the step of a program, with the classes joined that each of some layouts shards alike."""
    if not resolvers:
        return program.step
    seen: dict[object, int] = {}
    known = [resolver.colors for resolver in resolvers]
    colors = {label: seen.setdefault(tuple(of[label] for of in known), len(seen)) for label in program.step.axes.ways}
    return program.step.joined(colors, program.param_keys, kernel_labels(program.step))


def scattered(shift: Reshard, axes: int) -> Reshard:
    """Returns a reduce-scatter for an all-reduce whose result is then sharded over its axes, as the compiler does."""
    if shift.kind == "all-reduce" and not shift.over & ~axes:
        return replace(shift, kind="reduce-scatter")
    return shift
