"""Draws which device stores which shard of each array."""

from collections.abc import Sequence

from drawings.canvas import EDGE, LETTER, LINE, WIDTH, Diagram, Node, box, label, shade, shade_text, shortened
from spanax.check.array_placement import copies, shards
from spanax.hardware.mesh import MeshShape
from spanax.plan.sharding.placement import DEVICE, Placement
from spanax.show.placement import grid
from spanax.units import bytes_text

NAMES, HEIGHT, GAP = 53, 44, 5
"""Units: width of the names of mesh axes, height of an array, and the gap between two devices."""


def shards_diagram(leaves: Sequence[Placement], mesh: MeshShape, title: str) -> Diagram:
    """Returns the shards of arrays on each device: the dashed outline is the array, the filled area the shard.

    Args:
      leaves: the arrays, from top to bottom.
      mesh: the mesh, of at most 8 devices.
      title: the title.
    """
    top = EDGE + LINE + 4.0
    nodes = [label(EDGE, EDGE + 11, title, "t"), *_heads(mesh, top)]
    top += LINE * (1 + sum(size > 1 for _, size in mesh.axes)) + 6
    for leaf in leaves:
        nodes += [*_captions(leaf, mesh, top), *_columns(leaf, mesh, top + 2 * LINE)]
        top += 2 * LINE + HEIGHT + 12
    description = f"{mesh.size} devices, mesh {mesh}. " + "; ".join(_described(leaf, mesh) for leaf in leaves) + "."
    return Diagram(title, description, nodes, top, max(WIDTH, 2 * EDGE + 7 * len(title)))


def _column(mesh: MeshShape) -> float:
    """Returns the distance between two devices."""
    return min(76.0, (WIDTH - 2 * EDGE - NAMES + GAP) / mesh.size)


def _heads(mesh: MeshShape, top: float) -> list[Node]:
    """Returns the number of each device and its index along each mesh axis."""
    nodes, step, row = [label(EDGE, top + 10, "device", "s")], _column(mesh), 1
    middles = [EDGE + NAMES + device * step + (step - GAP) / 2 for device in range(mesh.size)]
    nodes += [label(middle, top + 10, str(device), "b m") for device, middle in enumerate(middles)]
    stride = mesh.size
    for name, size in mesh.axes:
        stride //= size
        if size > 1:
            nodes.append(label(EDGE, top + 10 + row * LINE, name, "q"))
            nodes += [
                label(middle, top + 10 + row * LINE, str(device // stride % size), "q m")
                for device, middle in enumerate(middles)
            ]
            row += 1
    return nodes


def _captions(leaf: Placement, mesh: MeshShape, top: float) -> list[Node]:
    """Returns the array with its dims and spec, and the share of a device."""
    dims = ", ".join(f"{name or '?'} {size}" for name, size in zip(leaf.axes, leaf.shape, strict=True))
    name = shortened(leaf.path, WIDTH - 2 * EDGE - LETTER * (len(dims) + 3))
    second = shortened(f"{_spec_text(leaf)}: {_share_text(leaf, mesh)}", WIDTH - 2 * EDGE)
    return [
        label(EDGE, top + 10, f"{name} [{dims}]", "b"),
        label(EDGE, top + 10 + 13, second, "q"),
    ]


def _spec_text(leaf: Placement) -> str:
    """Returns the spec as JAX prints it."""
    inner = (repr(axes[0] if len(axes) == 1 else axes) if axes else "None" for axes in leaf.spec)
    return f"P({', '.join(inner)})"


def _share_text(leaf: Placement, mesh: MeshShape) -> str:
    """Returns what each device stores."""
    where = "" if leaf.memory_kind == DEVICE else " in host memory"
    times = copies(leaf, mesh)
    share = "replicated" if times == mesh.size else f"{mesh.size // times} shards" + f", {times} copies" * (times > 1)
    return f"{share}, {bytes_text(leaf.local_bytes)} each{where}"


def _columns(leaf: Placement, mesh: MeshShape, top: float) -> list[Node]:
    """Returns the outline of the array for each device, and in it the shard that the device stores."""
    drawing, step = grid(leaf, mesh), _column(mesh)
    width, nodes = step - GAP, list[Node]()
    for index, shard in enumerate(shards(leaf, mesh)):
        spans = []
        for dim in (drawing.columns, drawing.rows):
            size = 1 if dim is None else leaf.shape[dim]
            first, last = (0, 1) if dim is None else (shard.start[dim], shard.stop[dim])
            spans.append((first / size, (last - first) / size))
        (left, across), (above, down) = spans
        for device in shard.devices:
            x = EDGE + NAMES + device * step
            corner, wide, high = (x + left * width, top + above * HEIGHT), across * width, down * HEIGHT
            nodes.append(box(x, top, width, HEIGHT, "full"))
            nodes.append(box(*corner, wide, high, shade(index)))
            if wide >= 8 and high >= 11:
                text = "full" if len(shard.devices) == mesh.size else str(index)
                nodes.append(label(corner[0] + wide / 2, corner[1] + high / 2 + 3.5, text, f"{shade_text(index)} m"))
    return nodes + _sides(leaf, drawing.rows, drawing.columns, top)


def _sides(leaf: Placement, rows: int | None, columns: int | None, top: float) -> list[Node]:
    """Returns the names of the dims that are drawn down and across."""
    nodes = []
    for dim, arrow, y in ((rows, "↓", top + 18), (columns, "→", top + 32)):
        if dim is not None:
            nodes.append(label(EDGE, y, f"{(leaf.axes[dim] or '?')[:7]}{arrow}", "q"))
    return nodes


def _described(leaf: Placement, mesh: MeshShape) -> str:
    dims = ", ".join(f"{name or '?'} {size}" for name, size in zip(leaf.axes, leaf.shape, strict=True))
    return f"{leaf.path} [{dims}] {_spec_text(leaf)}, {_share_text(leaf, mesh)}"
