"""Peak memory per device over a step, by walking the program in execution order.

A value is live from the kernel that writes it to the last kernel that reads it; a loop body adds to what is live around
it. A value inside a fused kernel takes no memory. Sizes are global bytes and the mesh axes that divide them, so one
walk serves all meshes on which a layout resolves equally.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from spanax.plan.cost.ring_attention import temporary_bytes
from spanax.plan.cost.roofline import shard_counts
from spanax.plan.cost.step_time import Grid
from spanax.plan.pipeline.bubble import num_in_flight
from spanax.plan.sharding.resolve import Constraint, Resolver, axes_of
from spanax.plan.spmd.partition import as_masks, union
from spanax.plan.spmd.sharded_program import ShardedProgram
from spanax.trace.analysis.liveness import Liveness
from spanax.trace.jaxpr.graph import CONTRACTIONS, Body, Op
from spanax.trace.rewrites.attention.operation import RING

Array = np.ndarray

GROUPS = ("activations", "gradients", "gathered weights")
"""The groups of memory in addition to the state."""

ACTIVATIONS, GRADIENTS, WEIGHTS = range(len(GROUPS))

STATE_GROUPS = {"param": "parameters", "optimizer": "optimizer", "other": "other state", "batch": "batch"}
"""The memory group of each kind of leaf."""

Column = tuple[int, bool, bool, bool, int]
"""Values that are divided equally: sharding, grows with the batch, stacked by layer, attention scores, group."""


@dataclass(frozen=True, eq=False)
class Level:
    """The peak moments of one body: global bytes by (moment, column), and the bodies that run at some of them."""

    live_bytes: Array
    columns: tuple[Column, ...]
    inside: dict[int, tuple["Level", ...]]


@dataclass(frozen=True, eq=False)
class State:
    """Leaves of the state and the batch: kind, global bytes, the axes that shard them, whether stacked by layer.

    Equally sharded leaves are merged. Each parameter also has its gradient, sharded as it is when accumulated.
    """

    kind: tuple[str, ...]
    num_bytes: Array
    axes: Array
    stacked: Array


@dataclass(frozen=True, eq=False)
class MemoryUse:
    """Bytes per device by group, one entry per candidate; `peak_bytes` is their sum."""

    groups: dict[str, Array]
    peak_bytes: Array


def state_of(resolver: Resolver) -> State:
    """Returns the leaves of the state and of the batch, sharded as in the plan's placements."""
    program, bits = resolver.program, {axis: 1 << index for index, axis in enumerate(resolver.mesh.names)}
    classes = program.step.axes.classes
    rows: dict[tuple[str, int, bool], int] = defaultdict(int)
    for leaf, value in zip((*program.leaves, *program.batch), program.step.graph.body.inputs, strict=True):
        labels = classes[value]
        spec, _ = resolver.placed(leaf, labels)
        is_stacked = not program.step.layer_labels.isdisjoint(labels)
        rows[leaf.kind, union(as_masks(spec, bits)), is_stacked] += leaf.num_bytes
        if leaf.kind == "param":
            spec = resolver.stored(resolver.used(labels, leaf.shape), labels, leaf.shape, "gradient")
            rows["gradient", union(as_masks(spec, bits)), is_stacked] += leaf.num_bytes
    kinds, axes, stacked = zip(*rows, strict=True)
    return State(kinds, np.asarray([*rows.values()], float), np.asarray(axes, int), np.asarray(stacked, bool))


def walk(sharded: ShardedProgram, *, is_tpu: bool = False) -> Level:
    """Returns the peak moments of a program under a layout, with the live ranges of a TPU's compiler or of others."""
    liveness = sharded.traced.tpu_liveness if is_tpu else sharded.traced.liveness
    return _level(sharded, liveness, sharded.traced.graph.body)


def memory_use(
    state: State,
    level: Level,
    sizes: Array,
    *,
    num_stages: Array,
    num_microbatches: Array,
    in_flight: Array,
    scale: Array,
    fused_attention: bool = False,
) -> MemoryUse:
    """Returns the bytes per device on every mesh.

    Args:
      state: the sharded leaves; the batch stays live until the step ends.
      level: the program's peak moments.
      sizes: a row per mesh axis, a column per mesh.
      num_stages: of the pipeline; they divide stacked layers, counted as fewer where some are padding.
      num_microbatches: if more than one, gradients are accumulated in a separate array.
      in_flight: the microbatches whose activations a stage stores at once.
      scale: the batch of one microbatch over the traced batch.
      fused_attention: whether attention scores stay on the chip.
    """
    num_shards = shard_counts(sizes)
    local = state.num_bytes[:, None] / num_shards[state.axes] / np.where(state.stacked[:, None], num_stages, 1)
    by_kind = {
        kind: local[np.asarray([leaf_kind == kind for leaf_kind in state.kind], bool)].sum(0)
        for kind in (*STATE_GROUPS, "gradient")
    }
    groups = {name: by_kind[kind] for kind, name in STATE_GROUPS.items()}
    groups["batch"] = groups["batch"] * scale * num_microbatches  # live from the start
    columns = _Columns(num_shards, scale, num_stages, in_flight, fused_attention)
    peak = _peak(level, columns)
    for index, name in enumerate(GROUPS):
        groups[name] = peak[index]
    groups["gradients"] = groups["gradients"] + np.where(num_microbatches > 1, by_kind["gradient"], 0.0)
    return MemoryUse(groups, sum(groups.values()))


def memory_per_device(state: State, level: Level, grid: Grid, *, fused_attention: bool = False) -> MemoryUse:
    """Returns the bytes per device on every mesh of a grid, under its pipeline schedule."""
    flying = num_in_flight(grid.schedule, grid.num_stages, grid.num_microbatches, grid.num_chunks)
    return memory_use(
        state,
        level,
        grid.sizes,
        num_stages=grid.shares,
        num_microbatches=grid.num_microbatches,
        in_flight=np.where(grid.num_stages > 1, flying, 1),
        scale=grid.scale,
        fused_attention=fused_attention,
    )


def _peak(level: Level, columns: "_Columns") -> Array:
    """Returns the bytes by group at the peak moment of each candidate: an array (group, candidate)."""
    shares = (
        np.stack([columns.share(column) for column in level.columns]) if level.columns else np.zeros((0, columns.count))
    )
    inside = {moment: _fullest_of([_peak(body, columns) for body in inner]) for moment, inner in level.inside.items()}
    totals = level.live_bytes @ shares
    for moment, inner in inside.items():
        totals[moment] += inner.sum(0)
    fullest = totals.argmax(0)
    groups = np.asarray([column[-1] for column in level.columns], int)
    peak_bytes = level.live_bytes[fullest].T * shares
    totals_by_group = np.stack([peak_bytes[groups == group].sum(0) for group in range(len(GROUPS))])
    for moment, inner in inside.items():
        totals_by_group += np.where(fullest == moment, inner, 0.0)
    return totals_by_group


def _fullest_of(arrays: Sequence[Array]) -> Array:
    """Returns, per candidate, the array (group, candidate) with the largest total."""
    stacked = np.stack(arrays)
    return np.take_along_axis(stacked, stacked.sum(1).argmax(0)[None, None], 0)[0]


class _Columns:
    """The share of a column's global bytes on one device."""

    def __init__(self, num_shards: Array, scale: Array, num_stages: Array, in_flight: Array, fused_attention: bool):
        self._num_shards, self._scale, self._stages, self._in_flight = num_shards, scale, num_stages, in_flight
        self._fused = fused_attention
        self.count = scale.shape[0]
        self._known: dict[Column, Array] = {}

    def share(self, column: Column) -> Array:
        """Returns one number per candidate."""
        if column not in self._known:
            axes, is_batched, is_stacked, is_score, _ = column
            share = 1.0 / self._num_shards[axes]
            if is_batched:
                share = share * self._scale * (self._in_flight if is_stacked else 1.0)
            if is_stacked:
                share = share / self._stages
            self._known[column] = share * (0.0 if is_score and self._fused else 1.0)
        return self._known[column]


def _level(sharded: ShardedProgram, liveness: Mapping[Body, Liveness], body: Body) -> Level:
    """Returns the moments of a body that may be its peak."""
    live, ops = liveness[body], sharded.traced.order[body]
    num_ops = len(ops)
    columns: dict[Column, int] = {}
    of_group = [columns.setdefault(_column(sharded, value), len(columns)) for value in live.values]
    spans = [*_gathered(sharded, ops), *_summed(sharded, ops), *_worked(sharded, ops)]
    of_span = [columns.setdefault(span.column, len(columns)) for span in spans]
    first = np.concatenate([live.first, np.asarray([span.first for span in spans], int)])
    last = np.concatenate([live.last, np.asarray([span.last for span in spans], int)])
    column = np.concatenate([np.asarray(of_group, int)[live.group], np.asarray(of_span, int)])
    num_bytes = np.concatenate([live.num_bytes[live.group], np.asarray([span.num_bytes for span in spans])])
    num_columns = len(columns)
    changes = np.bincount(first * num_columns + column, num_bytes, (num_ops + 2) * num_columns)
    changes -= np.bincount((last + 1) * num_columns + column, num_bytes, (num_ops + 2) * num_columns)
    live_bytes = changes.reshape(num_ops + 2, num_columns).cumsum(0)
    inside = {
        index: tuple(_level(sharded, liveness, inner_body) for inner_body in op.bodies)
        for index, op in enumerate(ops)
        if op.bodies
    }
    # Live bytes only grow until a live range ends.
    full = _fullest(live_bytes, np.setdiff1d(np.append(last[last < num_ops], max(num_ops - 1, 0)), list(inside)))
    moments = [*full, *inside]
    return Level(
        live_bytes[moments], tuple(columns), {len(full) + index: inner for index, inner in enumerate(inside.values())}
    )


@dataclass(frozen=True, slots=True)
class Span:
    """Bytes live only because of a layout, from one operation of a body to another, both included."""

    first: int
    last: int
    column: Column
    num_bytes: float


def _gathered(sharded: ShardedProgram, ops: Sequence[Op]) -> Iterator[Span]:
    """Yields stored weights in their used sharding, from the first gather to the last use."""
    spans: dict[tuple[int, Constraint], list[int]] = {}
    for index, op in enumerate(ops):
        use = None if op.bodies or op in sharded.traced.inert else sharded.division(op).operands
        if use is None or use.attention:
            continue
        for value, constraint in zip(op.inputs, use.inputs, strict=True):
            if constraint is not None:
                spans.setdefault((value, constraint), [index, index])[1] = index
    for (value, constraint), (first, last) in spans.items():
        axes = union(sharded.masks_of(value, constraint))
        yield Span(first, last, (axes, *_column(sharded, value)[1:-1], WEIGHTS), sharded.num_bytes(value))


def _summed(sharded: ShardedProgram, ops: Sequence[Op]) -> Iterator[Span]:
    """Yields sums that are replicated before they are scattered: gradients of stored weights.

    They are exchanged after the loops that follow, which do not need them.
    """
    last_loop = max((index for index, op in enumerate(ops) if op.bodies), default=0)
    for index, op in enumerate(ops):
        partitioned = sharded.division(op).partition if op.name in CONTRACTIONS else None
        for shift in partitioned.shifts if partitioned else ():
            if shift.kind == "reduce-scatter":
                (value,) = op.outputs
                column = (shift.unchanged, *_column(sharded, value)[1:])
                yield Span(index, max(index, last_loop), column, sharded.num_bytes(value))


def _worked(sharded: ShardedProgram, ops: Sequence[Op]) -> Iterator[Span]:
    """Yields the temporaries of ring attention."""
    for index, op in enumerate(ops):
        use = sharded.division(op).operands if op.name in RING else None
        if use is None or use.attention is None:
            continue
        for spec, num_bytes in temporary_bytes(sharded.traced.graph, op, use.attention, sharded.resolver.mesh):
            mask = sharded.mask([*axes_of(spec)])
            yield Span(index, index, (mask, *_column(sharded, op.inputs[0])[1:]), num_bytes)


def _column(sharded: ShardedProgram, value: int) -> Column:
    """Returns the column of a value in its own sharding."""
    traced, labels = sharded.traced, sharded.traced.sharding_keys[value].labels
    is_batched = sharded.is_batched(value)
    is_stacked = not traced.layer_labels.isdisjoint(labels)
    group = ACTIVATIONS if is_batched or not labels else GRADIENTS
    return union(sharded.masks(value)), is_batched, is_stacked, labels in traced.score_labels, group


def _fullest(live_bytes: Array, rows: Array) -> list[int]:
    """Returns the rows that no other row exceeds in every column."""
    rows, result = rows[np.argsort(-live_bytes[rows].sum(1), kind="stable")], []
    while rows.size:
        result.append(int(rows[0]))
        rows = rows[~(live_bytes[rows] <= live_bytes[rows[0]]).all(1)]
    return result
