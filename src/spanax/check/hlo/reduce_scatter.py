"""Detects reduce-scatters that compilers write in other ways: as an all-reduce and a slice, or as chains of permutes.

CPU programs, and all programs right after the partitioner, slice an all-reduce; TPU programs fuse both operations. A
chain of permutes around a matmul starts with a permute of zeros, and partial matmuls are added between its permutes. If
both directions of a ring are used, a reduce-scatter has two chains.
"""

import math
from collections import defaultdict
from collections.abc import Iterator

from spanax.check.hlo.module import Computation, Instruction, Module, Shape
from spanax.check.hlo.replica_groups import ReplicaGroups, groups_of
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


PERMUTES = ("collective-permute", "collective-permute-start")
FORWARDS = frozenset({"get-tuple-element", "bitcast", "copy", "reshape", "copy-start", "copy-done"})
ADDS = frozenset({"add", "fusion"})


def permute_chains(computation: Computation) -> dict[int, int]:
    """Returns the permutes of reduce-scatters -> the number of reduce-scatters, all attributed to the first permute."""
    chains: dict[tuple[int, str], list[Instruction]] = defaultdict(list)
    for permute in computation.instructions.values():
        if permute.opcode in PERMUTES and _sends_zeros(computation, permute):
            chains[permute.operands[0], permute.op_name].append(permute)
    counts: dict[int, int] = {}
    for starts in chains.values():
        seen = dict.fromkeys(starts)
        stack = list(starts)
        ends = 0
        while stack:
            successors = list(_successors(computation, stack.pop()))
            ends += not successors
            new = [permute for permute in successors if permute not in seen]
            seen |= dict.fromkeys(new)
            stack += new
        if len(seen) > len(starts):
            directions = len({groups_of(permute) for permute in seen})
            first, *following = seen
            counts |= {first.id: max(1, ends // directions), **{permute.id: 0 for permute in following}}
    return counts


def _sends_zeros(computation: Computation, permute: Instruction) -> bool:
    """Returns whether a permute sends a broadcast scalar, the zeros at the start of a chain."""
    sent = computation.instructions[permute.operands[0]]
    return sent.opcode == "broadcast" and not computation.instructions[sent.operands[0]].shape.dims


def _successors(computation: Computation, permute: Instruction) -> Iterator[Instruction]:
    """Yields the permutes that forward a received value after an addition."""
    sums = [user for user in _users(computation, permute) if user.opcode in ADDS]
    for addition in dict.fromkeys(sums):
        yield from (user for user in _users(computation, addition) if user.opcode in PERMUTES)


def _users(computation: Computation, instruction: Instruction) -> Iterator[Instruction]:
    """Yields the users of a value and of its views."""
    for user in computation.users.get(instruction.id, ()):
        if user.opcode in FORWARDS or user.opcode == "collective-permute-done":
            yield from _users(computation, user)
        else:
            yield user
