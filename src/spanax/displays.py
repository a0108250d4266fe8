"""Displays values in a notebook or as text, and what a long computation does at the moment."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any


def display(value: Any) -> str:
    """Returns a value as HTML for a notebook.

    Example:
      >>> from spanax.plan.pipeline.ticks import ticks
      >>> display(ticks("1f1b", 2, 2)).startswith("<div")
      True
    """
    from spanax.show.page.notebook import notebook

    return notebook(value)


def display_text(quotes: Any) -> str:
    """Returns the answers of several clusters as a table."""
    from spanax.show.quotes import quotes_text

    return quotes_text(quotes)


Show = Callable[[str], None]

_SHOW: ContextVar[Show | None] = ContextVar("show", default=None)


def doing(text: str) -> None:
    """Reports what is done from now on; nobody may listen.

    Example:
      >>> with told_to(print):
      ...     doing("tracing the step")
      tracing the step
    """
    show = _SHOW.get()
    if show is not None:
        show(text)


@contextmanager
def told_to(show: Show) -> Iterator[None]:
    """Calls a function with each text that is passed to `doing` in this context."""
    token = _SHOW.set(show)
    try:
        yield
    finally:
        _SHOW.reset(token)
