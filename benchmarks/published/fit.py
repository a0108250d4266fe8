"""The fit of all constants, robust to odd rows, and leave-one-source-out: each source predicted by a fit of the others.

The loss of a row is Huber's on log(predicted / measured), weighted so that a source counts as the root of its rows. A
prior holds a constant that the remaining sources do not determine near its physical value.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from published.alternatives import measurements, nearest
from published.cases import Case
from published.constants import CONSTANTS, defaults, point_of, prior, values_of
from published.prediction import Prices

KNEE = 0.1
"""Errors above it, of a logarithm, count linearly."""

NOISE = 0.1
"""The error of a typical row; the prior's weight in the fit is relative to it."""

STEP = 1e-3
"""Difference on a constant's scale for a derivative."""

ITERATIONS = 6
"""Of the fit on all sources; a source left out takes `CHORDS` from there, with the derivatives of all rows."""

CHORDS = 4

CLOSE = 0.01
"""Steps shorter than it, on the constants' scales, end a fit."""


@dataclass(frozen=True)
class HeldOut:
    """Seconds that constants of the other sources predict for one source, and those constants."""

    source: str
    seconds: np.ndarray
    values: dict[str, float]


class Fit:
    """A fit of the constants to the cases of some prices.

    Args:
      prices: of all cases.
    """

    def __init__(self, prices: Prices):
        self.prices = prices
        self.cases: Sequence[Case] = prices.cases
        self.sources = [case.row.source for case in self.cases]
        self._log_measured = np.log([case.measured_seconds for case in self.cases])
        self._center, self._width = prior()
        self._lower, self._upper = (
            np.asarray([c.free(getattr(c, key)) for c in CONSTANTS]) for key in ("lower", "upper")
        )
        self._measurements = measurements(self.cases)

    def all_sources(self) -> dict[str, float]:
        """Returns the constants that fit the cases of all sources."""
        point = point_of(defaults())
        best, least = point, np.inf
        for _ in range(ITERATIONS):
            errors = self._errors(point)
            loss = self._loss(point, errors, self._weights(errors, ""))
            if loss < least:
                best, least = point, loss
            last, point = point, self._step(point, errors, self._derivatives(point, errors), "")
            if np.abs(point - last).max() < CLOSE:
                break
        errors = self._errors(point)
        return values_of(point if self._loss(point, errors, self._weights(errors, "")) < least else best)

    def leave_one_out(self, values: dict[str, float]) -> list[HeldOut]:
        """Returns the prediction of every source by constants that were fitted without it.

        Args:
          values: the constants of `all_sources`, where each of the fits starts.
        """
        start = point_of(values)
        start_errors = self._errors(start)
        derivatives = self._derivatives(start, start_errors)
        result = []
        for source in sorted(set(self.sources)):
            point, errors = start, start_errors
            best, least = start, np.inf
            for _ in range(CHORDS + 1):
                loss = self._loss(point, errors, self._weights(errors, source))
                if loss < least:
                    best, least = point, loss
                last, point = point, self._step(point, errors, derivatives, source)
                if np.abs(point - last).max() < CLOSE:
                    break
                errors = self._errors(point)
            held = np.asarray([name == source for name in self.sources])
            result.append(HeldOut(source, self.prices.seconds(values_of(best), held), values_of(best)))
        return result

    def _errors(self, point: np.ndarray, cases: np.ndarray | None = None) -> np.ndarray:
        return np.log(self.prices.seconds(values_of(point), cases)) - self._log_measured

    def _derivatives(self, point: np.ndarray, errors: np.ndarray) -> np.ndarray:
        columns = []
        for index in range(point.size):
            moved = point.copy()
            moved[index] += STEP if point[index] + STEP < self._upper[index] else -STEP
            depends = np.asarray(
                [CONSTANTS[index].concerns(case.cluster.chip.name, case.runtime) for case in self.cases]
            )
            change = self._errors(moved, depends) - errors
            columns.append(np.where(depends, change, 0.0) / (moved[index] - point[index]))
        return np.stack(columns, 1)

    def _weights(self, errors: np.ndarray, without: str) -> np.ndarray:
        """Returns the weight of each case: a source's add up to the root of its measurements; 0 for those left out."""
        chosen = nearest(self._measurements, np.abs(errors)) & np.asarray(
            [source != without for source in self.sources]
        )
        counts = Counter(source for source, yes in zip(self.sources, chosen, strict=True) if yes)
        roots = np.asarray([counts[source] ** -0.5 if source in counts else 0.0 for source in self.sources])
        return np.where(chosen, roots, 0.0)

    def _loss(self, point: np.ndarray, errors: np.ndarray, weights: np.ndarray) -> float:
        size = np.abs(errors)
        huber = np.where(size < KNEE, size**2 / 2, KNEE * (size - KNEE / 2))
        return float((weights * huber).sum() / NOISE**2 + (((point - self._center) / self._width) ** 2).sum() / 2)

    def _step(self, point: np.ndarray, errors: np.ndarray, derivatives: np.ndarray, without: str) -> np.ndarray:
        """Returns the least-squares point of the errors as linear in the constants, at most 1 from the last."""
        weights = self._weights(errors, without)
        new = point
        for _ in range(8):
            linear = errors + derivatives @ (new - point)
            w = weights * np.minimum(1.0, KNEE / np.maximum(np.abs(linear), 1e-9)) / NOISE**2
            matrix = derivatives.T @ (w[:, None] * derivatives) + np.diag(self._width**-2)
            vector = derivatives.T @ (w * (derivatives @ point - errors)) + self._center / self._width**2
            new = np.linalg.solve(matrix, vector)
        return np.clip(point + np.clip(new - point, -1.0, 1.0), self._lower, self._upper)
