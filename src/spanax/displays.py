"""Displays values: in a notebook, and as the text of `str` where a table is needed."""

from typing import Any


def display(value: Any) -> str:
    """Returns a value as HTML for a notebook.

    Example:
      >>> import spanax
      >>> display(spanax.MeshShape.of("data=4,model=2")).startswith("<div")
      True
    """
    from spanax.show.page.notebook import notebook

    return notebook(value)


def display_text(quotes: Any) -> str:
    """Returns the answers of several clusters as a table."""
    from spanax.show.quotes import quotes_text

    return quotes_text(quotes)
