"""Draws the predicted peak memory of plans by group, as stacked bars with their numbers."""

from collections.abc import Mapping, Sequence

from spanax.show.diagrams.canvas import EDGE, LINE, WIDTH, Diagram, box, label, shade, shade_text
from spanax.show.page.parts.markup import Node
from spanax.units import bytes_text

NAMES, TOTAL, BAR = 60, 56, 22
"""Units: width of the names of plans, width of the totals, and height of a bar."""

COLUMN = 62
"""Units: width of a column of numbers."""

LEAST_SHARE = 0.005
"""Groups below this share of the largest peak are omitted."""


def memory_diagram(memory_by_plan: Mapping[str, Mapping[str, int]], title: str) -> Diagram:
    """Returns a bar per plan on one scale, its parts numbered as in the table of bytes below.

    Args:
      memory_by_plan: by the name of a plan, the bytes per device at the peak by group.
      title: the title.
    """
    largest = max(sum(memory.values()) for memory in memory_by_plan.values())
    groups = [
        group
        for group in dict.fromkeys(group for memory in memory_by_plan.values() for group in memory)
        if max(memory.get(group, 0) for memory in memory_by_plan.values()) > LEAST_SHARE * largest
    ]
    room = WIDTH - 2 * EDGE - NAMES - TOTAL
    nodes, top = [label(EDGE, EDGE + 11, title, "t")], EDGE + LINE + 6.0
    for name, memory in memory_by_plan.items():
        nodes.append(label(EDGE, top + 15, name, "b"))
        left = float(EDGE + NAMES)
        for index, group in enumerate(groups):
            width = room * memory.get(group, 0) / largest
            if width > 0:
                nodes.append(box(left, top, width, BAR, f"{shade(index)} edge"))
            if width >= 9:
                nodes.append(label(left + width / 2, top + 15, str(index + 1), f"{shade_text(index)} m"))
            left += width
        nodes.append(label(WIDTH - EDGE, top + 15, bytes_text(sum(memory.values())), "b e"))
        top += BAR + 5
    table, bottom = _table(memory_by_plan, groups, top + 8)
    texts = [f"{name} {bytes_text(sum(memory.values()))}" for name, memory in memory_by_plan.items()]
    return Diagram(title, f"Predicted peak per device: {', '.join(texts)}.", nodes + table, bottom)


def _table(
    memory_by_plan: Mapping[str, Mapping[str, int]], groups: Sequence[str], top: float
) -> tuple[list[Node], float]:
    """Returns the bytes of each group and plan, and the lower edge."""
    nodes, count = list[Node](), len(memory_by_plan)
    rights = [WIDTH - EDGE - (count - 1 - column) * COLUMN for column in range(count)]
    nodes += [label(right, top + 10, name, "q e") for name, right in zip(memory_by_plan, rights, strict=True)]
    for index, group in enumerate(groups):
        y = top + (index + 1) * LINE
        nodes += [
            box(EDGE, y, 13, 12, shade(index)),
            label(EDGE + 6.5, y + 9.5, str(index + 1), f"{shade_text(index)} m"),
        ]
        nodes.append(label(EDGE + 18, y + 10, group, "s"))
        for memory, right in zip(memory_by_plan.values(), rights, strict=True):
            nodes.append(label(right, y + 10, bytes_text(memory.get(group, 0)), "e"))
    return nodes, top + (len(groups) + 1) * LINE + EDGE
