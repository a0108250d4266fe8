"""Evaluates the traced program again, with the sharding constraints of the plan on its values.

Constraints also apply to values in loops and remat; the rest of the program is unchanged.
"""

import functools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.sharding import Mesh, PartitionSpec

from spanax.plan.sharding.lookups import without
from spanax.plan.sharding.operands import OperandSharding
from spanax.plan.sharding.pieces import Form, Forms, between
from spanax.plan.sharding.resolve import Constraint
from spanax.plan.sharding.xla_workarounds import is_extended
from spanax.plan.spmd.deferred_reductions import DeferredReductions
from spanax.step.attention import kernels  # noqa: F401  (registers the lowering of kernels for platforms)
from spanax.step.attention.ring import per_device_attention
from spanax.step.placement import platform_of
from spanax.step.replay.callbacks import is_callback, with_deferred_errors
from spanax.step.replay.halos import with_halos
from spanax.step.replay.interleaving import computed_in_pieces, in_order, in_pieces, interleaved, rowwise, shifted
from spanax.step.replay.partial_sums import (
    add_partial_sum_dims,
    evaluate_partial_sums,
    leading_after_stacked,
    leading_before_stacked,
    merged_leading,
    scattered_sum,
    scatters,
    summed_here,
)
from spanax.step.replay.sharded_lookup import match_sharded_lookup, sharded_lookup
from spanax.step.replay.single_contraction import single_contraction
from spanax.step.replay.sorted_rows import rows_by_device
from spanax.step.replay.specs import check_fits, partition_spec, sharding_of
from spanax.trace.jaxpr.graph import CONTRACTIONS, OWN_KERNEL, Body, Graph, Op, scan_counts
from spanax.trace.jaxpr.interpret import Values, as_traced, read, rebuilt, run, with_bodies
from spanax.trace.jaxpr.loops import LOOPS, const_pairs

# Constraints in the user's program refer to another mesh, and the plan already accounts for them.
DROPPED = frozenset({"sharding_constraint", "reshard"})

GROUPS = ("feature_group_count", "batch_group_count")
"""The parameters of a convolution that are divided by the number of shards."""


Placed = tuple[Constraint | None, Form]
"""The sharding of an array, None if it stays as it is, and its interleaved dims."""


Formed = dict[tuple[int, Constraint], Any]
"""Arrays with interleaved dims, by value and sharding."""


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
      forms: the interleaved dims of values; None: every dim is in its own order.
    """

    graph: Graph
    constraints: Sequence[Constraint | None]
    uses: Mapping[Op, OperandSharding]
    mesh: Mesh
    unreduced: DeferredReductions = DeferredReductions()
    instead: Mapping[Op, Callable[[Sequence[Any]], list[Any]]] = field(default_factory=dict)
    manual: frozenset[str] = frozenset()
    defers_errors: bool = False
    forms: Forms | None = None

    @cached_property
    def _moved(self) -> frozenset[int]:
        """The activations that contractions move. Without their own constraint, the compiler may move them earlier."""
        uses = ((op, use) for op, use in self.uses.items() if op.name in CONTRACTIONS)
        pairs = (pair for op, use in uses for pair in zip(op.inputs, use.inputs, strict=True))
        moved = {value for value, constraint in pairs if constraint is not None}
        known = ((value, self.constraints[value]) for value in moved)
        return frozenset(value for value, constraint in known if constraint is None or constraint.used is None)

    def body(
        self,
        body: Body,
        args: Sequence[Any],
        before: Sequence[Form] | None = None,
        after: Sequence[Form] | None = None,
    ) -> list[Any]:
        """Returns the outputs of a body, given its inputs.

        Args:
          body: the body.
          args: its inputs.
          before: the interleaved dims of the inputs; by default, none.
          after: those that the outputs will have; by default, none.
        """
        readers = self.graph.readers
        values = Values()
        for value, arg, form in zip(body.inputs, args, before or [()] * len(args), strict=True):
            with as_traced(readers[value][0]) if value in readers else nullcontext():
                values[value] = self._formed(value, arg, (None, form), self._target(value))
        self.ops(body.ops, values)
        outs = self.read(values, body.outputs)
        if body is self.graph.body:
            outs = [self._counted(value, array) for value, array in zip(body.outputs, outs, strict=True)]
        return [
            self._formed(value, out, self._target(value), (None, form))
            for value, out, form in zip(body.outputs, outs, after or [()] * len(outs), strict=True)
        ]

    def _target(self, value: int, use: Constraint | None = None) -> "Placed":
        """Returns the constraint of a value, or that of a use of it, with its interleaved dims."""
        constraint = self.constraints[value] if use is None else use
        if self.forms is None:
            return constraint, ()
        return constraint, self.forms.of(value) if use is None else self.forms.under(value, use)

    def _formed(self, value: int, array: Any, before: "Placed", after: "Placed") -> Any:
        """Returns an array with other interleaved dims, under the constraint of `after` if it has one.

        The order changes while the dim is replicated. One all-to-all exchanges the array from there to its shards.
        """
        leading = self._pending(value, array)
        if before[1] == after[1] or self.forms is None:
            return array if after[0] is None else self.constrained(array, after[0], leading)
        own, other = (before, after) if before[1] == () else (after, before)
        # Both may be interleaved, in other pieces: then in their own order between the two.
        if own[1]:
            return self._formed(value, self._formed(value, array, before, (None, ())), (None, ()), after)
        dims = [each.dim for each in other[1]]
        empty = ((),) * len(self.graph.shape(value))
        rest = tuple(() if dim in dims else by for dim, by in enumerate(own[0].spec if own[0] else empty))
        spec = between(rest, other[0].spec if other[0] else empty)
        exchanged = None if spec is None else Constraint(spec)
        ordered = Constraint(rest) if own[0] else None
        if own is after:
            array = self.constrained(self.constrained(array, exchanged, leading), ordered, leading)
            for each in shifted(other[1], len(leading)):
                array = in_order(array, each)
        else:
            array = self.constrained(array, ordered, leading)
            for each in shifted(other[1], len(leading)):
                array = interleaved(array, each)
            array = self.constrained(self.constrained(array, ordered, leading), exchanged, leading)
        return array if after[0] is None else self.constrained(array, after[0], leading)

    def ops(self, ops: Iterable[Op], values: Values) -> None:
        """Evaluates operations in order; reads operands from `values` and adds the results to it."""
        run(self.graph, ops, values, functools.partial(self._compute, {}))

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
        spec = partition_spec(constraint, self.manual, leading)
        check_fits(array.shape, spec, self.mesh)
        return jax.lax.with_sharding_constraint(array, spec if self.manual else sharding_of(self.mesh, spec))

    def _compute(self, formed: "Formed", op: Op, ins: Sequence[Any]) -> list[Any]:
        """Computes an operation; `formed` keeps operands that were interleaved, for other operations."""
        if op in self.instead:
            return self.instead[op](ins)
        ins = self._as_read(op, ins)
        if op.bodies:
            return self._with_bodies(op, ins)
        lookup = self._sharded_lookup(op, ins)
        if lookup is not None:
            return lookup
        use = self.uses.get(op)
        ins = ins if use is None else self._as_used(op, ins, use, formed)
        of_inputs, of_outputs = _uses(op, use)
        targets = [self._target(value, each) for value, each in zip(op.inputs, of_inputs, strict=True)]
        wanted = [self._target(value, each) for value, each in zip(op.outputs, of_outputs, strict=True)]
        after = map(self._target, op.outputs)
        if not any(form for _, form in (*targets, *wanted, *after)):
            return self._as_planned(op, self._results(op, ins, use), use)
        return self._interleaved(op, ins, use, (targets, wanted))

    def _interleaved(
        self, op: Op, ins: Sequence[Any], use: OperandSharding | None, placed: tuple[list["Placed"], list["Placed"]]
    ) -> list[Any]:
        """Computes an operation with interleaved dims: in a common order of rows, or piece by piece."""
        targets, wanted = placed
        forms = [form for _, form in (*targets, *wanted)]
        is_whole = bool(op.outputs) and not self.unreduced.of(op.outputs[0])
        pieces = in_pieces(self.graph, op, forms) if is_whole else None
        computed = pieces or rowwise(self.graph, op, forms)
        ins = [
            self._formed(value, array, target, (None if target[1] == form else target[0], form))
            for value, array, target, form in zip(op.inputs, ins, targets, computed, strict=False)
        ]
        if pieces is None:
            outs = self._results(op, ins, use)
        else:
            outs = computed_in_pieces(self.graph, op, ins, pieces)
        results = list[Any]()
        for value, out, target, form, use_of in zip(
            op.outputs, outs, wanted, computed[len(ins) :], _uses(op, use)[1], strict=True
        ):
            if use_of is not None or target[1] != form:
                out = self._formed(value, out, (None, form), target)
            results.append(out if use_of is None else self._formed(value, out, target, self._target(value)))
        return self._as_planned(op, results, use if use is None else replace(use, outputs=(None,) * len(outs)))

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
        varies = not self.unreduced.varying.isdisjoint(op.outputs)
        if varies or (op.name != OWN_KERNEL and op.outputs and self.unreduced.of(op.outputs[0])):
            has = list(map(self._pending, op.inputs, ins))
            return evaluate_partial_sums(self.graph, op, ins, has, self.unreduced, self.mesh, self.manual)
        if use is not None and use.is_local and self.mesh.size > 1:
            return _shard_by_shard(self, op, ins, use)
        outs = _single_contraction(self, op, ins, use)
        return op.bind(ins) if outs is None else outs

    def _as_read(self, op: Op, ins: Sequence[Any]) -> Sequence[Any]:
        """Returns the operands of an operation, with counts added unless it needs those of each device."""
        counts = self.unreduced.counts
        if counts.isdisjoint(op.inputs):
            return ins
        if op.bodies:
            kept = {outer for outer, inner in self.graph.wires(op).inputs if inner in counts}
        else:
            use = self.uses.get(op)
            is_by_device = counts.issuperset(op.outputs) or (use is not None and use.rows is not None)
            kept = set(op.inputs) if is_by_device else set()
        pairs = zip(op.inputs, ins, strict=True)
        return [array if value in kept else self._counted(value, array) for value, array in pairs]

    def _pending(self, value: int, array: Any) -> tuple[str, ...]:
        """Returns the mesh axes of the leading dims of an array: none of counts that were added, or of equal rows."""
        return self.unreduced.of(value) if np.ndim(array) > len(self.graph.shape(value)) else ()

    def _extended(self, value: int, like: int, array: Any) -> Any:
        """Returns an array with the leading dims of `value`, of one that is like another value, or has them already."""
        axes = self.unreduced.of(value)
        has = (self.unreduced.of(like) or axes) if np.ndim(array) > len(self.graph.shape(like)) else ()
        if value not in self.unreduced.varying:
            return add_partial_sum_dims(array, has, axes, self.mesh.shape)
        sizes = [self.mesh.shape[axis] for axis in axes]
        return array if has else jax.numpy.broadcast_to(array, (*sizes, *np.shape(array)))

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

    def _as_used(self, op: Op, ins: Sequence[Any], use: OperandSharding, formed: "Formed") -> Sequence[Any]:
        """Returns operands in the shardings that an operation needs."""
        for targets in filter(None, (use.first, use.inputs)):
            arrays = list[Any]()
            for value, array, target in zip(op.inputs, ins, targets, strict=True):
                before = self._target(value)
                after = self._target(value, target)
                if target is not None and before[1] != after[1]:
                    # The compiler would exchange an array once for each operation that reads it.
                    if (value, target) not in formed:
                        formed[value, target] = self._formed(value, array, before, after)
                    array = formed[value, target]
                else:
                    array = self.constrained(array, target, self._pending(value, array))
                arrays.append(array)
            ins = arrays
        return [lax.optimization_barrier(ins[0]), *ins[1:]] if use.is_isolated else ins

    def _as_planned(self, op: Op, outs: Sequence[Any], use: OperandSharding | None) -> list[Any]:
        """Returns results under the constraints of their values, unless they have them already."""
        # Terms of one sum, except those of a kernel, whose results may be different sums.
        own = op.outputs if op.name == OWN_KERNEL else op.outputs[:1] * len(op.outputs)
        deferred = list(map(self.unreduced.of, own))
        if use is not None:
            outs = list(map(self.constrained, outs, use.outputs, deferred))
        # The compiler propagates the sharding of an operand with the result's shape through elementwise operations. A
        # conversion keeps its constraint: otherwise the compiler could communicate the wider dtype.
        graph = self.graph
        constraints = self.constraints
        is_plain = op.is_elementwise and op.name != "convert_element_type" and use is None
        propagated = {(graph.shape(value), constraints[value]) for value in op.inputs} if is_plain else set()
        results = []
        current = use.outputs if use is not None else (None,) * len(outs)
        for value, out, previous, leading in zip(op.outputs, outs, current, deferred, strict=True):
            target = constraints[value]
            known = target is not None and any(target.spec) and (graph.shape(value), target) in propagated
            known = known and not (is_extended(graph, value, constraints) or value in self._moved)
            # A result that is already constrained needs no other: open dims would leave its sharding to the compiler.
            known = known or (previous is not None and (target is None or previous.spec == target.spec))
            results.append(out if known else self.constrained(out, target, leading))
        return results

    def _with_bodies(self, op: Op, ins: Sequence[Any]) -> list[Any]:
        """Evaluates a loop, a branch or a remat with constraints in its bodies; weights are gathered before a loop."""
        carried, after = self._boundary(op)
        if op.name in LOOPS:
            pairs = const_pairs(self.graph, op)
            consts = [
                self._formed(outer, array, self._target(outer), (self.constraints[inner], self._target(inner)[1]))
                for (outer, inner), array in zip(pairs, ins, strict=False)
            ]
            ins = [*consts, *ins[len(consts) :]]
            carried |= {inner: self._target(inner)[1] for _, inner in pairs}
        if self.unreduced.varying and op.name != "scan":
            inner = dict(self.graph.wires(op).inputs)
            ins = [
                self._extended(inner.get(value, value), value, array)
                for value, array in zip(op.inputs, ins, strict=True)
            ]

        def body(body: Body, args: Sequence[Any]) -> list[Any]:
            before = [carried.get(value, ()) for value in body.inputs]
            is_test = op.name == "while" and body is op.bodies[0]
            return self.body(body, args, before, None if is_test else after)

        if op.name == "scan":
            outs: Sequence[Any] = self._looped(op, ins, body)
        else:
            outs = with_bodies(op, ins, body, self._shape)
            triples = zip(op.outputs, op.bodies[-1].outputs, outs, strict=True)  # counts may leave a remat to be added
            outs = [out if self.unreduced.of(value) else self._counted(inner, out) for value, inner, out in triples]
        outs = [
            self._formed(value, out, (None, form), (None, self._target(value)[1]))
            for value, out, form in zip(op.outputs, outs, self._outside(op, after), strict=True)
        ]
        deferred = self.unreduced.of
        constraints = self.constraints
        return [self.constrained(out, constraints[v], deferred(v)) for v, out in zip(op.outputs, outs, strict=True)]

    def _boundary(self, op: Op) -> tuple[dict[int, Form], list[Form]]:
        """Returns the interleaved dims with which values enter the bodies of an operation, by value, and leave them."""
        wires = self.graph.wires(op)

        def inside(outer: int, inner: int) -> Form:
            return shifted(self._target(outer)[1], len(self.graph.shape(inner)) - len(self.graph.shape(outer)))

        before = {inner: inside(outer, inner) for outer, inner in wires.inputs}
        after = [inside(outer, inner) for outer, inner in wires.outputs[: len(op.outputs)]]
        for index, (first, _) in enumerate(wires.carried):
            after[index] = before[first]
        return before, after

    def _outside(self, op: Op, after: Sequence[Form]) -> list[Form]:
        """Returns the interleaved dims of the results of an operation with bodies."""
        wires = self.graph.wires(op).outputs[: len(op.outputs)]
        ranks = [len(self.graph.shape(outer)) - len(self.graph.shape(inner)) for outer, inner in wires]
        return [shifted(form, rank) for form, rank in zip(after, ranks, strict=True)]

    def _looped(self, op: Op, ins: Sequence[Any], evaluated: Callable[[Body, Sequence[Any]], list[Any]]) -> list[Any]:
        """Evaluates a loop, followed by the reductions that were deferred in it."""
        deferred = self.unreduced.of
        (body,) = op.bodies
        num_consts, num_carried = scan_counts(self.graph, op)
        num_fixed = num_consts + num_carried
        operands = list(map(self._extended, body.inputs, op.inputs, ins))
        operands[num_fixed:] = map(leading_after_stacked, operands[num_fixed:], map(deferred, body.inputs[num_fixed:]))
        targets = [*body.inputs[num_consts:num_fixed], *body.outputs[num_carried:]]
        pending = list(map(deferred, targets))

        def iteration(body: Body, args: Sequence[Any]) -> list[Any]:
            return list(map(self._extended, targets, body.outputs, evaluated(body, args)))

        if len(op.outputs) == len(op.eqn.outvars):
            outs = [*with_bodies(op, operands, iteration, self._shape)]
        else:  # the loop returns more than was traced
            outs = rebuilt(self.graph, op, operands, [lambda *args: iteration(body, args)])
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


def _uses(op: Op, use: OperandSharding | None) -> tuple[Sequence[Constraint | None], Sequence[Constraint | None]]:
    """Returns the constraints that an operation has for its operands and its results."""
    if use is None:
        return (None,) * len(op.inputs), (None,) * len(op.outputs)
    return use.inputs, use.outputs


def _shard_by_shard(replay: Replay, op: Op, ins: Sequence[Any], use: OperandSharding) -> list[Any]:
    """Computes an operation on each shard in `shard_map`, so that the compiler does not partition it."""
    mesh = replay.mesh
    manual = replay.manual
    specs = [
        tuple(PartitionSpec() if constraint is None else partition_spec(constraint, manual) for constraint in group)
        for group in (use.inputs, use.outputs)
    ]
    pending = [replay.unreduced.of(value) if op.name == OWN_KERNEL else () for value in op.outputs]
    specs[1] = tuple(PartitionSpec(*axes, *spec) for axes, spec in zip(pending, specs[1], strict=True))
    num_parts = math.prod(mesh.shape[axis] for axis in use.parts)
    grouped = [name for name in GROUPS if op.params.get(name, 1) > 1]

    def part(*parts: Any) -> tuple[Any, ...]:
        params = op.params | {name: op.params[name] // num_parts for name in grouped}
        outs = tuple(with_halos(op, parts, params, use.halos, mesh.shape) if use.halos else op.bind(parts, params))
        if not use.summed:
            return outs
        return tuple(map(functools.partial(summed_here, mesh), outs, use.summed, pending, specs[1]))

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
