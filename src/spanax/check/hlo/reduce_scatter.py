"""Detects reduce-scatters that are written as an all-reduce followed by a slice.

CPU programs, and all programs right after the partitioner, have only this form; TPU programs fuse both operations.
"""

import math
from collections.abc import Iterator

from spanax.check.hlo.module import Computation, Instruction, Module, Shape
from spanax.check.hlo.replica_groups import ReplicaGroups
from spanax.check.hlo.trip_counts import Values

VIEWS = frozenset({"copy", "bitcast", "reshape", "convert", "transpose"})


def reduce_scatters(
    module: Module, computation: Computation, instruction: Instruction, groups: ReplicaGroups
) -> tuple[list[Shape], list[tuple[Shape, int]]]:
    """Returns the unsliced results of an all-reduce, and the local shards (shape, bytes) of its sliced results."""
    results = instruction.shape.parts or (instruction.shape,)
    unsliced: list[Shape] = []
    shards: list[tuple[Shape, int]] = []
    for index, shape in enumerate(results):
        slices = list(_final_users(computation, instruction, index if instruction.shape.parts else None))
        local_slices = [
            end for end in slices if end is not None and _is_local_shard(module, computation, end, shape, groups)
        ]
        if slices and len(local_slices) == len(slices) and len({str(end.shape) for end in local_slices}) == 1:
            shards.append((local_slices[0].shape, shape.num_bytes // len(groups[0])))
        else:
            unsliced.append(shape)
    return unsliced, shards


def _final_users(computation: Computation, instruction: Instruction, part: int | None) -> Iterator[Instruction | None]:
    """Yields the final users of a result: slices, or None for any other user."""
    users = computation.users.get(instruction.id, [])
    if computation.root == instruction.id:
        yield None
    for user in users:
        if part is not None and user.opcode == "get-tuple-element":
            if user.message.tuple_index == part:
                yield from _final_users(computation, user, None)
        elif user.opcode == "all-reduce-done":
            yield from _final_users(computation, user, part)
        elif part is None and user.opcode in VIEWS:
            yield from _final_users(computation, user, None)
        else:
            yield user if user.opcode in ("dynamic-slice", "fusion") else None


def _is_local_shard(
    module: Module, computation: Computation, end: Instruction, shape: Shape, groups: ReplicaGroups
) -> bool:
    """Returns whether a slice gives each device of a group a different shard of the result."""
    if end.opcode == "fusion" or math.prod(end.shape.dims) * len(groups[0]) != math.prod(shape.dims):
        return False
    return len(groups[0]) > 1 and all(_offsets_differ(module, computation, end, group) for group in groups)


def _offsets_differ(module: Module, computation: Computation, end: Instruction, group: tuple[int, ...]) -> bool:
    offsets = set()
    for partition in group:
        values = Values(module, computation, [], partition)
        offset = tuple(values.of(operand) for operand in end.operands[1:])
        if not all(isinstance(entry, int | tuple) for entry in offset):
            return False
        offsets.add(offset)
    return len(offsets) == len(group)
