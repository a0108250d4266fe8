"""A registry of notebook displays, which `spanax.show` fills, so that values do not depend on it."""

from collections.abc import Callable
from typing import Any

_shown: list[Callable[[Any], str]] = []


def show_with(how: Callable[[Any], str]) -> None:
    """Say what makes HTML of a value."""
    _shown[:] = [how]


def display(value: Any) -> str | None:
    """A value as HTML, for a notebook; None where nobody said how, and then a notebook takes the text.

    Example:
      >>> import spanax
      >>> display(spanax.MeshShape.of("data=4,model=2")).startswith("<div")
      True
    """
    return _shown[0](value) if _shown else None
