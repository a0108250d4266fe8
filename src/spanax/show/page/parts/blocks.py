"""Sections of a page, and their texts and numbers: figures, facts, findings."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from spanax.check.finding import Finding
from spanax.show.page.parts.markup import Inside, Node, el, fill
from spanax.units import bytes_text


@dataclass(frozen=True)
class Block:
    """A section of a page.

    Attributes:
      title: the title.
      inside: the content.
      note: a line below the title.
      is_half: whether two such sections share a row on a wide screen.
    """

    title: str
    inside: Sequence[Node]
    note: str = ""
    is_half: bool = False


@dataclass(frozen=True)
class Figure:
    """A number at the top of a page: its name, the value, and a detail below it."""

    name: str
    value: str
    detail: str = ""
    is_bad: bool = False


def figures(items: Iterable[Figure]) -> Node:
    """Returns numbers side by side."""
    listed = el("dl", class_="figures")
    for item in items:
        detail = el("dd", item.detail, class_="beside") if item.detail else None
        value = el("dd", item.value, class_="value bad" if item.is_bad else "value")
        fill(listed, el("div", el("dt", item.name), value, detail))
    return listed


def section(block: Block, name: str = "") -> Node:
    """Returns a block with its title; `name` is the target of links."""
    note = el("p", block.note, class_="note") if block.note else None
    half = "half" if block.is_half else None
    return el("section", el("h2", block.title), note, *block.inside, id=name or None, class_=half)


def facts(pairs: Iterable[tuple[str, Inside]]) -> Node:
    """Returns names with their values; names without a value are omitted."""
    listed = el("dl", class_="facts")
    for name, value in pairs:
        if value is not None and value != "":
            fill(listed, el("dt", name), el("dd", value))
    return listed


def findings_list(findings: Iterable[Finding]) -> Node:
    """Returns findings with their severity and fix."""
    listed = el("ul", class_="findings")
    for finding in findings:
        badge = el("span", finding.severity.value, class_=f"badge {finding.severity.value}")
        size = el("span", f" {bytes_text(finding.num_bytes)} per device", class_="note") if finding.num_bytes else None
        fix = el("p", "Fix: ", finding.fix, class_="fix") if finding.fix else None
        fill(listed, el("li", el("p", badge, " ", el("code", finding.code), " ", finding.message, size), fix))
    return listed
