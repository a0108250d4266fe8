"""Drawings of an array on a mesh: a grid of its parts, each with the devices that hold it, as text or as SVG."""

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from rich import box
from rich.table import Table
from rich.text import Text

from spanax.check.array_placement import Shard, copies, shards
from spanax.hardware.mesh import MeshShape
from spanax.plan.plan import Placement
from spanax.units import bytes_text

STYLES = ("cyan", "green", "yellow", "magenta", "blue", "red", "bright_cyan", "bright_green")

CELL, LINE, EDGE = 26, 18, 12
"""Pixels of an SVG: a cell's height, a line of text, and the margin."""

LETTER = 7
"""Pixels of a letter in the SVG's 12-pixel monospace."""


@dataclass(frozen=True)
class Grid:
    """The parts of an array along at most two dims; of more split dims the first part is drawn.

    `rows` and `columns` are dims, or None; `cells` the devices of each part.
    """

    rows: int | None
    columns: int | None
    cells: tuple[tuple[Shard, ...], ...]
    left_out: tuple[int, ...]


def grid(leaf: Placement, mesh: MeshShape) -> Grid:
    """An array's parts as a grid: along the first split dim down, along the second across.

    Example:
      >>> leaf = Placement("w", (4, 6), "float32", "param", (None, None), (("data",), ("model",)), (2, 3), 24, "")
      >>> [[cell.devices for cell in row] for row in grid(leaf, MeshShape.of("data=2,model=2")).cells]
      [[(0,), (1,)], [(2,), (3,)]]
    """
    split = [dim for dim, by in enumerate(leaf.spec) if mesh.ways(by) > 1]
    # A dim that is whole makes one row or column: the last dims run across, as numpy prints them.
    columns = split[1] if len(split) > 1 else split[0] if split and split[0] == len(leaf.shape) - 1 else None
    rows = split[0] if split and split[0] != columns else None
    left_out = tuple(dim for dim in split if dim not in (rows, columns))
    table: dict[int, dict[int, Shard]] = {}
    for shard in shards(leaf, mesh):
        if all(shard.start[dim] == 0 for dim in left_out):
            row, column = (0 if dim is None else shard.start[dim] for dim in (rows, columns))
            table.setdefault(row, {})[column] = shard
    return Grid(
        rows, columns, tuple(tuple(row[at] for at in sorted(row)) for _, row in sorted(table.items())), left_out
    )


def drawn(leaf: Placement, mesh: MeshShape) -> tuple[str, Table]:
    """An array as a line that describes it, and a table of rich that draws it."""
    found = grid(leaf, mesh)
    table = Table(box=box.SQUARE, show_header=False, show_lines=True)
    for row in found.cells:
        table.add_row(
            *(Text(devices_text(cell.devices), STYLES[cell.devices[0] % len(STYLES)], justify="center") for cell in row)
        )
    return described(leaf, mesh, found), table


def described(leaf: Placement, mesh: MeshShape, found: Grid) -> str:
    """What the drawing of an array does not show."""
    dims = []
    for dim, (name, size, by) in enumerate(zip(leaf.axes, leaf.shape, leaf.spec, strict=True)):
        way = " down" if dim == found.rows else " across" if dim == found.columns else ""
        dims.append(f"{name or '?'}:{size}" + (f" / {'+'.join(by)} {mesh.ways(by)}{way}" if by else ""))
    times = copies(leaf, mesh)
    kept = f"{times} copies of each part" if times > 1 else "each part once"
    more = f"; the first part of dim {', '.join(map(str, found.left_out))} is drawn" if found.left_out else ""
    return f"{leaf.path} {leaf.dtype}[{', '.join(dims)}]: {bytes_text(leaf.local_bytes)} a device, {kept}{more}"


def svg(leaves: Sequence[Placement], mesh: MeshShape, title: str) -> str:
    """The drawings of arrays below each other as an SVG file; parts on the same first device have the same colour."""
    parts: list[str] = []
    width, top = EDGE + LETTER * len(title), EDGE + LINE
    parts.append(_text(EDGE, top, title, bold=True))
    for leaf in leaves:
        found = grid(leaf, mesh)
        caption = described(leaf, mesh, found)
        top += LINE + EDGE
        parts.append(_text(EDGE, top, caption))
        width = max(width, EDGE + LETTER * len(caption))
        texts = [[devices_text(cell.devices) for cell in row] for row in found.cells]
        cell_width = max(30, 10 + LETTER * max(len(text) for row in texts for text in row))
        top += EDGE // 2
        for row, cells in zip(texts, found.cells, strict=True):
            for at, (text, cell) in enumerate(zip(row, cells, strict=True)):
                left = EDGE + at * cell_width
                hue = 360 * cell.devices[0] // mesh.size
                parts.append(
                    f'<rect x="{left}" y="{top}" width="{cell_width}" height="{CELL}" '
                    f'fill="hsl({hue},65%,80%)" stroke="#333"/>'
                )
                parts.append(_text(left + cell_width // 2, top + CELL - 9, text, middle=True))
            width = max(width, EDGE + len(row) * cell_width)
            top += CELL
    size = f'width="{width + EDGE}" height="{top + EDGE}"'
    style = 'font-family="monospace" font-size="12"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size} {style}>\n' + "\n".join(parts) + "\n</svg>\n"


def devices_text(devices: Sequence[int]) -> str:
    """Device numbers, runs of them with a dash, steps with a colon.

    Example:
      >>> devices_text([0, 1, 2, 3]), devices_text([0, 2, 4, 6]), devices_text([1, 5]), devices_text([0, 1, 4, 5])
      ('0-3', '0-6:2', '1,5', '0,1,4,5')
    """
    steps = {after - before for before, after in zip(devices, devices[1:], strict=False)}
    if len(devices) > 2 and len(steps) == 1:
        (step,) = steps
        return f"{devices[0]}-{devices[-1]}" + (f":{step}" if step > 1 else "")
    if len(devices) > 8:
        return f"{','.join(map(str, devices[:4]))},... ({len(devices)})"
    return ",".join(map(str, devices))


def _text(left: int, top: int, text: str, *, bold: bool = False, middle: bool = False) -> str:
    extra = ' font-weight="bold"' * bold + ' text-anchor="middle"' * middle
    return f'<text x="{left}" y="{top}"{extra}>{escape(text)}</text>'
