"""Cost terms of ring attention: FLOPs, communication and memory."""

import math
from collections.abc import Callable, Iterator

from spanax.hardware.mesh import MeshShape
from spanax.plan.sharding.attention import AttentionSharding
from spanax.plan.sharding.partition import PartitionedOp, Reshard, as_masks, union, words_of_sum
from spanax.plan.sharding.resolve import Spec, axes_of
from spanax.plan.spmd.terms import HOP, ROUND, Matmul
from spanax.trace.analysis.op_groups import OpGroup
from spanax.trace.jaxpr.graph import Graph, Op
from spanax.trace.rewrites.attention.blockwise import BLOCK
from spanax.trace.rewrites.attention.operation import BACKWARD
from spanax.trace.rewrites.attention.scores import Form, Shares, shares

SUMMED_BYTES = 12.0
USED_BYTES = 4.0
"""Bytes per score of a compiled block: a 32-bit sum is written and read by its maximum and its exponential; the 16-bit
result is written and read by the next matmul. Source: XLA does not fuse two matmuls (openxla/xla, instruction fusion).
"""


def ring_of(sharding: AttentionSharding, mesh: MeshShape) -> Shares:
    """Returns the sequence chunks of every device of the ring; of one device without a ring."""
    return shares(sharding.form, mesh.ways(sharding.ring))


def ring_partition(graph: Graph, op: Op, sharding: AttentionSharding, mesh: MeshShape) -> PartitionedOp:
    """Returns how an attention operation is partitioned, with its collectives.

    Keys and values circulate past all other devices; their gradients circulate with them and back to their device,
    from the first step on, when they are still zero, so that all steps are one loop. Where the chunks of a device are
    not its stored ones, all values with queries or keys are exchanged before and after, once. Partial gradients are
    all-reduced.
    """
    mask = _masks(mesh)
    ring = mask((sharding.ring,))
    shifts: list[Reshard] = []
    if mesh.ways(sharding.ring) > 1:
        is_moved = ring_of(sharding, mesh).is_moved
        for value, spec, rounds, width in _moving(graph, op, sharding):
            common = mask(spec) & ~ring
            hops = is_moved * width + rounds * (width if value in op.outputs else -1)
            for kind, times in ((ROUND, rounds * width), (HOP, hops)):
                if times:
                    shifts.append(Reshard(kind, value, ring, common, False, times))
    if op.name == BACKWARD:
        used = mask(sharding.axes)
        for value, spec in zip(op.outputs, sharding.results(op), strict=True):
            if over := used & ~mask(spec):
                shifts.append(Reshard("all-reduce", value, over, mask(spec), False, words_of_sum(graph, value)))
    return PartitionedOp(mask(sharding.axes), (), (), tuple(shifts))


def _masks(mesh: MeshShape) -> Callable[[Spec], int]:
    """Returns a function from a spec to its mesh axes as one mask."""
    bits = {axis: 1 << index for index, axis in enumerate(mesh.names)}
    return lambda spec: union(as_masks(spec, bits))


def _moving(graph: Graph, op: Op, sharding: AttentionSharding) -> Iterator[tuple[int, Spec, int, int]]:
    """Yields values that are exchanged or circulate: the spec, number of rounds, bytes sent over stored bytes.

    Gradients are accumulated in 32 bits, whatever their dtype.
    """
    is_back = op.name == BACKWARD
    keys = (op.inputs[1], op.inputs[2])
    for value, spec in zip(op.inputs, sharding.operands(op), strict=True):
        if value in keys:
            continue
        if not axes_of(spec).isdisjoint(sharding.ring):
            yield value, spec, 0, 1
    for value in keys:
        yield value, sharding.keys, 1, 1
    for index, (value, spec) in enumerate(zip(op.outputs, sharding.results(op), strict=True)):
        width = words_of_sum(graph, value) if is_back else 1
        is_key = is_back and index in (1, 2)
        if not axes_of(spec).isdisjoint(sharding.ring):
            yield value, spec, int(is_key), width


def products(
    graph: Graph, op: Op, sharding: AttentionSharding, mesh: MeshShape
) -> list[tuple[float, tuple[float, ...]]]:
    """Returns FLOPs and sizes (m, n, k, separate products) of its matmuls: two forward, five backward.

    Source: Dao et al., FlashAttention, arXiv 2205.14135, algorithms 1 and 4. Statically masked blocks are not
    computed: the share of `zigzag`, and within each part of the sequence that of a kernel's blocks.
    """
    form = sharding.form
    share = _computed_share(ring_of(sharding, mesh), op)
    count = math.prod(form.sizes[: form.num_batch])
    rows = math.prod(form.sizes[form.num_batch : form.keys])
    keys = form.sizes[form.keys] * share
    width = graph.shape(op.inputs[0])[-1]
    result = graph.shape(op.inputs[2])[-1]
    scores = (rows, keys, width, count)
    outputs = (rows, result, keys, count)
    backward = [
        scores,
        (rows, keys, result, count),
        (rows, width, keys, count),
        (keys, width, rows, count),
        (keys, result, rows, count),
    ]
    return [(2.0 * math.prod(sizes), sizes) for sizes in (backward if op.name == BACKWARD else [scores, outputs])]


def _computed_share(ring: Shares, op: Op) -> float:
    """Returns the share of the scores that is computed: a kernel computes the blocks in which its pattern shows a key.

    Which blocks have no pair of equal ids is known to the batch alone.
    """
    kernel = op.params["kernel"]
    form: Form = op.params["form"]
    if kernel is not None and not kernel.is_causal and ring.num_devices == 1:
        return kernel.pattern.share(form.sizes[form.queries], form.sizes[form.keys], BLOCK)
    if kernel is None or not kernel.is_causal:
        return ring.share
    num, total = ring.counts
    num_parts = len(ring.owned[0])
    num_blocks = max(form.sizes[form.keys] // (ring.num_devices * num_parts * BLOCK), 1)
    return (num - num_parts * (1 - 1 / num_blocks) / 2) / total


def matmul_rows(
    graph: Graph, group: OpGroup, sharding: AttentionSharding, mesh: MeshShape, is_batched: bool, dtype: str
) -> list[Matmul]:
    """Returns the rows of its matmuls."""
    op = group.op
    mask = _masks(mesh)
    form = sharding.form
    separate = mask(sharding.axes[: form.num_batch])
    rows = mask(sharding.axes[form.num_batch : form.keys])
    queries = math.prod(form.sizes[form.num_batch : form.keys])
    size = graph.avals[op.inputs[0]].dtype.itemsize
    matmuls: list[Matmul] = []
    is_kernel = op.params["kernel"] is not None
    keys = products(graph, op, sharding, mesh)[0][1][1]
    for flops, (m, n, k, count) in products(graph, op, sharding, mesh):
        size_axes = [rows if dim == queries else 0 for dim in (m, n, k)]
        num_bytes = [count * elements * size for elements in (m * k, k * n, m * n)]
        # A kernel does not materialize its scores; compiled blocks of them are summed in 32 bits and used in 16.
        is_sum = n == keys
        score_bytes = SUMMED_BYTES if is_sum else USED_BYTES
        num_bytes[2 if is_sum else 0] *= 0.0 if is_kernel else score_bytes / size
        shardings = [separate | rows] * 3  # keys too: each device has one shard of them per step
        matmuls.append(
            Matmul(
                flops=flops,
                work=separate | rows,
                sizes=[m, n, k, count],
                size_axes=[*size_axes, separate],
                batched=3 if is_batched else -1,
                num_bytes=num_bytes,
                bytes_axes=shardings,
                bytes_batched=[is_batched] * 3,
                dtypes=dtype,
                runs=group.runs,
                phase=int(group.phase),
                in_layers=group.in_layers,
                fused=is_kernel,
            )
        )
    return matmuls


def temporary_bytes(graph: Graph, op: Op, sharding: AttentionSharding, mesh: MeshShape) -> list[tuple[Spec, float]]:
    """Returns the bytes of its temporaries, by sharding, in addition to operands and results.

    Keys as stored, as sent and as received; 32-bit accumulators with their next terms; a block of scores, its weights,
    and in the backward pass their gradients. A kernel stores no scores, and without a ring only one 32-bit accumulator
    in the backward pass.
    """
    form = sharding.form
    size = graph.num_bytes
    numbers = lambda value: 4.0 * math.prod(graph.shape(value))  # noqa: E731
    if op.params["kernel"] and mesh.ways(sharding.ring) == 1:
        return [(sharding.rows(wide=True), numbers(op.inputs[0]))] if op.name == BACKWARD else []
    parts = mesh.ways(sharding.ring) * len(ring_of(sharding, mesh).owned[0])
    block = min(BLOCK, form.sizes[form.keys] // parts)
    rows = 4.0 * math.prod(form.sizes[: form.keys])
    q, k, v = op.inputs[:3]
    scores = 0.0 if op.params["kernel"] else rows * block
    queries = sharding.rows(wide=True)
    if op.name == BACKWARD:
        sums = numbers(k) + numbers(v)
        extras = [
            (spec, numbers(value))
            for spec, value in zip(sharding.extras(op.params["grads"]), op.outputs[3:], strict=True)
        ]
        return [(queries, 2 * numbers(q) + 2 * scores), (sharding.keys, 2 * (size(k) + size(v)) + 3 * sums), *extras]
    return [(queries, size(q) + 2 * numbers(op.outputs[0]) + 2 * scores), (sharding.keys, 2 * (size(k) + size(v)))]
