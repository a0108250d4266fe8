"""Replay: the traced program run again, with the resolver's constraints on its values.

What was planned is what runs: constraints recurse into loops and remat, and nothing else of the program changes.
"""

import functools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from spanax.plan.sharding.operands import OperandSharding
from spanax.plan.sharding.resolve import Constraint
from spanax.plan.spmd.deferred_reductions import DeferredReductions
from spanax.run.step.attention import kernels  # noqa: F401  (what a platform's kernel computes is lowered to it)
from spanax.run.step.attention.ring import attended_part
from spanax.run.step.platform import platform_of
from spanax.run.step.replay.cpu_matmuls import single_contraction
from spanax.run.step.replay.partial_sums import behind, in_front, in_parts, lifted, together
from spanax.run.step.replay.sharded_lookup import look_up, match_sharded_lookup
from spanax.trace.jaxpr.graph import Body, Graph, Op, scan_counts
from spanax.trace.jaxpr.interpret import Values, as_traced, read, run, with_bodies

# A user's own constraints name a mesh that is not this one, and are met by the plan instead.
DROPPED = frozenset({"sharding_constraint", "reshard"})

GROUPS = ("feature_group_count", "batch_group_count")
"""Of a convolution, what a device has a part of."""


class ConstraintError(AssertionError):
    """A constraint that does not fit the value it is put on: an error of Spanax, whatever the user asked for."""


@dataclass(frozen=True, eq=False)
class Replay:
    """A traced program that runs again, piece by piece, under the constraints.

    Attributes:
      graph: the traced program.
      constraints: one a value, by number; None leaves a value to the compiler.
      uses: the operations that take operands otherwise than they lie.
      mesh: the devices.
      unreduced: the sums that are put off.
      instead: for an operation, what runs in its place.
      manual: the mesh axes that the surroundings have split by hand already.
    """

    graph: Graph
    constraints: Sequence[Constraint | None]
    uses: Mapping[Op, OperandSharding]
    mesh: Mesh
    unreduced: DeferredReductions = DeferredReductions()
    instead: Mapping[Op, Callable[[Sequence[Any]], list[Any]]] = field(default_factory=dict)
    manual: frozenset[str] = frozenset()

    def body(self, body: Body, args: Sequence[Any]) -> list[Any]:
        """Returns the outputs of a body, given its inputs."""
        readers, values = self.graph.readers, Values()
        for value, arg in zip(body.inputs, args, strict=True):
            with as_traced(readers[value][0]) if value in readers else nullcontext():
                values[value] = self.constrained(arg, self.constraints[value], self.unreduced.of(value))
        self.ops(body.ops, values)
        return self.read(values, body.outputs)

    def ops(self, ops: Iterable[Op], values: Values) -> None:
        """Evaluates operations in order; reads operands from `values` and adds the results to it."""
        run(self.graph, ops, values, self._compute)

    def read(self, values: Mapping[int, Any], numbers: Iterable[int]) -> list[Any]:
        """Returns values by number: computed ones, literals and constants."""
        return read(self.graph, values, numbers)

    def constrained(
        self, array: Any, constraint: Constraint | None, leading: Sequence[str | tuple[str, ...] | None] = ()
    ) -> Any:
        """An array where a constraint wants it; the dims before those that it speaks of are split as `leading` says.

        Raises:
          ConstraintError: the constraint does not fit the shape of the array.
        """
        # What lies on the host was put there from a device, split as it was there.
        is_single = self.mesh.size == math.prod(self.mesh.shape[axis] for axis in self.manual)
        if any(leading) and constraint is None:
            constraint = Constraint(((),) * (array.ndim - len(leading)), is_open=True)
        if constraint is None or is_single or jax.typeof(array).memory_space == jax.memory.Space.Host:
            return array
        spec = _partition_spec(constraint, self.manual, leading)
        _check_fits(array.shape, spec, self.mesh)
        return jax.lax.with_sharding_constraint(array, spec if self.manual else _sharding(self.mesh, spec))

    def _compute(self, op: Op, ins: Sequence[Any]) -> list[Any]:
        if op in self.instead:
            return self.instead[op](ins)
        if op.bodies:
            return self._with_bodies(op, ins)
        use, late = self.uses.get(op), self.unreduced.of(op.outputs[0]) if op.outputs else ()
        split = (
            match_sharded_lookup(self.graph, op, self.constraints, self.manual) if self.manual and not late else None
        )
        if split is not None:
            return look_up(self.graph, op, split, ins, self.mesh, self.manual)
        if use is not None:
            for brought in filter(None, (use.first, use.inputs)):
                ins = [self.constrained(array, wanted) for array, wanted in zip(ins, brought, strict=True)]
            if use.is_isolated:
                ins = [lax.optimization_barrier(ins[0]), *ins[1:]]
        if op.name in DROPPED:
            outs = list(ins[:1])
        elif late:
            outs = in_parts(self.graph, op, ins, self.unreduced, self.mesh, self.manual)
        elif use is not None and use.is_local and self.mesh.size > 1:
            around = None if op.params.get("kernel") else use.attention
            part = None if around is None else attended_part(op, around, self.mesh, self.manual)
            outs = _shard_by_shard(op, use, self.mesh, ins, self.manual, part)
        else:
            outs = self._product(op, ins, use) or op.bind(ins)
        if use is not None:
            outs = [self.constrained(array, wanted, late) for array, wanted in zip(outs, use.outputs, strict=True)]
        # Elementwise, with an operand of the result's shape and split: the compiler carries that over. Not over another
        # dtype: it would move the wider.
        graph, constraints = self.graph, self.constraints
        is_plain = op.is_elementwise and op.name != "convert_element_type" and use is None
        carried = {(graph.shape(value), constraints[value]) for value in op.inputs} if is_plain else set()
        found = []
        placed = use.outputs if use is not None else (None,) * len(outs)
        for value, out, before in zip(op.outputs, outs, placed, strict=True):
            wanted = constraints[value]
            known = wanted is not None and any(wanted.spec) and (graph.shape(value), wanted) in carried
            # A result that is placed already stays so: a constraint with open dims would leave those to the compiler.
            known = known or (before is not None and (wanted is None or before.spec == wanted.spec))
            found.append(out if known else self.constrained(out, wanted, late))
        return found

    def _product(self, op: Op, ins: Sequence[Any], use: OperandSharding | None) -> list[Any] | None:
        """A matmul as CPUs take it best; None for all else."""
        if op.name != "dot_general" or platform_of(self.mesh) != "cpu":
            return None
        known: Sequence[Constraint | None]
        if self.mesh.size == 1:
            known = [Constraint(((),) * array.ndim) for array in ins]
        else:
            known = [self.constraints[value] for value in op.inputs] if use is None else use.inputs
        return single_contraction(op, ins, known, self.manual)

    def _with_bodies(self, op: Op, ins: Sequence[Any]) -> list[Any]:
        """A loop, a branch or a remat, its bodies under the constraints."""
        if op.name == "scan":
            outs: Sequence[Any] = self._looped(op, ins)
        else:
            outs = with_bodies(op, ins, self.body, self._leading)
        late, constraints = self.unreduced.of, self.constraints
        return [self.constrained(out, constraints[v], late(v)) for v, out in zip(op.outputs, outs, strict=True)]

    def _looped(self, op: Op, ins: Sequence[Any]) -> list[Any]:
        """A loop, and behind it the sums that were put off in it."""
        late, ways, (body,) = self.unreduced.of, self.mesh.shape, op.bodies
        num_consts, num_carried = scan_counts(self.graph, op)
        num_fixed = num_consts + num_carried
        taken = [
            lifted(array, late(value), late(inner), ways)
            for value, inner, array in zip(op.inputs, body.inputs, ins, strict=True)
        ]
        taken[num_fixed:] = map(behind, taken[num_fixed:], map(late, body.inputs[num_fixed:]))
        going = [*map(late, body.inputs[num_consts:num_fixed]), *map(late, body.outputs[num_carried:])]

        def turn(body: Body, args: Sequence[Any]) -> list[Any]:
            outs = zip(body.outputs, self.body(body, args), going, strict=True)
            return [lifted(out, late(value), axes, ways) for value, out, axes in outs]

        outs = [*with_bodies(op, taken, turn, self._leading)]
        outs[num_carried:] = map(in_front, outs[num_carried:], going[num_carried:])
        pairs = zip(op.outputs, outs, going, strict=True)
        return [self.reduced(out, self.constraints[value], axes, late(value)) for value, out, axes in pairs]

    def reduced(self, array: Any, constraint: Constraint | None, axes: Sequence[str], left: Sequence[str] = ()) -> Any:
        """A value in parts over `axes`, summed over all but those that are `left`."""
        if axes == left:
            return array
        over = tuple(axis for axis in axes if axis not in left)
        if constraint is not None:  # what is split over the same axes is scattered by the sum
            spec = tuple(tuple(axis for axis in by if axis not in over) for by in constraint.spec)
            constraint = replace(constraint, spec=spec)
        array = self.constrained(together(array, axes, left), constraint, (over, *left))
        return lax.reduce(array, np.zeros((), array.dtype), lax.add, [0])

    def _leading(self, value: int) -> list[int]:
        return [self.mesh.shape[axis] for axis in self.unreduced.of(value)]


def _shard_by_shard(
    op: Op,
    use: OperandSharding,
    mesh: Mesh,
    ins: Sequence[Any],
    manual: frozenset[str],
    instead: Callable[..., Any] | None = None,
) -> list[Any]:
    """The operation on each device's part, or what runs instead of it there, without a word from the compiler."""
    specs = [
        tuple(PartitionSpec() if wanted is None else _partition_spec(wanted, manual) for wanted in group)
        for group in (use.inputs, use.outputs)
    ]
    divided = [name for name in GROUPS if op.params.get(name, 1) > 1]

    def part(*parts: Any) -> tuple[Any, ...]:
        outs = tuple(op.bind(parts, op.params | {name: op.params[name] // use.parts for name in divided}))
        return jax.lax.psum(outs, use.summed) if use.summed else outs

    # Inside of a manual part of the mesh it is the rest that is split here, of the mesh that is known there.
    where: dict[str, Any] = {"axis_names": set(mesh.axis_names) - manual} if manual else {"mesh": mesh}
    return list(jax.shard_map(instead or part, in_specs=specs[0], out_specs=specs[1], check_vma=False, **where)(*ins))


@functools.lru_cache(maxsize=4096)
def _check_fits(shape: tuple[int, ...], spec: PartitionSpec, mesh: Mesh) -> None:
    """Raises where a spec is of another rank than a shape, or does not divide it: JAX would ignore both."""
    axes = [() if by in (None, PartitionSpec.UNCONSTRAINED) else by if isinstance(by, tuple) else (by,) for by in spec]
    ways = [math.prod(mesh.shape[axis] for axis in by) for by in axes]
    if len(ways) != len(shape) or any(size % parts for size, parts in zip(shape, ways, strict=True)):
        raise ConstraintError(f"sharding constraint {spec} does not fit shape {shape} on mesh {dict(mesh.shape)}.")


@functools.lru_cache(maxsize=4096)
def _sharding(mesh: Mesh, spec: PartitionSpec) -> NamedSharding:
    return NamedSharding(mesh, spec)


def _partition_spec(
    constraint: Constraint, manual: frozenset[str] = frozenset(), leading: Sequence[str | tuple[str, ...] | None] = ()
) -> PartitionSpec:
    whole = PartitionSpec.UNCONSTRAINED if constraint.is_open else None
    spec = [tuple(axis for axis in axes if axis not in manual) for axes in constraint.spec]
    by_dim = (whole if not axes else axes[0] if len(axes) == 1 else axes for axes in spec)
    return PartitionSpec(*leading, *by_dim)
