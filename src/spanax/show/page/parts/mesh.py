"""Mesh: the devices as a grid: the last axis across, the one before it down, and a grid for each of the rest."""

import itertools
import math

from spanax.hardware.mesh import MeshShape
from spanax.show.page.parts.bars import colour
from spanax.show.page.parts.markup import Node, el, fill

MOST = 256
"""So many devices are drawn; of a larger mesh the first along each axis."""

SIZES = {"large": 16, "small": 64, "tiny": MOST}
"""How large a device is drawn, by how many there are at most."""


def mesh_grid(mesh: MeshShape) -> Node:
    """The devices of a mesh, each with its number; script.js colours them by the part of an array that they hold."""
    axes = [(name, size) for name, size in mesh.axes if size > 1] or list(mesh.axes[-1:]) or [("device", 1)]
    drawn = _drawn([size for _, size in axes])
    outer, inner = drawn[:-2], drawn[-2:]
    strides = [math.prod(size for _, size in axes[at + 1 :]) for at in range(len(axes))]
    grids = el("div", class_="grids")
    for at in itertools.product(*map(range, outer)):
        grid = el("div", class_="grid", style=f"--columns:{inner[-1]}")
        for inside in itertools.product(*map(range, inner)):
            place = (*at, *inside)
            number = sum(index * stride for index, stride in zip(place, strides, strict=True))
            fill(grid, el("span", el("b", str(number)), el("i"), class_="cell", data_at=" ".join(map(str, place))))
        title = ", ".join(f"{name} {index}" for (name, _), index in zip(axes, at, strict=False))
        fill(grids, el("div", el("p", title, class_="facet") if title else None, grid))
    size = next(size for size, most in SIZES.items() if math.prod(drawn) <= most)
    return el(
        "div", legend(mesh), grids, _left_out(axes, drawn), class_=f"mesh {size}", role="img", aria_label=caption(mesh),
        data_mesh=" ".join(str(size) for _, size in axes),
    )  # fmt: skip


def caption(mesh: MeshShape) -> str:
    """A mesh in words.

    Example:
      >>> said(MeshShape.of("fsdp=4,model=2"))
      '8 devices: fsdp 4 down, model 2 across'
    """
    axes = [(name, size) for name, size in mesh.axes if size > 1]
    ways = [*[""] * (len(axes) - 2), " down", " across"][-len(axes) :] if axes else []
    told = ", ".join(f"{name} {size}{way}" for (name, size), way in zip(axes, ways, strict=True))
    return f"{mesh.size} devices: {told}" if axes else "one device"


def axis_colour(mesh: MeshShape, axis: str) -> str:
    """The class of the colour that stands for a mesh axis."""
    return colour(mesh.names.index(axis))


def legend(mesh: MeshShape) -> Node:
    """The axes of a mesh with their colours."""
    listed = el("p", class_="axes")
    ways = ("across", "down")
    shown = [(name, size) for name, size in mesh.axes if size > 1]
    for at, (name, size) in enumerate(shown):
        behind = len(shown) - 1 - at
        way = f" {ways[behind]}" if behind < len(ways) else ""
        fill(listed, el("span", el("b", name), f" {size}{way}", class_=f"chip {axis_colour(mesh, name)}"), " ")
    return listed


def _drawn(sizes: list[int]) -> list[int]:
    """How many of each axis are drawn."""
    most = min(max(sizes), MOST)
    while math.prod(min(size, most) for size in sizes) > MOST:
        most -= 1
    return [min(size, most) for size in sizes]


def _left_out(axes: list[tuple[str, int]], drawn: list[int]) -> Node | None:
    short = [f"{shown} of {size} along {name}" for (name, size), shown in zip(axes, drawn, strict=True) if shown < size]
    return el("p", f"Drawn are the first {', '.join(short)}.", class_="note") if short else None
