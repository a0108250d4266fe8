"""Tree: elements of HTML and SVG as values, and their text; the standard library escapes what is inside of them."""

import xml.etree.ElementTree as ElementTree
from typing import Any

from spanax.printable import printable_lines

Node = ElementTree.Element
Inside = Node | str | None


def el(tag: str, /, *inside: Inside, **attributes: Any) -> Node:
    """An element; `class_` and `data_by` are the attributes class and data-by, and one that is None is left out.

    Example:
      >>> html(el("p", "a < b ", el("b", "c"), class_="x", title=None, data_n=3))
      '<p class="x" data-n="3">a &lt; b <b>c</b></p>'
    """
    found = ElementTree.Element(tag)
    for key, value in attributes.items():
        if value is not None:
            found.set(key.rstrip("_").replace("_", "-"), _written(str(value)))
    return fill(found, *inside)


def fill(parent: Node, *inside: Inside) -> Node:
    """Put texts and elements at the end of an element, and return it."""
    for one in inside:
        if isinstance(one, ElementTree.Element):
            parent.append(one)
        elif one and len(parent):
            parent[-1].tail = (parent[-1].tail or "") + _written(one)
        elif one:
            parent.text = (parent.text or "") + _written(one)
    return parent


def html(node: Node) -> str:
    """The text of an element with all that is inside of it."""
    return ElementTree.tostring(node, encoding="unicode", method="html")


def _written(text: str) -> str:
    """A text that can be part of a page, whatever file it comes from."""
    return printable_lines(text)
