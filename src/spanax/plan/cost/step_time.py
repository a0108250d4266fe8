"""Step time, term by term, for thousands of meshes at once.

All figures are per device. Devices do equal work, so one represents all. Stages of a pipeline differ; the last one,
which also runs the head, sets the pace.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from spanax.hardware.cluster import Cluster
from spanax.hardware.collectives import Collective, collective_seconds
from spanax.hardware.links import AxisLink
from spanax.plan.cost.calibration import Assumptions
from spanax.plan.cost.links import FIELDS, STAGES, Links
from spanax.plan.cost.overlap import ONCE, Exposed, Key, class_of, hide, runtime_of
from spanax.plan.cost.roofline import (
    collective_load,
    grouped,
    matmul_seconds,
    shard_counts,
    step_flops,
    traffic_seconds,
)
from spanax.plan.cost.transfers import exposed_copies
from spanax.plan.pipeline.bubble import step_seconds
from spanax.plan.sharding.layer_partition import shares
from spanax.plan.spmd.terms import HOP, KINDS, ROUND, Collectives, Matmuls, Terms
from spanax.trace.analysis.op_groups import Phase

Array = np.ndarray

COLLECTIVES: dict[str, Collective] = {
    "all-gather": "all_gather",
    "all-reduce": "all_reduce",
    "reduce-scatter": "reduce_scatter",
    "all-to-all": "all_to_all",
}
"""The collectives of `KINDS` as `collective_seconds` names them."""

COMPUTING = ("matmuls", "memory", "kernel starts")
"""The terms of computation."""

IDLE = ("bubble", "transfers between stages")
"""The terms of a pipeline: the time in which stages wait for others, and what sends between them add to it."""

WEIGHTED = "matmuls with weights"
"""The matmuls outside of attention; a part of the term `matmuls`."""

COLLECTIVE_DISPATCH = 2.1
"""The time in which a host dispatches a collective, in fused kernels.

Source: `python benchmarks/eager_dispatch.py`, PyTorch 2.13.0: 1.6 to 2.8, with and without checkpoints.
"""

SHARPNESS = 5.5
"""The exponent of the soft maximum of host and device time. Source: as `Assumptions`."""


@dataclass(frozen=True, eq=False)
class Grid:
    """The meshes and the schedule of the batch; every array has one entry per candidate.

    `sizes` has a row for each mesh axis of the terms. `scale` is the batch of one microbatch over the traced batch.
    `num_layers` are the layers that the stages divide; 0 where they divide them evenly.
    """

    sizes: Array
    num_stages: Array
    num_microbatches: Array
    scale: Array
    schedule: str = "1f1b"
    num_chunks: int = 1
    num_layers: int = 0

    def select(self, columns: Array) -> "Grid":
        """Returns the grid of some candidates."""
        return replace(
            self,
            sizes=self.sizes[:, columns],
            num_stages=self.num_stages[columns],
            num_microbatches=self.num_microbatches[columns],
            scale=self.scale[columns],
        )

    @property
    def shares(self) -> Array:
        """The number of parts that the layers are divided into; uneven stages have padding."""
        return np.asarray(shares(self.num_layers, self.num_stages, self.num_chunks))


@dataclass(frozen=True, eq=False)
class Costs:
    """Seconds of one step by term, one entry per candidate; they add up to `step_seconds`.

    `hidden` is the communication by term that runs during computation, and is not part of the step time. `stage` has
    the times of one stage, which no schedule changes; `attention` is the part of the term `matmuls` in attention.
    `repeats_most` is whether more than half of the FLOPs of all devices of a stage repeat those of another device.
    """

    terms: dict[str, Array]
    step_seconds: Array
    flops: Array
    hidden: dict[str, Array]
    stage: "Stage"
    attention: Array
    repeats_most: Array

    def select(self, columns: Array) -> "Costs":
        """Returns the costs of some candidates."""
        terms, hidden = ({name: row[columns] for name, row in rows.items()} for rows in (self.terms, self.hidden))
        stage = Stage(self.stage.tasks[:, columns], self.stage.hop[columns])
        rows = {name: getattr(self, name)[columns] for name in ("step_seconds", "flops", "attention", "repeats_most")}
        return Costs(terms=terms, hidden=hidden, stage=stage, **rows)

    def scheduled(self, grid: Grid) -> "Costs":
        """Returns the costs under the schedule of a grid with the same meshes, microbatches and parts of the layers."""
        terms = self.terms | self.stage.idle_seconds(grid)
        return replace(self, terms=terms, step_seconds=np.sum([*terms.values()], 0))

    def without_attention(self) -> Array:
        """Returns seconds of the terms that no form of attention shortens, one entry per candidate."""
        changed = ("activations between devices", "memory", *IDLE)
        return np.asarray(sum(row for name, row in self.terms.items() if name not in changed) - self.attention)

    def plus(self, name: str, seconds: Array) -> "Costs":
        """Returns the costs with more seconds in a term of the step time."""
        terms = self.terms | {name: self.terms.get(name, 0.0) + seconds}
        return replace(self, terms=terms, step_seconds=self.step_seconds + seconds)


@dataclass(frozen=True, eq=False)
class Stage:
    """Seconds of one microbatch in the layers of one stage, a row for each of `schedules.KINDS`, and of a send.

    The gradient of the inputs includes recomputed layers.
    """

    tasks: Array
    hop: Array

    def idle_seconds(self, grid: Grid) -> dict[str, Array]:
        """Returns the bubble, without hops, and the time that hops add to a step, by term."""
        busy = self.tasks.sum(0) * grid.num_microbatches
        forward, backward, weights = self.tasks / grid.num_chunks
        without, pipelined = (
            step_seconds(
                grid.schedule,
                grid.num_stages,
                grid.num_microbatches,
                grid.num_chunks,
                forward_seconds=forward,
                backward_seconds=backward,
                weight_seconds=weights,
                hop_seconds=hop,
            )
            for hop in (0.0, self.hop)
        )
        idle = zip(IDLE, (without - busy, pipelined - without), strict=True)
        return {name: np.where(grid.num_stages > 1, np.maximum(seconds, 0.0), 0.0) for name, seconds in idle}


def price(
    terms: Terms, cluster: Cluster, grid: Grid, assumptions: Assumptions | None = None, table: "GridTable | None" = None
) -> Costs:
    """Returns the cost of a step on every mesh of a grid.

    A microbatch runs the forward and backward pass of the layers and of the operations around them, and waits for
    gathers of weights. Gradients are reduced over `data` and weights updated once per step.
    """
    assumptions = assumptions or Assumptions()
    overlap = runtime_of(cluster) if assumptions.overlap is None else assumptions.overlap
    terms = _as_run(terms, assumptions)
    num_shards = shard_counts(grid.sizes)
    grid_table = table or Table(cluster, terms.axes, [grid], assumptions).select(grid)
    parts = _computed(terms, num_shards, grid_table, grid, assumptions)
    computing = {
        (phase, inside): np.sum([parts[phase, inside, name] for name in COMPUTING], 0) for phase, inside, _ in parts
    }
    moved = _moved(terms, num_shards, grid_table, grid, assumptions)
    exposed = hide(moved, computing, overlap, grid.shares, terms.num_layers)
    layers, around = (_microbatch(parts, exposed, inside) for inside in (True, False))
    _wait_for_host(layers, around, terms, num_shards, grid.num_stages, assumptions)
    # Replicas within a stage send one shard each (Megatron-LM's scatter and gather, arXiv 2104.04473).
    hop = grid_table.hop_seconds(terms.carry_bytes * grid.scale / num_shards[-1]) * (1.0 - overlap.hops)
    stage = Stage(sum(layers.values()) / grid.shares * _shares_of_tasks(parts, exposed), hop)
    # The last stage also runs the operations around the layers, and all other stages wait for it.
    count = grid.num_microbatches
    seconds_by_term = {name: (layers[name] / grid.shares + around[name]) * count for name in layers}
    seconds_by_term |= stage.idle_seconds(grid)
    seconds_by_term[ONCE] = np.zeros(grid.scale.shape)
    for (phase, inside, name), seconds in exposed.seconds.items():
        if name == ONCE:
            seconds_by_term[ONCE] = seconds_by_term[ONCE] + seconds / (grid.shares if inside else 1)
        elif phase == Phase.UPDATE:
            seconds_by_term["weights between devices"] += seconds / grid.shares
    seconds_by_term["update"] = (
        computing[Phase.UPDATE, True] / grid.shares + computing[Phase.UPDATE, False] / grid.shares
    )
    flops, repeats_most = step_flops(terms.matmuls, num_shards, grid.scale, grid.shares, count)
    copies = exposed_copies(terms, num_shards, grid.scale, computing, cluster.chip)
    seconds_by_term |= {name: seconds * count / grid.shares for name, seconds in copies.items()}
    hidden = exposed.hidden_by_term(grid.shares, grid.num_microbatches)
    share = {True: count / grid.shares, False: count}
    attention = sum((parts[key] - parts[*key[:2], WEIGHTED]) * share[key[1]] for key in parts if key[2] == "matmuls")
    return Costs(seconds_by_term, np.sum([*seconds_by_term.values()], 0), flops, hidden, stage, attention, repeats_most)


@dataclass(frozen=True, eq=False)
class RowSeconds:
    """Seconds of one step in each row of `Matmuls`, of `MemoryTraffic` and of its kernels, one column per candidate."""

    matmuls: Array
    memory: Array
    kernels: Array


def row_seconds(terms: Terms, cluster: Cluster, grid: Grid, assumptions: Assumptions | None = None) -> RowSeconds:
    """Returns the seconds of every row of computation; `price` adds them up to `COMPUTING` and the update."""
    assumptions = assumptions or Assumptions()
    terms = _as_run(terms, assumptions)
    matmuls = terms.matmuls
    traffic = terms.memory_traffic
    matmul_seconds_of = Table(cluster, terms.axes, [grid], assumptions).select(grid).matmul_seconds
    traffic_time = traffic_seconds(traffic, shard_counts(grid.sizes), grid.scale, cluster.chip, assumptions)
    start = np.full(grid.scale.shape, assumptions.start * cluster.chip.kernel_start_seconds)
    inside = np.arange(2) == 1

    def per_step(seconds: Array, phase: Array, in_layers: Array) -> Array:
        is_update = (phase == Phase.UPDATE)[:, None]
        shares = np.where(in_layers[:, None] | is_update, grid.shares, 1)
        return np.asarray(seconds * np.where(is_update, 1, grid.num_microbatches) / shares)

    return RowSeconds(
        per_step(matmul_seconds_of(matmuls) * matmuls.runs[:, None], matmuls.phase, matmuls.in_layers),
        per_step(traffic_time, traffic.phase, traffic.in_layers),
        np.stack(
            [per_step(traffic.kernels[phase][:, None] * start, np.full(2, phase), inside).sum(0) for phase in Phase]
        ),
    )


def _as_run(terms: Terms, assumptions: Assumptions) -> Terms:
    """Returns the terms with what a runtime repeats, and with its kernels for ragged matmuls."""
    if assumptions.repeats_forward:
        terms = repeated(terms, assumptions.gathers_again, assumptions.repeats_forward)
    return grouped(terms) if assumptions.grouped_matmul else terms


def _shares_of_tasks(parts: dict[tuple[Any, ...], Array], exposed: Exposed) -> Array:
    """Returns the share of each kind of task in the seconds of the layers.

    The gradient of a weight multiplies as much as the forward pass with it: its share is that of the forward matmuls.
    """
    seconds = [
        sum(parts[phase, True, name] for name in COMPUTING) + exposed.phase(phase)
        for phase in (Phase.FORWARD, Phase.BACKWARD)
    ]
    total = np.maximum(seconds[0] + seconds[1], np.finfo(float).tiny)
    forward = seconds[0] / total
    weights = np.minimum(parts[Phase.FORWARD, True, WEIGHTED], seconds[1] / 2) / total
    return np.stack([forward, 1.0 - forward - weights, weights])


def _computed(
    terms: Terms, num_shards: Array, table: "GridTable", grid: Grid, assumptions: Assumptions
) -> dict[tuple[Any, ...], Array]:
    """Returns seconds by (phase, in the layers, term), for one microbatch."""
    matmuls = terms.matmuls
    traffic = terms.memory_traffic
    chip = table.table.chip
    matmul_time = table.matmul_seconds(matmuls) * matmuls.runs[:, None]
    traffic_time = traffic_seconds(traffic, num_shards, grid.scale, chip, assumptions)
    result: dict[tuple[Any, ...], Array] = {}
    for phase in Phase:
        for inside in (False, True):
            for name, rows, seconds in (("matmuls", matmuls, matmul_time), ("memory", traffic, traffic_time)):
                chosen = (rows.phase == phase) & (rows.in_layers == inside)
                result[phase, inside, name] = seconds[chosen].sum(0)
            chosen = (matmuls.phase == phase) & (matmuls.in_layers == inside) & ~matmuls.fused
            result[phase, inside, WEIGHTED] = matmul_time[chosen & ~matmuls.scores.any(1)].sum(0)
            kernels = traffic.kernels[phase][int(inside)]
            start = kernels * assumptions.start * chip.kernel_start_seconds
            result[phase, inside, "kernel starts"] = np.full_like(result[phase, inside, "memory"], start)
    return result


def repeated(terms: Terms, gathers_again: bool = False, share: float = 1.0) -> Terms:
    """Returns the terms with the layers' forward pass repeated; the backward pass reuses the repetition's weights.

    Args:
      terms: of a program without remat.
      gathers_again: whether weights are freed in between, and gathered a third time.
      share: of the forward pass that is repeated.
    """
    matmuls = terms.matmuls
    traffic = terms.memory_traffic
    collectives = terms.collectives
    kernels = traffic.kernels.astype(float)
    kernels[Phase.FORWARD, 1] = kernels[Phase.FORWARD, 1] * (1 + share)
    again = [1 + share * ((rows.phase == Phase.FORWARD) & rows.in_layers) for rows in (matmuls, traffic, collectives)]
    gathers = np.where(collectives.of_weights & (not gathers_again), 1, again[2])
    return replace(
        terms,
        matmuls=replace(matmuls, runs=matmuls.runs * again[0]),
        memory_traffic=replace(traffic, num_bytes=traffic.num_bytes * again[1], kernels=kernels),
        collectives=replace(collectives, runs=collectives.runs * gathers),
    )


def _wait_for_host(
    layers: dict[str, Array],
    around: dict[str, Array],
    terms: Terms,
    num_shards: Array,
    stages: Array,
    assumptions: Assumptions,
) -> None:
    """Adds the time that a device waits for a host that dispatches kernel by kernel to the kernel starts.

    A microbatch takes the longer of both, with a soft corner: neither is steady. Each term increases by the same share.
    Collectives of activations are dispatched like kernels; those of weights are few, in buckets.
    """
    if not assumptions.dispatch_seconds:
        return
    moves = terms.collectives
    sent = (moves.runs * ~moves.of_weights * (moves.phase != Phase.UPDATE))[:, None] * (num_shards[moves.over] > 1)
    count = terms.memory_traffic.kernels[: Phase.UPDATE].sum() + COLLECTIVE_DISPATCH * sent.sum(0)
    host = count * assumptions.dispatch_seconds / stages
    device = (sum(layers.values()) + sum(around.values())) / stages
    growth = (1 + (host / device) ** SHARPNESS) ** (1 / SHARPNESS)
    for part in (layers, around):
        part["kernel starts"] = part["kernel starts"] + (growth - 1) * sum(part.values())


def _moved(
    terms: Terms, num_shards: Array, table: "GridTable", grid: Grid, assumptions: Assumptions
) -> dict[Key, Array]:
    """Returns seconds, and the same times their contention, by (phase, in the layers, class), per microbatch.

    Those of the class `ONCE` are per step. Collectives of weights in one place are combined into one message, as
    compilers do; the compiler for CPUs does not.
    """
    collectives = terms.collectives
    scale = np.where(collectives.batched[:, None], grid.scale, 1.0)
    num_bytes = collectives.num_bytes[:, None] * scale / num_shards[collectives.unchanged]
    result: dict[Key, Array] = defaultdict(lambda: np.zeros((2, *grid.scale.shape)))
    combines = not table.table.chip.shared
    for (kind, over, phase, inside, of_weights, _), rows in _messages(collectives, combines).items():
        # A scan over layers without a carry, such as one over independent tasks, is not counted as layers.
        if combines and of_weights and inside and terms.num_layers:
            runs = terms.num_layers
        elif combines and of_weights and not inside:
            runs = 1
        else:
            runs = collectives.runs[rows].max()
        total = (num_bytes[rows] * collectives.runs[rows][:, None]).sum(0) / runs
        total = total * collective_load(terms, kind, over, assumptions)
        seconds = runs * table.seconds(kind, over, total, assumptions)
        slowed = seconds * table.link(over).contention
        result[phase, inside, class_of(KINDS[kind], of_weights, phase)] += np.stack([seconds, slowed])
    return result


def _messages(collectives: Collectives, combines: bool) -> dict[tuple[Any, ...], list[int]]:
    """Returns rows of one message, by (kind, over, phase, in the layers, of weights), and the row if sent alone."""
    together: dict[tuple[Any, ...], list[int]] = defaultdict(list)
    places = (collectives.kind, collectives.over, collectives.phase, collectives.in_layers, collectives.of_weights)
    for row, place in enumerate(zip(*(column.tolist() for column in places), strict=True)):
        together[*place, None if combines and place[-1] else row].append(row)
    return together


def _microbatch(parts: dict[Any, Array], exposed: Exposed, inside: bool) -> dict[str, Array]:
    """Returns seconds of one microbatch by name, forward and backward, inside the layers or around them."""
    result = {name: parts[Phase.FORWARD, inside, name] + parts[Phase.BACKWARD, inside, name] for name in COMPUTING}
    for name in ("activations between devices", "weights between devices"):
        result[name] = np.zeros_like(result["memory"]) + exposed.microbatch(name, inside)
    return result


class Table:
    """A cache shared by many layouts: the links between the devices, and the time of each matmul.

    Args:
      cluster: the devices.
      axes: names of the mesh axes inside a stage, in order.
      grids: all grids to be priced.
      assumptions: constants that no data sheet states.
    """

    def __init__(self, cluster: Cluster, axes: Sequence[str], grids: Sequence[Grid], assumptions: Assumptions):
        candidates = np.hstack([np.zeros((len(axes) + 2, 0)), *map(_columns, grids)])
        self._each = [np.unique(row) for row in candidates]
        self._codes, first = np.unique(self._code(candidates), return_index=True)
        meshes = candidates[:-1, first]
        self._scale = candidates[-1, first]
        self.links = Links(cluster, axes, meshes.astype(int))
        self._num_shards = shard_counts(meshes[1:])
        self.chip = cluster.chip
        self._assumptions = assumptions
        self._matmuls: dict[tuple[Any, ...], Array] = {}

    def select(self, grid: Grid) -> "GridTable":
        """Returns the part of the table for a grid's candidates."""
        return GridTable(self, np.searchsorted(self._codes, self._code(_columns(grid))), {})

    def matmul_seconds(self, matmuls: Matmuls) -> list[Array]:
        """Returns seconds of one run of each matmul: an array of all candidates for each."""
        keys = matmuls.keys
        new = [row for row, key in enumerate(keys) if key not in self._matmuls]
        computed = matmul_seconds(matmuls.some(new), self._num_shards, self._scale, self.chip, self._assumptions)
        self._matmuls |= {keys[row]: seconds for row, seconds in zip(new, computed, strict=True)}
        return [self._matmuls[key] for key in keys]

    def _code(self, candidates: Array) -> Array:
        """Returns one number per candidate."""
        places = [np.searchsorted(each, row) for each, row in zip(self._each, candidates, strict=True)]
        return np.ravel_multi_index(places, [len(each) for each in self._each])


def _columns(grid: Grid) -> Array:
    """Returns the columns that identify candidates, whatever the schedule: stages, sizes and scale."""
    return np.vstack([grid.num_stages[None], grid.sizes, grid.scale[None]])


@dataclass(frozen=True, eq=False)
class GridTable:
    """A table for some candidates, by their indices among all."""

    table: Table
    where: Array
    known: dict[int, AxisLink]

    def matmul_seconds(self, matmuls: Matmuls) -> Array:
        """Returns seconds of one run of each matmul; one row per matmul, one column per candidate."""
        rows = [seconds[self.where] for seconds in self.table.matmul_seconds(matmuls)]
        return np.stack(rows) if rows else np.zeros((0, self.where.size))

    def link(self, over: int) -> AxisLink:
        """Returns the links of groups over a set of axes, per candidate."""
        if over not in self.known:
            links = self.table.links.over(over)
            self.known[over] = AxisLink(**{name: getattr(links, name)[self.where] for name in FIELDS})
        return self.known[over]

    def seconds(self, kind: int, over: int, num_bytes: Array, assumptions: Assumptions) -> Array:
        """Returns seconds of one collective over a set of axes; `num_bytes` are those of one group's full array."""
        link = self.link(over)
        name = KINDS[kind]
        if name in (HOP, ROUND):
            return self.hop_seconds(num_bytes / link.size, over) * (link.size if name == ROUND else 1)
        link = replace(link, start_seconds=link.start_seconds * assumptions.start)
        num_bytes = num_bytes / link.size if name == "all-to-all" else num_bytes
        return collective_seconds(COLLECTIVES[name], num_bytes, link)

    def hop_seconds(self, num_bytes: Array, over: int = STAGES) -> Array:
        """Returns seconds of one send to a neighbor along a set of axes, by default to the next stage."""
        return collective_seconds("permute", num_bytes, replace(self.link(over), start_seconds=0.0))
