"""Charts the communication between devices in bytes by mesh axes and kind of collective."""

from collections.abc import Mapping

from spanax.plan.prediction import Moved
from spanax.show.page.parts.bars import Bar, stacked
from spanax.show.page.parts.markup import Node, el
from spanax.units import bytes_text


def traffic(sides: Mapping[str, Moved]) -> Node:
    """Returns bytes per device and step, one bar per set of mesh axes and side.

    Args:
      sides: by name, such as `predicted` and `compiled`: bytes by mesh axes and kind.
    """
    all_axes = sorted({axes for moved in sides.values() for axes in moved}, key=lambda axes: -_largest(sides, axes))
    bars = [
        Bar(axes if len(sides) == 1 else f"{axes}, {side}", moved.get(axes, {}))
        for axes in all_axes
        for side, moved in sides.items()
    ]
    if not any(bar.total for bar in bars):
        return el("p", "No communication between devices.", class_="note")
    return stacked("bytes received per device and step, by mesh axes", bars, bytes_text)


def _largest(sides: Mapping[str, Moved], axes: str) -> int:
    return max(sum(moved.get(axes, {}).values()) for moved in sides.values())
