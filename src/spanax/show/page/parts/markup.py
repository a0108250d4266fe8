"""Builds HTML and SVG elements, and their text; the standard library escapes text and attributes.

Texts of files are untrusted: their control characters are escaped.
"""

import xml.etree.ElementTree as ElementTree
from typing import Any

from spanax.printable import printable_lines

Node = ElementTree.Element
Inside = Node | str | None


def el(tag: str, /, *inside: Inside, **attributes: Any) -> Node:
    """Returns an element; `class_` and `data_by` become the attributes class and data-by, None omits an attribute.

    Example:
      >>> html(el("p", "a < b ", el("b", "c"), class_="x", title=None, data_n=3))
      '<p class="x" data-n="3">a &lt; b <b>c</b></p>'
    """
    element = ElementTree.Element(tag)
    for key, value in attributes.items():
        if value is not None:
            element.set(key.rstrip("_").replace("_", "-"), printable_lines(str(value)))
    return fill(element, *inside)


def fill(parent: Node, *inside: Inside) -> Node:
    """Appends texts and elements to an element, and returns it."""
    for child in inside:
        if isinstance(child, ElementTree.Element):
            parent.append(child)
        elif child and len(parent):
            parent[-1].tail = (parent[-1].tail or "") + printable_lines(child)
        elif child:
            parent.text = (parent.text or "") + printable_lines(child)
    return parent


def html(node: Node) -> str:
    """Returns the HTML of an element and its children."""
    return ElementTree.tostring(node, encoding="unicode", method="html")
