"""Displays values of Spanax as HTML in a notebook: each as a page in a frame."""

from collections.abc import Callable
from typing import Any

from spanax.check.report import Report
from spanax.plan.advice.quotes import Quotes
from spanax.plan.candidate import Search
from spanax.plan.pipeline.ticks import Ticks
from spanax.plan.plan import Plan
from spanax.show.page.check import check_page
from spanax.show.page.document import Block, Page, frame, text
from spanax.show.page.plan import layouts_part, plan_page, quotes_page
from spanax.show.placement import axes_text
from spanax.show.schedules import ticks_text
from spanax.trace.program import Program

MAX_LAYOUTS = 20
"""Number of layouts of a search that are shown."""


def notebook(value: Any) -> str:
    """Returns a value as HTML.

    Raises:
      KeyError: the type has no display.

    Example:
      >>> from spanax.plan.pipeline.ticks import ticks
      >>> "1f1b" in notebook(ticks("1f1b", 2, 2))
      True
    """
    return frame(SHOWN[type(value)](value))


def _text_page(kind: str, content: str) -> Page:
    return Page(kind, kind.capitalize(), [Block(kind.capitalize(), [text(kind, content)])])


def _search(search: Search) -> Page:
    layouts = Block("Layouts", [layouts_part(search, MAX_LAYOUTS)])
    return Page("layouts", f"{search.layouts_priced:,} layouts priced on {search.cluster}", [layouts])


SHOWN: dict[type, Callable[[Any], Page]] = {
    Plan: plan_page,
    Quotes: lambda quotes: quotes_page(quotes, "the program"),
    Program: lambda program: _text_page("axes", axes_text(program)),
    Search: _search,
    Report: check_page,
    Ticks: lambda ticks: _text_page("schedule", ticks_text(ticks)),
}
"""By type, the function that returns the page of a value."""
