"""Peak memory per device over a step, by walking the program in execution order.

A value is live from the kernel that writes it to the last kernel that reads it; a loop body adds to what is live around
it. A value inside a fused kernel takes no memory. Sizes are global bytes and the mesh axes that divide them, so one
walk serves all meshes on which a layout resolves equally.
"""

import itertools
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from spanax.plan.cost.memory.columns import Column, Columns
from spanax.plan.cost.memory.moments import fullest
from spanax.plan.cost.memory.state import OFFLOADED, STATE_GROUPS, State, is_table, state_padding, table_copies
from spanax.plan.cost.memory.tables import Counts, counted, num_window_tuples, table_bytes
from spanax.plan.cost.memory.tiles import OnChip, Tiled
from spanax.plan.cost.roofline import shard_counts
from spanax.plan.cost.step_time import Grid
from spanax.plan.pipeline.bubble import num_in_flight, num_pending
from spanax.plan.sharding.partition import Masks, union
from spanax.plan.sharding.resolve import axes_of
from spanax.plan.spmd.ring_attention import temporary_bytes
from spanax.plan.spmd.sharded_program import ShardedProgram
from spanax.plan.spmd.tiled_scatter import LANES, WORD_BYTES
from spanax.trace.analysis.labels import Labels
from spanax.trace.analysis.liveness import SCATTERS, Liveness
from spanax.trace.jaxpr.dim_maps.windows import WINDOWED
from spanax.trace.jaxpr.graph import CONTRACTIONS, Body, Op
from spanax.trace.jaxpr.loops import LOOPS, const_pairs
from spanax.trace.rewrites.attention.operation import RING

Array = np.ndarray

GROUPS = ("activations", "gradients", "gathered weights")
"""The groups of memory in addition to the state."""

ACTIVATIONS, GRADIENTS, WEIGHTS = range(len(GROUPS))

COPIED_LEAVES = 4
"""The offloaded arrays that are on a device at once: two moments of the updated parameter, and of the next.

Source: an assumption. Compiled for v5e:2x4, gpt2 needs no more than without these arrays; where memory is free, TPU
compilers copy more of them at once (llama3-8b on v5e:2x4: 13.0 GB predicted, 15.3 GB of 16.9 GB compiled).
"""

PADDING = "padding of the state"
TABLES = "compiler's tables"
"""The groups of memory that only TPUs have."""

LIVE_MARGIN = 0.15
"""Fraction of the live values that an upper estimate for a TPU adds: fragmentation, and the order of operations.
Source: `python benchmarks/memory_cells.py`."""

MARGIN = 0.12
MARGIN_BYTES = 32 << 20
"""What an upper estimate for other chips adds, a fraction and bytes: for parts of sums, combined collectives, and the
workspaces of libraries, which small programs have as large ones do. Source: the programs in
tests/data/memory_cells.json."""

LARGE_SHARE = 1 / 64
"""Padding is computed for values of at least this share of the largest live bytes of a body; others are merged."""


@dataclass(frozen=True, eq=False)
class Level:
    """The peak moments of one body: global bytes by (moment, column), and the bodies that run at some of them.

    `counts` has the kernels, scalars and collectives of the body and of the bodies in it, for a TPU only.
    """

    live_bytes: Array
    columns: tuple[Column, ...]
    inside: dict[int, tuple["Level", ...]]
    counts: Counts = Counts()


@dataclass(frozen=True, eq=False)
class Meshes:
    """Candidates of one sharding, an element each.

    Attributes:
      sizes: a row per mesh axis, a column per mesh.
      num_stages: of the pipeline; they divide stacked layers, counted as fewer where some are padding.
      num_microbatches: if more than one, gradients are accumulated in a separate array.
      in_flight: the microbatches whose activations a stage stores at once.
      scale: the batch of one microbatch over the traced batch.
    """

    sizes: Array
    num_stages: Array
    num_microbatches: Array
    in_flight: Array
    scale: Array


@dataclass(frozen=True, eq=False)
class MemoryUse:
    """Bytes per device by group, one entry per candidate; `peak_bytes` is their sum, without those in host memory.

    `upper_bytes` is the upper estimate of the sum, by which a layout fits.
    """

    groups: dict[str, Array]
    peak_bytes: Array
    upper_bytes: Array
    host_bytes: Array

    def select(self, columns: Array | slice) -> "MemoryUse":
        """Returns the bytes of some candidates."""
        groups = {name: values[columns] for name, values in self.groups.items()}
        return MemoryUse(groups, self.peak_bytes[columns], self.upper_bytes[columns], self.host_bytes[columns])


def walk(sharded: ShardedProgram, *, is_tpu: bool = False, has_host: bool = True) -> Level:
    """Returns the peak moments of a program under a layout, with the live ranges of a TPU's compiler or of others.

    Without `has_host`, values in host memory are in that of the devices: both are one on simulated devices.
    """
    liveness = sharded.traced.tpu_liveness if is_tpu else sharded.traced.liveness
    return _level(sharded, liveness, sharded.traced.graph.body, has_host)


def ring_memory(sharded: ShardedProgram) -> list[object]:
    """Returns the collectives and temporaries of rings: with equal shardings, moments differ only if these do."""
    graph = sharded.traced.graph
    mesh = sharded.resolver.mesh
    result = list[object]()
    for op in (op for name in sorted(RING) for op in sharded.traced.first_ops.get(name, ())):
        division = sharded.division(op)
        use = None if division.operands is None else division.operands.attention
        result.append((division.partition, use and temporary_bytes(graph, op, use, mesh)))
    return result


def memory_use(
    state: State,
    level: Level,
    meshes: Meshes,
    *,
    fused_attention: bool = False,
    on_chip: OnChip | None = None,
) -> MemoryUse:
    """Returns the bytes per device on every mesh.

    Args:
      state: the sharded leaves; the batch stays live until the step ends.
      level: the program's peak moments.
      meshes: the candidates.
      fused_attention: whether attention scores stay on the chip.
      on_chip: the compiler-managed memory of a TPU, which also pads arrays; None: no array is padded.
    """
    num_stages = meshes.num_stages
    num_microbatches = meshes.num_microbatches
    scale = meshes.scale
    num_shards = shard_counts(meshes.sizes)
    by_kind = {kind: state.local_bytes(kind, num_shards, num_stages) for kind in (*STATE_GROUPS, "gradient", OFFLOADED)}
    groups = {name: by_kind[kind] for kind, name in STATE_GROUPS.items()}
    groups["batch"] = groups["batch"] * scale * num_microbatches  # live from the start
    columns = Columns(num_shards, scale, num_stages, meshes.in_flight, fused_attention, on_chip)
    peak = _peak(level, columns)
    if on_chip is not None:
        total = peak[: len(GROUPS)].sum(0)
        small = peak[len(GROUPS)]
        peak = peak[: len(GROUPS)] * on_chip.share_in_main_memory(total, small)
        groups[PADDING] = state_padding(state, num_shards, scale, num_stages)
        windows = num_window_tuples(level.counts.sums, num_shards, scale)
        groups[TABLES] = table_bytes(state, level.counts, on_chip.free_share(total), windows)
    for index, name in enumerate(GROUPS):
        groups[name] = peak[index]
    updated = COPIED_LEAVES * state.largest_bytes(OFFLOADED, num_shards, num_stages)
    # Activations are freed before the update.
    groups["optimizer"] = groups["optimizer"] + np.maximum(updated - groups["activations"], 0.0)
    groups["gradients"] = groups["gradients"] + np.where(num_microbatches > 1, by_kind["gradient"], 0.0)
    host_bytes = by_kind[OFFLOADED] + _host_bytes(level, columns)
    peak_bytes = np.sum([*groups.values()], 0)
    if on_chip is None:
        upper = peak_bytes * (1 + MARGIN) + MARGIN_BYTES
    else:
        live = on_chip.most_in_main_memory(_upper(level, columns))
        live = np.maximum(live, table_copies(state, num_shards, scale, num_stages))
        tables = table_bytes(state, level.counts, np.ones(1), windows, is_upper=True)
        upper = peak_bytes - peak.sum(0) - groups[TABLES] + (1 + LIVE_MARGIN) * live + tables
    return MemoryUse(groups, peak_bytes, np.maximum(upper, peak_bytes), host_bytes)


def memory_per_device(
    state: State,
    level: Level,
    grids: Sequence[Grid],
    *,
    fused_attention: bool = False,
    on_chip: OnChip | None = None,
) -> list[MemoryUse]:
    """Returns the bytes per device on every mesh of some grids, each under its pipeline schedule.

    The operands of a pending weight gradient count as much as the activations of a microbatch: each matmul needs the
    gradient of its output along with its input.
    """
    columns = [(*grid.sizes, grid.shares, grid.num_microbatches, _num_in_flight(grid), grid.scale) for grid in grids]
    *sizes, num_stages, num_microbatches, in_flight, scale = map(np.concatenate, zip(*columns, strict=True))
    meshes = Meshes(np.stack(sizes), num_stages, num_microbatches, in_flight, scale)
    memory = memory_use(state, level, meshes, fused_attention=fused_attention, on_chip=on_chip)
    ends = np.cumsum([grid.scale.size for grid in grids]).tolist()
    return [memory.select(slice(start, end)) for start, end in itertools.pairwise([0, *ends])]


def _num_in_flight(grid: Grid) -> Array:
    """Returns the microbatches whose activations a stage stores at once; one in a single chunk counts as its share."""
    flying = num_in_flight(grid.schedule, grid.num_stages, grid.num_microbatches, grid.num_chunks) / grid.num_chunks
    flying = flying + num_pending(grid.schedule, grid.num_stages, grid.num_microbatches)
    return np.where(grid.num_stages > 1, flying, 1)


def _peak(level: Level, columns: Columns) -> Array:
    """Returns the bytes by group at the peak moment of each candidate: an array (group, candidate).

    One more row has the bytes of the values that are small enough for the memory on the chip.
    """
    shares = (
        np.stack([columns.share(column) for column in level.columns]) if level.columns else np.zeros((0, columns.count))
    )
    inside = {moment: _fullest_of([_peak(body, columns) for body in inner]) for moment, inner in level.inside.items()}
    totals = level.live_bytes @ shares
    for moment, inner in inside.items():
        totals[moment] += inner[: len(GROUPS)].sum(0)
    fullest = totals.argmax(0)
    groups = np.asarray([column.group for column in level.columns], int)
    peak_bytes = level.live_bytes[fullest].T * shares
    small = np.asarray([columns.is_small(column) for column in level.columns]).reshape(peak_bytes.shape)
    totals_by_group = np.stack(
        [*(peak_bytes[groups == group].sum(0) for group in range(len(GROUPS))), (peak_bytes * small).sum(0)]
    )
    for moment, inner in inside.items():
        totals_by_group += np.where(fullest == moment, inner, 0.0)
    return totals_by_group


def _upper(level: Level, columns: Columns) -> Array:
    """Returns the most live bytes of each candidate, with every value in its largest form."""
    shares = [columns.share(column, is_upper=True) for column in level.columns]
    totals = level.live_bytes @ np.reshape(shares, (len(level.columns), columns.count))
    for moment, inner in level.inside.items():
        totals[moment] += np.max([_upper(body, columns) for body in inner], 0)
    return np.asarray(totals.max(0, initial=0.0))


def _host_bytes(level: Level, columns: Columns) -> Array:
    """Returns the largest bytes of values in host memory at one moment, for each candidate."""
    rows = [index for index, column in enumerate(level.columns) if column.is_on_host]
    shares = [columns.share(level.columns[row]._replace(is_on_host=False)) for row in rows]
    totals = level.live_bytes[:, rows] @ np.reshape(shares, (len(rows), columns.count))
    for moment, inner in level.inside.items():
        totals[moment] += np.max([_host_bytes(body, columns) for body in inner], 0)
    return np.asarray(totals.max(0, initial=0.0))


def _fullest_of(arrays: Sequence[Array]) -> Array:
    """Returns, per candidate, the array (group, candidate) with the largest total."""
    stacked = np.stack(arrays)
    return np.take_along_axis(stacked, stacked[:, : len(GROUPS)].sum(1).argmax(0)[None, None], 0)[0]


def _level(sharded: ShardedProgram, liveness: Mapping[Body, Liveness], body: Body, has_host: bool) -> Level:
    """Returns the moments of a body that may be its peak."""
    live = liveness[body]
    ops = sharded.traced.order[body]
    num_ops = len(ops)
    columns: dict[Column, int] = {}
    is_tpu = liveness is sharded.traced.tpu_liveness
    largest = live.num_bytes.max(initial=0.0) * LARGE_SHARE if is_tpu else math.inf
    on_host = {value for value in live.values if sharded.traced.graph.is_on_host(value)} if has_host else set()
    on_host.difference_update(body.inputs)  # copied to the device
    of_group = []
    for value, is_tiled in zip(live.values, (live.num_bytes >= largest).tolist(), strict=True):
        column = _column(sharded, value, is_tiled=is_tiled)
        column = column._replace(is_on_host=True) if value in on_host else column
        of_group.append(columns.setdefault(column, len(columns)))
    stored = sharded.traced.memory_plans[body].kept
    divided = sharded.traced.divided[body]
    spans = [*_gathered(sharded, ops, stored), *_summed(sharded, body, divided), *_worked(sharded, divided)]
    spans += (*_row_major(sharded, divided), *_windows(sharded, divided)) if is_tpu else ()
    spans += _reduced(sharded, live, ops) if is_tpu and body is sharded.traced.graph.body else ()
    of_span = [columns.setdefault(span.column, len(columns)) for span in spans]
    first = np.concatenate([live.first, np.asarray([span.first for span in spans], int)])
    last = np.concatenate([live.last, np.asarray([span.last for span in spans], int)])
    rows = np.concatenate([np.asarray(of_group, int)[live.group], np.asarray(of_span, int)])
    num_bytes = np.concatenate([live.num_bytes[live.group], np.asarray([span.num_bytes for span in spans], float)])
    num_columns = len(columns)
    changes = np.bincount(first * num_columns + rows, num_bytes, (num_ops + 2) * num_columns)
    changes -= np.bincount((last + 1) * num_columns + rows, num_bytes, (num_ops + 2) * num_columns)
    live_bytes = changes.reshape(num_ops + 2, num_columns).cumsum(0)
    inside = {
        index: tuple(_level(sharded, liveness, inner_body, has_host) for inner_body in op.bodies)
        for index, op in enumerate(ops)
        if op.bodies
    }
    # Live bytes only grow until a live range ends.
    full = fullest(live_bytes, np.setdiff1d(np.append(last[last < num_ops], max(num_ops - 1, 0)), list(inside)))
    moments = [*full, *inside]
    counts = [each.counts for inner in inside.values() for each in inner]
    return Level(
        live_bytes[moments],
        tuple(columns),
        {len(full) + index: inner for index, inner in enumerate(inside.values())},
        sum(counts, counted(sharded, live, body, ops)) if is_tpu else Counts(),
    )


@dataclass(frozen=True, slots=True)
class Span:
    """Bytes live only because of a layout, from one operation of a body to another, both included."""

    first: int
    last: int
    column: Column
    num_bytes: float


def _gathered(sharded: ShardedProgram, ops: Sequence[Op], stored: Collection[int]) -> Iterator[Span]:
    """Yields operands as an operation or a loop uses them, if it gathers them: from the first such use to the last.

    An operation that is fused into its consumers, such as a transposition, uses its operands until they run.
    """
    spans: dict[tuple[int, Masks], list[int]] = {}
    fused = dict[int, list[list[int]]]()
    for index, op in enumerate(ops):
        passed = [span for value in op.inputs for span in fused.get(value, ())] if fused else []
        for span in passed:
            span[1] = index
        for value, inner in const_pairs(sharded.traced.graph, op) if op.name in LOOPS else ():
            if (masks := sharded.masks(inner)) != sharded.masks(value) and value not in sharded.traced.uniform:
                spans.setdefault((value, masks), [index, index])[1] = index
        if op.bodies or op in sharded.traced.inert:
            continue
        division = sharded.division(op)
        if division.operands is None and not (division.partition and division.partition.shifts):
            if passed:
                fused |= {value: passed for value in op.outputs if value not in stored}
            continue
        if division.operands is not None and division.operands.attention:
            continue
        used = dict[int, Masks]()
        group = sharded.traced.alike[op]
        for shift in division.partition.shifts if division.partition else ():
            if shift.kind == "all-gather" and shift.is_operand and shift.value in group.inputs:
                value = op.inputs[group.inputs.index(shift.value)]
                used[value] = tuple(mask & ~shift.over for mask in used.get(value, sharded.masks(value)))
        for value, constraint in zip(op.inputs, division.operands.inputs if division.operands else (), strict=False):
            if constraint is not None:
                used[value] = sharded.masks_of(value, constraint)
        for use in used.items():
            passed.append(spans.setdefault(use, [index, index]))
            passed[-1][1] = index
        if passed:
            fused |= {value: passed for value in op.outputs if value not in stored}
    for (value, masks), (first, last) in spans.items():
        column = _column(sharded, value)
        group_of = ACTIVATIONS if column.is_batched else WEIGHTS
        yield Span(first, last, column._replace(axes=union(masks), group=group_of), sharded.num_bytes(value))


def _summed(sharded: ShardedProgram, body: Body, divided: Sequence[tuple[int, Op]]) -> Iterator[Span]:
    """Yields sums that are replicated before they are scattered: gradients of stored weights.

    They are exchanged after the loops that follow, which do not need them.
    """
    last_loop = max((index for index, op in enumerate(sharded.traced.order[body]) if op.bodies), default=0)
    for index, op in divided:
        partitioned = sharded.division(op).partition if op.name in CONTRACTIONS else None
        for shift in partitioned.shifts if partitioned else ():
            if shift.kind == "reduce-scatter":
                (value,) = op.outputs
                column = _column(sharded, value)._replace(axes=shift.unchanged)
                yield Span(index, max(index, last_loop), column, sharded.num_bytes(value))
                words = math.prod(sharded.traced.graph.shape(value)) * WORD_BYTES
                yield Span(index, index, column._replace(is_upper=True), words)


def _row_major(sharded: ShardedProgram, divided: Sequence[tuple[int, Op]]) -> Iterator[Span]:
    """Yields tables with narrow rows in the layout in which they are indexed, which is copied to or from their own.

    The sum of a scatter over a sharded batch has all rows on every device until it is scattered. Source: the copies
    before gathers and after scatters in the programs of tests/data/memory_cells.json.
    """
    for index, op in divided:
        if op.name not in (*SCATTERS, "gather"):
            continue
        table = op.outputs[0] if op.name in SCATTERS else op.inputs[0]
        shape = sharded.traced.graph.shape(table)
        column = _column(sharded, table, is_tiled=True)
        if column.tiled is None or len(shape) < 2 or shape[-1] % LANES == 0 or len(shape) - 1 in op.indexed:
            continue
        division = sharded.division(op)
        axes = column.tiled.axes
        for shift in division.partition.shifts if division.partition and op.name in SCATTERS else ():
            axes = tuple(mask & shift.unchanged for mask in axes)
        if op.name == "gather" and division.operands is not None and division.operands.inputs[0] is not None:
            axes = sharded.masks_of(table, division.operands.inputs[0])
        tiled = column.tiled._replace(axes=axes, indexed=op.indexed)
        column = column._replace(axes=union(axes), tiled=tiled)
        num_bytes = sharded.num_bytes(table)
        if shape[-1] < LANES:
            yield Span(index, index, column, num_bytes)
        yield Span(index, index, column._replace(is_upper=True), num_bytes)  # a copy to it from the last one


def _windows(sharded: ShardedProgram, divided: Sequence[tuple[int, Op]]) -> Iterator[Span]:
    """Yields the windows of convolutions of activations, which only the upper estimate has."""
    for index, op in divided:
        if op.name != "conv_general_dilated" or sharded.is_batched(op.inputs[1]):
            continue
        value = max((op.inputs[0], op.outputs[0]), key=sharded.num_bytes)
        width = max(
            sharded.traced.graph.shape(op.inputs[1])[dim] for dim in op.params["dimension_numbers"].rhs_spec[2:]
        )
        column = _column(sharded, value, is_tiled=True)
        if width > 1 and column.tiled is not None:
            tiled = column.tiled._replace(window=width)
            yield Span(index, index, column._replace(tiled=tiled, is_upper=True), sharded.num_bytes(value))


def _reduced(sharded: ShardedProgram, live: Liveness, ops: Sequence[Op]) -> Iterator[Span]:
    """Yields what the gradients of weights need in addition, which only the upper estimate has.

    The compiler sums them in float32, holds a sum and its terms at once, and keeps a narrower copy of the weight.
    """
    for first, last, group in zip(live.first.tolist(), live.last.tolist(), live.group.tolist(), strict=True):
        value = live.values[group]
        column = _column(sharded, value)
        if column.group == GRADIENTS and ops[first].name in CONTRACTIONS:
            num_words = math.prod(sharded.traced.graph.shape(value))
            is_narrow = sharded.num_bytes(value) < num_words * WORD_BYTES
            num_bytes = (1 + is_narrow) * num_words * WORD_BYTES
            yield Span(0, last, column._replace(is_upper=True), num_bytes)


def _worked(sharded: ShardedProgram, divided: Sequence[tuple[int, Op]]) -> Iterator[Span]:
    """Yields the temporaries of ring attention, the copies of shards with their halos, and rows as they are sent."""
    for index, op in divided:
        partition = sharded.division(op).partition if op in sharded.traced.sorted_rows.ops else None
        for value in [shift.instead[0].value for shift in partition.shifts if shift.instead] if partition else ():
            yield Span(index, index, _column(sharded, value), sharded.num_bytes(value))
        use = sharded.division(op).operands if op.name in RING | WINDOWED else None
        for value in {op.inputs[each.window.read[0]] for each in use.halos if each.halo.size} if use else ():
            yield Span(index, index, _column(sharded, value), sharded.num_bytes(value))
        if use is None or use.attention is None:
            continue
        for spec, num_bytes in temporary_bytes(sharded.traced.graph, op, use.attention, sharded.resolver.mesh):
            mask = sharded.mask([*axes_of(spec)])
            yield Span(index, index, _column(sharded, op.inputs[0])._replace(axes=mask), num_bytes)


def _column(sharded: ShardedProgram, value: int, *, is_tiled: bool = False) -> Column:
    """Returns the column of a value in its own sharding."""
    known = sharded.cache.columns
    key = sharded.traced.sharding_keys[value]
    of = value, is_tiled, sharded.numbers[key.number]
    column = known.get(of)
    if column is None:
        column = known[of] = _new_column(sharded, value, is_tiled=is_tiled)
    return column


def _new_column(sharded: ShardedProgram, value: int, *, is_tiled: bool) -> Column:
    traced = sharded.traced
    labels = sharded.traced.sharding_keys[value].labels
    is_batched = sharded.is_batched(value)
    is_stacked = not traced.layer_labels.isdisjoint(labels)
    group = ACTIVATIONS if is_batched or not labels else GRADIENTS
    tiled = None
    if is_tiled and labels:
        aval = traced.graph.avals[value]
        is_batch = tuple(label is not None and label in traced.batch_labels for label in labels)
        is_layers = tuple(label is not None and label in traced.layer_labels for label in labels)
        itemsize = getattr(aval.dtype, "itemsize", WORD_BYTES)
        indexed = tuple(range(len(labels) - 1)) if labels in sharded.kernel_labels else ()
        spatial = tuple(dim for dim, label in enumerate(labels) if label in traced.spatial_labels)
        tiled = Tiled(
            traced.graph.shape(value), sharded.masks(value), is_batch, is_layers, itemsize, False, indexed, spatial
        )
        if not is_batched and is_table(labels, traced.looked_up):
            lookups, axes = _lookups(sharded, labels)
            tiled = tiled._replace(lookups=lookups, lookup_axes=axes)
    return Column(union(sharded.masks(value)), is_batched, is_stacked, labels in traced.score_labels, group, tiled)


def _lookups(sharded: ShardedProgram, labels: Labels) -> tuple[int, int]:
    """Returns the largest number of rows that one operation looks up in a table, and the mesh axes that shard it."""
    graph = sharded.traced.graph
    gathers = sharded.traced.first_ops.get("gather", ())
    indices = [op.inputs[1] for op in gathers if sharded.traced.sharding_keys[op.inputs[0]].labels == labels]
    most = max(indices, key=lambda value: math.prod(graph.shape(value)), default=None)
    return (1, 0) if most is None else (math.prod(graph.shape(most)), union(sharded.masks(most)))
