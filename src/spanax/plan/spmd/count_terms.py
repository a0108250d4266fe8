"""Counts the cost terms of one layout in one walk over a program's groups of operations."""

import itertools
import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from spanax.plan.cost.ring_attention import works
from spanax.plan.cost.terms import KINDS, Collectives, Matmuls, MemoryTraffic, Terms
from spanax.plan.spmd.deferred_reductions import DeferredReductions
from spanax.plan.spmd.partition import PartitionedOp, Reshard, transition, union
from spanax.plan.spmd.sharded_program import ShardedProgram, scattered
from spanax.trace.analysis.gradient_accumulation import GradientSum
from spanax.trace.analysis.op_groups import OpGroup, Phase, contraction_dims, contraction_flops, trips
from spanax.trace.jaxpr.graph import CONTRACTIONS, Op
from spanax.trace.rewrites.attention.operation import RING


def count_terms(
    laid: ShardedProgram,
    only: frozenset[int] | None = None,
    *,
    adds_first: bool = False,
    late: DeferredReductions | None = None,
) -> Terms:
    """The terms of a layout on a program: one walk over its kinds of operations.

    Args:
      laid: the program's step under the layout.
      only: count the collectives of these values alone, as those of one leaf (`spanax.trace.analysis.leaf_aliases`).
      late: the sums over devices that loops put off; none if left out.
      adds_first: whether the compiler adds sums over devices before it has summed them, and sums once: those for TPUs
        and GPUs do, XLA's for CPUs does not. Source: the programs of docs/check.md.
    """
    traced, found = laid.traced, _TermCounter(laid, only, late or DeferredReductions())
    for kind in traced.op_groups:
        if kind.op not in traced.inert:
            found.add(kind)
    found.add_ends()
    found.defer()
    for meeting in traced.gradient_sums if adds_first else ():
        found.join(meeting)
    carry, num_layers = traced.layer_carry
    num_bytes = 0 if carry is None else laid.num_bytes(carry)
    return Terms(laid.resolver.mesh.names, found.matmuls(), _touches(laid), found.collectives(), num_bytes, num_layers)


class _TermCounter:
    """The rows of the terms as they are found; equal moves are counted together."""

    def __init__(self, laid: ShardedProgram, only: frozenset[int] | None, late: DeferredReductions):
        self.laid, self.traced, self._only, self._late = laid, laid.traced, only, late
        self._works: list[tuple[Any, ...]] = []
        self._moves: dict[tuple[Any, ...], int] = defaultdict(int)
        self._gathered = set[tuple[int, str, int, int]]()

    def add(self, kind: OpGroup) -> None:
        """Count one kind of operation."""
        op, laid = kind.op, self.laid
        if op.bodies:
            self._add_wires(kind)
            return
        division = laid.division(op)
        for shift in division.split.shifts if division.split else ():
            is_counted = shift.is_operand or self._only is not None
            self._move(self._runs(kind, shift) if is_counted else kind.runs, kind.phase, kind.in_layers, [shift])
        if op.name in RING and division.use and division.use.around and division.split:
            of_q = op.inputs[0]
            told = laid.is_batched(of_q), _dtype_name(self.traced.graph.avals[of_q].dtype)
            rows = works(self.traced.graph, op, division.use.around, laid.resolver.mesh, *told)
            self._works += [(*row, kind.runs, int(kind.phase), kind.in_layers) for row in rows]
        if op.name in CONTRACTIONS and division.split:
            known = laid.known.matmuls
            if division not in known:
                known[division] = _matmul(laid, op, division.split)
            self._works.append((*known[division], kind.runs, int(kind.phase), kind.in_layers))

    def _add_wires(self, kind: OpGroup) -> None:
        """Where a value is split otherwise outside of a loop than inside, or after a round than before."""
        wires = self.traced.graph.wires(kind.op)
        num_trips = trips(kind.op)
        for pairs, swap in ((wires.inputs, False), (wires.outputs, True)):
            for outer, inner in pairs:
                outside, inside = self.laid.masks(outer), self.laid.masks(inner)
                extra = len(outside) - len(inside)
                before, after = (inside, outside[extra:]) if swap else (outside[extra:], inside)
                runs = kind.runs * (num_trips if extra else 1)
                shifts = transition(inner, before, after, is_operand=False)
                self._move(self._of(inner, runs), kind.phase, kind.in_layers, shifts)
        for first, last in wires.carried:
            shifts = transition(last, self.laid.masks(last), self.laid.masks(first), is_operand=False)
            self._move(self._of(last, kind.runs * num_trips), kind.phase, kind.in_layers, shifts)

    def add_ends(self) -> None:
        """Where a leaf of the state comes out of the step otherwise than it is kept, which is as it went in."""
        body, num_leaves = self.traced.graph.body, len(self.traced.graph.body.outputs) - self.traced.num_results
        for old, new in zip(body.inputs[:num_leaves], body.outputs[:num_leaves], strict=True):
            shifts = transition(new, self.laid.masks(new), self.laid.masks(old), is_operand=False)
            self._move(self._of(new, 1), Phase.UPDATE, False, shifts)

    def defer(self) -> None:
        """Take back the sums over devices that loops put off, and count those behind the loops."""
        late, laid = self._late, self.laid
        for kind in self.traced.op_groups if late.sums else ():
            for op, runs in kind.ops:
                mask = laid.mask(late.of(op.outputs[0])) if op in late.sums else 0
                split = laid.division(op).split if mask else None
                runs = self._of(op.outputs[0], runs)
                for shift in split.shifts if split else ():
                    if shift.kind == "all-reduce":
                        self._move(-runs, kind.phase, kind.in_layers, [shift])
                        left = scattered(replace(shift, over=shift.over & ~mask), union(laid.masks(shift.value)))
                        self._move(runs if left.over else 0, kind.phase, kind.in_layers, [left])
            for value in set(kind.op.outputs).intersection(late.ends) if kind.op.bodies else ():
                lies = union(laid.masks(value))
                shift = scattered(Reshard("all-reduce", value, laid.mask(late.ends[value]), lies, False), lies)
                in_layers = not self.traced.layer_labels.isdisjoint(self.traced.sharding_keys[value].labels)
                self._move(self._of(value, kind.runs), kind.phase, in_layers, [shift])

    def join(self, meeting: GradientSum) -> None:
        """Take back the sums over devices of results that are added to others which are summed alike."""
        needed = list[tuple[int, OpGroup, Reshard] | None]()  # what each part needs, if it is one sum over devices
        at = itertools.count()
        for kind in meeting.sums:
            if kind is not None:
                needed.append(self._summed(kind, next(at)))
                continue
            right, left = needed.pop(), needed.pop()
            is_alike = left and right and (left[2].over, left[2].kept) == (right[2].over, right[2].kept)
            needed.append(left if is_alike else None)
            if right and is_alike:
                runs = sum(self._of(values[right[0]], runs) for values, runs in meeting.met)
                self._move(-runs, right[1].phase, right[1].in_layers, [right[2]])

    def _summed(self, kind: OpGroup, at: int) -> tuple[int, OpGroup, Reshard] | None:
        split = None if any(op in self._late.sums for op, _ in kind.ops) else self.laid.division(kind.op).split
        sums = [one for one in split.shifts if one.kind == "all-reduce"] if split else []
        return (at, kind, sums[0]) if len(sums) == 1 else None

    def _of(self, value: int, runs: int) -> int:
        return runs if self._only is None or value in self._only else 0

    def _runs(self, kind: OpGroup, shift: Reshard) -> int:
        """How often a value really moves: what one operation has gathered, others of the same body read too.

        What depends on no input is the same in every round of a loop, and is moved before it.
        """
        values, runs = (*kind.op.inputs, *kind.op.outputs), 0
        at = values.index(shift.value)
        for op, times in kind.ops:
            value = (*op.inputs, *op.outputs)[at]
            if shift.is_operand:
                key = (value, shift.kind, shift.over, shift.kept)
                times = 0 if key in self._gathered else times if self.traced.axes.origins[value] else 1
                self._gathered.add(key)
            runs += self._of(value, times)
        return runs

    def _move(self, runs: int, phase: Phase, in_layers: bool, shifts: Sequence[Reshard]) -> None:
        for shift in shifts:
            if not runs or shift.value in self.traced.uniform:
                continue
            key = (
                KINDS.index(shift.kind),
                self.laid.num_bytes(shift.value),
                shift.over,
                shift.kept & ~shift.over,
                self.laid.is_batched(shift.value),
                int(phase),
                in_layers,
                not self.laid.is_batched(shift.value),
            )
            self._moves[key] += runs * shift.times

    def matmuls(self) -> Matmuls:
        """The contractions, as arrays."""
        flops, work, sizes, splits, batched, num_bytes, bytes_splits, grows, *rest = _columns(self._works, 14)
        dtypes, scores, fused, runs, phase, inside = rest
        return Matmuls(
            flops=np.asarray(flops, float),
            work=np.asarray(work, int),
            sizes=np.asarray(sizes, float).reshape(-1, 4),
            splits=np.asarray(splits, int).reshape(-1, 4),
            batched=np.asarray(batched, int),
            num_bytes=np.asarray(num_bytes, float).reshape(-1, 3),
            bytes_splits=np.asarray(bytes_splits, int).reshape(-1, 3),
            bytes_batched=np.asarray(grows, bool).reshape(-1, 3),
            dtypes=tuple(dtypes),
            runs=np.asarray(runs, float),
            phase=np.asarray(phase, int),
            in_layers=np.asarray(inside, bool),
            scores=np.asarray(scores, bool).reshape(-1, 3),
            fused=np.asarray(fused, bool),
        )

    def collectives(self) -> Collectives:
        """The collectives, as arrays."""
        rows = [(*key, runs) for key, runs in self._moves.items() if runs]
        kind, num_bytes, over, kept, batched, phase, in_layers, of_weights, runs = _columns(rows, 9)
        return Collectives(
            kind=np.asarray(kind, int),
            num_bytes=np.asarray(num_bytes, float),
            over=np.asarray(over, int),
            kept=np.asarray(kept, int),
            batched=np.asarray(batched, bool),
            runs=np.asarray(runs, float),
            phase=np.asarray(phase, int),
            in_layers=np.asarray(in_layers, bool),
            of_weights=np.asarray(of_weights, bool),
        )


def _matmul(laid: ShardedProgram, op: Op, split: PartitionedOp) -> tuple[Any, ...]:
    """A row of `Matmuls` but for when it runs and how often."""
    traced, graph = laid.traced, laid.traced.graph
    summed, passed = contraction_dims(op)
    lhs, rhs, out = op.inputs[0], op.inputs[1], op.outputs[0]
    shape, labels = graph.shape(out), traced.axes.classes[out]
    groups: list[list[tuple[float, int, bool]]] = [[], [], [], []]  # m, n, k, separate products
    grows = traced.batch_labels
    for a, b, at in passed:
        where = 3 if a >= 0 and b >= 0 else 0 if a >= 0 else 1
        groups[where].append((shape[at], split.result[at], labels[at] in grows))
    for a, _ in summed:
        label = traced.axes.classes[lhs][a]
        groups[2].append((graph.shape(lhs)[a], split.operands[0][a], label in grows))
    flops = contraction_flops(graph, op)
    if op.name == "conv_general_dilated":
        _as_matmul(op, groups, shape, split, flops)
    values = (lhs, rhs, out)
    return (
        flops,
        split.work,
        [math.prod(size for size, _, _ in group) for group in groups],
        [union([mask for _, mask, _ in group]) for group in groups],
        next((at for at, group in enumerate(groups) if any(grow for _, _, grow in group)), -1),
        [laid.num_bytes(value) for value in values],
        [union(masks) for masks in (*split.operands[:2], split.result)],
        [laid.is_batched(value) for value in values],
        _dtype_name(graph.avals[lhs].dtype),
        [traced.sharding_keys[value].labels in traced.score_labels for value in values],
        False,
    )


def _as_matmul(
    op: Op, groups: list[list[tuple[float, int, bool]]], shape: Sequence[int], split: PartitionedOp, flops: int
) -> None:
    """Complete m, n, k and the number of products of a convolution: its places are rows, its window is summed over.

    The channels of a group see only those of the same group. Zeros between dilated inputs are not summed.
    """
    batch, _, *places = op.params["dimension_numbers"].out_spec
    rows = [batch, *places] if op.params["batch_group_count"] > 1 else places
    groups[0] += [(shape[at], split.result[at], False) for at in rows]
    num_groups = max(op.params["feature_group_count"], op.params["batch_group_count"])
    if num_groups > 1:
        ((channels, mask, grows),) = groups[3]
        groups[3] = [(num_groups, mask, grows)]
        groups[1].append((channels / num_groups, 0, False))
    counted = math.prod(size for size, _, _ in groups[2])
    groups[2].append((flops / (2 * math.prod(shape) * counted), 0, False))


def _touches(laid: ShardedProgram) -> MemoryTraffic:
    rows: dict[tuple[Any, ...], float] = defaultdict(float)
    traced = laid.traced
    for value, phase, in_layers, times in traced.memory_traffic.touched:
        is_score = traced.sharding_keys[value].labels in traced.score_labels
        rows[union(laid.masks(value)), laid.is_batched(value), phase, in_layers, is_score] += times * laid.num_bytes(
            value
        )
    split, batched, phases, inside, scores, num_bytes = _columns([(*key, size) for key, size in rows.items()], 6)
    return MemoryTraffic(
        num_bytes=np.asarray(num_bytes, float),
        split=np.asarray(split, int),
        batched=np.asarray(batched, bool),
        phase=np.asarray(phases, int),
        in_layers=np.asarray(inside, bool),
        scores=np.asarray(scores, bool),
        kernels=np.asarray(traced.memory_traffic.kernels, float),
    )


def _columns(rows: Sequence[tuple[Any, ...]], count: int) -> list[list[Any]]:
    return [[row[at] for row in rows] for at in range(count)]


def _dtype_name(dtype: Any) -> str:
    """What hardware calls the dtype of a matmul; integers and what is wider than float32 go by float32."""
    name = str(dtype)
    if name.startswith("float8"):
        return "fp8"
    return {"bfloat16": "bf16", "float16": "fp16", "int8": "int8", "uint8": "int8"}.get(name, "fp32")
