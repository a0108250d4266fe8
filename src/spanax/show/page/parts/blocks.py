"""Blocks: the parts of a page that are words and numbers: figures at the top, sections, facts, findings."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from spanax.check.finding import Finding
from spanax.show.page.parts.markup import Inside, Node, el, fill
from spanax.units import bytes_text


@dataclass(frozen=True)
class Block:
    """A section of a page: a title, what is in it, and a line on how it is to be read.

    `is_half`: two of them fit beside each other on a wide screen.
    """

    title: str
    inside: Sequence[Node]
    note: str = ""
    is_half: bool = False


@dataclass(frozen=True)
class Figure:
    """One number at the top of a page: what it is, the value, and what it stands beside."""

    name: str
    value: str
    beside: str = ""
    is_bad: bool = False


def figures(found: Iterable[Figure]) -> Node:
    """Numbers side by side."""
    listed = el("dl", class_="figures")
    for one in found:
        beside = el("dd", one.beside, class_="beside") if one.beside else None
        value = el("dd", one.value, class_="value bad" if one.is_bad else "value")
        fill(listed, el("div", el("dt", one.name), value, beside))
    return listed


def section(block: Block, name: str = "") -> Node:
    """A block with its title; `name` is what links lead to."""
    note = el("p", block.note, class_="note") if block.note else None
    half = "half" if block.is_half else None
    return el("section", el("h2", block.title), note, *block.inside, id=name or None, class_=half)


def facts(pairs: Iterable[tuple[str, Inside]]) -> Node:
    """Names and what is said of each; those of which nothing is said are left out."""
    listed = el("dl", class_="facts")
    for name, said in pairs:
        if said is not None and said != "":
            fill(listed, el("dt", name), el("dd", said))
    return listed


def findings_list(found: Iterable[Finding]) -> Node:
    """Findings with their weight, and what to do."""
    listed = el("ul", class_="findings")
    for one in found:
        weight = el("span", one.severity.value, class_=f"badge {one.severity.value}")
        size = el("span", f" {bytes_text(one.num_bytes)} a device", class_="note") if one.num_bytes else None
        fix = el("p", "Fix: ", one.fix, class_="fix") if one.fix else None
        fill(listed, el("li", el("p", weight, " ", el("code", one.code), " ", one.message, size), fix))
    return listed
