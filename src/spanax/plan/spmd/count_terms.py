"""Counts the cost terms of one layout in one walk over a program's groups of operations."""

import itertools
import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from spanax.plan.cost.ring_attention import matmul_rows
from spanax.plan.cost.terms import KINDS, Collectives, HostCopies, Matmuls, MemoryTraffic, Terms, table
from spanax.plan.spmd.deferred_reductions import DeferredReductions
from spanax.plan.spmd.partition import PartitionedOp, Reshard, transition, union
from spanax.plan.spmd.sharded_program import ShardedProgram, scattered
from spanax.plan.spmd.slices import exchanges
from spanax.plan.spmd.tiled_scatter import as_tiles
from spanax.plan.spmd.tpu_matmuls import (
    RENAMED,
    is_gathered_rounded,
    is_rounded,
    num_parts,
    tpu_matmul,
)
from spanax.trace.analysis.gradient_accumulation import GradientSum
from spanax.trace.analysis.op_groups import OpGroup, Phase, executed_flops, num_groups, trips
from spanax.trace.jaxpr.graph import CONTRACTIONS, RAGGED, Op
from spanax.trace.rewrites.attention.operation import RING


def count_terms(
    sharded: ShardedProgram,
    only: frozenset[int] | None = None,
    *,
    adds_first: bool = False,
    narrows_first: bool = False,
    is_tpu_program: bool = False,
    expands_ragged: bool = False,
    late: DeferredReductions | None = None,
) -> Terms:
    """Returns the cost terms of a layout, counted in one walk over the program's groups of operations.

    Args:
      sharded: the program's step under the layout.
      only: count the collectives of these values alone, such as those of one leaf
      (`spanax.trace.analysis.leaf_aliases`).
      late: the reductions that loops defer; none by default.
      adds_first: whether the compiler adds partial sums before it all-reduces them, once: those for TPUs and GPUs do,
        XLA's for CPUs does not. Source: the programs of docs/check.md.
      narrows_first: whether the compiler converts a sum to a narrower dtype before it all-reduces it, where only the
        converted sum is used: that for TPUs does. Source: programs of tests/byo for v5e:2x4, libtpu 0.0.52.
      is_tpu_program: whether to count what a program compiled for TPUs runs (`tpu_matmuls`, `tiled_scatter`), which
        depends on the sizes of the mesh.
      expands_ragged: whether ragged matmuls are masked matmuls before they are partitioned, so that one over rows
        computes each shard of its result alone: for CPUs they are, while libtpu 0.0.52 computes all of it on every
        device. Source: tests/byo/sorted_moe.py under `spanax check`, levels 2 and 3.
    """
    late = late or DeferredReductions()
    counter = _TermCounter(sharded, only, late, narrows_first, is_tpu_program, expands_ragged)
    traced = sharded.traced
    for group in traced.op_groups:
        if group.op not in traced.inert:
            counter.add(group)
    counter.add_ends()
    counter.defer()
    for gradient_sum in traced.gradient_sums if adds_first else ():
        counter.join(gradient_sum)
    carry, num_layers = traced.layer_carry
    num_bytes = 0 if carry is None else sharded.num_bytes(carry)
    matmuls = table(Matmuls, counter.matmul_rows)
    tables = matmuls, _memory_traffic(sharded), counter.collectives(), _host_copies(sharded)
    return Terms(sharded.resolver.mesh.names, *tables, num_bytes, num_layers)


SUMS = ("all-reduce", "reduce-scatter")
"""Collectives that reduce. A compiler that fuses an all-reduce with a slice late adds the operands of both first."""


class _TermCounter:
    """Accumulates the rows of the terms; equal collectives are counted together."""

    def __init__(
        self,
        sharded: ShardedProgram,
        only: frozenset[int] | None,
        late: DeferredReductions,
        narrows_first: bool,
        is_tpu_program: bool,
        expands_ragged: bool,
    ):
        self._narrows_first, self._is_tpu_program = narrows_first, is_tpu_program
        self._expands_ragged = expands_ragged
        self.sharded, self.traced, self._only, self._late = sharded, sharded.traced, only, late
        self.matmul_rows: list[tuple[Any, ...]] = []
        self._moves: dict[tuple[Any, ...], int] = defaultdict(int)
        self._gathered = set[tuple[int, str, int, int]]()

    def add(self, group: OpGroup) -> None:
        """Counts one group of operations."""
        op, sharded = group.op, self.sharded
        if op.bodies:
            self._add_wires(group)
            return
        division = sharded.division(op)
        exchanged = tuple(exchanges(sharded, op)) if self._is_tpu_program else ()
        for exchange in exchanged:
            moved = Reshard(exchange.kind, exchange.value, exchange.over, exchange.sharding, False)
            factor = exchange.factor * (0.5 if is_rounded(self.traced.graph, op.outputs[exchange.output]) else 1.0)
            self._move(self._of(exchange.value, group.runs), group.phase, group.in_layers, [moved], factor)
        for shift in division.partition.shifts if division.partition else ():
            if exchanged and shift.kind == "all-gather" and shift.is_operand:
                continue
            is_counted = shift.is_operand or self._only is not None
            self._move(self._runs(group, shift) if is_counted else group.runs, group.phase, group.in_layers, [shift])
        if op.name in RING and division.operands and division.operands.attention and division.partition:
            of_q = op.inputs[0]
            properties = sharded.is_batched(of_q), _dtype_name(self.traced.graph.avals[of_q].dtype)
            rows = matmul_rows(self.traced.graph, op, division.operands.attention, sharded.resolver.mesh, *properties)
            for row in rows:
                self._add_matmul(row, group, (-1, 1, 0))
        if op.name in CONTRACTIONS and division.partition:
            known = sharded.cache.matmuls
            if division not in known:
                is_expanded = self._expands_ragged and _sums_rows(op)
                partition = _expanded(sharded, op, division.partition) if is_expanded else division.partition
                known[division] = _matmul(sharded, op, partition)
            row = known[division]
            runs = group.runs - sum(times for each, times in group.ops if each in self.traced.repeated)
            if self._is_tpu_program:
                row, factor = tpu_matmul(sharded, op, row)
                runs *= factor
            self._add_matmul(row, group, _of_experts(sharded, op, division.partition), runs)

    def _add_matmul(
        self, row: Sequence[Any], group: OpGroup, of_experts: tuple[int, int, int], runs: int | None = None
    ) -> None:
        *first, scores, is_fused = row
        runs = group.runs if runs is None else runs
        self.matmul_rows.append((*first, runs, int(group.phase), group.in_layers, scores, is_fused, *of_experts))

    def _add_wires(self, group: OpGroup) -> None:
        """Counts reshards between the outside and the inside of a loop, and between its iterations."""
        wires = self.traced.graph.wires(group.op)
        num_trips = trips(group.op)
        for pairs, swap in ((wires.inputs, False), (wires.outputs, True)):
            for outer, inner in pairs:
                outside, inside = self.sharded.masks(outer), self.sharded.masks(inner)
                extra = len(outside) - len(inside)
                before, after = (inside, outside[extra:]) if swap else (outside[extra:], inside)
                runs = group.runs * (num_trips if extra else 1)
                shifts = transition(inner, before, after, is_operand=False)
                self._move(self._of(inner, runs), group.phase, group.in_layers, shifts)
        for first, last in wires.carried:
            shifts = transition(last, self.sharded.masks(last), self.sharded.masks(first), is_operand=False)
            self._move(self._of(last, group.runs * num_trips), group.phase, group.in_layers, shifts)

    def add_ends(self) -> None:
        """Counts reshards of state leaves that the step returns with another sharding than their stored one."""
        body, num_leaves = self.traced.graph.body, len(self.traced.graph.body.outputs) - self.traced.num_results
        for old, new in zip(body.inputs[:num_leaves], body.outputs[:num_leaves], strict=True):
            shifts = transition(new, self.sharded.masks(new), self.sharded.masks(old), is_operand=False)
            self._move(self._of(new, 1), Phase.UPDATE, False, shifts)

    def defer(self) -> None:
        """Removes the reductions that loops defer, and counts those after the loops."""
        late, sharded = self._late, self.sharded
        for group in self.traced.op_groups if late.sums else ():
            for op, runs in group.ops:
                mask = sharded.mask(late.of(op.outputs[0])) if op in late.sums else 0
                partitioned = sharded.division(op).partition if mask else None
                runs = self._of(op.outputs[0], runs)
                for shift in partitioned.shifts if partitioned else ():
                    if shift.kind == "all-reduce":
                        self._move(-runs, group.phase, group.in_layers, [shift])
                        remaining = replace(shift, over=shift.over & ~mask)
                        remaining = scattered(remaining, union(sharded.masks(shift.value)))
                        self._move(runs if remaining.over else 0, group.phase, group.in_layers, [remaining])
            for value in set(group.op.outputs).intersection(late.ends) if group.op.bodies else ():
                axes = union(sharded.masks(value))
                shift = scattered(Reshard("all-reduce", value, sharded.mask(late.ends[value]), axes, False), axes)
                in_layers = not self.traced.layer_labels.isdisjoint(self.traced.sharding_keys[value].labels)
                self._move(self._of(value, group.runs), group.phase, in_layers, [shift])

    def join(self, gradient_sum: GradientSum) -> None:
        """Removes all-reduces of results that are only added to results with an equal all-reduce."""
        needed = list[tuple[int, OpGroup, Reshard] | None]()  # the all-reduce of each part, if it has exactly one
        counter = itertools.count()
        for group in gradient_sum.sums:
            if group is not None:
                needed.append(self._summed(group, next(counter)))
                continue
            right, left = needed.pop(), needed.pop()
            is_equal = left and right and (left[2].over, left[2].unchanged) == (right[2].over, right[2].unchanged)
            needed.append(left if is_equal else None)
            if right and is_equal:
                runs = sum(self._of(values[right[0]], runs) for values, runs in gradient_sum.occurrences)
                self._move(-runs, right[1].phase, right[1].in_layers, [right[2]])

    def _summed(self, group: OpGroup, index: int) -> tuple[int, OpGroup, Reshard] | None:
        partitioned = (
            None if any(op in self._late.sums for op, _ in group.ops) else self.sharded.division(group.op).partition
        )
        sums = [shift for shift in partitioned.shifts if self._is_joined(shift)] if partitioned else []
        return (index, group, sums[0]) if len(sums) == 1 else None

    def _is_joined(self, shift: Reshard) -> bool:
        """Returns whether sums are added before they are reduced, scattered ones on TPUs only.

        Sums that a TPU's compiler converts before it reduces them are reduced one by one. Source: the gradients of the
        shared block of `tied` in tests/zoo.py, libtpu 0.0.52 for v5e:2x4.
        """
        is_converted = self._num_bytes(replace(shift, kind="all-reduce")) != self.sharded.num_bytes(shift.value)
        is_reduced = shift.kind == "all-reduce" or (self._is_tpu_program and shift.kind == "reduce-scatter")
        return is_reduced and not is_converted

    def _of(self, value: int, runs: int) -> int:
        return runs if self._only is None or value in self._only else 0

    def _runs(self, group: OpGroup, shift: Reshard) -> int:
        """Returns how often a value is moved; operations of the same body share a resharded operand.

        A value that depends on no input is equal in every iteration of a loop, and is moved once before it.
        """
        values, runs = (*group.op.inputs, *group.op.outputs), 0
        index = values.index(shift.value)
        for op, times in group.ops:
            value = (*op.inputs, *op.outputs)[index]
            if shift.is_operand:
                key = (value, shift.kind, shift.over, shift.unchanged)
                times = 0 if key in self._gathered else times if self.traced.axes.origins[value] else 1
                self._gathered.add(key)
            runs += self._of(value, times)
        return runs

    def _move(self, runs: int, phase: Phase, in_layers: bool, shifts: Sequence[Reshard], of_bytes: float = 1.0) -> None:
        for shift in shifts:
            if not runs or shift.value in self.traced.uniform:
                continue
            factor = of_bytes
            if self._is_tpu_program:
                shift, change = self._on_tpu(shift)
                factor *= change
            key = (
                KINDS.index(shift.kind),
                self._num_bytes(shift) * factor,
                shift.over,
                shift.unchanged & ~shift.over,
                self.sharded.is_batched(shift.value),
                int(phase),
                in_layers,
                not self.sharded.is_batched(shift.value),
            )
            self._moves[key] += runs * shift.times

    def _on_tpu(self, shift: Reshard) -> tuple[Reshard, float]:
        """Returns a collective as a TPU runs it, and the factor by which its bytes change."""
        if shift.kind in SUMS:
            factor = num_parts(self.traced.graph, shift.value)
            if shift.kind == "reduce-scatter":
                shift, padding = as_tiles(self.sharded, shift)
                factor *= padding
            return shift, factor
        is_narrow = shift.kind == "all-gather" and shift.is_operand and is_gathered_rounded(self.sharded, shift.value)
        return shift, 0.5 if is_narrow else 1.0

    def _num_bytes(self, shift: Reshard) -> int:
        """Returns the global bytes of the value that moves; of a narrower copy where only that is used."""
        num_bytes = self.sharded.num_bytes(shift.value)
        if not self._narrows_first or shift.kind != "all-reduce":
            return num_bytes
        graph, value = self.traced.graph, shift.value
        while len(readers := graph.readers[value]) == 1 and readers[0].name in RENAMED:
            value = readers[0].outputs[0]
            if not np.issubdtype(graph.avals[value].dtype, np.integer) and graph.avals[value].dtype != bool:
                num_bytes = min(num_bytes, graph.num_bytes(value))
        return num_bytes

    def collectives(self) -> Collectives:
        """Returns the collectives, with the number of runs of equal ones."""
        rows = [(*key[:5], runs, *key[5:]) for key, runs in self._moves.items() if runs]
        return table(Collectives, rows)


def _matmul(sharded: ShardedProgram, op: Op, partitioned: PartitionedOp) -> tuple[Any, ...]:
    """Returns a row of `Matmuls`, without its phase and number of runs."""
    traced, graph = sharded.traced, sharded.traced.graph
    summed, passed = op.dim_map.contraction
    lhs, rhs, out = op.inputs[0], op.inputs[1], op.outputs[0]
    shape, labels = graph.shape(out), traced.axes.classes[out]
    groups: list[list[tuple[float, int, bool]]] = [[], [], [], []]  # m, n, k, separate products
    batch_labels = traced.batch_labels
    for a, b, index in passed:
        group_index = 3 if a >= 0 and b >= 0 else 0 if a >= 0 else 1
        groups[group_index].append((shape[index], partitioned.result[index], labels[index] in batch_labels))
    for a, _ in summed:
        label = traced.axes.classes[lhs][a]
        groups[2].append((graph.shape(lhs)[a], partitioned.operands[0][a], label in batch_labels))
    flops = executed_flops(graph, op)
    if op.name == RAGGED:
        groups[3].append((num_groups(graph, op), 0, False))
    if op.name == "conv_general_dilated":
        _as_matmul(op, groups, shape, partitioned, flops)
    values = (lhs, rhs, out)
    return (
        flops,
        partitioned.work,
        [math.prod(size for size, _, _ in group) for group in groups],
        [union([mask for _, mask, _ in group]) for group in groups],
        next((index for index, group in enumerate(groups) if any(grow for _, _, grow in group)), -1),
        [sharded.num_bytes(value) for value in values],
        [union(masks) for masks in (*partitioned.operands[:2], partitioned.result)],
        [sharded.is_batched(value) for value in values],
        _dtype_name(graph.avals[lhs].dtype),
        [traced.sharding_keys[value].labels in traced.score_labels for value in values],
        False,
    )


def _sums_rows(op: Op) -> bool:
    """Returns whether an operation is a ragged matmul that contracts its rows: the gradient of its weights."""
    if op.name != RAGGED:
        return False
    rows = op.params["ragged_dot_dimension_numbers"].lhs_ragged_dimensions
    return any(lhs in rows for lhs, _ in op.dim_map.contraction[0])


def _expanded(sharded: ShardedProgram, op: Op, partitioned: PartitionedOp) -> PartitionedOp:
    """Returns the partition of a matmul that computes its result as it is sharded afterwards."""
    masks = sharded.masks(op.outputs[0])
    return replace(partitioned, work=partitioned.work | union(masks), result=masks)


def _of_experts(sharded: ShardedProgram, op: Op, partitioned: PartitionedOp) -> tuple[int, int, int]:
    """Returns the last columns of a row of `Matmuls`: the ragged size, the number of groups, the axes of experts."""
    traced, graph, experts = sharded.traced, sharded.traced.graph, sharded.traced.routings
    labels = [traced.axes.classes[value] for value in (*op.inputs[:2], op.outputs[0])]
    masks = (*partitioned.operands[:2], partitioned.result)
    pairs = [pair for dims in zip(labels, masks, strict=True) for pair in zip(*dims, strict=True)]
    axes = union([mask for label, mask in pairs if label in experts])
    if op.name != RAGGED:
        return -1, 1, axes
    return 2 if _sums_rows(op) else 0, num_groups(graph, op), axes


def _as_matmul(
    op: Op, groups: list[list[tuple[float, int, bool]]], shape: Sequence[int], partitioned: PartitionedOp, flops: int
) -> None:
    """Completes m, n, k and the number of products of a convolution; output positions are rows, its window contracted.

    The channels of a group are contracted only with those of the same group. Zeros of dilated inputs are not counted.
    """
    batch, _, *places = op.params["dimension_numbers"].out_spec
    rows = [batch, *places] if op.params["batch_group_count"] > 1 else places
    groups[0] += [(shape[dim], partitioned.result[dim], False) for dim in rows]
    num_groups = max(op.params["feature_group_count"], op.params["batch_group_count"])
    if num_groups > 1:
        ((channels, mask, grows),) = groups[3]
        groups[3] = [(num_groups, mask, grows)]
        groups[1].append((channels / num_groups, 0, False))
    num_summed = math.prod(size for size, _, _ in groups[2])
    groups[2].append((flops / (2 * math.prod(shape) * num_summed), 0, False))


def _memory_traffic(sharded: ShardedProgram) -> MemoryTraffic:
    rows: dict[tuple[Any, ...], float] = defaultdict(float)
    traced = sharded.traced
    for value, phase, in_layers, times in traced.memory_traffic.touched:
        is_score = traced.sharding_keys[value].labels in traced.score_labels
        key = (union(sharded.masks(value)), sharded.is_batched(value), phase, in_layers, is_score)
        rows[key] += times * sharded.num_bytes(value)
    kernels = np.asarray(traced.memory_traffic.kernels, float)
    return table(MemoryTraffic, [(num_bytes, *key) for key, num_bytes in rows.items()], kernels=kernels)


def _host_copies(sharded: ShardedProgram) -> HostCopies:
    graph, rows = sharded.traced.graph, list[tuple[Any, ...]]()
    for group in sharded.traced.op_groups:
        for op, runs in group.ops if group.op.name == "device_put" else ():
            (value,), (copy,) = op.inputs, op.outputs
            if graph.is_on_host(value) != graph.is_on_host(copy):
                mask, is_batched = union(sharded.masks(value)), sharded.is_batched(value)
                rows.append((runs * sharded.num_bytes(value), mask, is_batched, graph.is_on_host(copy)))
    return table(HostCopies, rows)


def _dtype_name(dtype: Any) -> str:
    """Returns the hardware's name for the dtype of a matmul; integers and wider dtypes count as float32."""
    name = str(dtype)
    if name.startswith(("float8", "float4")):
        return "fp8" if name.startswith("float8") else "fp4"
    return {"bfloat16": "bf16", "float16": "fp16", "int8": "int8", "uint8": "int8"}.get(name, "fp32")
