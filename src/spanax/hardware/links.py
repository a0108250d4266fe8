"""The bandwidth and latency of collectives over mesh axes, from the topology of the cluster.

Devices are in row-major order: neighbors along the last mesh axis are neighbors in the cluster.
"""

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from spanax.errors import ClusterError, HardwareError, UnknownNameError, nearest
from spanax.hardware.chip import Chip, Link
from spanax.hardware.cluster import Cluster
from spanax.hardware.mesh import MeshShape
from spanax.hardware.torus import Part, joined, place


@dataclass(frozen=True)
class AxisLink:
    """The link between the `size` devices of a group along mesh axes; bandwidths are unidirectional, per device.

    `bytes_per_second` is for all_gather and reduce_scatter; the other collectives have their own fields.
    `latency_seconds` is per step of a ring with size - 1 steps, `tree_latency_seconds` the latency from the leaves of
    a tree to its root, and `start_seconds` the overhead per collective. If hidden, it slows computation by the share
    `contention` of its time. `over` names the links. All numbers may be
    arrays over meshes.

    Example:
      >>> from spanax.hardware.cluster import cluster
      >>> link = axis_link(cluster("v5e:16x16"), MeshShape.of("data=16,model=16"), "model")
      >>> link.over, round(link.bytes_per_second / 1e9), round(link.tree_latency_seconds * 1e6)
      ('ici 1 axis, wrapped', 90, 8)
    """

    size: Any
    bytes_per_second: Any
    all_reduce_bytes_per_second: Any
    all_to_all_bytes_per_second: Any
    permute_bytes_per_second: Any
    latency_seconds: Any
    tree_latency_seconds: Any
    start_seconds: Any
    contention: Any = 0.0
    over: str = ""


ALONE = AxisLink(1, math.inf, math.inf, math.inf, math.inf, 0.0, 0.0, 0.0, 0.0, "one device")


def axis_link(cluster: Cluster, mesh: MeshShape, axes: str | Sequence[str]) -> AxisLink:
    """Returns the link of a collective over one or more mesh axes.

    With a switch, stride s (the product of the later sizes), size n and nodes of D devices, the group is within a node
    if s n <= D and between nodes if s >= D. Otherwise it is a ring through several nodes at the lower of the bandwidth
    within a node and the total inter-node bandwidth of the group's devices in one node.

    In a torus, dims are assigned to the last mesh axis first. A group over k full dims that wrap around sends in both
    directions along each dim, over 2 k links. Part of a dim, or a dim that does not wrap around, has one link.

    Raises:
      SpanaxError: the mesh has no such axis, its size is not that of the torus, or the chip's links are unknown.

    Source: torus, jax-ml/scaling-book @0819a7d sharding.md; rings through nodes, NCCL (one ring per network port).

    Example:
      >>> from spanax.hardware.cluster import cluster
      >>> mesh = MeshShape.of("data=4,fsdp=4,model=4")
      >>> for axes in ("model", "fsdp", "data", ("fsdp", "model")):
      ...     link = axis_link(cluster("a100:8x8"), mesh, axes)
      ...     print(link.size, link.over, round(link.bytes_per_second / 1e9))
      4 nvlink 228
      4 nvlink+infiniband 46
      4 infiniband 23
      16 nvlink+infiniband 182
      >>> axis_link(cluster("v5p:4x4x4"), mesh, ("data", "model")).over
      'ici 2 axes, wrapped'
    """
    names = mesh.names
    axis_names = (axes,) if isinstance(axes, str) else axes
    for axis in axis_names:
        if axis not in names:
            raise UnknownNameError(f"the mesh has no axis '{axis}'.", where=f"mesh {mesh}", fix=nearest(axis, names))
    positions = tuple(position for position, name in enumerate(names) if name in axis_names)
    return _axis_link(cluster, tuple(size for _, size in mesh.axes), positions)


def within(sizes: Sequence[Any], node: int) -> list[Any]:
    """Returns the number of devices along each axis in the same node (or slice); `sizes` may be arrays over meshes.

    Groups of equal size over the same axes have the same link if their meshes agree in these numbers.

    Example:
      >>> [int(size) for size in within((4, 4, 4), 8)]
      [1, 2, 4]
    """
    shared_sizes = list[Any]()
    stride = 1
    for size in reversed(sizes):
        shared_sizes.insert(0, np.clip(node // stride, 1, size))
        stride = stride * size
    return shared_sizes


def _axis_link(cluster: Cluster, sizes: tuple[int, ...], positions: tuple[int, ...]) -> AxisLink:
    size = math.prod(sizes[position] for position in positions)
    if size == 1:
        return ALONE
    chip = cluster.chip
    node = cluster.devices_per_node
    inside_node = tuple(map(int, within(sizes, node)))
    members = math.prod(inside_node[position] for position in positions)
    if members == 1:
        return _switched(_known(chip, chip.between, "between nodes"), size)
    link = _known(chip, chip.inside, "between devices")
    if link.kind == "torus":
        placed = _placed(cluster, inside_node)
        parts = [part for position in positions for part in placed[position]]
        inside = _torus(chip, link, members, joined(parts, cluster.shape, link.wraps(cluster.shape)))
    else:
        inside = _switched(link, members)
    if members == size:
        return inside
    return _mixed(inside, _known(chip, chip.between, "between nodes"), size)


def _switched(link: Link, size: int) -> AxisLink:
    """Returns the link of a group through a switch, or over the direct links between its devices."""
    rate = link.effective_bytes_per_second
    if link.kind == "direct" and link.max_devices and link.max_devices > 1:
        rate *= (size - 1) / (link.max_devices - 1)
    adds = link.in_switch_share is not None and size >= (link.in_switch_devices or 2)
    all_reduce = link.bytes_per_second * (link.in_switch_share or 0.0) if adds else rate
    latency = math.ceil(math.log2(size)) * link.latency_seconds
    device_rate = rate / (size - 1) if link.kind == "direct" else rate
    return AxisLink(
        size,
        rate,
        all_reduce,
        rate,
        device_rate,
        link.latency_seconds,
        latency,
        link.start_seconds,
        link.contention,
        link.name,
    )


def _mixed(inside: AxisLink, between: Link, size: int) -> AxisLink:
    """Returns the link of a group with `inside.size` devices in each of several nodes.

    Source of the all-to-all: deepseek-ai/DeepEP @0297fc8, README.md, "Performance": 16 H100s on two nodes exchange 90
    and 81 GB/s, their own parts included, and 32 on four 61; this formula returns 91 and 60.
    """
    members = inside.size
    nodes = -(-size // inside.size)
    line = between.effective_bytes_per_second
    rate = min(inside.bytes_per_second, members * line)
    # An all_to_all concurrently sends one part to other nodes, over one link per device, and the other within the node.
    slowest = max((size - members) / line, (members - 1) / inside.all_to_all_bytes_per_second) / size
    return AxisLink(
        size=size,
        bytes_per_second=rate,
        all_reduce_bytes_per_second=min(inside.all_reduce_bytes_per_second, members * line),
        all_to_all_bytes_per_second=(size - 1) / size / slowest,
        permute_bytes_per_second=min(inside.permute_bytes_per_second, line),
        latency_seconds=(inside.latency_seconds * (members - 1) + between.latency_seconds) / members,
        tree_latency_seconds=inside.tree_latency_seconds + math.ceil(math.log2(nodes)) * between.latency_seconds,
        start_seconds=max(inside.start_seconds, between.start_seconds),
        contention=inside.contention if inside.bytes_per_second < members * line else between.contention,
        over=f"{inside.over}+{between.name}",
    )


def _torus(chip: Chip, link: Link, size: int, parts: list[Part]) -> AxisLink:
    """Returns the link of a group over parts of the dims of a torus, used concurrently."""
    line = link.effective_bytes_per_second
    on_chip = link.on_chip_bytes_per_second or line
    dims = [part for part in parts if part.dim >= 0]
    rate = sum(line * (2 if part.wraps else 1) / part.stride for part in dims)
    if len(dims) < len(parts):
        # The devices of a chip use all of its links, and forward what they receive to each other.
        rate = min(rate * chip.devices_per_chip, on_chip) if dims else on_chip
    # Half of the traffic crosses the bisection of a dim, which has two links per direction in a ring, one in a row.
    crossing = [part.size * part.stride / (line * (8 if part.wraps else 4)) for part in dims]
    crossing += [part.size / (4 * on_chip) for part in parts if part.dim < 0]
    hops = sum(part.hops for part in parts)
    wrapping = "wrapped" if all(part.wraps for part in dims) else "not wrapped"
    return AxisLink(
        size=size,
        bytes_per_second=rate,
        all_reduce_bytes_per_second=rate,
        all_to_all_bytes_per_second=(size - 1) / size / max(crossing),
        permute_bytes_per_second=min([line / part.stride for part in dims] or [on_chip]),
        latency_seconds=hops * link.latency_seconds / (size - 1),
        tree_latency_seconds=hops * link.latency_seconds,
        start_seconds=link.start_seconds,
        contention=link.contention,
        over=f"{link.name} {len(dims)} {'axis' if len(dims) == 1 else 'axes'}, {wrapping}" if dims else "on chip",
    )


@functools.lru_cache(maxsize=4096)
def _placed(cluster: Cluster, within: tuple[int, ...]) -> tuple[tuple[Part, ...], ...]:
    link = _known(cluster.chip, cluster.chip.inside, "between devices")
    if math.prod(within) != cluster.devices_per_node:
        raise ClusterError(
            f"mesh axes of {' x '.join(map(str, within))} do not fill {cluster.devices_per_node} devices.",
            where=f"cluster {cluster}",
            fix=f"a mesh whose product is {cluster.num_devices}",
        )
    return place(within, cluster.shape, link.wraps(cluster.shape), cluster.chip.devices_per_chip)


def _known(chip: Chip, link: Link | None, what: str) -> Link:
    if link is None:
        raise HardwareError(
            f"the link of '{chip.name}' {what} is unknown.",
            fix="a cluster file with [inside] and [between]: `spanax probe` writes one",
        )
    return link
