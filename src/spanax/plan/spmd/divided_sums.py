"""Gradients of stored weights that devices would compute repeatedly: the partitioner divides them among these devices.

A partial sum over P devices that is stored sharded over the same axes, and repeated by R devices along axes that shard
neither operand, is computed shard by shard where P divides R: each of the R devices computes one of the P shards, these
are all-reduced, and a permute moves each to its device. Source: openxla/xla xla/service/spmd/dot_handler.cc
(`PartitionDotGroupOnContracting`: the groups are aligned with the replicated devices of the result); 16 matmuls and
tests/byo/mae.py, multitask.py and tests/zoo.py (swin) for v5e:2x4, libtpu 0.0.52.
"""

from dataclasses import replace

from spanax.plan.sharding.partition import PartitionedOp, Reshard, union
from spanax.plan.spmd.sharded_program import ShardedProgram
from spanax.plan.spmd.tiled_scatter import is_vector_product
from spanax.trace.jaxpr.graph import Op


def num_divided(sharded: ShardedProgram, op: Op, partition: PartitionedOp | None) -> int:
    """Returns the number of parts into which devices that would repeat a matmul divide it; 1 for most operations.

    Args:
      sharded: the program's step under the layout, on a mesh with the sizes that it runs on.
      op: the operation.
      partition: how it is partitioned otherwise.
    """
    if op.name != "dot_general" or partition is None:
        return 1
    sums = [shift for shift in partition.shifts if not shift.is_operand and shift.value == op.outputs[0]]
    if [shift.kind for shift in sums] != ["reduce-scatter"] or is_vector_product(sharded.traced.graph, op):
        return 1
    num_parts = ways(sharded, sums[0].over)
    num_repeating = ways(sharded, ~union([partition.work, *map(union, partition.operands), union(partition.result)]))
    return num_parts if num_repeating % num_parts == 0 else 1


def divided(sharded: ShardedProgram, shift: Reshard) -> tuple[tuple[Reshard, float], tuple[Reshard, float]]:
    """Returns the collectives of a divided sum, each with the bytes that move as a multiple of those of its kind.

    They are an all-reduce of a shard, and a permute of it along all axes of the sum and of the devices that repeat it.
    """
    mesh = sharded.resolver.mesh
    repeating = [1 << bit for bit in range(len(mesh.names)) if not (shift.unchanged | shift.over) >> bit & 1]
    num_parts, num_repeating = (ways(sharded, mask) for mask in (shift.over, sum(repeating)))
    permute = replace(shift, kind="collective-permute", over=shift.over | sum(repeating))
    return (replace(shift, kind="all-reduce"), 1 / num_parts), (permute, float(num_repeating))


def ways(sharded: ShardedProgram, mask: int) -> int:
    """Returns the number of devices along mesh axes."""
    mesh = sharded.resolver.mesh
    return mesh.ways([axis for bit, axis in enumerate(mesh.names) if mask >> bit & 1])
