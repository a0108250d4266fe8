"""Builds a diagram as one SVG file with a title, a description, and the colors of the pages in both themes."""

import re
import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from spanax.show.page.document import text_of
from spanax.show.page.parts.bars import COLOURS
from spanax.show.page.parts.markup import Node, el

WIDTH, EDGE, LINE = 380, 10, 15
"""Units of a diagram: its width, the margin, and the height of a line of text."""

SCALE = 1.2
"""Pixels per unit where there is room: two diagrams fit side by side; a phone shows one at about 0.9."""

LETTER = 6.1
"""Units per letter in the 10-unit monospace font."""

STRIPE = 3
"""Units between the lines that mark areas by a texture."""


@dataclass(frozen=True)
class Diagram:
    """A drawing: its title, a description for screen readers, its elements, and its height and width in units.

    Elements have classes of `STYLE`, and `c1` to `c8` for areas and `o1` to `o8` for text on them.
    """

    title: str
    description: str
    nodes: Sequence[Node]
    height: float
    width: float = WIDTH


STYLE = (
    "text{font:10px ui-monospace,Menlo,Consolas,monospace}.b{font-weight:700}.t{font:700 12px system-ui,sans-serif}"
    ".s{font:10.5px system-ui,sans-serif}.m{text-anchor:middle}.e{text-anchor:end}"
)
"""Fonts and alignment: `b` bold, `t` a title, `s` a sentence, `m` centered, `e` aligned to the end."""

ROLES = {
    "surface": ".page{fill:%s;stroke:none}.edge{stroke:%s}",
    "ink": "text{fill:%s}.line{fill:none;stroke:%s}",
    "quiet": ".q{fill:%s}.full{fill:none;stroke:%s;stroke-dasharray:3 2}",
    "idle": ".idle{fill:%s}",
    "rule": ".rule{fill:none;stroke:%s}",
}
"""By variable of style.css, the rules that use it."""


def svg_text(diagram: Diagram) -> str:
    """Returns the SVG of a diagram."""
    width, height = diagram.width, diagram.height
    inside = [node for part in diagram.nodes for node in part.iter()]
    classes = {name for node in inside for name in node.get("class", "").split()}
    root = el(
        "svg",
        el("title", diagram.title),
        el("desc", diagram.description),
        el("style", _style(classes)),
        el("rect", width=_number(width), height=_number(height), rx=6, class_="page"),
        *diagram.nodes,
        xmlns="http://www.w3.org/2000/svg", viewBox=f"0 0 {_number(width)} {_number(height)}",
        width=_number(width * SCALE), height=_number(height * SCALE), role="img",
    )  # fmt: skip
    ElementTree.indent(root, "")
    return ElementTree.tostring(root, encoding="unicode") + "\n"


def label(x: float, y: float, text: str, css: str = "", **attributes: Any) -> Node:
    """Returns a text at its baseline."""
    return el("text", text, x=_number(x), y=_number(y), class_=css or None, **attributes)


def box(x: float, y: float, width: float, height: float, css: str, **attributes: Any) -> Node:
    """Returns a rectangle."""
    sizes = {"x": x, "y": y, "width": width, "height": height}
    return el("rect", **{key: _number(value) for key, value in sizes.items()}, class_=css, **attributes)


def boxes(corners: Sequence[tuple[float, float, float, float]], css: str) -> Node:
    """Returns rectangles (x, y, width, height) of one class as a single path."""
    text = "".join(
        f"M{_number(x)} {_number(y)}h{_number(width)}v{_number(height)}h{_number(-width)}z"
        for x, y, width, height in corners
    )
    return el("path", d=text, class_=css)


def shade(index: int) -> str:
    """Returns the class of an area by its index.

    Example:
      >>> shade(0), shade(9)
      ('c1', 'c2')
    """
    return f"c{index % COLOURS + 1}"


def shade_text(index: int) -> str:
    """Returns the class of text on such an area."""
    return f"o{index % COLOURS + 1}"


def shortened(text: str, width: float) -> str:
    """Returns a monospaced text that fits a width; of a longer one, the end, which names an array.

    Example:
      >>> shortened("blocks.attention.out.kernel", 80)
      '…n.out.kernel'
    """
    most = max(2, int(width / LETTER))
    return text if len(text) <= most else "…" + text[len(text) - most + 1 :]


@cache
def themes() -> tuple[dict[str, str], dict[str, str]]:
    """Returns the colors of style.css by variable, for the light and the dark theme."""
    light, dark = (
        dict(re.findall(r"--(\w+): (#[0-9a-f]{6})", block))
        for block in re.findall(r"\.spanax \{([^}]*--surface[^}]*)\}", text_of("style.css"))
    )
    return light, dark


def _style(classes: set[str]) -> str:
    """Returns the rules for the classes of a diagram, in both themes."""
    light, dark = (_rules(theme, classes) for theme in themes())
    return f"{STYLE}{light}@media(prefers-color-scheme:dark){{{dark}}}"


def _rules(theme: dict[str, str], classes: set[str]) -> str:
    rules = "".join(rule.replace("%s", theme[name]) for name, rule in ROLES.items())
    for number in range(1, COLOURS + 1):
        for name in (f"c{number}", f"o{number}"):
            if name in classes:
                rules += f".{name}{{fill:{theme[name]}}}"
    return rules


def _number(value: float) -> str:
    return f"{value:.1f}".removesuffix(".0")
