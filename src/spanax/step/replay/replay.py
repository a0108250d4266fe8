"""Evaluates the traced program again, with the sharding constraints of the plan on its values.

Constraints also apply to values in loops and remat; the rest of the program is unchanged.
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

from spanax.plan.sharding.lookups import without
from spanax.plan.sharding.operands import OperandSharding
from spanax.plan.sharding.resolve import Constraint
from spanax.plan.sharding.xla_workarounds import is_extended
from spanax.plan.spmd.deferred_reductions import DeferredReductions
from spanax.step.attention import kernels  # noqa: F401  (registers the lowering of kernels for platforms)
from spanax.step.attention.ring import per_device_attention
from spanax.step.placement import platform_of
from spanax.step.replay.callbacks import is_callback, with_deferred_errors
from spanax.step.replay.partial_sums import (
    add_partial_sum_dims,
    evaluate_partial_sums,
    leading_after_stacked,
    leading_before_stacked,
    merged_leading,
    scattered_sum,
    scatters,
)
from spanax.step.replay.sharded_lookup import match_sharded_lookup, sharded_lookup
from spanax.step.replay.sorted_rows import row_by_row, rows_by_device
from spanax.trace.jaxpr.graph import Body, Graph, Op, scan_counts
from spanax.trace.jaxpr.interpret import Values, as_traced, read, run, with_bodies
from spanax.trace.jaxpr.loops import LOOPS, const_pairs

# Constraints in the user's program refer to another mesh, and the plan already accounts for them.
DROPPED = frozenset({"sharding_constraint", "reshard"})

GROUPS = ("feature_group_count", "batch_group_count")
"""The parameters of a convolution that are divided by the number of shards."""


class ConstraintError(AssertionError):
    """A sharding constraint does not fit its value: an internal error of Spanax."""


@dataclass(frozen=True, eq=False)
class Replay:
    """Evaluates parts of a traced program under sharding constraints.

    Attributes:
      graph: the traced program.
      constraints: the constraint of each value, by number; None leaves the sharding to the compiler.
      uses: the operations that need their operands in another sharding.
      mesh: the device mesh.
      unreduced: the deferred reductions.
      instead: functions that replace operations.
      manual: the mesh axes that are manual in the surrounding `shard_map`.
      defers_errors: whether errors of callbacks are raised by `raise_deferred`, after the program.
    """

    graph: Graph
    constraints: Sequence[Constraint | None]
    uses: Mapping[Op, OperandSharding]
    mesh: Mesh
    unreduced: DeferredReductions = DeferredReductions()
    instead: Mapping[Op, Callable[[Sequence[Any]], list[Any]]] = field(default_factory=dict)
    manual: frozenset[str] = frozenset()
    defers_errors: bool = False

    def body(self, body: Body, args: Sequence[Any]) -> list[Any]:
        """Returns the outputs of a body, given its inputs."""
        readers = self.graph.readers
        values = Values()
        for value, arg in zip(body.inputs, args, strict=True):
            with as_traced(readers[value][0]) if value in readers else nullcontext():
                values[value] = self.constrained(arg, self.constraints[value], self.unreduced.of(value))
        self.ops(body.ops, values)
        results = self.read(values, body.outputs)
        if body is not self.graph.body:
            return results
        return [self._counted(value, array) for value, array in zip(body.outputs, results, strict=True)]

    def ops(self, ops: Iterable[Op], values: Values) -> None:
        """Evaluates operations in order; reads operands from `values` and adds the results to it."""
        run(self.graph, ops, values, self._compute)

    def read(self, values: Mapping[int, Any], numbers: Iterable[int]) -> list[Any]:
        """Returns values by number: computed ones, literals and constants."""
        return read(self.graph, values, numbers)

    def constrained(
        self, array: Any, constraint: Constraint | None, leading: Sequence[str | tuple[str, ...] | None] = ()
    ) -> Any:
        """Returns an array with a sharding constraint; `leading` shards the dims before those of the constraint.

        Raises:
          ConstraintError: the constraint does not fit the shape of the array.
        """
        # An array in host memory was copied from devices, and has their sharding.
        is_single = self.mesh.size == math.prod(self.mesh.shape[axis] for axis in self.manual)
        if any(leading) and constraint is None:
            constraint = Constraint(((),) * (array.ndim - len(leading)), is_open=True)
        if constraint is None or is_single or jax.typeof(array).memory_space == jax.memory.Space.Host:
            return array
        taken = {axis for by in leading for axis in ((by,) if isinstance(by, str) else by or ())}
        constraint = replace(constraint, spec=without(constraint.spec, taken)) if taken else constraint
        spec = _partition_spec(constraint, self.manual, leading)
        _check_fits(array.shape, spec, self.mesh)
        return jax.lax.with_sharding_constraint(array, spec if self.manual else _sharding(self.mesh, spec))

    def _compute(self, op: Op, ins: Sequence[Any]) -> list[Any]:
        if op in self.instead:
            return self.instead[op](ins)
        ins = self._as_read(op, ins)
        if op.bodies:
            return self._with_bodies(op, ins)
        lookup = self._sharded_lookup(op, ins)
        if lookup is not None:
            return lookup
        use = self.uses.get(op)
        ins = ins if use is None else self._as_used(op, ins, use)
        return self._as_planned(op, self._results(op, ins, use), use)

    def _results(self, op: Op, ins: Sequence[Any], use: OperandSharding | None) -> Sequence[Any]:
        """Computes an operation without bodies."""
        if op.name in DROPPED:
            return ins[:1]
        if self.defers_errors and is_callback(op):
            return with_deferred_errors(self.graph, op, ins)
        if use is not None and use.rows is not None and self.mesh.size > 1:
            arrays = rows_by_device(op, ins, use.rows, self.mesh, self.manual)
            if not use.rows.summed or not self.unreduced.counts.isdisjoint(op.outputs):
                return arrays
            return [self.reduced(arrays[0], self.constraints[op.outputs[0]], use.rows.summed)]
        if not self.unreduced.varying.isdisjoint(op.outputs):
            numbers = [len(self._pending(*each)) for each in zip(op.inputs, ins, strict=True)]
            axes = self.unreduced.of(op.outputs[0])
            return row_by_row(op, ins, numbers, [self.mesh.shape[axis] for axis in axes])
        if op.outputs and self.unreduced.of(op.outputs[0]):
            return evaluate_partial_sums(self.graph, op, ins, self._terms(op), self.mesh, self.manual)
        if use is not None and use.is_local and self.mesh.size > 1:
            return _shard_by_shard(self, op, ins, use)
        outs = _single_contraction(self, op, ins, use)
        return op.bind(ins) if outs is None else outs

    def _terms(self, op: Op) -> DeferredReductions:
        """Returns the deferred reductions of the operands of an operation, which may need counts of all rows."""
        use = self.uses.get(op)
        by_device = self.unreduced.counts.issuperset(op.outputs) or (use is not None and use.rows is not None)
        return self.unreduced if by_device else self.unreduced.added

    def _as_read(self, op: Op, ins: Sequence[Any]) -> Sequence[Any]:
        """Returns the operands of an operation, with counts added unless it needs those of each device."""
        counts = self.unreduced.counts
        if counts.isdisjoint(op.inputs):
            return ins
        if op.bodies:
            kept = {outer for outer, inner in self.graph.wires(op).inputs if inner in counts}
        else:
            kept = set(op.inputs) if self._terms(op) is self.unreduced else set()
        pairs = zip(op.inputs, ins, strict=True)
        return [array if value in kept else self._counted(value, array) for value, array in pairs]

    def _pending(self, value: int, array: Any, spread: int | None = None) -> tuple[str, ...]:
        """Returns the mesh axes of the leading dims of an array: none of counts that were added, or of equal rows."""
        axes = self.unreduced.of(value) or (() if spread is None else self.unreduced.of(spread))
        return axes if np.ndim(array) > len(self.graph.shape(value)) else ()

    def _spread(self, value: int, like: int, array: Any) -> Any:
        """Returns an array as the value needs it: one for each device, also of an array that has the rank of `like`."""
        axes = self.unreduced.of(value) if value in self.unreduced.varying else ()
        if not axes or np.ndim(array) > len(self.graph.shape(like)):
            return array
        return jax.numpy.broadcast_to(array, (*(self.mesh.shape[axis] for axis in axes), *np.shape(array)))

    def _counted(self, value: int, array: Any) -> Any:
        """Returns a value; counts of each device's rows are added."""
        axes = self.unreduced.of(value) if value in self.unreduced.counts else ()
        return self.reduced(array, self.constraints[value], axes)

    def _sharded_lookup(self, op: Op, ins: Sequence[Any]) -> list[Any] | None:
        """Computes a lookup in a sharded table inside of a stage, where the compiler cannot; None for others."""
        use = self.uses.get(op)
        of_rows = use is not None and use.rows is not None
        if not self.manual or of_rows or (op.outputs and self.unreduced.of(op.outputs[0])):
            return None
        lookup = match_sharded_lookup(self.graph, op, self.constraints, self.manual)
        return None if lookup is None else sharded_lookup(self.graph, op, lookup, ins, self.mesh, self.manual)

    def _as_used(self, op: Op, ins: Sequence[Any], use: OperandSharding) -> Sequence[Any]:
        """Returns operands in the shardings that an operation needs."""
        for targets in filter(None, (use.first, use.inputs)):
            leading = map(self._terms(op).of, op.inputs)
            ins = [self.constrained(*operand) for operand in zip(ins, targets, leading, strict=True)]
        return [lax.optimization_barrier(ins[0]), *ins[1:]] if use.is_isolated else ins

    def _as_planned(self, op: Op, outs: Sequence[Any], use: OperandSharding | None) -> list[Any]:
        """Returns results under the constraints of their values, unless they have them already."""
        deferred = self.unreduced.of(op.outputs[0]) if op.outputs else ()
        if use is not None:
            outs = [self.constrained(array, target, deferred) for array, target in zip(outs, use.outputs, strict=True)]
        # The compiler propagates the sharding of an operand with the result's shape through elementwise operations. A
        # conversion keeps its constraint: otherwise the compiler could communicate the wider dtype.
        graph = self.graph
        constraints = self.constraints
        is_plain = op.is_elementwise and op.name != "convert_element_type" and use is None
        propagated = {(graph.shape(value), constraints[value]) for value in op.inputs} if is_plain else set()
        results = []
        current = use.outputs if use is not None else (None,) * len(outs)
        for value, out, previous in zip(op.outputs, outs, current, strict=True):
            target = constraints[value]
            known = target is not None and any(target.spec) and (graph.shape(value), target) in propagated
            known = known and not is_extended(graph, value, constraints)
            # A result that is already constrained needs no other: open dims would leave its sharding to the compiler.
            known = known or (previous is not None and (target is None or previous.spec == target.spec))
            results.append(out if known else self.constrained(out, target, deferred))
        return results

    def _with_bodies(self, op: Op, ins: Sequence[Any]) -> list[Any]:
        """Evaluates a loop, a branch or a remat with constraints in its bodies; weights are gathered before a loop."""
        if op.name in LOOPS:
            pairs = const_pairs(self.graph, op)
            consts = [
                self.constrained(array, self.constraints[inner], self._pending(outer, array))
                for (outer, inner), array in zip(pairs, ins, strict=False)
            ]
            ins = [*consts, *ins[len(consts) :]]
        if self.unreduced.varying:
            inner = dict(self.graph.wires(op).inputs)
            ins = [
                self._spread(inner.get(outer, outer), outer, array) for outer, array in zip(op.inputs, ins, strict=True)
            ]
        if op.name == "scan":
            outs: Sequence[Any] = self._looped(op, ins)
        else:
            outs = with_bodies(op, ins, self.body, self._shape)
            triples = zip(op.outputs, op.bodies[-1].outputs, outs, strict=True)  # counts may leave a remat to be added
            outs = [out if self.unreduced.of(value) else self._counted(inner, out) for value, inner, out in triples]
        deferred = self.unreduced.of
        constraints = self.constraints
        return [self.constrained(out, constraints[v], deferred(v)) for v, out in zip(op.outputs, outs, strict=True)]

    def _looped(self, op: Op, ins: Sequence[Any]) -> list[Any]:
        """Evaluates a loop, followed by the reductions that were deferred in it."""
        deferred = self.unreduced.of
        axis_sizes = self.mesh.shape
        (body,) = op.bodies
        num_consts, num_carried = scan_counts(self.graph, op)
        num_fixed = num_consts + num_carried
        operands = [
            add_partial_sum_dims(array, self._pending(value, array, inner), deferred(inner), axis_sizes)
            for value, inner, array in zip(op.inputs, body.inputs, ins, strict=True)
        ]
        operands[num_fixed:] = map(leading_after_stacked, operands[num_fixed:], map(deferred, body.inputs[num_fixed:]))
        pending = [*map(deferred, body.inputs[num_consts:num_fixed]), *map(deferred, body.outputs[num_carried:])]
        targets = [*body.inputs[num_consts:num_fixed], *body.outputs[num_carried:]]

        def iteration(body: Body, args: Sequence[Any]) -> list[Any]:
            outs = [
                self._spread(target, value, out)
                for target, value, out in zip(targets, body.outputs, self.body(body, args), strict=True)
            ]
            return [
                add_partial_sum_dims(out, self._pending(value, out, target), axes, axis_sizes)
                for value, target, out, axes in zip(body.outputs, targets, outs, pending, strict=True)
            ]

        outs = [*with_bodies(op, operands, iteration, self._shape)]
        outs[num_carried:] = map(leading_before_stacked, outs[num_carried:], pending[num_carried:])
        pairs = zip(op.outputs, outs, pending, strict=True)
        return [self.reduced(out, self.constraints[value], axes, deferred(value)) for value, out, axes in pairs]

    def reduced(self, array: Any, constraint: Constraint | None, axes: Sequence[str], left: Sequence[str] = ()) -> Any:
        """Returns a value with partial sums over `axes`, reduced over all axes except `left`."""
        if axes == left:
            return array
        summed = tuple(axis for axis in axes if axis not in left)
        array = merged_leading(array, axes, left)
        if constraint is not None and not constraint.is_open and scatters(constraint.spec, summed):
            return scattered_sum(array, summed, (*left, *constraint.spec), self.mesh, self.manual)
        if constraint is not None:  # the dim of partial sums has the axes until they are reduced
            spec = tuple(tuple(axis for axis in by if axis not in summed) for by in constraint.spec)
            constraint = replace(constraint, spec=spec)
        array = self.constrained(array, constraint, (summed, *left))
        return lax.reduce(array, np.zeros((), array.dtype), lax.add, [0])

    def _shape(self, value: int) -> tuple[int, ...]:
        return (*(self.mesh.shape[axis] for axis in self.unreduced.of(value)), *self.graph.shape(value))


def _shard_by_shard(replay: Replay, op: Op, ins: Sequence[Any], use: OperandSharding) -> list[Any]:
    """Computes an operation on each shard in `shard_map`, so that the compiler does not partition it."""
    mesh = replay.mesh
    manual = replay.manual
    specs = [
        tuple(PartitionSpec() if constraint is None else _partition_spec(constraint, manual) for constraint in group)
        for group in (use.inputs, use.outputs)
    ]
    grouped = [name for name in GROUPS if op.params.get(name, 1) > 1]

    def part(*parts: Any) -> tuple[Any, ...]:
        outs = tuple(op.bind(parts, op.params | {name: op.params[name] // use.parts for name in grouped}))
        return jax.lax.psum(outs, use.summed) if use.summed else outs

    function = part if use.attention is None else per_device_attention(op, use.attention, mesh, manual)
    # In a surrounding shard_map, the mesh is that of the context, and the axes that are not yet manual become manual.
    automatic = set(mesh.axis_names) - manual
    if not automatic:
        return list(function(*ins))
    context: dict[str, Any] = {"axis_names": automatic} if manual else {"mesh": mesh}
    return list(jax.shard_map(function, in_specs=specs[0], out_specs=specs[1], check_vma=False, **context)(*ins))


def _single_contraction(replay: Replay, op: Op, ins: Sequence[Any], use: OperandSharding | None) -> list[Any] | None:
    """Computes a matmul in the form that is fast on CPUs; None for other operations and where there is none."""
    if op.name != "dot_general" or platform_of(replay.mesh) != "cpu":
        return None
    known: Sequence[Constraint | None]
    if replay.mesh.size == 1:
        known = [Constraint(((),) * array.ndim) for array in ins]
    else:
        known = [replay.constraints[value] for value in op.inputs] if use is None else use.inputs
    return single_contraction(op, ins, known, replay.manual)


@functools.lru_cache(maxsize=4096)
def _check_fits(shape: tuple[int, ...], spec: PartitionSpec, mesh: Mesh) -> None:
    """Raises ConstraintError if a spec has another rank than a shape or does not divide it, which JAX would ignore."""
    sharded = [() if by in (None, PartitionSpec.UNCONSTRAINED) else by for by in spec]
    axes = [by if isinstance(by, tuple) else (by,) for by in sharded]
    num_shards = [math.prod(mesh.shape[axis] for axis in by) for by in axes]
    if len(num_shards) != len(shape) or any(size % parts for size, parts in zip(shape, num_shards, strict=True)):
        raise ConstraintError(f"sharding constraint {spec} does not fit shape {shape} on mesh {dict(mesh.shape)}.")


@functools.lru_cache(maxsize=4096)
def _sharding(mesh: Mesh, spec: PartitionSpec) -> NamedSharding:
    return NamedSharding(mesh, spec)


def _partition_spec(
    constraint: Constraint, manual: frozenset[str] = frozenset(), leading: Sequence[str | tuple[str, ...] | None] = ()
) -> PartitionSpec:
    unsharded = PartitionSpec.UNCONSTRAINED if constraint.is_open else None
    spec = [tuple(axis for axis in axes if axis not in manual) for axes in constraint.spec]
    by_dim = [axes[0] if len(axes) == 1 else axes or unsharded for axes in spec]
    return PartitionSpec(*leading, *by_dim)


def single_contraction(
    op: Op, ins: Sequence[Any], constraints: Sequence[Constraint | None], manual: frozenset[str] = frozenset()
) -> list[Any] | None:
    """Computes a matmul with its adjacent contracting dims merged into one, which XLA's CPU compiler runs faster.

    The gradient of a weight contracts batch and positions. For two contracting dims the CPU compiler transposes and
    copies an operand, and recomputes its producers for the copy (`CPU_TRANSPOSES` in `plan/sharding/xla_workarounds`);
    for one, it reads the operand in place.

    Returns None unless they are adjacent and only the first is sharded: the spec of a merged dim cannot express an
    inner dim that is sharded, so XLA would gather the operand.
    """
    summed, (batch, _) = op.params["dimension_numbers"]
    if batch or len(summed[0]) < 2 or not all(map(_is_adjacent, summed)):
        return None
    for dims, constraint in zip(summed, constraints, strict=True):
        if constraint is None or constraint.is_open or any(set(constraint.spec[dim]) - manual for dim in dims[1:]):
            return None
    merged = [lax.collapse(array, dims[0], dims[-1] + 1) for array, dims in zip(ins, summed, strict=True)]
    numbers = (tuple((dims[0],) for dims in summed), ((), ()))
    return op.bind(merged, op.params | {"dimension_numbers": numbers})


def _is_adjacent(dims: Sequence[int]) -> bool:
    return list(dims) == list(range(dims[0], dims[0] + len(dims)))
