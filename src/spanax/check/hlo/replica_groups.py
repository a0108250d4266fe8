"""Decodes the replica groups of collectives and maps them to mesh axes.

XLA has four encodings of replica groups, and a TPU program may use three of them. Their ids are partition ids, which
are flat indices into the mesh and not device ids.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from spanax.check.hlo.module import Instruction
from spanax.hardware.mesh import MeshShape

ReplicaGroups = tuple[tuple[int, ...], ...]


def groups_of(instruction: Instruction) -> ReplicaGroups:
    """Returns the replica groups; empty for one group of all partitions. Of a permute, the (source, target) pairs."""
    message = instruction.message
    if message.source_target_pairs:
        return tuple((pair.source, pair.target) for pair in message.source_target_pairs)
    if message.HasField("mesh_axes_replica_groups"):
        return _mesh_groups(message.mesh_axes_replica_groups)
    for parent in (message, message.collective_device_list):
        if parent.HasField("iota_replica_groups"):
            return _iota_groups(parent.iota_replica_groups)
    groups = message.collective_device_list.replica_groups or message.replica_groups
    return tuple(tuple(group.replica_ids) for group in groups)


def _iota_groups(message: Any) -> ReplicaGroups:
    """Decodes iota groups, `[groups,size]<=[dims]T(order)`."""
    ids = _iota(message.iota_reshape_dims, message.iota_transpose_perm)
    return tuple(map(tuple, ids.reshape(message.num_replica_groups, message.num_devices_per_group).tolist()))


def _iota(dims: Sequence[int], order: Sequence[int]) -> np.ndarray:
    ids = np.arange(math.prod(dims)).reshape(dims)
    return ids.transpose(order) if order else ids


def _mesh_groups(message: Any) -> ReplicaGroups:
    """Decodes groups along axes, or sub-axes (outer, size), of a mesh in the instruction."""
    mesh = message.mesh
    sizes = [axis.size for axis in mesh.axes]
    ids = np.array(mesh.device_ids or range(math.prod(sizes)))
    if not mesh.device_ids and mesh.HasField("iota"):
        ids = _iota(mesh.iota.reshape_dims, mesh.iota.transpose_perm)
    parts = [[1, 1, size] for size in sizes]  # of each axis, the sizes outside, along and inside of the groups
    for reference in message.axes:
        size = sizes[reference.mesh_axis_index]
        part = reference.sub_axis
        outer, along = (part.pre_size, part.size) if reference.HasField("sub_axis") else (1, size)
        parts[reference.mesh_axis_index] = [outer, along, size // (outer * along)]
    split = ids.reshape([size for part in parts for size in part])
    along_axes = range(1, split.ndim, 3)
    grouped = np.moveaxis(split, along_axes, range(split.ndim - len(sizes), split.ndim))
    return tuple(map(tuple, grouped.reshape(-1, math.prod(part[1] for part in parts)).tolist()))


def axes_of(groups: ReplicaGroups, sizes: Mapping[str, int]) -> str:
    """Returns the mesh axes along which partitions communicate, prefixed with `~` if groups do not span the axes.

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
        coordinates = np.unravel_index(np.asarray(group), shape) if shape else ()
        along |= {axis for axis, indices in enumerate(coordinates) if (indices != indices[0]).any()}
    names = [name for axis, name in enumerate(sizes) if axis in along]
    is_partial = any(len(group) != math.prod(sizes[name] for name in names) for group in groups)
    return "~" * is_partial + "+".join(names)


def across_slices(mesh: MeshShape, num_slices: int) -> ReplicaGroups:
    """Returns the groups of partitions with the same index in each slice; the major mesh axes span the slices.

    Example:
      >>> across_slices(MeshShape.of("data=2,fsdp=2"), 2)
      ((0, 2), (1, 3))
    """
    within, between = mesh.split(num_slices)
    ids = np.arange(mesh.size).reshape([size for pair in zip(between, within, strict=True) for size in pair])
    outer = tuple(range(0, ids.ndim, 2))
    by_slice = np.moveaxis(ids, outer, tuple(range(len(outer)))).reshape(num_slices, -1)
    return tuple(map(tuple, by_slice.T.tolist()))
