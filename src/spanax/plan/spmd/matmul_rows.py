"""The rows of the matmuls of one layout: what a device computes and reads for each contraction."""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from spanax.plan.sharding.partition import PartitionedOp, union
from spanax.plan.spmd.sharded_program import ShardedProgram
from spanax.plan.spmd.terms import Matmul
from spanax.trace.analysis.op_groups import OpGroup, executed_flops, num_groups
from spanax.trace.jaxpr.graph import RAGGED, Op


def matmul_row(sharded: ShardedProgram, group: OpGroup, partitioned: PartitionedOp, runs: int, experts: int) -> Matmul:
    """Returns the row of a matmul or convolution that runs so often, and whose experts are on these mesh axes."""
    op = group.op
    traced = sharded.traced
    graph = sharded.traced.graph
    summed, passed = op.dim_map.contraction
    lhs = op.inputs[0]
    rhs = op.inputs[1]
    out = op.outputs[0]
    shape = graph.shape(out)
    labels = traced.axes.classes[out]
    groups: list[list[tuple[float, int, bool]]] = [[], [], [], []]  # m, n, k, separate products
    batch_labels = traced.batch_labels
    for a, b, index in passed:
        group_index = 0 if a >= 0 else 1
        if a >= 0 and b >= 0:
            group_index = 3
        groups[group_index].append((shape[index], partitioned.result[index], labels[index] in batch_labels))
    for a, _ in summed:
        label = traced.axes.classes[lhs][a]
        groups[2].append((graph.shape(lhs)[a], partitioned.operands[0][a], label in batch_labels))
    flops = executed_flops(graph, op)
    if op.name == RAGGED:
        groups[3].append((num_groups(graph, op), 0, False))
    if op.name == "conv_general_dilated":
        _as_matmul(op, groups, shape, partitioned, flops)
    values = (lhs, rhs, out)
    row = Matmul(
        flops=flops,
        work=partitioned.work,
        sizes=[math.prod(size for size, _, _ in dims) for dims in groups],
        size_axes=[union([mask for _, mask, _ in dims]) for dims in groups],
        batched=next((index for index, dims in enumerate(groups) if any(grow for _, _, grow in dims)), -1),
        num_bytes=[sharded.num_bytes(value) for value in values],
        bytes_axes=[union(masks) for masks in (*partitioned.operands[:2], partitioned.result)],
        bytes_batched=[sharded.is_batched(value) for value in values],
        dtypes=dtype_name(graph.avals[lhs].dtype),
        runs=runs,
        phase=int(group.phase),
        in_layers=group.in_layers,
        scores=[traced.sharding_keys[value].labels in traced.score_labels for value in values],
        expert_axes=experts,
    )
    if op.name != RAGGED:
        return row
    return row._replace(ragged=2 if sums_rows(op) else 0, groups=num_groups(graph, op))


def with_rows(row: Matmul, share: float) -> Matmul:
    """Returns a row of a ragged matmul over a share of its rows."""
    sizes = [size * share if index == row.ragged else size for index, size in enumerate(row.sizes)]
    return row._replace(flops=row.flops * share, sizes=sizes)


def sums_rows(op: Op) -> bool:
    """Returns whether an operation is a ragged matmul that contracts its rows: the gradient of its weights."""
    if op.name != RAGGED:
        return False
    rows = op.params["ragged_dot_dimension_numbers"].lhs_ragged_dimensions
    return any(lhs in rows for lhs, _ in op.dim_map.contraction[0])


def expanded(sharded: ShardedProgram, op: Op, partitioned: PartitionedOp) -> PartitionedOp:
    """Returns the partition of a matmul that computes its result as it is sharded afterwards."""
    masks = sharded.masks(op.outputs[0])
    return replace(partitioned, work=partitioned.work | union(masks), result=masks)


def expert_axes(sharded: ShardedProgram, op: Op, partitioned: PartitionedOp) -> int:
    """Returns the mesh axes that shard the experts of a matmul."""
    traced = sharded.traced
    experts = sharded.traced.routings
    labels = [traced.axes.classes[value] for value in (*op.inputs[:2], op.outputs[0])]
    masks = (*partitioned.operands[:2], partitioned.result)
    pairs = [pair for dims in zip(labels, masks, strict=True) for pair in zip(*dims, strict=True)]
    return union([mask for label, mask in pairs if label in experts])


def _as_matmul(
    op: Op, groups: list[list[tuple[float, int, bool]]], shape: Sequence[int], partitioned: PartitionedOp, flops: int
) -> None:
    """Completes m, n, k and the number of products of a convolution; output positions are rows, its window contracted.

    The channels of a group are contracted only with those of the same group. Zeros of dilated inputs are not counted.
    """
    batch, _, *places = op.params["dimension_numbers"].out_spec
    rows = [batch, *places] if op.params["batch_group_count"] > 1 else places
    groups[0] += [(shape[dim], partitioned.result[dim], False) for dim in rows]
    num_groups = max(op.params["feature_group_count"], op.params["batch_group_count"])
    if num_groups > 1:
        ((channels, mask, grows),) = groups[3]
        groups[3] = [(num_groups, mask, grows)]
        groups[1].append((channels / num_groups, 0, False))
    num_summed = math.prod(size for size, _, _ in groups[2])
    groups[2].append((flops / (2 * math.prod(shape) * num_summed), 0, False))


def dtype_name(dtype: Any) -> str:
    """Returns the hardware's name for the dtype of a matmul; integers and wider dtypes count as float32."""
    name = str(dtype)
    if name.startswith(("float8", "float4")):
        return "fp8" if name.startswith("float8") else "fp4"
    return {"bfloat16": "bf16", "float16": "fp16", "int8": "int8", "uint8": "int8"}.get(name, "fp32")
