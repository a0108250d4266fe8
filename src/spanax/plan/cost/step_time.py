"""Step time, term by term, for thousands of meshes at once.

All figures are per device. Devices do equal work, so one represents all. Stages of a pipeline differ; the last one,
which also runs the head, sets the pace.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from spanax.hardware.chip import Chip
from spanax.hardware.cluster import Cluster
from spanax.hardware.collectives import Collective, collective_seconds, permute_seconds
from spanax.hardware.links import AxisLink
from spanax.plan.cost.calibration import Assumptions
from spanax.plan.cost.expert_load import collective_load, grouped, matmul_loads
from spanax.plan.cost.links import FIELDS, STAGES, Links
from spanax.plan.cost.ring_attention import HOP, ROUND
from spanax.plan.cost.terms import KINDS, Collectives, Matmuls, MemoryTraffic, Terms
from spanax.plan.pipeline.bubble import step_seconds
from spanax.plan.pipeline.layer_partition import shares
from spanax.trace.analysis.op_groups import Phase

Array = np.ndarray

TILE = 128
"""Rows and columns of a result tile of one core. Source: NVIDIA's matmul guide, and a TPU's unit."""


NARROWEST = 8
"""The fewest rows or columns of a tensor core's tile. Source: NVIDIA's matmul guide, 16-bit numbers."""

CAST = 1.5
"""Bytes of a cast of operands to eight bits, over their 16-bit bytes: two bytes read, one written."""

COLLECTIVES: dict[str, Collective] = {
    "all-gather": "all_gather",
    "all-reduce": "all_reduce",
    "reduce-scatter": "reduce_scatter",
    "all-to-all": "all_to_all",
}
"""The collectives of `KINDS` as `collective_seconds` names them."""

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

    @property
    def shares(self) -> Array:
        """The number of parts that the layers are divided into; uneven stages have padding."""
        return np.asarray(shares(self.num_layers, self.num_stages, self.num_chunks))


@dataclass(frozen=True, eq=False)
class Costs:
    """Seconds of one step by term, one entry per candidate; they add up to `step_seconds`."""

    terms: dict[str, Array]
    step_seconds: Array
    flops: Array


def price(
    terms: Terms, cluster: Cluster, grid: Grid, assumptions: Assumptions | None = None, table: "GridTable | None" = None
) -> Costs:
    """Returns the cost of a step on every mesh of a grid.

    A microbatch runs the forward and backward pass of the layers and of the operations around them, and waits for
    gathers of weights. Gradients are reduced over `data` and weights updated once per step.
    """
    assumptions = assumptions or Assumptions()
    terms = repeated(terms, assumptions.gathers_again) if assumptions.repeats_forward else terms
    terms = grouped(terms) if assumptions.grouped_matmul else terms
    num_shards = shard_counts(grid.sizes)
    grid_table = table or Table(cluster, terms.axes, [grid], assumptions).select(grid)
    parts = _computed(terms, num_shards, grid_table, grid, assumptions)
    moved, once = _moved(terms, num_shards, grid_table, grid, assumptions)
    stages, count = grid.num_stages, grid.num_microbatches
    layers, around = (_sum(parts, moved, inside) for inside in (True, False))
    _wait_for_host(layers, around, terms, stages, assumptions)
    divided = grid.shares
    stage = sum(layers.values()) / divided
    # Replicas within a stage send one shard each (Megatron-LM's scatter and gather, arXiv 2104.04473).
    hop = grid_table.hop_seconds(terms.carry_bytes * grid.scale / num_shards[-1])
    # Only the bubble distinguishes forward and backward, and it depends on their sum.
    third = stage / 3 / grid.num_chunks
    pipelined = step_seconds(
        grid.schedule, stages, count, grid.num_chunks,
        forward_seconds=third, backward_seconds=third, weight_seconds=third, hop_seconds=hop,
    )  # fmt: skip
    # The last stage also runs the operations around the layers, and all other stages wait for it.
    seconds_by_term = {name: (layers[name] / divided + around[name]) * count for name in layers}
    seconds_by_term["pipeline"] = np.where(stages > 1, np.maximum(pipelined - stage * count, 0.0), 0.0)
    seconds_by_term["gradient sync"] = once
    for name, seconds_by_key in (("weights between devices", moved), ("update", parts)):
        seconds = sum(value for (phase, _, _), value in seconds_by_key.items() if phase == Phase.UPDATE) / divided
        seconds_by_term[name] = seconds_by_term.get(name, 0.0) + seconds
    matmuls = terms.matmuls
    runs = matmuls.runs[:, None] / np.where(matmuls.in_layers[:, None], divided, 1)
    flops = (_flops(matmuls, num_shards, grid.scale) * runs).sum(0) * count
    return Costs(seconds_by_term, sum(seconds_by_term.values()), flops)


def shard_counts(sizes: Array) -> Array:
    """Returns the number of shards of every set of mesh axes, as a mask; `sizes` is (mesh axis, mesh)."""
    num_axes, num_meshes = sizes.shape
    table = np.ones((1 << num_axes, num_meshes))
    for axis in range(num_axes):
        table[1 << axis : 2 << axis] = table[: 1 << axis] * sizes[axis]
    return table


def matmul_seconds(matmuls: Matmuls, num_shards: Array, scale: Array, chip: Chip, assumptions: Assumptions) -> Array:
    """Returns seconds of one run of each matmul: a roofline over full tiles. One row per matmul, one column per mesh.

    Each core computes one tile of the result at a time, and the last wave of tiles leaves cores idle (`_tiled`). Memory
    traffic may take longer than the arithmetic. The kernel's start is added, and for eight bits the casts.

    Source: roofline, Williams et al. (2009); tiles and rounds, NVIDIA "Matrix multiplication background user's guide".
    """
    sizes = matmuls.sizes[:, :, None] / num_shards[matmuls.size_axes]
    grows = np.arange(4)[None, :, None] == matmuls.batched[:, None, None]
    m, n, k, count = np.moveaxis(np.where(grows, sizes * scale, sizes), 1, 0)
    count = count * matmul_loads(matmuls, num_shards, assumptions)
    of_scores = matmuls.scores.any(1).reshape(-1, 1)
    in_kernel = matmuls.fused.reshape(-1, 1)
    is_fused = (of_scores & assumptions.fused_attention) | in_kernel
    in_memory = np.where(matmuls.scores & assumptions.fused_attention, 0.0, 1.0).reshape(-1, 3, 1)
    operand_bytes = matmuls.num_bytes[:, :, None] / num_shards[matmuls.bytes_axes]
    operand_bytes = np.where(matmuls.bytes_batched[:, :, None], operand_bytes * scale, operand_bytes)
    is_cast = np.asarray([dtype == "fp8" for dtype in matmuls.dtypes])[:, None]
    num_bytes = (in_memory * operand_bytes).sum(1)
    rates = {dtype: chip.flops_per_second(dtype) * chip.sustained_share for dtype in set(matmuls.dtypes)}
    rate = np.asarray([rates[dtype] for dtype in matmuls.dtypes])[:, None]
    first = np.where(of_scores, assumptions.score_products, assumptions.first_products)
    done, partial_bytes = _tiled(m, n, k, np.maximum(count, 1.0), first, chip.num_cores, assumptions.idle_rounds)
    arithmetic, num_bytes = done / rate, num_bytes + partial_bytes
    causal_share = np.where(in_kernel, 1.0, assumptions.causal_share)  # its FLOPs already exclude masked scores
    fused = _flops(matmuls, num_shards, scale) * causal_share / (assumptions.attention * rate)
    start = assumptions.start * chip.kernel_start_seconds
    memory_rate = _memory_rate(chip)
    longer = np.maximum(np.where(is_fused, fused, arithmetic), num_bytes / memory_rate)
    return start + longer + is_cast * CAST * operand_bytes[:, :2].sum(1) / memory_rate


def _tiled(
    m: Array, n: Array, k: Array, count: Array, first: Array, cores: int | None, idle_rounds: float
) -> tuple[Array, Array | float]:
    """Returns the FLOPs that all cores could do in the time of a result's tiles, and the bytes of partial sums.

    A tile is square, or as narrow as the result and proportionally longer. Where there are fewer tiles than cores, each
    sum is divided into parts, one per core, which are written and added. A single core only pads its tiles.

    Source: cuBLAS and cuDNN (split-k); NVIDIA CUTLASS, "Efficient GEMM in CUDA", parallelized reductions.
    """
    if cores is None:
        return 2.0 * TILE**2 * np.ceil(m / TILE) * np.ceil(n / TILE) * count * k, 0.0
    narrow = 2.0 ** np.ceil(np.log2(np.clip(np.minimum(m, n), NARROWEST, TILE)))
    tiles = np.ceil(np.minimum(m, n) / narrow) * np.ceil(np.maximum(m, n) * narrow / TILE**2) * count
    parts = np.clip(np.floor(cores / tiles), 1.0, np.maximum(np.floor(k / TILE), 1.0))
    rounds = np.maximum(tiles * parts / cores, 1.0) + idle_rounds
    return rounds * 2.0 * TILE**2 * (k / parts + first) * cores, np.where(parts > 1, 8.0 * parts * m * n * count, 0.0)


def traffic_seconds(
    traffic: MemoryTraffic, num_shards: Array, scale: Array, chip: Chip, assumptions: Assumptions
) -> Array:
    """Returns seconds per row of fused traffic: bytes over the memory's rate, times `touched_around` around the layers.

    Source: a kernel that only copies is as fast as the memory (roofline).
    """
    num_bytes = traffic.num_bytes[:, None] * np.where(traffic.batched[:, None], scale, 1.0) / num_shards[traffic.axes]
    repeats = np.where(traffic.in_layers | (traffic.phase == Phase.UPDATE), 1.0, assumptions.touched_around)
    factor = np.where(traffic.scores & assumptions.fused_attention, 0.0, assumptions.touched * repeats).reshape(-1, 1)
    return factor * num_bytes / _memory_rate(chip)


def _computed(
    terms: Terms, num_shards: Array, table: "GridTable", grid: Grid, assumptions: Assumptions
) -> dict[tuple[Any, ...], Array]:
    """Returns seconds by (phase, in the layers, term), for one microbatch."""
    matmuls, traffic, chip = terms.matmuls, terms.memory_traffic, table.table.chip
    matmul_time = table.matmul_seconds(matmuls) * matmuls.runs[:, None]
    traffic_time = traffic_seconds(traffic, num_shards, grid.scale, chip, assumptions)
    result: dict[tuple[Any, ...], Array] = {}
    for phase in Phase:
        for inside in (False, True):
            for name, rows, seconds in (("matmuls", matmuls, matmul_time), ("memory", traffic, traffic_time)):
                chosen = (rows.phase == phase) & (rows.in_layers == inside)
                result[phase, inside, name] = seconds[chosen].sum(0)
            kernels = traffic.kernels[phase][int(inside)]
            start = kernels * assumptions.start * chip.kernel_start_seconds
            result[phase, inside, "kernel starts"] = np.full_like(result[phase, inside, "memory"], start)
    return result


def repeated(terms: Terms, gathers_again: bool = False) -> Terms:
    """Returns the terms with the layers' forward pass twice; the backward pass reuses weights gathered by the second.

    Args:
      terms: of a program without remat.
      gathers_again: whether weights are freed in between, and gathered a third time.
    """
    matmuls, traffic, collectives = terms.matmuls, terms.memory_traffic, terms.collectives
    kernels = traffic.kernels.copy()
    kernels[Phase.FORWARD, 1] *= 2
    again = [1 + ((rows.phase == Phase.FORWARD) & rows.in_layers) for rows in (matmuls, traffic, collectives)]
    gathers = np.where(collectives.of_weights & (not gathers_again), 1, again[2])
    return replace(
        terms,
        matmuls=replace(matmuls, runs=matmuls.runs * again[0]),
        memory_traffic=replace(traffic, num_bytes=traffic.num_bytes * again[1], kernels=kernels),
        collectives=replace(collectives, runs=collectives.runs * gathers),
    )


def _wait_for_host(
    layers: dict[str, Array], around: dict[str, Array], terms: Terms, stages: Array, assumptions: Assumptions
) -> None:
    """Adds the time that a device waits for a host that dispatches kernel by kernel to the kernel starts.

    A microbatch takes the longer of both, with a soft corner: neither is steady. Each term increases by the same share.
    """
    if not assumptions.dispatch_seconds:
        return
    host = terms.memory_traffic.kernels[: Phase.UPDATE].sum() * assumptions.dispatch_seconds / stages
    device = (sum(layers.values()) + sum(around.values())) / stages
    growth = (1 + (host / device) ** SHARPNESS) ** (1 / SHARPNESS)
    for part in (layers, around):
        part["kernel starts"] = part["kernel starts"] + (growth - 1) * sum(part.values())


def _moved(
    terms: Terms, num_shards: Array, table: "GridTable", grid: Grid, assumptions: Assumptions
) -> tuple[dict[tuple[Any, ...], Array], Array]:
    """Returns seconds by (phase, in the layers, of weights), per microbatch; and of gradient reductions per step.

    Collectives of weights in one place are combined into one message, as compilers do; the compiler for CPUs does not.
    """
    collectives = terms.collectives
    scale = np.where(collectives.batched[:, None], grid.scale, 1.0)
    num_bytes = collectives.num_bytes[:, None] * scale / num_shards[collectives.unchanged]
    result: dict[tuple[Any, ...], Array] = defaultdict(lambda: np.zeros(grid.scale.shape))
    once = np.zeros(grid.scale.shape)
    combines = not table.table.chip.shared
    for (kind, over, phase, inside, of_weights, _), rows in _messages(collectives, combines).items():
        # A scan over layers without a carry, such as one over independent tasks, is not counted as layers.
        is_per_layer = combines and of_weights and inside and terms.num_layers
        runs = terms.num_layers if is_per_layer else collectives.runs[rows].max()
        total = (num_bytes[rows] * collectives.runs[rows][:, None]).sum(0) / runs
        total = total * collective_load(terms, kind, over, assumptions)
        seconds = runs * table.seconds(kind, over, total, assumptions)
        is_sum = KINDS[kind] == "all-reduce"
        if of_weights and is_sum and phase != Phase.FORWARD:
            once = once + seconds / (grid.shares if inside else 1)
        else:  # sums in the forward pass are the loss, or a mean over the batch
            result[phase, inside, of_weights and not is_sum] += seconds
    return result, once


def _messages(collectives: Collectives, combines: bool) -> dict[tuple[Any, ...], list[int]]:
    """Returns rows of one message, by (kind, over, phase, in the layers, of weights), and the row if sent alone."""
    together: dict[tuple[Any, ...], list[int]] = defaultdict(list)
    places = (collectives.kind, collectives.over, collectives.phase, collectives.in_layers, collectives.of_weights)
    for row, place in enumerate(zip(*(column.tolist() for column in places), strict=True)):
        together[*place, None if combines and place[-1] else row].append(row)
    return together


def _sum(parts: dict[Any, Array], moved: dict[Any, Array], inside: bool) -> dict[str, Array]:
    """Returns seconds of one microbatch by name, forward and backward, inside the layers or around them."""
    names = ("matmuls", "memory", "kernel starts")
    result = {name: parts[Phase.FORWARD, inside, name] + parts[Phase.BACKWARD, inside, name] for name in names}
    for of_weights, name in ((False, "activations between devices"), (True, "weights between devices")):
        result[name] = moved[Phase.FORWARD, inside, of_weights] + moved[Phase.BACKWARD, inside, of_weights]
    return result


def _flops(matmuls: Matmuls, num_shards: Array, scale: Array) -> Array:
    return matmuls.flops[:, None] * np.where(matmuls.batched[:, None] >= 0, scale, 1.0) / num_shards[matmuls.work]


def _memory_rate(chip: Chip) -> float:
    return (chip.memory_bytes_per_second or np.inf) * chip.memory_share


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
        meshes, self._scale = candidates[:-1, first], candidates[-1, first]
        self.links = Links(cluster, axes, meshes.astype(int))
        self._num_shards, self.chip, self._assumptions = shard_counts(meshes[1:]), cluster.chip, assumptions
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
        link, name = self.link(over), KINDS[kind]
        if name in (HOP, ROUND):
            return self.hop_seconds(num_bytes / link.size, over) * (link.size if name == ROUND else 1)
        link = replace(link, start_seconds=link.start_seconds * assumptions.start)
        num_bytes = num_bytes / link.size if name == "all-to-all" else num_bytes
        return collective_seconds(COLLECTIVES[name], num_bytes, link)

    def hop_seconds(self, num_bytes: Array, over: int = STAGES) -> Array:
        """Returns seconds of one send to a neighbor along a set of axes, by default to the next stage."""
        link = self.link(over)
        return permute_seconds(num_bytes, link.size, link.permute_bytes_per_second, link.latency_seconds)
