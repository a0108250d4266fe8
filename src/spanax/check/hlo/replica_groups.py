"""Groups: who takes part in a collective, and along which mesh axes that is.

XLA writes groups in four ways, three of which occur in one TPU program. The numbers in them are partitions: places in
the mesh, flat, and not device ids.
"""

import itertools
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence

import numpy as np

from spanax.check.hlo.module import Instruction
from spanax.check.hlo.protobuf import Fields, fields, messages, number, numbers, raw
from spanax.hardware.mesh import MeshShape

ReplicaGroups = tuple[tuple[int, ...], ...]


def groups_of(instruction: Instruction) -> ReplicaGroups:
    """Partitions that talk to each other; none at all: all in one group. Of a permute, pairs of sender and receiver."""
    message = instruction.fields
    if 52 in message:
        return tuple((number(fields(pair), 1), number(fields(pair), 2)) for pair in messages(message, 52))
    if 93 in message:
        return _named(fields(raw(message, 93)))
    if 92 in message:
        return _counted(fields(raw(message, 92)))
    listed = fields(raw(message, 87))
    if 2 in listed:
        return _counted(fields(raw(listed, 2)))
    found = messages(listed, 1) or messages(message, 49)
    return tuple(numbers(fields(group), 1) for group in found)


def _counted(message: Fields) -> ReplicaGroups:
    """`[groups,size]<=[dims]T(order)`: partitions counted through a transposed box."""
    ids = _iota(numbers(message, 3), numbers(message, 4))
    rows = ids.reshape(number(message, 1), number(message, 2)).tolist()
    return tuple(map(tuple, rows))


def _iota(dims: Sequence[int], order: Sequence[int]) -> np.ndarray:
    ids = np.arange(math.prod(dims)).reshape(dims)
    return ids.transpose(order) if order else ids


def _named(message: Fields) -> ReplicaGroups:
    """Partitions that differ only along some axes of a mesh of XLA's own, or along a part (outer, size) of one."""
    mesh = fields(raw(message, 1))
    sizes = [number(fields(axis), 2) for axis in messages(mesh, 1)]
    ids = numbers(mesh, 2)
    if not ids and 3 in mesh:
        box = fields(raw(mesh, 3))
        ids = tuple(_iota(numbers(box, 1), numbers(box, 2)).ravel().tolist())
    over: dict[int, tuple[int, int]] = {}
    for reference in map(fields, messages(message, 2)):
        axis = number(reference, 1)
        part = fields(raw(reference, 2))
        over[axis] = (number(part, 1), number(part, 2)) if part else (1, sizes[axis])
    groups = defaultdict[tuple[int, ...], list[int]](list)
    places = itertools.product(*map(range, sizes))
    for place, partition in zip(places, ids or range(math.prod(sizes)), strict=True):
        rest: list[int] = []
        for axis, at in enumerate(place):
            outer, size = over.get(axis, (1, 1))
            inner = sizes[axis] // (outer * size)
            rest += [at // (inner * size), at % inner]
        groups[tuple(rest)].append(partition)
    return tuple(map(tuple, groups.values()))


def axes_of(groups: ReplicaGroups, sizes: Mapping[str, int]) -> str:
    """The mesh axes along which partitions talk; `~` before them: not to all along these axes.

    Example:
      >>> axes_of(((0, 1), (2, 3)), {"data": 2, "model": 2}), axes_of((), {"data": 2, "model": 2})
      ('model', 'data+model')
      >>> axes_of(((0, 1), (2, 3)), {"data": 4})
      '~data'
    """
    shape = tuple(sizes.values())
    groups = groups or (tuple(range(math.prod(shape))),)
    along: set[int] = set()
    for group in groups:
        places = np.unravel_index(np.asarray(group), shape) if shape else ()
        along |= {axis for axis, at in enumerate(places) if (at != at[0]).any()}
    names = [name for axis, name in enumerate(sizes) if axis in along]
    partly = any(len(group) != math.prod(sizes[name] for name in names) for group in groups)
    return "~" * partly + "+".join(names)


def across_slices(mesh: MeshShape, num_slices: int) -> ReplicaGroups:
    """Partitions at the same place in each slice, where the slowest axes of the mesh lie between slices.

    Example:
      >>> across_slices(MeshShape.of("data=2,fsdp=2"), 2)
      ((0, 2), (1, 3))
    """
    within, between = mesh.split(num_slices)
    ids = np.arange(mesh.size).reshape([size for pair in zip(between, within, strict=True) for size in pair])
    outer = tuple(range(0, ids.ndim, 2))
    by_slice = np.moveaxis(ids, outer, tuple(range(len(outer)))).reshape(num_slices, -1)
    return tuple(map(tuple, by_slice.T.tolist()))
