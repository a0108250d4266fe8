"""A traced function under one layout: shardings of values, resharding of operands, collectives."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from spanax.plan.cost.ring_attention import ring_split
from spanax.plan.sharding.operands import LOOKUPS, OperandSharding, operand_sharding
from spanax.plan.sharding.resolve import Constraint, Resolver
from spanax.plan.spmd.partition import Masks, PartitionedOp, Reshard, as_masks, spmd_partition, transition, union
from spanax.trace.jaxpr.dim_rules import ELEMENTWISE
from spanax.trace.jaxpr.graph import Op
from spanax.trace.rewrites.attention.operation import RING
from spanax.trace.traced import Traced


@dataclass(frozen=True, eq=False, slots=True)
class Division:
    """What happens to one operation: how it takes its operands, and how it is divided with all that moves for it.

    `use` is None where it takes everything as it lies, `split` where nothing can move.
    """

    use: OperandSharding | None
    split: PartitionedOp | None


@dataclass(frozen=True, eq=False)
class Known:
    """What layouts of one function over the same mesh axes have in common, so that it is worked out once for all.

    `numbers` counts the ways in which values lie; `divisions` are known by the operation and how its values lie, and
    `matmuls` by their division: what a row of `Matmuls` says but for when it runs and how often.
    """

    numbers: dict[Constraint | None, int] = field(default_factory=dict)
    divisions: dict[tuple[object, ...], Division] = field(default_factory=dict)
    matmuls: dict[Division, tuple[Any, ...]] = field(default_factory=dict)


class ShardedProgram:
    """Found when it is asked for, and kept: once for each role of values, and once for each kind of operation.

    Args:
      resolver: the layout, over the program on a mesh.
      traced: the program's step, or its evaluation.
      known: what is known of other layouts of the same function over the same mesh axes; what is found is added.
    """

    def __init__(self, resolver: Resolver, traced: Traced, known: Known | None = None):
        self.resolver, self.traced = resolver, traced
        self.constraints = resolver.constraints(traced)
        self.known = known or Known()
        self._bits = {axis: 1 << at for at, axis in enumerate(resolver.mesh.names)}
        self._lies: dict[int, tuple[int, Masks]] = {}
        self._divisions: dict[Op, Division] = {}

    def masks(self, value: int) -> Masks:
        """How a value lies."""
        return self._lying(value)[1]

    def masks_of(self, value: int, constraint: Constraint | None) -> Masks:
        """How a constraint has a value; whole without one."""
        if constraint is None:
            return (0,) * len(self.traced.graph.shape(value))
        return as_masks(constraint.spec, self._bits)

    def mask(self, axes: Sequence[str]) -> int:
        """Mesh axes as a mask."""
        return sum(self._bits[axis] for axis in axes)

    def is_batched(self, value: int) -> bool:
        """Whether a value grows with the batch."""
        return not self.traced.batch_labels.isdisjoint(self.traced.sharding_keys[value].labels)

    def num_bytes(self, value: int) -> int:
        """Bytes of the whole value."""
        aval = self.traced.graph.avals[value]
        return math.prod(aval.shape) * getattr(aval.dtype, "itemsize", 4)

    def division(self, op: Op) -> Division:
        """What happens to an operation; its shifts name the values of the one that stands for its kind."""
        op = self.traced.alike[op]
        if op not in self._divisions:
            lies = tuple(self._lying(value)[0] for value in (*op.inputs, *op.outputs))
            key = (op, lies, self.resolver.mesh if op.name in LOOKUPS | RING else None)
            if key not in self.known.divisions:
                self.known.divisions[key] = self._divide(op)
            self._divisions[op] = self.known.divisions[key]
        return self._divisions[op]

    def _lying(self, value: int) -> tuple[int, Masks]:
        role = id(self.traced.sharding_keys[value])
        if role not in self._lies:
            constraint, numbers = self.constraints[value], self.known.numbers
            number = numbers.setdefault(constraint, len(numbers))
            self._lies[role] = number, self.masks_of(value, constraint)
        return self._lies[role]

    def _divide(self, op: Op) -> Division:
        ins, outs = [self.masks(value) for value in op.inputs], [self.masks(value) for value in op.outputs]
        if op.name in ELEMENTWISE and all(masks == outs[0] or not any(masks) for masks in ins):
            return Division(None, None)
        use = operand_sharding(self.resolver, self.traced, op, self.constraints)
        wanted, shifts = list(outs), list[Reshard]()
        for at, constraint in enumerate(use.inputs if use else ()):
            if constraint is not None:
                asked = self.masks_of(op.inputs[at], constraint)
                shifts += transition(op.inputs[at], ins[at], asked, is_operand=True)
                ins[at] = asked
        for at, constraint in enumerate(use.outputs if use else ()):
            if constraint is not None:
                wanted[at] = self.masks_of(op.outputs[at], constraint)
        if use is not None and use.around is not None:
            split = ring_split(self.traced.graph, op, use.around, self.resolver.mesh)
        else:
            split = spmd_partition(self.traced.graph, self.traced.axes.classes, op, ins, wanted)
        shifts += split.shifts
        for value, before, after in zip(op.outputs, wanted, outs, strict=True):
            further = union(after) & ~union(before)
            shifts = [scattered(shift, further) if shift.value == value else shift for shift in shifts]
            shifts += transition(value, before, after, is_operand=False)
        return Division(use, replace(split, shifts=tuple(shifts)))


def scattered(shift: Reshard, split: int) -> Reshard:
    """A sum that is split right after it, over the axes it goes over: the compiler makes one of both."""
    if shift.kind == "all-reduce" and not shift.over & ~split:
        return replace(shift, kind="reduce-scatter")
    return shift
