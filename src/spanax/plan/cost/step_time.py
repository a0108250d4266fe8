"""Step time, term by term, for thousands of meshes at once.

All figures are per device. Devices do equal work, so one stands for all. Stages of a pipeline differ; the last one,
which also runs the head, sets the pace.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from spanax.hardware.chip import Chip
from spanax.hardware.cluster import Cluster
from spanax.hardware.collectives import all_gather_seconds, all_reduce_seconds, all_to_all_seconds, permute_seconds
from spanax.plan.cost.calibration import Assumptions
from spanax.plan.cost.links import Links
from spanax.plan.cost.terms import Collectives, Matmuls, MemoryTraffic, Terms
from spanax.plan.pipeline.bubble import step_seconds
from spanax.plan.pipeline.layer_partition import shares
from spanax.trace.analysis.op_groups import Phase

Array = np.ndarray

TILE = 128
"""Rows and columns of a result that one core makes at a time. Source: NVIDIA's matmul guide, and a TPU's unit."""


NARROWEST = 8
"""Rows or columns that a tensor core takes at least. Source: NVIDIA's matmul guide, 16-bit numbers."""

CAST = 1.5
"""Bytes to turn operands into eight bits, over theirs in sixteen: read in two bytes, written in one."""

SHARPNESS = 5.5
"""How sharply the longer of host and device decides. Source: as `Assumptions`."""


@dataclass(frozen=True, eq=False)
class Grid:
    """The meshes, and how the batch goes through them; every array has one entry a candidate.

    `sizes` has a row for each mesh axis of the terms. `scale` is the batch of one microbatch over the traced batch.
    `num_layers` are what the stages divide; 0 where they divide them evenly.
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
        """Into how many parts the layers count as divided: where stages do not divide them, some have padding."""
        return np.asarray(shares(self.num_layers, self.num_stages, self.num_chunks))


@dataclass(frozen=True, eq=False)
class Costs:
    """Seconds of one step by what they go to, one entry a candidate; they add up to `step_seconds`."""

    terms: dict[str, Array]
    step_seconds: Array
    flops: Array


def price(
    terms: Terms, cluster: Cluster, grid: Grid, given: Assumptions | None = None, table: "TableAt | None" = None
) -> Costs:
    """What a step costs on every mesh of a grid.

    A microbatch goes forward and backward through the layers and what is around them, and waits for the weights it
    needs to be gathered. Gradients are summed over `data` once a step, the update is done once a step.
    """
    given = given or Assumptions()
    terms = repeated(terms, given.gathers_again) if given.repeats_forward else terms
    ways = ways_table(grid.sizes)
    at = table or Table(cluster, terms.axes, [grid], given).at(grid)
    parts = _computed(terms, ways, at, grid, given)
    moved, once = _moved(terms, ways, at, grid, given)
    stages, count = grid.num_stages, grid.num_microbatches
    layers, around = (_sum(parts, moved, inside) for inside in (True, False))
    _wait_for_host(layers, around, terms, stages, given)
    divided = grid.shares
    stage = sum(layers.values()) / divided
    # Devices of a stage that hold the same send a part each (Megatron-LM's scatter and gather, arXiv 2104.04473).
    hop = at.hop_seconds(terms.carry_bytes * grid.scale / ways[-1])
    # Forward and backward are told apart only for the bubble, which in the end depends on their sum.
    third = stage / 3 / grid.num_chunks
    pipelined = step_seconds(
        grid.schedule, stages, count, grid.num_chunks,
        forward_seconds=third, backward_seconds=third, weight_seconds=third, hop_seconds=hop,
    )  # fmt: skip
    # The last stage also has what is around the layers, and all others wait for it.
    named = {name: (layers[name] / divided + around[name]) * count for name in layers}
    named["pipeline"] = np.where(stages > 1, np.maximum(pipelined - stage * count, 0.0), 0.0)
    named["gradient sync"] = once
    for name, found in (("weights between devices", moved), ("update", parts)):
        seconds = sum(value for (phase, _, _), value in found.items() if phase == Phase.UPDATE) / divided
        named[name] = named.get(name, 0.0) + seconds
    works = terms.matmuls
    flops = _flops(works, ways, grid.scale) * works.runs[:, None] / np.where(works.in_layers[:, None], divided, 1)
    return Costs(named, sum(named.values()), flops.sum(0) * count)


def ways_table(sizes: Array) -> Array:
    """For every set of mesh axes, as a mask, the number of parts; `sizes` has a row an axis and a column a mesh."""
    num_axes, num_meshes = sizes.shape
    table = np.ones((1 << num_axes, num_meshes))
    for axis in range(num_axes):
        table[1 << axis : 2 << axis] = table[: 1 << axis] * sizes[axis]
    return table


def matmul_seconds(works: Matmuls, ways: Array, scale: Array, chip: Chip, given: Assumptions) -> Array:
    """Seconds of one run of each matmul: a roofline over whole tiles. One row a matmul, one column a mesh.

    A result is made in tiles, each by one core, and the last round of tiles leaves cores idle (`_tiled`). Reading and
    writing may take longer than the arithmetic. The kernel's start comes on top, and in eight bits the casts.

    Source: roofline, Williams et al. (2009); tiles and rounds, NVIDIA "Matrix multiplication background user's guide".
    """
    sizes = works.sizes[:, :, None] / ways[works.splits]
    grows = np.arange(4)[None, :, None] == works.batched[:, None, None]
    m, n, k, count = np.moveaxis(np.where(grows, sizes * scale, sizes), 1, 0)
    of_scores = works.scores.any(1).reshape(-1, 1)
    in_kernel = works.fused.reshape(-1, 1)
    is_fused = (of_scores & given.fused_attention) | in_kernel
    kept = np.where(works.scores & given.fused_attention, 0.0, 1.0).reshape(-1, 3, 1)
    each = works.num_bytes[:, :, None] / ways[works.bytes_splits]
    each = np.where(works.bytes_batched[:, :, None], each * scale, each)
    is_cast = np.asarray([dtype == "fp8" for dtype in works.dtypes])[:, None]
    num_bytes = (kept * each).sum(1)
    rates = {dtype: chip.flops_per_second(dtype) * chip.sustained_share for dtype in set(works.dtypes)}
    rate = np.asarray([rates[dtype] for dtype in works.dtypes])[:, None]
    first = np.where(of_scores, given.score_products, given.first_products)
    done, partial_bytes = _tiled(m, n, k, np.maximum(count, 1.0), first, chip.num_cores, given.idle_rounds)
    arithmetic, num_bytes = done / rate, num_bytes + partial_bytes
    causal_share = np.where(in_kernel, 1.0, given.causal_share)  # what it leaves out is not among its FLOPs
    fused = _flops(works, ways, scale) * causal_share / (given.attention * rate)
    start = given.start * chip.kernel_start_seconds
    memory_rate = _memory_rate(chip)
    longer = np.maximum(np.where(is_fused, fused, arithmetic), num_bytes / memory_rate)
    return start + longer + is_cast * CAST * each[:, :2].sum(1) / memory_rate


def _tiled(
    m: Array, n: Array, k: Array, count: Array, first: Array, cores: int | None, idle_rounds: float
) -> tuple[Array, Array | float]:
    """FLOPs that the time of a result's tiles is worth with all cores working, and bytes of sums left in parts.

    A tile is square, or as narrow as the result and longer by as much. Where there are fewer tiles than cores, each
    sum is cut into parts, one a core, which are written and added up. One core alone only fills its tiles up.

    Source: cuBLAS and cuDNN (split-k); NVIDIA CUTLASS, "Efficient GEMM in CUDA", parallelized reductions.
    """
    if cores is None:
        return 2.0 * TILE**2 * np.ceil(m / TILE) * np.ceil(n / TILE) * count * k, 0.0
    narrow = 2.0 ** np.ceil(np.log2(np.clip(np.minimum(m, n), NARROWEST, TILE)))
    tiles = np.ceil(np.minimum(m, n) / narrow) * np.ceil(np.maximum(m, n) * narrow / TILE**2) * count
    parts = np.clip(np.floor(cores / tiles), 1.0, np.maximum(np.floor(k / TILE), 1.0))
    rounds = np.maximum(tiles * parts / cores, 1.0) + idle_rounds
    return rounds * 2.0 * TILE**2 * (k / parts + first) * cores, np.where(parts > 1, 8.0 * parts * m * n * count, 0.0)


def touch_seconds(touches: MemoryTraffic, ways: Array, scale: Array, chip: Chip, given: Assumptions) -> Array:
    """Seconds of each row of fused traffic: its bytes over the memory's rate, times `touched_around` around the layers.

    Source: a kernel that only passes numbers on is as fast as the memory (roofline).
    """
    num_bytes = touches.num_bytes[:, None] * np.where(touches.batched[:, None], scale, 1.0) / ways[touches.split]
    again = np.where(touches.in_layers | (touches.phase == Phase.UPDATE), 1.0, given.touched_around)
    kept = np.where(touches.scores & given.fused_attention, 0.0, given.touched * again).reshape(-1, 1)
    return kept * num_bytes / _memory_rate(chip)


def _computed(
    terms: Terms, ways: Array, table: "TableAt", grid: Grid, given: Assumptions
) -> dict[tuple[Any, ...], Array]:
    """Seconds by (phase, in the layers, what they go to), for one microbatch."""
    works, touches, chip = terms.matmuls, terms.memory_traffic, table.table.chip
    matmuls = table.matmul_seconds(works) * works.runs[:, None]
    touched = touch_seconds(touches, ways, grid.scale, chip, given)
    found: dict[tuple[Any, ...], Array] = {}
    for phase in Phase:
        for inside in (False, True):
            for name, rows, seconds in (("matmuls", works, matmuls), ("memory", touches, touched)):
                chosen = (rows.phase == phase) & (rows.in_layers == inside)
                found[phase, inside, name] = seconds[chosen].sum(0)
            kernels = touches.kernels[phase][int(inside)]
            start = kernels * given.start * chip.kernel_start_seconds
            found[phase, inside, "kernel starts"] = np.full_like(found[phase, inside, "memory"], start)
    return found


def repeated(terms: Terms, gathers_again: bool = False) -> Terms:
    """The terms with the layers' forward pass twice; what the second one gathers is there for the way back too.

    Args:
      terms: of a program that keeps everything.
      gathers_again: whether weights are let go of in between, and gathered a third time.
    """
    works, touches, moves = terms.matmuls, terms.memory_traffic, terms.collectives
    kernels = touches.kernels.copy()
    kernels[Phase.FORWARD, 1] *= 2
    again = [1 + ((rows.phase == Phase.FORWARD) & rows.in_layers) for rows in (works, touches, moves)]
    return replace(
        terms,
        matmuls=replace(works, runs=works.runs * again[0]),
        memory_traffic=replace(touches, num_bytes=touches.num_bytes * again[1], kernels=kernels),
        collectives=replace(moves, runs=moves.runs * np.where(moves.of_weights & (not gathers_again), 1, again[2])),
    )


def _wait_for_host(
    layers: dict[str, Array], around: dict[str, Array], terms: Terms, stages: Array, given: Assumptions
) -> None:
    """Add to the kernel starts what a device waits for a host that dispatches kernel by kernel.

    A microbatch takes the longer of both, with a soft corner: neither is steady. Of each part the same share is added.
    """
    if not given.dispatch_seconds:
        return
    host = terms.memory_traffic.kernels[: Phase.UPDATE].sum() * given.dispatch_seconds / stages
    device = (sum(layers.values()) + sum(around.values())) / stages
    grows = (1 + (host / device) ** SHARPNESS) ** (1 / SHARPNESS)
    for part in (layers, around):
        part["kernel starts"] = part["kernel starts"] + (grows - 1) * sum(part.values())


def _moved(
    terms: Terms, ways: Array, table: "TableAt", grid: Grid, given: Assumptions
) -> tuple[dict[tuple[Any, ...], Array], Array]:
    """Seconds by (phase, in the layers, of weights), for one microbatch; and those of gradients summed once a step.

    What is gathered or scattered of the weights at one place goes in one message, as compilers combine it; that for the
    CPU does not.
    """
    moves = terms.collectives
    num_bytes = moves.num_bytes[:, None] * np.where(moves.batched[:, None], grid.scale, 1.0) / ways[moves.kept]
    found: dict[tuple[Any, ...], Array] = defaultdict(lambda: np.zeros(grid.scale.shape))
    once = np.zeros(grid.scale.shape)
    combines = not table.table.chip.shared
    for (kind, over, phase, inside, of_weights, _), rows in _messages(moves, combines).items():
        runs = terms.num_layers if combines and of_weights and inside else moves.runs[rows].max()
        total = (num_bytes[rows] * moves.runs[rows][:, None]).sum(0) / runs
        seconds = runs * table.seconds(kind, over, total, given)
        is_sum = kind == 1
        if of_weights and is_sum and phase != Phase.FORWARD:
            once = once + seconds / (grid.shares if inside else 1)
        else:  # what is summed on the way to the loss is the loss, or a mean of the batch
            found[phase, inside, of_weights and not is_sum] += seconds
    return found, once


def _messages(moves: Collectives, combines: bool) -> dict[tuple[Any, ...], list[int]]:
    """Rows that go together, by (kind, over, phase, in the layers, of weights), and the row of what goes alone."""
    together: dict[tuple[Any, ...], list[int]] = defaultdict(list)
    places = (moves.kind, moves.over, moves.phase, moves.in_layers, moves.of_weights)
    for row, place in enumerate(zip(*(column.tolist() for column in places), strict=True)):
        together[*place, None if combines and place[-1] else row].append(row)
    return together


def _sum(parts: dict[Any, Array], moved: dict[Any, Array], inside: bool) -> dict[str, Array]:
    """Seconds of one microbatch by name, forward and backward, of what is inside the layers or around them."""
    names = ("matmuls", "memory", "kernel starts")
    found = {name: parts[Phase.FORWARD, inside, name] + parts[Phase.BACKWARD, inside, name] for name in names}
    for of_weights, name in ((False, "activations between devices"), (True, "weights between devices")):
        found[name] = moved[Phase.FORWARD, inside, of_weights] + moved[Phase.BACKWARD, inside, of_weights]
    return found


def _flops(works: Matmuls, ways: Array, scale: Array) -> Array:
    return works.flops[:, None] * np.where(works.batched[:, None] >= 0, scale, 1.0) / ways[works.work]


def _memory_rate(chip: Chip) -> float:
    return (chip.memory_bytes_per_second or np.inf) * chip.memory_share


class Table:
    """What is the same for many layouts, worked out once: what joins the devices, and how long a matmul takes.

    Args:
      cluster: the machine.
      axes: names of the mesh axes inside a stage, in order.
      grids: all that will be priced.
      given: what no data sheet says.
    """

    def __init__(self, cluster: Cluster, axes: Sequence[str], grids: Sequence[Grid], given: Assumptions):
        candidates = np.hstack([np.zeros((len(axes) + 2, 0)), *map(_columns, grids)])
        self._each = [np.unique(row) for row in candidates]
        self._codes, first = np.unique(self._code(candidates), return_index=True)
        meshes, self._scale = candidates[:-1, first], candidates[-1, first]
        self.links = Links(cluster, axes, meshes.astype(int))
        self._ways, self.chip, self._given = ways_table(meshes[1:]), cluster.chip, given
        self._matmuls: dict[tuple[Any, ...], Array] = {}

    def at(self, grid: Grid) -> "TableAt":
        """The part of a grid's candidates."""
        return TableAt(self, np.searchsorted(self._codes, self._code(_columns(grid))), {})

    def matmul_seconds(self, works: Matmuls) -> list[Array]:
        """Seconds of one run of each matmul: an array of all candidates for each."""
        keys = works.keys
        new = [row for row, key in enumerate(keys) if key not in self._matmuls]
        found = matmul_seconds(works.some(new), self._ways, self._scale, self.chip, self._given)
        self._matmuls |= {keys[row]: seconds for row, seconds in zip(new, found, strict=True)}
        return [self._matmuls[key] for key in keys]

    def _code(self, candidates: Array) -> Array:
        """One number a candidate."""
        places = [np.searchsorted(each, row) for each, row in zip(self._each, candidates, strict=True)]
        return np.ravel_multi_index(places, [len(each) for each in self._each])


def _columns(grid: Grid) -> Array:
    """What tells candidates apart, whatever the schedule: stages, sizes and scale."""
    return np.vstack([grid.num_stages[None], grid.sizes, grid.scale[None]])


@dataclass(frozen=True, eq=False)
class TableAt:
    """A table for some candidates, by where they stand among all."""

    table: Table
    where: Array
    known: dict[int, dict[str, Array]]

    def matmul_seconds(self, works: Matmuls) -> Array:
        """Seconds of one run of each matmul; one row a matmul, one column a candidate."""
        found = [seconds[self.where] for seconds in self.table.matmul_seconds(works)]
        return np.stack(found) if found else np.zeros((0, self.where.size))

    def arrays(self, over: int) -> dict[str, Array]:
        """What joins groups over a set of axes, candidate by candidate."""
        if over not in self.known:
            self.known[over] = {name: values[self.where] for name, values in self.table.links.arrays(over).items()}
        return self.known[over]

    def seconds(self, kind: int, over: int, num_bytes: Array, given: Assumptions) -> Array:
        """Seconds of one collective over a set of axes; `num_bytes` are the whole array's of one group."""
        link = self.arrays(over)
        size, start = link["size"], link["start_seconds"] * given.start
        if kind == 1:
            rate = link["all_reduce_bytes_per_second"]
            return all_reduce_seconds(num_bytes, size, rate, link["latency_seconds"], start, link["way_seconds"])
        if kind >= 4:  # a hop, or as many as there are devices
            rate, latency = link["permute_bytes_per_second"], link["latency_seconds"]
            return permute_seconds(num_bytes / size, size, rate, latency) * (1 if kind == 4 else size)
        if kind == 3:
            rate = link["all_to_all_bytes_per_second"]
            return all_to_all_seconds(num_bytes / size, size, rate, link["way_seconds"], start)
        return all_gather_seconds(num_bytes, size, link["bytes_per_second"], link["latency_seconds"], start)

    def hop_seconds(self, num_bytes: Array) -> Array:
        """Seconds of one send from a stage to the next."""
        link = self.arrays(-1)
        return np.where(link["size"] > 1, num_bytes / link["permute_bytes_per_second"] + link["latency_seconds"], 0.0)
