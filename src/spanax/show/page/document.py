"""Writes a page as one HTML file that contains its style and script and loads nothing."""

import base64
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib.metadata import version
from importlib.resources import files
from pathlib import Path

from spanax.errors import WriteError
from spanax.show.page.parts.blocks import Block, Figure, figures, section
from spanax.show.page.parts.markup import Node, el, html


@dataclass(frozen=True)
class Page:
    """The content of a page.

    Attributes:
      kind: its subject: a run, a plan, a check.
      title: the title.
      lead: a sentence below the title.
      figures: numbers at the top.
      blocks: sections.
      next: the command to run next.
    """

    kind: str
    title: str
    lead: str
    figures: Sequence[Figure]
    blocks: Sequence[Block]
    next: str = ""


def document(page: Page) -> str:
    """Returns the HTML of a page."""
    script = text_of("script.js")
    # Names in a plan are untrusted: the policy allows only this script, and loads nothing.
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'; base-uri 'none'"
    head = el(
        "head",
        el("meta", charset="utf-8"),
        el("meta", http_equiv="Content-Security-Policy", content=policy),
        el("meta", name="viewport", content="width=device-width, initial-scale=1"),
        el("meta", name="color-scheme", content="light dark"),
        el("title", f"{page.title} – Spanax"),
        el("style", text_of("style.css")),
    )
    return f"<!doctype html>\n{html(el('html', head, el('body', _body(page), el('script', script)), lang='en'))}\n"


def write(page: Page, path: Path) -> str:
    """Writes a page to a file, and returns a line that reports it.

    Raises:
      WriteError: it cannot be written.
    """
    try:
        path.write_text(document(page), encoding="utf-8")
    except OSError as error:
        raise WriteError(f"cannot write the page '{path}'.", where=error.strerror or str(error)) from None
    return f"written to {path}: open it in a browser"


def fragment(*inside: Node) -> str:
    """Returns elements with their style and without script, for a notebook."""
    return html(el("div", el("style", text_of("style.css")), *inside, class_="spanax fragment"))


@cache
def text_of(name: str) -> str:
    """Returns the text of a file in this package."""
    return files(__package__).joinpath(name).read_text(encoding="utf-8")


def _body(page: Page) -> Node:
    command = el("p", el("code", page.next), class_="next") if page.next else None
    lead = el("p", page.lead, class_="lead")
    top = el("header", el("p", f"Spanax · {page.kind}", class_="kicker"), el("h1", page.title), lead, command)
    names = [f"section-{number}" for number in range(1, len(page.blocks) + 1)]
    links = [el("a", block.title, href=f"#{name}") for name, block in zip(names, page.blocks, strict=True)]
    contents = el("nav", *links, aria_label="On this page") if len(links) > 1 else None
    sections = [section(block, name) for name, block in zip(names, page.blocks, strict=True)]
    foot = el("footer", el("p", f"Made by Spanax {version('spanax')}. This page is a single file and loads nothing."))
    return el(
        "main", top, figures(page.figures), contents, el("div", *sections, class_="sections"), foot, class_="spanax"
    )
