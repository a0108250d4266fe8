"""The configuration of the documentation site: `make docs` builds it, and every warning is an error."""

import ast
import re
from importlib.metadata import version as installed
from typing import Any

from docutils import nodes

project = "Spanax"
author = copyright = "the Spanax authors"
release = version = installed("spanax")

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
myst_heading_anchors = 3
smartquotes = False  # it renders `--layout` in text as a dash

html_theme = "furo"  # self-contained: pages load nothing from other sites
html_title = f"Spanax {release}"
html_copy_source = html_show_sourcelink = False
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_js_files = ["site.js"]

autodoc_typehints = "description"
napoleon_use_ivar = True


def from_markdown(app: Any, what: str, name: str, thing: Any, options: Any, lines: list[str]) -> None:
    """Converts docstrings from Markdown to reStructuredText: double backticks, and escaped asterisks and bars."""
    parts = re.split(r"((?:^\s*>>>.*\n(?:.*\S.*\n)*))", "\n".join([*lines, ""]), flags=re.MULTILINE)
    for index in range(0, len(parts), 2):
        pieces = re.split(r"`+([^`]+)`+", parts[index])
        pieces[::2] = [re.sub(r"(?<!\w)[|*]|[|*](?=\w)", r"\\\g<0>", piece) for piece in pieces[::2]]
        pieces[1::2] = [f"``{piece}``\\ " for piece in pieces[1::2]]
        parts[index] = "".join(pieces)
    lines[:] = "".join(parts).split("\n")


def with_language(app: Any, page: Any) -> None:
    """Sets the language of indented blocks, which Markdown does not state."""
    for block in page.findall(nodes.literal_block):
        if block.get("language") == "none":
            block["language"] = language_of(block.astext())


def language_of(text: str) -> str:
    """Returns the language of a block: a Python session, Python, or shell commands."""
    if text.startswith(">>>"):
        return "pycon"
    try:
        ast.parse(text)
    except SyntaxError:
        return "bash" if re.match(r"(spanax|pip|make|python) ", text) else "none"
    return "python"


def with_levels(app: Any, name: str, template: str, context: dict[str, Any], page: Any) -> None:
    """Adds the level to the headings of tables of contents, which ARIA requires and Sphinx omits."""
    for part in ("furo_navigation_tree", "body"):
        context[part] = context.get(part, "").replace(
            'class="caption" role="heading"', 'class="caption" role="heading" aria-level="2"'
        )


def setup(app: Any) -> None:
    """Registers the event handlers."""
    app.connect("autodoc-process-docstring", from_markdown, priority=400)  # before napoleon, at 500
    app.connect("doctree-read", with_language)
    app.connect("html-page-context", with_levels, priority=900)  # after furo, at 500
