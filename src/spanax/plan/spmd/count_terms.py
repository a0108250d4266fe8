"""Counts the cost terms of one layout in one walk over a program's groups of operations."""

import itertools
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from spanax.plan.sharding.partition import Reshard, transition, union
from spanax.plan.spmd.deferred_reductions import DeferredReductions
from spanax.plan.spmd.divided_sums import divided, num_divided, ways
from spanax.plan.spmd.matmul_rows import dtype_name, expanded, in_group, kernel_row, matmul_row, of_experts, sums_rows
from spanax.plan.spmd.ring_attention import matmul_rows
from spanax.plan.spmd.sharded_program import ShardedProgram, scattered
from spanax.plan.spmd.slices import exchanges
from spanax.plan.spmd.terms import KINDS, Collectives, HostCopies, Matmuls, MemoryTraffic, Terms, table
from spanax.plan.spmd.tiled_scatter import as_tiles, halo_shards
from spanax.plan.spmd.tpu_kernels import KernelMatmul, kernel_matmuls
from spanax.plan.spmd.tpu_matmuls import (
    RENAMED,
    is_gathered_rounded,
    is_gathered_sum,
    is_rounded,
    num_parts,
    tpu_matmul,
)
from spanax.trace.analysis.gradient_accumulation import GradientSum
from spanax.trace.analysis.op_groups import OpGroup, Phase, trips
from spanax.trace.jaxpr.graph import CONTRACTIONS
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


class Move(NamedTuple):
    """A collective of a group of operations.

    Attributes:
      key: its row of `Collectives`, without the number of runs; None for a value that needs no communication.
      runs: how often it runs, in addition to `uses`.
      uses: the operands that it moves, with their shardings, each with a number of runs. Operations of the same body
        share a resharded operand: only the first group that uses it so moves it.
      times: how often each run repeats.
    """

    key: tuple[Any, ...] | None
    runs: int
    uses: tuple[tuple[tuple[int, str, int, int], int], ...] = ()
    times: int = 1


class Counted(NamedTuple):
    """What a group of operations, or a boundary of the step, adds to the terms: rows of `Matmuls`, and collectives."""

    matmuls: tuple[tuple[Any, ...], ...]
    moves: tuple[Move, ...]


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
        self._shared = set[tuple[KernelMatmul, int]]()
        # Programs for TPUs depend on the sizes of the mesh, and `only` on the values.
        is_shared = only is None and not is_tpu_program
        self._known: dict[tuple[object, ...], Counted] = sharded.cache.counted if is_shared else {}

    def add(self, group: OpGroup) -> None:
        """Counts one group of operations."""
        op, sharded = group.op, self.sharded
        if op.bodies:
            self._count((op, *[sharded.numbers[key] for key in self.traced.wire_keys[op]]), self._wires, group)
        else:
            self._count((op, sharded.division(op)), self._group, group)

    def add_ends(self) -> None:
        """Counts reshards of state leaves that the step returns with another sharding than their stored one."""
        keys, numbers = self.traced.sharding_keys, self.sharded.numbers
        self._count(
            (None, *[numbers[keys[value].number] for pair in self.traced.updated for value in pair]), self._ends
        )

    def _count(self, key: tuple[object, ...], count: Callable[..., Counted], *of: Any) -> None:
        """Adds what `count` returns for `of`, from the cache where the layout of the key is known."""
        key = (*key, self._narrows_first, self._expands_ragged)
        counted = self._known.get(key)
        if counted is None:
            counted = self._known[key] = count(*of)
        self.matmul_rows += counted.matmuls
        gathered, moves = self._gathered, self._moves
        for row, runs, uses, times in counted.moves:
            for use, number in uses:
                if use not in gathered:
                    gathered.add(use)
                    runs += number
            if runs and row is not None:
                moves[row] += runs * times

    def _group(self, group: OpGroup) -> Counted:
        op, sharded = group.op, self.sharded
        division, moves = sharded.division(op), list[Move]()
        exchanged = tuple(exchanges(sharded, op)) if self._is_tpu_program else ()
        for exchange in exchanged:
            moved = Reshard(exchange.kind, exchange.value, exchange.over, exchange.sharding, False)
            factor = exchange.factor * (0.5 if is_rounded(self.traced.graph, op.outputs[exchange.output]) else 1.0)
            key = self._key(moved, group.phase, group.in_layers, factor)
            moves.append(Move(key, self._of(exchange.value, group.runs)))
        for shift in division.partition.shifts if division.partition else ():
            if not (exchanged and shift.kind == "all-gather" and shift.is_operand):
                moves += [self._moved(group, shift, key) for key in self._keys(group, shift)]
        rows = list[tuple[Any, ...]]()
        if op.name in RING and division.operands and division.operands.attention and division.partition:
            use, graph, of_q = division.operands.attention, self.traced.graph, op.inputs[0]
            properties = sharded.is_batched(of_q), dtype_name(graph.avals[of_q].dtype)
            products = matmul_rows(graph, op, use, sharded.resolver.mesh, *properties)
            rows += [in_group(row, group, (-1, 1, 0), group.runs) for row in products]
        if op.name in CONTRACTIONS and division.partition:
            is_expanded = self._expands_ragged and sums_rows(op)
            partition = expanded(sharded, op, division.partition) if is_expanded else division.partition
            row = matmul_row(sharded, op, partition)
            runs = self._distinct_runs(group)
            if self._is_tpu_program:
                row, factor = tpu_matmul(sharded, op, row)
                runs *= factor
            rows.append(in_group(row, group, of_experts(sharded, op, division.partition), runs))
        if self._is_tpu_program and division.partition:
            rows += self._kernel_rows(group, division.partition.work)
        return Counted(tuple(rows), tuple(moves))

    def _distinct_runs(self, group: OpGroup) -> int:
        """Returns how often the operations of a group run, without those that equal an earlier one."""
        return group.runs - sum(times for op, times in group.ops if op in self.traced.repeated)

    def _kernel_rows(self, group: OpGroup, work: int) -> Iterator[tuple[Any, ...]]:
        """Yields the rows of the matmuls into which a TPU's compiler expands an operation."""
        graph = self.traced.graph
        for matmul in kernel_matmuls(graph, group.op):
            shape = (matmul, work)
            runs = group.runs * matmul.count
            if matmul.is_shared:
                runs = int(shape not in self._shared)
                self._shared.add(shape)
            yield in_group(kernel_row(graph, group.op, matmul, work), group, (-1, 1, 0), runs)

    def _keys(self, group: OpGroup, shift: Reshard) -> list[tuple[Any, ...] | None]:
        """Returns the rows of a collective of a group; two for a sum that a TPU divides, or moves after a scatter."""
        place = group.phase, group.in_layers
        if not self._is_tpu_program or shift.kind != "reduce-scatter":
            return [self._key(shift, *place)]
        # Permutes move a sum in the dtype of its all-reduce.
        narrowing = self._num_bytes(replace(shift, kind="all-reduce")) / self._num_bytes(shift)
        if num_divided(self.sharded, group.op, self.sharded.division(group.op).partition) > 1:
            (summed, share), (permute, factor) = divided(self.sharded, shift)
            return [self._key(summed, *place, share), self._key(permute, *place, factor * narrowing)]
        halo = replace(shift, kind="collective-permute")
        factor = halo_shards(self.sharded, shift)
        return [self._key(shift, *place), *([self._key(halo, *place, factor * narrowing)] if factor else [])]

    def _moved(self, group: OpGroup, shift: Reshard, key: tuple[Any, ...] | None) -> Move:
        """Returns the collective of a group.

        A value that depends on no input is equal in every iteration of a loop, and is moved once before it.
        """
        if not shift.is_operand and self._only is None:
            return Move(key, self._distinct_runs(group), times=shift.times)
        index = (*group.op.inputs, *group.op.outputs).index(shift.value)
        values = [((*op.inputs, *op.outputs)[index], times) for op, times in group.ops]
        if not shift.is_operand:
            return Move(key, sum(self._of(value, times) for value, times in values), times=shift.times)
        origins = self.traced.axes.origins
        uses = [
            ((value, shift.kind, shift.over, shift.unchanged), self._of(value, times if origins[value] else 1))
            for value, times in values
        ]
        return Move(key, 0, tuple(uses), shift.times)

    def _wires(self, group: OpGroup) -> Counted:
        """Counts reshards between the outside and the inside of a loop, and between its iterations."""
        wires, moves = self.traced.graph.wires(group.op), list[Move]()
        num_trips = trips(group.op)
        for pairs, swap in ((wires.inputs, False), (wires.outputs, True)):
            for outer, inner in pairs:
                outside, inside = self.sharded.masks(outer), self.sharded.masks(inner)
                extra = len(outside) - len(inside)
                before, after = (inside, outside[extra:]) if swap else (outside[extra:], inside)
                runs = self._of(inner, group.runs * (num_trips if extra else 1))
                shifts = transition(inner, before, after, is_operand=False)
                moves += [Move(self._key(shift, group.phase, group.in_layers), runs) for shift in shifts]
        for first, last in wires.carried:
            shifts = transition(last, self.sharded.masks(last), self.sharded.masks(first), is_operand=False)
            runs = self._of(last, group.runs * num_trips)
            moves += [Move(self._key(shift, group.phase, group.in_layers), runs) for shift in shifts]
        return Counted((), tuple(moves))

    def _ends(self) -> Counted:
        moves = list[Move]()
        for old, new in self.traced.updated:
            shifts = transition(new, self.sharded.masks(new), self.sharded.masks(old), is_operand=False)
            moves += [Move(self._key(shift, Phase.UPDATE, False), self._of(new, 1)) for shift in shifts]
        return Counted((), tuple(moves))

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
                        self._move(-runs, group.phase, group.in_layers, shift)
                        remaining = replace(shift, over=shift.over & ~mask)
                        remaining = scattered(remaining, union(sharded.masks(shift.value)))
                        self._move(runs if remaining.over else 0, group.phase, group.in_layers, remaining)
            for value in set(group.op.outputs).intersection(late.ends) if group.op.bodies else ():
                axes = union(sharded.masks(value))
                shift = scattered(Reshard("all-reduce", value, sharded.mask(late.ends[value]), axes, False), axes)
                in_layers = not self.traced.layer_labels.isdisjoint(self.traced.sharding_keys[value].labels)
                self._move(self._of(value, group.runs), group.phase, in_layers, shift)

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
                for key in self._keys(right[1], right[2]):
                    self._add(-runs * right[2].times, key)

    def _summed(self, group: OpGroup, index: int) -> tuple[int, OpGroup, Reshard] | None:
        is_late = bool(self._late.sums) and any(op in self._late.sums for op, _ in group.ops)
        partitioned = None if is_late else self.sharded.division(group.op).partition
        sums = [shift for shift in partitioned.shifts if self._is_joined(shift)] if partitioned else []
        return (index, group, sums[0]) if len(sums) == 1 else None

    def _is_joined(self, shift: Reshard) -> bool:
        """Returns whether sums are added before they are reduced, scattered ones on TPUs only.

        Sums that a TPU's compiler converts before it reduces them are reduced one by one. Source: the gradients of the
        shared block of `tied` in tests/zoo.py, libtpu 0.0.52 for v5e:2x4.
        """
        is_reduced = shift.kind == "all-reduce" or (self._is_tpu_program and shift.kind == "reduce-scatter")
        return is_reduced and self._num_bytes(replace(shift, kind="all-reduce")) == self.sharded.num_bytes(shift.value)

    def _of(self, value: int, runs: int) -> int:
        return runs if self._only is None or value in self._only else 0

    def _key(self, shift: Reshard, phase: Phase, in_layers: bool, of_bytes: float = 1.0) -> tuple[Any, ...] | None:
        """Returns the row of a collective, without its number of runs; None for a uniform value."""
        if shift.value in self.traced.uniform:
            return None
        if self._is_tpu_program:
            shift, change = self._on_tpu(shift)
            of_bytes *= change
        is_batched = self.sharded.is_batched(shift.value)
        num_bytes, unchanged = self._num_bytes(shift) * of_bytes, shift.unchanged & ~shift.over
        place = int(phase), in_layers, not is_batched
        return KINDS.index(shift.kind), num_bytes, shift.over, unchanged, is_batched, *place

    def _move(self, runs: int, phase: Phase, in_layers: bool, shift: Reshard) -> None:
        self._add(runs * shift.times, self._key(shift, phase, in_layers))

    def _add(self, runs: int, key: tuple[Any, ...] | None) -> None:
        if runs and key is not None:
            self._moves[key] += runs

    def _on_tpu(self, shift: Reshard) -> tuple[Reshard, float]:
        """Returns a collective as a TPU runs it, and the factor by which its bytes change."""
        if shift.kind in SUMS:
            factor = num_parts(self.traced.graph, shift.value)
            if shift.kind == "reduce-scatter":
                shift, padding = as_tiles(self.sharded, shift)
                factor *= padding
            if is_gathered_sum(self.traced.graph, shift.value):
                # One dim is gathered as the sum of zero-padded shards, as small parameters are.
                kind = "all-gather" if len(self.traced.graph.shape(shift.value)) > 1 else "all-reduce"
                return replace(shift, kind=kind), float(ways(self.sharded, shift.over))
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


def _memory_traffic(sharded: ShardedProgram) -> MemoryTraffic:
    rows: dict[tuple[Any, ...], float] = defaultdict(float)
    traced = sharded.traced
    for number, place, num_bytes in traced.touched_bytes:
        rows[sharded.axes_of(number), *place] += num_bytes
    kernels = np.asarray(traced.memory_traffic.kernels, float)
    return table(MemoryTraffic, [(num_bytes, *key) for key, num_bytes in rows.items()], kernels=kernels)


def _host_copies(sharded: ShardedProgram) -> HostCopies:
    graph, rows = sharded.traced.graph, list[tuple[Any, ...]]()
    for op, runs in sharded.traced.host_copies:
        (value,), (copy,) = op.inputs, op.outputs
        mask, is_batched = union(sharded.masks(value)), sharded.is_batched(value)
        rows.append((runs * sharded.num_bytes(value), mask, is_batched, graph.is_on_host(copy)))
    return table(HostCopies, rows)
