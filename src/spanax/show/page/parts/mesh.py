"""Draws a mesh as grids of devices: the last axis across, the one before it down, one grid per index of the others."""

import itertools
import math

from spanax.hardware.mesh import MeshShape
from spanax.show.page.parts.bars import colour
from spanax.show.page.parts.markup import Node, el, fill

MAX_DEVICES = 256
"""Number of devices drawn; of a larger mesh, the first along each axis."""

SIZES = {"large": 16, "small": 64, "tiny": MAX_DEVICES}
"""By size of a drawn device, the largest number of devices."""


def mesh_grid(mesh: MeshShape) -> Node:
    """Returns the devices of a mesh with their numbers; script.js colors them by the shard that they hold."""
    axes = [(name, size) for name, size in mesh.axes if size > 1] or list(mesh.axes[-1:]) or [("device", 1)]
    drawn = _drawn([size for _, size in axes])
    outer, inner = drawn[:-2], drawn[-2:]
    strides = [math.prod(size for _, size in axes[dim + 1 :]) for dim in range(len(axes))]
    grids = el("div", class_="grids")
    for outer_index in itertools.product(*map(range, outer)):
        grid = el("div", class_="grid", style=f"--columns:{inner[-1]}")
        for inner_index in itertools.product(*map(range, inner)):
            place = (*outer_index, *inner_index)
            number = sum(index * stride for index, stride in zip(place, strides, strict=True))
            fill(grid, el("span", el("b", str(number)), el("i"), class_="cell", data_at=" ".join(map(str, place))))
        title = ", ".join(f"{name} {index}" for (name, _), index in zip(axes, outer_index, strict=False))
        fill(grids, el("div", el("p", title, class_="facet") if title else None, grid))
    size = next(size for size, limit in SIZES.items() if math.prod(drawn) <= limit)
    return el(
        "div", legend(mesh), grids, _left_out(axes, drawn), class_=f"mesh {size}", role="img", aria_label=caption(mesh),
        data_mesh=" ".join(str(size) for _, size in axes),
    )  # fmt: skip


def caption(mesh: MeshShape) -> str:
    """Returns the axes of a mesh as text.

    Example:
      >>> caption(MeshShape.of("fsdp=4,model=2"))
      '8 devices: fsdp 4 down, model 2 across'
    """
    axes = [(name, size) for name, size in mesh.axes if size > 1]
    directions = [*[""] * (len(axes) - 2), " down", " across"][-len(axes) :] if axes else []
    text = ", ".join(f"{name} {size}{direction}" for (name, size), direction in zip(axes, directions, strict=True))
    return f"{mesh.size} devices: {text}" if axes else "one device"


def axis_colour(mesh: MeshShape, axis: str) -> str:
    """Returns the CSS class of the color of a mesh axis."""
    return colour(mesh.names.index(axis))


def legend(mesh: MeshShape) -> Node:
    """Returns the axes of a mesh with their colors."""
    listed = el("p", class_="axes")
    directions = ("across", "down")
    shown = [(name, size) for name, size in mesh.axes if size > 1]
    for index, (name, size) in enumerate(shown):
        from_last = len(shown) - 1 - index
        direction = f" {directions[from_last]}" if from_last < len(directions) else ""
        fill(listed, el("span", el("b", name), f" {size}{direction}", class_=f"chip {axis_colour(mesh, name)}"), " ")
    return listed


def _drawn(sizes: list[int]) -> list[int]:
    """Returns the number of devices drawn along each axis."""
    limit = min(max(sizes), MAX_DEVICES)
    while math.prod(min(size, limit) for size in sizes) > MAX_DEVICES:
        limit -= 1
    return [min(size, limit) for size in sizes]


def _left_out(axes: list[tuple[str, int]], drawn: list[int]) -> Node | None:
    short = [f"{shown} of {size} along {name}" for (name, size), shown in zip(axes, drawn, strict=True) if shown < size]
    return el("p", f"Shows the first {', '.join(short)}.", class_="note") if short else None
