"""Counts the cost terms of one layout in one walk over a program's groups of operations."""

import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Container, Iterable
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from spanax.plan.sharding.partition import Masks, Reshard, reductions, transition, union
from spanax.plan.spmd.compiler import Compiler
from spanax.plan.spmd.deferred_reductions import DeferredReductions
from spanax.plan.spmd.matmul_rows import dtype_name, expanded, expert_axes, matmul_row, sums_rows, with_rows
from spanax.plan.spmd.own_kernels import kernel_rows
from spanax.plan.spmd.ring_attention import matmul_rows
from spanax.plan.spmd.sharded_program import ShardedProgram, scattered
from spanax.plan.spmd.terms import KINDS, Collectives, HostCopies, Matmul, Matmuls, MemoryTraffic, Terms, table
from spanax.plan.spmd.tiled_scatter import is_rounded, is_windowed_alone, is_windowed_sum, narrowest_copy_bytes
from spanax.trace.analysis.op_groups import GradientSum, OpGroup, Phase, ancestors_of_loss, phase_of_values, trips
from spanax.trace.jaxpr.graph import CONTRACTIONS, OWN_KERNEL, Op
from spanax.trace.rewrites.attention.operation import RING


def count_terms(
    sharded: ShardedProgram,
    only: frozenset[int] | None = None,
    *,
    compiler: Compiler | None = None,
    late: DeferredReductions | None = None,
    left_out: Container[Op] = (),
) -> Terms:
    """Returns the cost terms of a layout, counted in one walk over the program's groups of operations.

    Args:
      sharded: the program's step under the layout; with sums that the compiler all-reduces, on a mesh with its sizes.
      only: count the collectives of these values alone, such as those of one leaf
      (`spanax.trace.analysis.liveness`).
      compiler: what the compiler changes; nothing by default.
      late: the reductions that loops defer; none by default.
      left_out: operations that are not counted, for a lower bound.
    """
    counter = _counted(sharded, only, compiler or Compiler(), late, left_out)
    carry, num_layers = sharded.traced.layer_carry
    num_bytes = 0 if carry is None else sharded.num_bytes(carry)
    matmuls = table(Matmuls, counter.matmul_rows)
    tables = matmuls, _memory_traffic(sharded), _collectives(counter.moves.items()), _host_copies(sharded)
    return Terms(sharded.resolver.mesh.names, *tables, num_bytes, num_layers)


def collectives_by_value(
    sharded: ShardedProgram, *, compiler: Compiler | None = None, late: DeferredReductions | None = None
) -> dict[tuple[int, Phase], Collectives]:
    """Returns the collectives of `count_terms` by the value that they move and by phase; equal values have equal parts.

    The sum of gradients after a loop over microbatches is part of the backward pass.
    """
    traced = sharded.traced
    forward = ancestors_of_loss(traced.traced)
    moved = _moved_alike(sharded)
    moves: dict[tuple[int, Phase], list[tuple[tuple[Any, ...], float]]] = defaultdict(list)
    for key, runs in _counted(sharded, None, compiler or Compiler(), late).moves.items():
        phase = max(key[5], phase_of_values(traced.axes, key[-1:], forward))
        alike = moved.get(key[-1], {key[-1]: 1})
        for value, times in alike.items():
            moves[value, Phase(phase)].append((key, runs * times / sum(alike.values())))
    return {place: _collectives(rows) for place, rows in moves.items()}


def _moved_alike(sharded: ShardedProgram) -> dict[int, Counter[int]]:
    """Returns, for the values of the first operation of a group that move, those of all, with their numbers of runs."""
    result: dict[int, Counter[int]] = defaultdict(Counter)
    for group in sharded.traced.op_groups:
        partition = None if group.op.bodies else sharded.division(group.op).partition
        for moved in {shift.value for shift in partition.shifts} if partition else ():
            index = (*group.op.inputs, *group.op.outputs).index(moved)
            for op, times in group.ops:
                result[moved][(*op.inputs, *op.outputs)[index]] += times
    return result


def matmuls_by_group(sharded: ShardedProgram, *, compiler: Compiler | None = None) -> tuple[list[OpGroup], Matmuls]:
    """Returns the matmuls of `count_terms`, and the group of operations of each."""
    counter = _TermCounter(sharded, None, DeferredReductions(), compiler or Compiler())
    groups = list[OpGroup]()
    for group in sharded.traced.op_groups:
        if group.op not in sharded.traced.inert:
            counter.add(group)
            groups += [group] * (len(counter.matmul_rows) - len(groups))
    return groups, table(Matmuls, counter.matmul_rows)


def _counted(
    sharded: ShardedProgram,
    only: frozenset[int] | None,
    compiler: Compiler,
    late: DeferredReductions | None,
    left_out: Container[Op] = (),
) -> "_TermCounter":
    counter = _TermCounter(sharded, only, late or DeferredReductions(), compiler)
    traced = sharded.traced
    for group in traced.op_groups:
        if group.op not in traced.inert and group.op not in left_out:
            counter.add(group)
    counter.add_ends()
    counter.defer()
    for gradient_sum in traced.gradient_sums if compiler.adds_first else ():
        counter.join(gradient_sum)
    return counter


class Move(NamedTuple):
    """A collective of a group of operations.

    Attributes:
      key: its row of `Collectives`, without the number of runs, and its value; None if that needs no communication.
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

    matmuls: tuple[Matmul, ...]
    moves: tuple[Move, ...]


class _TermCounter:
    """Accumulates the rows of the terms; equal collectives of a value are counted together."""

    def __init__(
        self, sharded: ShardedProgram, only: frozenset[int] | None, late: DeferredReductions, compiler: Compiler
    ):
        self.sharded = sharded
        self.traced = sharded.traced
        self._only = only
        self._late = late
        self._compiler = compiler
        self.matmul_rows: list[Matmul] = []
        self.moves: dict[tuple[Any, ...], int] = defaultdict(int)
        self._gathered = set[tuple[int, str, int, int]]()
        # What is all-reduced depends on the sizes of the mesh, and `only` on the values.
        is_shared = only is None and not compiler.all_reduced
        self._known: dict[tuple[object, ...], Counted] = sharded.cache.counted if is_shared else {}

    def add(self, group: OpGroup) -> None:
        """Counts one group of operations."""
        op = group.op
        sharded = self.sharded
        if op.bodies:
            self._count((op, *[sharded.numbers[key] for key in self.traced.wire_keys[op]]), self._wires, group)
        else:
            self._count((op, sharded.division(op)), self._group, group)

    def add_ends(self) -> None:
        """Counts reshards of state leaves that the step returns with another sharding than their stored one."""
        keys = self.traced.sharding_keys
        numbers = self.sharded.numbers
        self._count(
            (None, *[numbers[keys[value].number] for pair in self.traced.updated for value in pair]), self._ends
        )

    def _count(self, key: tuple[object, ...], count: Callable[..., Counted], *of: Any) -> None:
        """Adds what `count` returns for `of`, from the cache where the layout of the key is known."""
        key = (*key, self._compiler)
        counted = self._known.get(key)
        if counted is None:
            counted = self._known[key] = count(*of)
        self.matmul_rows += counted.matmuls
        gathered = self._gathered
        moves = self.moves
        for row, runs, uses, times in counted.moves:
            for use, number in uses:
                if use not in gathered:
                    gathered.add(use)
                    runs += number
            if runs and row is not None:
                moves[row] += runs * times

    def _group(self, group: OpGroup) -> Counted:
        op = group.op
        sharded = self.sharded
        division = sharded.division(op)
        moves = list[Move]()
        for shift in division.partition.shifts if division.partition else ():
            for each in (self._compiler.sends_rows and shift.instead) or (shift,):
                moves.append(self._moved(group, each, self._key(each, group.phase, group.in_layers)))
        rows = list[Matmul]()
        if op.name in RING and division.operands and division.operands.attention and division.partition:
            use = division.operands.attention
            graph = self.traced.graph
            of_q = op.inputs[0]
            properties = sharded.is_batched(of_q), dtype_name(graph.avals[of_q].dtype)
            rows += matmul_rows(graph, group, use, sharded.resolver.mesh, *properties)
        if op.name == OWN_KERNEL:
            rows += kernel_rows(sharded, group)
        if op.name in CONTRACTIONS and division.partition:
            by_row = None if division.operands is None else division.operands.rows
            is_expanded = self._compiler.expands_ragged and sums_rows(op) and by_row is None
            partition = expanded(sharded, op, division.partition) if is_expanded else division.partition
            experts = expert_axes(sharded, op, division.partition)
            row = matmul_row(sharded, group, partition, self._distinct_runs(group), experts)
            excess = math.prod(each.excess for each in division.operands.halos) if division.operands else 1.0
            rows.append(with_rows(row, excess if by_row is None else by_row.share))
        return Counted(tuple(rows), tuple(moves))

    def _distinct_runs(self, group: OpGroup) -> int:
        """Returns how often the operations of a group run, without those that equal an earlier one."""
        return group.runs - sum(times for op, times in group.ops if op in self.traced.repeated)

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
        wires = self.traced.graph.wires(group.op)
        moves = list[Move]()
        num_trips = trips(group.op)
        for outer, inner in wires.inputs:
            if outer in self.traced.uniform:
                continue
            before, after, times = self._ends_of(outer, inner, num_trips)
            runs = self._of(inner, group.runs * times)
            for shift in transition(inner, before, after, is_operand=False):
                # Loops of one body share a value that is resharded before them.
                use = (outer, shift.kind, shift.over, shift.unchanged), runs
                moves.append(Move(self._key(shift, group.phase, group.in_layers), 0, (use,)))
        for outer, inner in wires.outputs:
            after, before, times = self._ends_of(outer, inner, num_trips)
            runs = self._of(inner, group.runs * times)
            shifts = transition(inner, before, after, is_operand=False)
            moves += [Move(self._key(shift, group.phase, group.in_layers), runs) for shift in shifts]
        for first, last in wires.carried:
            shifts = transition(last, self.sharded.masks(last), self.sharded.masks(first), is_operand=False)
            runs = self._of(last, group.runs * num_trips)
            moves += [Move(self._key(shift, group.phase, group.in_layers), runs) for shift in shifts]
        return Counted((), tuple(moves))

    def _ends_of(self, outer: int, inner: int, num_trips: int) -> tuple[Masks, Masks, int]:
        """Returns the sharding of a value outside and inside of a loop, and how often it passes between them."""
        outside = self.sharded.masks(outer)
        inside = self.sharded.masks(inner)
        extra = len(outside) - len(inside)
        return outside[extra:], inside, num_trips if extra else 1

    def _ends(self) -> Counted:
        moves = list[Move]()
        for old, new in self.traced.updated:
            shifts = transition(new, self.sharded.masks(new), self.sharded.masks(old), is_operand=False)
            moves += [Move(self._key(shift, Phase.UPDATE, False), self._of(new, 1)) for shift in shifts]
        return Counted((), tuple(moves))

    def defer(self) -> None:
        """Removes the reductions that loops defer, and counts those after the loops."""
        late = self._late
        sharded = self.sharded
        for group in self.traced.op_groups if late.sums else ():
            for op, count in group.ops if group.op.outputs else ():
                partitioned = sharded.division(op).partition if op in late.sums else None
                alike = dict(zip(self.traced.alike[op].outputs, op.outputs, strict=True))
                for shift in partitioned.shifts if partitioned else ():
                    mask = sharded.mask(late.of(alike.get(shift.value, -1)))
                    if shift.kind == "all-reduce" and mask:
                        runs = self._of(alike[shift.value], count)
                        self._move(-runs, group.phase, group.in_layers, shift)
                        remaining = replace(shift, over=shift.over & ~mask)
                        remaining = scattered(remaining, union(sharded.masks(shift.value)))
                        self._move(runs if remaining.over else 0, group.phase, group.in_layers, remaining)
            for value in set(group.op.outputs).intersection(late.ends) if group.op.bodies else ():
                over = sharded.mask(late.ends[value])
                requested = sharded.masks(value)
                in_layers = not self.traced.layer_labels.isdisjoint(self.traced.sharding_keys[value].labels)
                summed = tuple(mask & ~over for mask in requested)
                for shift in reductions(value, [over], summed, requested, is_eager=True):
                    self._move(self._of(value, group.runs), group.phase, in_layers, shift)

    def join(self, gradient_sum: GradientSum) -> None:
        """Removes reductions of results that are only added to results with an equal reduction."""
        needed = list[tuple[int, OpGroup, Reshard] | None]()  # the reduction of each part, if it has exactly one
        counter = itertools.count()
        for group in gradient_sum.sums:
            if group is not None:
                needed.append(self._summed(group, next(counter)))
                continue
            right = needed.pop()
            left = needed.pop()
            is_equal = left and right and replace(left[2], value=0) == replace(right[2], value=0)
            needed.append(left if is_equal else None)
            if right and is_equal:
                runs = sum(self._of(values[right[0]], runs) for values, runs in gradient_sum.occurrences)
                self._move(-runs, right[1].phase, right[1].in_layers, right[2])

    def _summed(self, group: OpGroup, index: int) -> tuple[int, OpGroup, Reshard] | None:
        is_late = bool(self._late.sums) and any(op in self._late.sums for op, _ in group.ops)
        partitioned = None if is_late else self.sharded.division(group.op).partition
        sums = [shift for shift in partitioned.shifts if self._is_joined(shift)] if partitioned else []
        return (index, group, sums[0]) if len(sums) == 1 else None

    def _is_joined(self, shift: Reshard) -> bool:
        """Returns whether sums are added before they are reduced.

        Sums that a TPU's compiler converts before it reduces them are reduced one by one, and so are windowed ones.
        Source: the gradients of the shared block of `tied` in tests/zoo.py, libtpu 0.0.52 for v5e:2x4.
        """
        if shift.kind == "all-reduce":
            return self._num_bytes(shift) == self.sharded.num_bytes(shift.value)
        is_windowed = self._compiler.narrows_first and is_windowed_alone(self.sharded, shift)
        return shift.kind == "reduce-scatter" and not is_windowed

    def _of(self, value: int, runs: int) -> int:
        return runs if self._only is None or value in self._only else 0

    def _key(self, shift: Reshard, phase: Phase, in_layers: bool) -> tuple[Any, ...] | None:
        """Returns the row of a collective, without its number of runs, and its value; None for a uniform value."""
        if shift.value in self.traced.uniform:
            return None
        if shift.kind == "reduce-scatter" and self._is_all_reduced(shift):
            shift = replace(shift, kind="all-reduce")
        is_batched = self.sharded.is_batched(shift.value)
        num_bytes = self._num_bytes(shift)
        unchanged = shift.unchanged & ~shift.over
        place = int(phase), in_layers, not is_batched
        return KINDS.index(shift.kind), num_bytes, shift.over, unchanged, is_batched, *place, shift.value

    def _move(self, runs: int, phase: Phase, in_layers: bool, shift: Reshard) -> None:
        key = self._key(shift, phase, in_layers)
        if runs and key is not None:
            self.moves[key] += runs * shift.times

    def _is_all_reduced(self, shift: Reshard) -> bool:
        """Returns whether a sum that is stored sharded is all-reduced; a loop of permutes scatters that of a matmul."""
        is_whole = self.sharded.ways(shift.over) == self._compiler.all_reduced
        return is_whole and not is_windowed_sum(self.sharded, shift)

    def _num_bytes(self, shift: Reshard) -> float:
        """Returns the global bytes of the value that moves; of a narrower copy where only that is used."""
        graph = self.traced.graph
        value = shift.value
        if self._compiler.narrows_first and shift.kind == "all-reduce":
            return narrowest_copy_bytes(graph, value)
        is_gather = shift.kind == "all-gather" and shift.is_operand
        is_halved = self._compiler.rounds_first and is_gather and is_rounded(graph, value)
        return self.sharded.num_bytes(value) * shift.share / (2 if is_halved else 1)


def _collectives(moves: Iterable[tuple[tuple[Any, ...], float]]) -> Collectives:
    """Returns the collectives, with the number of runs of equal ones, whatever their values."""
    total: dict[tuple[Any, ...], float] = defaultdict(int)
    for key, runs in moves:
        total[key[:-1]] += runs
    return table(Collectives, [(*key[:5], runs, *key[5:]) for key, runs in total.items() if runs])


def _memory_traffic(sharded: ShardedProgram) -> MemoryTraffic:
    rows: dict[tuple[Any, ...], float] = defaultdict(float)
    traced = sharded.traced
    for number, place, num_bytes in traced.touched_bytes:
        rows[sharded.axes_of(number), *place] += num_bytes
    kernels = np.asarray(traced.memory_traffic.kernels, float)
    return table(MemoryTraffic, [(num_bytes, *key) for key, num_bytes in rows.items()], kernels=kernels)


def _host_copies(sharded: ShardedProgram) -> HostCopies:
    graph = sharded.traced.graph
    copies = sharded.traced.host_copies
    bodies = sharded.traced.order.values() if copies else ()
    loops = {op: number for number, ops in enumerate(bodies) for op in ops if op.name == "device_put"}
    rows = list[tuple[Any, ...]]()
    for op, runs in copies:
        (value,) = op.inputs
        (copy,) = op.outputs
        mask = union(sharded.masks(value))
        is_batched = sharded.is_batched(value)
        num_bytes = runs * sharded.num_bytes(value)
        rows.append((num_bytes, mask, is_batched, graph.is_on_host(copy), loops[op], runs))
    return table(HostCopies, rows)
