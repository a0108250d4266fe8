"""Displays values in a notebook."""

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
