"""Traffic: what moves between devices, by mesh axes and kind of collective."""

from collections.abc import Mapping

from spanax.plan.cost.prediction import Moved
from spanax.show.page.parts.bars import Bar, stacked
from spanax.show.page.parts.markup import Node, el
from spanax.units import bytes_text


def traffic(said: Mapping[str, Moved]) -> Node:
    """Bytes of one device and step, a bar for each set of mesh axes and each who says so: `predicted`, `compiled`."""
    every = sorted({axes for moved in said.values() for axes in moved}, key=lambda axes: -_most(said, axes))
    bars = [
        Bar(axes if len(said) == 1 else f"{axes}, {who}", moved.get(axes, {}))
        for axes in every
        for who, moved in said.items()
    ]
    if not any(bar.total for bar in bars):
        return el("p", "Nothing moves between devices.", class_="note")
    return stacked("bytes that a device receives in a step, by mesh axes", bars, bytes_text)


def _most(said: Mapping[str, Moved], axes: str) -> int:
    return max(sum(moved.get(axes, {}).values()) for moved in said.values())
