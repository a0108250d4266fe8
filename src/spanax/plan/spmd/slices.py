"""What devices exchange to slice or to concatenate along a sharded dim.

Device i has the i-th shard of the operand, and the i-th shard of a slice lies on other devices: the partitioner
permutes what is needed from each distance. Concatenation exchanges the operands so that each device has all of a part,
and the result back. Source: programs of tests/byo for v5e:2x4, libtpu 0.0.52; openxla/xla
xla/service/spmd/spmd_partitioner_util.cc (`ExchangeHaloAndGetValidData`).
"""

from collections.abc import Iterator
from dataclasses import dataclass

from spanax.plan.spmd.sharded_program import ShardedProgram
from spanax.trace.jaxpr.graph import Op


@dataclass(frozen=True, slots=True)
class Exchange:
    """A collective on a value.

    Attributes:
      kind: `all-to-all` or `collective-permute`.
      value: the value that moves.
      output: the index of the result of the operation that it is or becomes.
      over: the mesh axes of the collective.
      sharding: the other mesh axes that shard the value; all of them for a permute.
      factor: the bytes that move, as a multiple of those of a shard.
    """

    kind: str
    value: int
    output: int
    over: int
    sharding: int
    factor: float


def exchanges(sharded: ShardedProgram, op: Op) -> Iterator[Exchange]:
    """Yields the collectives of a slice, split or concatenation along a sharded dim; none for other operations.

    Args:
      sharded: the program's step under the layout, on a mesh with the sizes that it runs on.
      op: the operation.
    """
    graph = sharded.traced.graph
    if op.name == "split":
        dim, start = op.params["axis"], 0
        for index, size in enumerate(op.params["sizes"]):
            yield from _sliced(sharded, op, index, dim, start)
            start += size
    elif op.name == "slice" and op.params["strides"] is None:
        for dim, start in enumerate(op.params["start_indices"]):
            if graph.shape(op.outputs[0])[dim] != graph.shape(op.inputs[0])[dim]:
                yield from _sliced(sharded, op, 0, dim, start)
    elif op.name == "concatenate":
        for value in (*op.inputs, *op.outputs):
            masks = sharded.masks(value)
            if over := masks[op.params["dimension"]]:
                yield Exchange("all-to-all", value, 0, over, _union(masks) & ~over, 1.0)


def _sliced(sharded: ShardedProgram, op: Op, index: int, dim: int, start: int) -> Iterator[Exchange]:
    masks, mesh = sharded.masks(op.outputs[index]), sharded.resolver.mesh
    over = masks[dim]
    if not over or sharded.masks(op.inputs[0])[dim] != over:
        return
    count = mesh.ways([axis for bit, axis in enumerate(mesh.names) if over >> bit & 1])
    graph = sharded.traced.graph
    before, after = (graph.shape(value)[dim] // count for value in (op.inputs[0], op.outputs[index]))
    moved = 0
    for distance in range(1 - count, count):
        # Shard i of the slice and the shard of the operand at this distance from it overlap in these elements.
        overlaps = [
            min(start + (shard + 1) * after, (shard + distance + 1) * before)
            - max(start + shard * after, (shard + distance) * before)
            for shard in range(max(0, -distance), min(count, count - distance))
        ]
        moved += max(0, *overlaps) if distance else 0
    if moved:
        yield Exchange("collective-permute", op.outputs[index], index, over, _union(masks), moved / after)


def _union(masks: tuple[int, ...]) -> int:
    result = 0
    for mask in masks:
        result |= mask
    return result
