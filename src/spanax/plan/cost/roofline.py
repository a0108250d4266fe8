"""Seconds of one run of each matmul and of fused memory traffic on one device: a roofline, for thousands of meshes."""

from dataclasses import replace

import numpy as np

from spanax.hardware.chip import Chip
from spanax.plan.cost.calibration import Assumptions
from spanax.plan.cost.kernel_rates import attention_flops_per_second, kernel_on, vector_rate_of
from spanax.plan.spmd.terms import KINDS, Matmuls, MemoryTraffic, Terms
from spanax.trace.analysis.op_groups import Phase

Array = np.ndarray

TILE = 128
"""Rows and columns of a result tile of one of a GPU's cores. Source: NVIDIA's matmul guide."""

NARROWEST = 8
"""The fewest rows or columns of a tensor core's tile. Source: NVIDIA's matmul guide, 16-bit numbers."""

NARROW = ("fp8", "fp4")
"""Dtypes to which a runtime casts activations and gradients before a matmul."""

SENT = KINDS.index("all-to-all")
"""The collective that sends tokens to experts and back."""


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
    traffic may take longer than the arithmetic. The kernel's start is added, and for narrow dtypes the casts.

    Many products that are narrower than a tile of a tensor core, such as depthwise convolutions, run on vector units.
    Other convolutions are matmuls over the channels and the window.

    Source: roofline, Williams et al. (2009); tiles and rounds, NVIDIA "Matrix multiplication background user's guide";
    convolutions as implicit matmuls, Chetlur et al., "cuDNN" (arXiv 1410.0759), which 16-bit ones run for their
    tensor cores (NVIDIA "Convolutional layers user's guide").
    """
    sizes = matmuls.sizes[:, :, None] / num_shards[matmuls.size_axes]
    grows = np.arange(4)[None, :, None] == matmuls.batched[:, None, None]
    m, n, k, count = np.moveaxis(np.where(grows, sizes * scale, sizes), 1, 0)
    of_scores = matmuls.scores.any(1).reshape(-1, 1)
    in_kernel = matmuls.fused.reshape(-1, 1)
    is_fused = (of_scores & assumptions.fused_attention) | in_kernel
    in_memory = np.where(matmuls.scores & assumptions.fused_attention, 0.0, 1.0).reshape(-1, 3, 1)
    operand_bytes = matmuls.num_bytes[:, :, None] / num_shards[matmuls.bytes_axes]
    operand_bytes = np.where(matmuls.bytes_batched[:, :, None], operand_bytes * scale, operand_bytes)
    rates = {dtype: chip.flops_per_second(dtype) * chip.sustained_share for dtype in set(matmuls.dtypes)}
    rate = np.asarray([rates[dtype] for dtype in matmuls.dtypes])[:, None]
    first = np.where(of_scores, assumptions.score_products, assumptions.first_products)
    is_several = count > 1
    count = np.maximum(count * matmul_loads(matmuls, num_shards, assumptions), 1.0)
    done, partial_bytes = _tiled(m, n, k, count, first, chip, assumptions.idle_rounds)
    on_vectors = is_several & (np.minimum(m, n) < NARROWEST) & ~of_scores & (chip.num_cores is not None)
    arithmetic = np.where(on_vectors, 2 * m * n * k * count / vector_rate_of(chip)[0], done / rate)
    num_bytes = (in_memory * operand_bytes).sum(1) + np.where(on_vectors, 0.0, partial_bytes)
    causal_share = np.where(in_kernel, 1.0, assumptions.causal_share)  # its FLOPs already exclude masked scores
    # Of queries, keys and channels the channels are the fewest, and queries of grouped heads are counted together.
    head_dim, length, _ = np.sort(matmuls.sizes[:, :3], 1).T[:, :, None]
    kernel_rate = attention_flops_per_second(assumptions.attention or kernel_on(chip), chip, head_dim, length)
    fused = executed_flops(matmuls, num_shards, scale) * causal_share / kernel_rate
    start = assumptions.start * chip.kernel_start_seconds
    longer = np.maximum(np.where(is_fused, fused, arithmetic), num_bytes / memory_rate(chip))
    return start + longer + assumptions.cast * _cast_bytes(matmuls, operand_bytes) / memory_rate(chip)


def _cast_bytes(matmuls: Matmuls, operand_bytes: Array) -> Array:
    """Returns the bytes of operands that are cast to a narrow dtype before each matmul.

    Weights are cast once per step. The gradient of a weight, both of whose operands have the batch, reads what earlier
    matmuls cast.
    """
    batched = matmuls.bytes_batched[:, :2]
    is_cast = np.asarray([dtype in NARROW for dtype in matmuls.dtypes], bool) & (batched.sum(1) == 1)
    return np.where(batched[:, :, None] & is_cast[:, None, None], operand_bytes[:, :2], 0.0).sum(1)


def _tiled(
    m: Array, n: Array, k: Array, count: Array, first: Array, chip: Chip, idle_rounds: float
) -> tuple[Array, Array | float]:
    """Returns the FLOPs that all cores could do in the time of a result's tiles, and the bytes of partial sums.

    A tile is square, or as narrow as the result and proportionally longer. Where there are fewer tiles than cores, each
    sum is divided into parts, one per core, which are written and added. A single core only pads its tiles.

    Source: cuBLAS and cuDNN (split-k); NVIDIA CUTLASS, "Efficient GEMM in CUDA", parallelized reductions.
    """
    cores = chip.num_cores
    if cores is None:
        return 2.0 * chip.tile**2 * np.ceil(m / chip.tile) * np.ceil(n / chip.tile) * count * k, 0.0
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
    return factor * num_bytes / memory_rate(chip)


def executed_flops(matmuls: Matmuls, num_shards: Array, scale: Array) -> Array:
    return matmuls.flops[:, None] * np.where(matmuls.batched[:, None] >= 0, scale, 1.0) / num_shards[matmuls.work]


def step_flops(
    matmuls: Matmuls, num_shards: Array, scale: Array, shares: Array, num_microbatches: Array
) -> tuple[Array, Array]:
    """Returns the FLOPs of a step on each device, and whether devices repeat more than half of them, per candidate.

    Args:
      matmuls: those of a microbatch.
      num_shards: as `shard_counts`; the last row is the number of devices of a stage.
      scale: the batch of a microbatch over the traced batch.
      shares: the number of parts that divide the layers.
      num_microbatches: per step.
    """
    runs = matmuls.runs[:, None] / np.where(matmuls.in_layers[:, None], shares, 1)
    flops, unsharded = (
        (executed_flops(matmuls, shards, scale) * runs).sum(0) * num_microbatches
        for shards in (num_shards, np.ones_like(num_shards))
    )
    return flops, flops * num_shards[-1] > 2 * unsharded


def memory_rate(chip: Chip) -> float:
    return (chip.memory_bytes_per_second or np.inf) * chip.memory_share


def grouped(terms: Terms) -> Terms:
    """Returns the terms with kernels for ragged matmuls: each row is multiplied by the matrix of its own group only.

    A group has its share of the rows, and tiles of its own: the fewer rows, the more of a tile is padding. Where the
    rows are contracted, each group sums over its share.

    Source: Gale et al., "MegaBlocks", 2022 (arXiv 2211.15841), section 4; a tile belongs to one expert.
    """
    matmuls = terms.matmuls
    is_ragged = np.arange(4)[None, :] == matmuls.ragged[:, None]
    sizes = np.where(is_ragged, matmuls.sizes / matmuls.groups[:, None], matmuls.sizes)
    return replace(terms, matmuls=replace(matmuls, flops=matmuls.flops / matmuls.groups, sizes=sizes))


def matmul_loads(matmuls: Matmuls, num_shards: np.ndarray, assumptions: Assumptions) -> np.ndarray:
    """Returns the work of the busiest device over the mean: one row per matmul, one column per mesh."""
    return np.where(num_shards[matmuls.expert_axes] > 1, assumptions.imbalance, 1.0)


def collective_load(terms: Terms, kind: int, over: int, assumptions: Assumptions) -> float:
    """Returns the bytes that the busiest device sends to experts over the mean; 1 for any other collective."""
    axes = int(np.bitwise_or.reduce(terms.matmuls.expert_axes, initial=0))
    return assumptions.imbalance if kind == SENT and over & axes else 1.0
