"""Builds a diagram as one SVG file with a title, a description, and the colors of the pages in both themes."""

import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

Node = ElementTree.Element

COLORS = 8
"""Number of colors of areas."""

LIGHT = {
    "surface": "#ffffff", "ink": "#1b2029", "quiet": "#586172", "idle": "#e9ecf1", "rule": "#dfe3e9",
    "c1": "#204ade", "c2": "#882e08", "c3": "#0ea76a", "c4": "#621162",
    "c5": "#c2870b", "c6": "#7796ac", "c7": "#1a96ec", "c8": "#5f232d",
    "o1": "#ffffff", "o2": "#ffffff", "o3": "#0b0d11", "o4": "#ffffff",
    "o5": "#0b0d11", "o6": "#0b0d11", "o7": "#0b0d11", "o8": "#ffffff",
}  # fmt: skip
"""Colors of the light theme: areas as in page.css, and `o1` to `o8` for text on them."""

DARK = {
    "surface": "#12151b", "ink": "#e8ebf0", "quiet": "#a3adbb", "idle": "#232a34", "rule": "#2d3542",
    "c1": "#396cf4", "c2": "#d97a0c", "c3": "#38ca90", "c4": "#e67de4",
    "c5": "#e0d83a", "c6": "#717686", "c7": "#d7e2f2", "c8": "#d04542",
    "o1": "#ffffff", "o2": "#0b0d11", "o3": "#0b0d11", "o4": "#0b0d11",
    "o5": "#0b0d11", "o6": "#ffffff", "o7": "#0b0d11", "o8": "#ffffff",
}  # fmt: skip
"""Those of the dark theme."""

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
"""By color, the rules that use it."""


def el(tag: str, /, *inside: Node | str, **attributes: Any) -> Node:
    """Returns an element; `class_` becomes the attribute class, and None omits an attribute."""
    element = ElementTree.Element(tag)
    for key, value in attributes.items():
        if value is not None:
            element.set(key.rstrip("_"), str(value))
    for child in inside:
        if isinstance(child, str):
            element.text = (element.text or "") + child
        else:
            element.append(child)
    return element


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
    return f"c{index % COLORS + 1}"


def shade_text(index: int) -> str:
    """Returns the class of text on such an area."""
    return f"o{index % COLORS + 1}"


def shortened(text: str, width: float) -> str:
    """Returns a monospaced text that fits a width; of a longer one, the end, which names an array.

    Example:
      >>> shortened("blocks.attention.out.kernel", 80)
      '…n.out.kernel'
    """
    most = max(2, int(width / LETTER))
    return text if len(text) <= most else "…" + text[len(text) - most + 1 :]


def _style(classes: set[str]) -> str:
    """Returns the rules for the classes of a diagram, in both themes."""
    light, dark = (_rules(theme, classes) for theme in (LIGHT, DARK))
    return f"{STYLE}{light}@media(prefers-color-scheme:dark){{{dark}}}"


def _rules(theme: dict[str, str], classes: set[str]) -> str:
    rules = "".join(rule.replace("%s", theme[name]) for name, rule in ROLES.items())
    for number in range(1, COLORS + 1):
        for name in (f"c{number}", f"o{number}"):
            if name in classes:
                rules += f".{name}{{fill:{theme[name]}}}"
    return rules


def _number(value: float) -> str:
    return f"{value:.1f}".removesuffix(".0")
