"""Scatter: all-reduces of which each device keeps only its part, which is a reduce-scatter.

CPU programs, and all programs right after the partitioner, have no other way to write one; TPU programs fuse both.
"""

import math
from collections.abc import Iterator

from spanax.check.hlo.module import Computation, Instruction, Module, Shape
from spanax.check.hlo.protobuf import number
from spanax.check.hlo.replica_groups import ReplicaGroups
from spanax.check.hlo.trip_counts import Values

CARRIES = frozenset({"copy", "bitcast", "reshape", "convert", "transpose"})


def reduce_scatters(
    module: Module, computation: Computation, one: Instruction, groups: ReplicaGroups
) -> tuple[list[Shape], list[tuple[Shape, int]]]:
    """The results of an all-reduce that stay whole, and the parts (shape, bytes) that devices keep of the others."""
    results = one.shape.parts or (one.shape,)
    whole: list[Shape] = []
    parts: list[tuple[Shape, int]] = []
    for at, shape in enumerate(results):
        slices = list(_ends(computation, one, at if one.shape.parts else None))
        kept = [end for end in slices if end is not None and _is_own_part(module, computation, end, shape, groups)]
        if slices and len(kept) == len(slices) and len({str(end.shape) for end in kept}) == 1:
            parts.append((kept[0].shape, shape.num_bytes // len(groups[0])))
        else:
            whole.append(shape)
    return whole, parts


def _ends(computation: Computation, one: Instruction, part: int | None) -> Iterator[Instruction | None]:
    """Who uses a result in the end: slices, or None for anything else."""
    users = computation.users.get(one.id, [])
    if computation.root == one.id:
        yield None
    for user in users:
        if part is not None and user.opcode == "get-tuple-element":
            if number(user.fields, 13) == part:
                yield from _ends(computation, user, None)
        elif user.opcode == "all-reduce-done":
            yield from _ends(computation, user, part)
        elif part is None and user.opcode in CARRIES:
            yield from _ends(computation, user, None)
        else:
            yield user if user.opcode in ("dynamic-slice", "fusion") else None


def _is_own_part(
    module: Module, computation: Computation, end: Instruction, shape: Shape, groups: ReplicaGroups
) -> bool:
    """Whether a slice gives every device of a group another part, and devices of the same place in it the same."""
    if end.opcode == "fusion" or math.prod(end.shape.dims) * len(groups[0]) != math.prod(shape.dims):
        return False
    return len(groups[0]) > 1 and all(_differ(module, computation, end, group) for group in groups)


def _differ(module: Module, computation: Computation, end: Instruction, group: tuple[int, ...]) -> bool:
    places = set()
    for partition in group:
        values = Values(module, computation, [], partition)
        at = tuple(values.of(operand) for operand in end.operands[1:])
        if not all(isinstance(one, int | tuple) for one in at):
            return False
        places.add(at)
    return len(places) == len(group)
