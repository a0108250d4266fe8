"""Draws the collectives of a step: what each device of a group has before and after each of them."""

from collections.abc import Callable
from dataclasses import dataclass

from drawings.canvas import EDGE, LINE, Diagram, Node, box, el, label, shade, shade_text
from spanax.hardware.mesh import MeshShape
from spanax.plan.plan import Moved
from spanax.units import bytes_text

MAX_DEVICES = 4
"""Number of devices of a group that are drawn."""

LEAST_SHARE = 0.01
"""Collectives below this share of the bytes of a step are omitted."""

COLUMN, BLOCK, GAP = 36, 14, 4
"""Units: width of a device with its gap, height of a block, and the gap."""

AFTER = 212
"""Units: left edge of the devices after the collective."""


@dataclass(frozen=True)
class Block:
    """A part of an array on a device: its index, its text, and its row. A partial sum is drawn as an outline."""

    index: int
    text: str
    row: int
    is_partial: bool = False


def _letter(index: int) -> str:
    return "ABCDEFGH"[index]


def _shard(device: int, count: int) -> list[Block]:
    return [Block(device, _letter(device), device)]


def _all(device: int, count: int) -> list[Block]:
    return [Block(index, _letter(index), index) for index in range(count)]


def _partial(device: int, count: int) -> list[Block]:
    return [Block(index, f"{_letter(index).lower()}{device}", index, True) for index in range(count)]


def _row(device: int, count: int) -> list[Block]:
    return [Block(device, f"{_letter(device)}{index}", index) for index in range(count)]


def _column(device: int, count: int) -> list[Block]:
    return [Block(index, f"{_letter(index)}{device}", index) for index in range(count)]


def _shifted(device: int, count: int) -> list[Block]:
    index = (device - 1) % count
    return [Block(index, _letter(index), device)]


DRAWN: dict[str, tuple[Callable[[int, int], list[Block]], Callable[[int, int], list[Block]], str]] = {
    "all-gather": (_shard, _all, "each device receives the shards of the others"),
    "reduce-scatter": (_partial, _shard, "partial sums are added; each device keeps a shard"),
    "all-reduce": (_partial, _all, "partial sums are added; each device has the sum"),
    "all-to-all": (_row, _column, "each device sends a different part to each other"),
    "collective-permute": (_shard, _shifted, "each device sends its part to the next"),
}
"""By kind of collective: the blocks of a device before and after, and a description."""


def collectives_diagram(moved: Moved, mesh: MeshShape, title: str) -> Diagram:
    """Returns a panel per collective, the largest first, with the bytes that each device receives per step.

    Args:
      moved: bytes by mesh axes and kind, as in `Prediction.moved`.
      mesh: the mesh.
      title: the title.
    """
    total = sum(size for kinds in moved.values() for size in kinds.values())
    items = sorted(((size, kind, axes) for axes, kinds in moved.items() for kind, size in kinds.items()), reverse=True)
    items = [item for item in items if item[0] > LEAST_SHARE * total]
    nodes, top, texts = [label(EDGE, EDGE + 11, title, "t")], EDGE + LINE + 6.0, []
    for size, kind, axes in items:
        group = mesh.ways(axes.split("+"))
        head = f"{kind} over {axes}: {bytes_text(size)} per step"
        texts.append(f"{head}: {DRAWN[kind][2]}")
        nodes += [label(EDGE, top + 10, head, "b"), label(EDGE, top + 10 + LINE, DRAWN[kind][2], "s q")]
        panel, bottom = _panel(kind, group, top + 2 * LINE + 2)
        nodes += panel
        top = bottom + 10
    if any(DRAWN[kind][0] is _partial for _, kind, _ in items):
        nodes.append(label(EDGE, top + 8, "a0, a1: partial sums of block A on devices 0 and 1", "s q"))
        top += LINE
    return Diagram(title, "; ".join(texts) + ".", nodes, top + 6)


def _panel(kind: str, group: int, top: float) -> tuple[list[Node], float]:
    """Returns the devices before and after a collective, and the lower edge."""
    count = min(group, MAX_DEVICES)
    before, after, _ = DRAWN[kind]
    height, nodes = count * BLOCK + 4, list[Node]()
    for blocks, left in ((before, EDGE), (after, AFTER)):
        for device in range(count):
            x = left + device * COLUMN
            nodes.append(label(x + (COLUMN - GAP) / 2, top + 9, str(device), "q m"))
            nodes.append(box(x, top + 13, COLUMN - GAP, height, "rule"))
            for block in blocks(device, count):
                y = top + 15 + block.row * BLOCK
                css = "line" if block.is_partial else shade(block.index)
                ink = "m" if block.is_partial else f"{shade_text(block.index)} m"
                nodes.append(box(x + 2, y + 0.5, COLUMN - GAP - 4, BLOCK - 1, css))
                nodes.append(label(x + (COLUMN - GAP) / 2, y + 10, block.text, ink))
        if group > count:
            nodes.append(label(left + count * COLUMN + 2, top + 13 + height / 2, "…", "b"))
    middle = top + 13 + height / 2
    start = EDGE + 4 * COLUMN + 18
    nodes.append(el("path", d=f"M{start} {middle:.1f}h22m-5 -4l5 4l-5 4", class_="line"))
    return nodes, top + 13 + height
