"""Summarizes a search: the best layout with its plan, collectives and reasons, or what would make a layout fit."""

from collections.abc import Sequence
from dataclasses import dataclass

from spanax.plan.advice.rules_of_thumb import rule
from spanax.plan.candidate import Search, shortfall
from spanax.plan.evaluate import Moved, evaluated
from spanax.plan.plan import Plan


@dataclass(frozen=True)
class Best:
    """The best candidate of a search: its plan, its collectives, and the rule of thumb that it follows."""

    plan: Plan
    collectives: Moved
    rule: str


@dataclass(frozen=True)
class Summary:
    """A search with what its answer reports.

    Attributes:
      search: the search.
      best: the layout of `search.best`; None if nothing fits.
      shortfall: why nothing fits; empty otherwise.
      remedies: options, each of which makes a layout fit; empty if one fits.
    """

    search: Search
    best: Best | None
    shortfall: str = ""
    remedies: tuple[str, ...] = ()

    @property
    def reserve(self) -> float:
        """The share of the memory that the prediction of the best candidate, or of the leanest, must not use."""
        candidate = next(iter((*self.search.candidates, *self.search.nearest)), None)
        return 0.0 if candidate is None else 1 - candidate.peak_bytes / candidate.upper_bytes


def summarize(search: Search, fits_with: Sequence[str] = ()) -> Summary:
    """Returns the summary of a search, and of what would make a layout fit, the `remedies` of its request."""
    candidate = search.best
    if candidate is None:
        return Summary(search, None, shortfall(search), tuple(fits_with))
    evaluation = evaluated(search, candidate)
    plan = evaluation.plan
    return Summary(search, Best(plan, evaluation.collectives, rule(search, candidate, plan)))
