"""Draws arrays with the axes of their dims: equal axes have equal names, colors and numbers."""

from collections.abc import Sequence

from spanax.show.diagrams.canvas import EDGE, LINE, WIDTH, Diagram, box, label, shade, shade_text, shortened
from spanax.show.page.parts.markup import Node
from spanax.trace.variables import Leaf

HEIGHT, BAND, PER_ROW = 62, 15, 2
"""Units: height of an array and of the band of a dim; and the number of arrays in a row."""


def dims_diagram(leaves: Sequence[Leaf], title: str) -> Diagram:
    """Returns matrices as rectangles with the name of a dim along each side.

    Args:
      leaves: arrays with two dims.
      title: the title.
    """
    names = [str(name) for name in dict.fromkeys(name for leaf in leaves for name in leaf.axes)]
    nodes, top, step = [label(EDGE, EDGE + 11, title, "t")], EDGE + LINE + 6.0, (WIDTH - EDGE) / PER_ROW
    for index, leaf in enumerate(leaves):
        left, y = EDGE + index % PER_ROW * step, top + index // PER_ROW * (HEIGHT + BAND + LINE + 14)
        nodes += _matrix(leaf, names, left, y, step - EDGE)
    bottom = top + -(-len(leaves) // PER_ROW) * (HEIGHT + BAND + LINE + 14)
    texts = [
        f"{leaf.path} [{', '.join(f'{name} {size}' for name, size in zip(leaf.axes, leaf.shape, strict=True))}]"
        for leaf in leaves
    ]
    return Diagram(title, "; ".join(texts) + ".", nodes, bottom)


def _matrix(leaf: Leaf, names: Sequence[str], left: float, top: float, width: float) -> list[Node]:
    """Returns a matrix: its first dim named at the left, its second one above."""
    (down, across), (rows, columns) = map(str, leaf.axes), leaf.shape
    side, y = 78.0, top + LINE
    first, second = names.index(down), names.index(across)
    return [
        label(left, top + 10, shortened(leaf.path, width), "b"),
        box(left + side, y, width - side, BAND, f"{shade(second)} edge"),
        label(left + (side + width) / 2, y + 11, f"{across} {columns}", f"{shade_text(second)} m"),
        box(left, y + BAND, side, HEIGHT, f"{shade(first)} edge"),
        label(left + side / 2, y + BAND + HEIGHT / 2 + 3, f"{down} {rows}", f"{shade_text(first)} m"),
        box(left + side, y + BAND, width - side, HEIGHT, "rule"),
    ]
