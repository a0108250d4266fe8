"""The site: `make docs` builds it, and every warning is an error."""

import ast
import re
from importlib.metadata import version as installed
from typing import Any

from docutils import nodes

project = "Spanax"
author = copyright = "the Spanax authors"
release = version = installed("spanax")

extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
myst_heading_anchors = 3

nb_execution_mode = "force"  # notebooks have no stored outputs: every picture is of this build
nb_execution_raise_on_error = True
nb_execution_timeout = 600
nb_execution_in_temp = True
nb_merge_streams = True
nb_output_stderr = "remove"  # the plugins of absent accelerators report there that they are absent

html_theme = "furo"  # all that it needs is in the site: nothing is loaded from elsewhere
html_title = f"Spanax {release}"
html_copy_source = html_show_sourcelink = False
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_js_files = ["site.js"]

autodoc_typehints = "description"
napoleon_use_ivar = True


def from_markdown(app: Any, what: str, name: str, thing: Any, options: Any, lines: list[str]) -> None:
    """Docstrings write code in single backticks, as Markdown does; what autodoc reads wants two, and no stray signs."""
    parts = re.split(r"((?:^\s*>>>.*\n(?:.*\S.*\n)*))", "\n".join([*lines, ""]), flags=re.MULTILINE)
    for at in range(0, len(parts), 2):
        pieces = re.split(r"`+([^`]+)`+", parts[at])
        pieces[::2] = [re.sub(r"(?<!\w)[|*]|[|*](?=\w)", r"\\\g<0>", piece) for piece in pieces[::2]]
        pieces[1::2] = [f"``{piece}``\\ " for piece in pieces[1::2]]
        parts[at] = "".join(pieces)
    lines[:] = "".join(parts).split("\n")


def coloured(app: Any, page: Any) -> None:
    """Indented blocks do not say what they are, and can be told."""
    for block in page.findall(nodes.literal_block):
        if block.get("language") == "none":
            block["language"] = written_in(block.astext())


def written_in(text: str) -> str:
    """The language of a block: a session of Python, Python, or commands."""
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
    """What Sphinx is to do besides."""
    app.connect("autodoc-process-docstring", from_markdown, priority=400)  # before napoleon, at 500
    app.connect("doctree-read", coloured)
    app.connect("html-page-context", with_levels, priority=900)  # after furo, at 500
