"""Draws the devices of nodes, and the groups that communicate along a mesh axis."""

from collections.abc import Sequence

from spanax.hardware.cluster import Cluster
from spanax.hardware.links import AxisLink
from spanax.hardware.mesh import MeshShape
from spanax.show.diagrams.canvas import EDGE, LINE, WIDTH, Diagram, box, label, shade, shade_text
from spanax.show.page.parts.markup import Node
from spanax.units import quantity_text

DEVICE, GAP = 40, 3
"""Units: width of a device with its gap, and the gap."""

HEIGHT = 34
"""Units: height of a device."""


def neighbors_diagram(cluster: Cluster, links: Sequence[tuple[MeshShape, AxisLink]], axis: str, title: str) -> Diagram:
    """Returns the devices of each node in order, with their groups along a mesh axis as letters, for each mesh.

    Args:
      cluster: the devices; its nodes are drawn side by side.
      links: meshes of all devices, from top to bottom, each with the link along the axis.
      axis: a mesh axis of all meshes.
      title: the title.
    """
    nodes, top, texts = [label(EDGE, EDGE + 11, title, "t")], EDGE + LINE + 6.0, []
    for mesh, link in links:
        speed = quantity_text(float(link.bytes_per_second), "bytes per second", 3)
        head = f"{mesh}: {axis} over {link.over}, {speed}"
        letters = ["ABCDEFGHIJKLMNOP"[group] for group in groups(mesh, axis)]
        texts.append(f"{head}, groups {' '.join(letters)}")
        nodes += [label(EDGE, top + 10, head, "b"), *_devices(cluster, letters, top + LINE)]
        top += 2 * LINE + HEIGHT + 20
    nodes.append(label(EDGE, top + 8, f"Equal letters: the devices of one group along {axis}", "s q"))
    return Diagram(title, "; ".join(texts) + ".", nodes, top + LINE + 6)


def groups(mesh: MeshShape, axis: str) -> list[int]:
    """Returns for each device the index of its group along a mesh axis: its position along all other axes.

    Example:
      >>> groups(MeshShape.of("data=2,model=2"), "model"), groups(MeshShape.of("model=2,data=2"), "model")
      ([0, 0, 1, 1], [0, 1, 0, 1])
    """
    sizes = dict(mesh.axes)
    names = list(sizes)
    inner = mesh.ways(names[names.index(axis) + 1 :])
    return [device // (inner * sizes[axis]) * inner + device % inner for device in range(mesh.size)]


def _devices(cluster: Cluster, letters: Sequence[str], top: float) -> list[Node]:
    nodes, (num_nodes, per_node) = list[Node](), cluster.shape
    room = (WIDTH - 2 * EDGE) / num_nodes
    step = min(DEVICE, (room - 14) / per_node)
    for node in range(num_nodes):
        left = EDGE + node * room
        nodes += [label(left + 4, top + 10, f"node {node}", "q"), box(left, top + LINE, room - 6, HEIGHT + 8, "rule")]
        for place in range(per_node):
            device = node * per_node + place
            index, x, y = ord(letters[device]) - ord("A"), left + 4 + place * step, top + LINE + 4
            nodes.append(box(x, y, step - GAP, HEIGHT, shade(index)))
            middle = x + (step - GAP) / 2
            nodes.append(label(middle, y + 14, str(device), f"{shade_text(index)} m"))
            nodes.append(label(middle, y + 27, letters[device], f"{shade_text(index)} m b"))
    return nodes
