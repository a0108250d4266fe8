"""Writes a page: a value as JSON in one HTML file, which contains the script that draws it and loads nothing."""

import base64
import hashlib
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from html import escape
from importlib.metadata import version
from importlib.resources import files
from pathlib import Path
from string import Template
from typing import Any

from spanax.errors import FileErrors, WriteError
from spanax.printable import printable_lines
from spanax.train.record.metric_curves import Point, thinned

Part = dict[str, Any]
"""What page.js draws in a section, by its `kind`: a table, bars, lines or text."""

Cell = str | tuple[str, float | None]
"""A text, or a number as text with the value to sort by."""


@dataclass(frozen=True)
class Block:
    """A section of a page: its title, its content, and a line below the title."""

    title: str
    parts: Sequence[Part]
    note: str = ""


@dataclass(frozen=True)
class Page:
    """The content of a page.

    Attributes:
      kind: its subject: a run, a plan, a check.
      title: the title.
      blocks: sections.
    """

    kind: str
    title: str
    blocks: Sequence[Block]


def table(caption: str, columns: Sequence[str], rows: Iterable[Sequence[Cell]]) -> Part:
    """Returns a table; readers sort a long one by its headers, and select its rows by a text."""
    return {"kind": "table", "caption": caption, "columns": columns, "rows": list(rows)}


def bars(
    caption: str,
    sizes_by_label: Mapping[str, Mapping[str, float]],
    formatted: Callable[[float], str],
    limit: float | None = None,
) -> Part:
    """Returns bars of parts below each other on one scale, with a table of the numbers.

    Args:
      caption: what the bars show.
      sizes_by_label: the parts of each bar by name, from top to bottom; those of size 0 are omitted.
      formatted: formats a size.
      limit: position of a line across the bars.
    """
    rows = []
    for label, sizes in sizes_by_label.items():
        parts = [{"name": name, "size": size, "text": formatted(size)} for name, size in sizes.items() if size > 0]
        rows.append({"label": label, "text": formatted(sum(sizes.values())), "parts": parts})
    end = {"size": limit, "text": formatted(limit)} if limit else None
    return {"kind": "bars", "caption": caption, "bars": rows, "limit": end}


def lines(caption: str, points_by_name: Mapping[str, Sequence[Point]], *, from_zero: bool = False) -> Part:
    """Returns values over the steps of a run, thinned without losing their extremes."""
    curves = [{"name": name, "points": thinned(points)} for name, points in points_by_name.items() if points]
    return {"kind": "lines", "caption": caption, "curves": curves, "from_zero": from_zero}


def text(caption: str, content: str) -> Part:
    """Returns lines of text with their spaces."""
    return {"kind": "text", "caption": caption, "text": content}


def document(page: Page) -> str:
    """Returns the HTML of a page."""
    shown = _shown(asdict(page))
    script = _file("page.js")
    # Names in a value are untrusted: the policy allows only this script, and loads nothing.
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'; base-uri 'none'"
    return Template(_file("page.html")).substitute(
        {name: escape(shown[name]) for name in ("kind", "title")},
        policy=policy,
        style=_file("page.css"),
        script=script,
        version=version("spanax"),
        value=json.dumps(shown, allow_nan=False).replace("<", "\\u003c"),  # no text ends the element
    )


def frame(page: Page) -> str:
    """Returns a page for a notebook, in a frame that reaches nothing around it."""
    height = min(600, 200 + 160 * len(page.blocks))
    content = escape(document(page))
    label = escape(printable_lines(page.title))
    style = f"width:100%;height:{height}px;border:0;resize:vertical"
    return (
        '<div class="spanax fragment">'
        f'<iframe title="{label}" sandbox="allow-scripts" style="{style}" srcdoc="{content}"></iframe></div>'
    )


def write(page: Page, path: Path) -> str:
    """Writes a page to a file, and returns a line that reports it.

    Raises:
      WriteError: it cannot be written.
    """
    with FileErrors(WriteError, f"cannot write the page '{path}'."):
        path.write_text(document(page), encoding="utf-8")
    return f"written to {path}: open it in a browser"


@cache
def _file(name: str) -> str:
    return files(__package__).joinpath(name).read_text(encoding="utf-8")


def _shown(value: Any) -> Any:
    """Returns a value for JSON: control characters of texts are escaped, and numbers that are not finite are null."""
    if isinstance(value, str):
        return printable_lines(value)
    if isinstance(value, Mapping):
        return {key: _shown(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_shown(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
