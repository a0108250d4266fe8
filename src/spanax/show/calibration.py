"""Formats a calibration as text and JSON: constants, measured steps and best layouts, before and after."""

from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from spanax.plan.calibration.calibrate import Calibrated, CalibratedStep, Calibration
from spanax.plan.candidate import Candidate, Search
from spanax.show.search import layout_json
from spanax.show.tables import table_text
from spanax.units import quantity_text

KINDS = {"FLOP/s": "operations per second", "B/s": "bytes per second", "s": "seconds"}
"""Unit of a constant -> kind of quantity."""

MAX_ROWS = 12
"""Number of measured steps that the text lists; --json has all."""

WIDTH = 400
"""The largest number of letters per line of measured steps, so that paths are not wrapped."""


def calibration_text(calibration: Calibration, before: Search, after: Search) -> Iterator[str]:
    """Yields lines: the constants, the measured steps and the best layout, each before and after."""
    steps = calibration.steps
    sources = dict.fromkeys(step.source for step in steps)
    yield f"calibrated on {', '.join(sources)}:" if calibration.is_applied else _unchanged_text(steps)
    yield table_text(("constant", "before", "after", "+-"), [_constant_cells(row) for row in calibration.constants])
    yield ""
    heads = ("measured", "layout", "step s", "+-", "before", "error", "after", "error")
    yield table_text(heads, [_step_cells(step) for step in steps[:MAX_ROWS]], width=WIDTH)
    if len(steps) > MAX_ROWS:
        yield f"{len(steps) - MAX_ROWS} more with --json"
    first, second = calibration.errors
    yield f"mean error of the predictions: {_percent(first)} before, {_percent(second)} after"
    for step in steps[:1] if len({step.transfers for step in steps}) == 1 else steps:
        if step.transfers:
            yield f"note: {step.source} was measured on {', '.join(step.transfers)}: it counts less"
    if before.best is not None and after.best is not None:
        yield f"best before: {_best_text(before.best)}"
        yield f"best after:  {_best_text(after.best)}"


def calibration_json(calibration: Calibration, before: Search, after: Search) -> dict[str, Any]:
    """Returns the object `calibration` of `spanax plan --json`."""
    first, second = calibration.errors
    return {
        "applied": calibration.is_applied,
        "constants": [asdict(constant) for constant in calibration.constants],
        "steps": [asdict(step) | {"transfers": list(step.transfers)} for step in calibration.steps],
        "mean_error_before": first,
        "mean_error_after": second,
        "best_before": _best_json(before.best),
        "best_after": _best_json(after.best),
    }


def _unchanged_text(steps: tuple[CalibratedStep, ...]) -> str:
    largest = max(abs(step.before / step.measured - 1) for step in steps)
    noise = max(step.noise for step in steps)
    return (
        f"not calibrated: predictions differ from the measured steps by at most {_percent(largest)}, "
        f"within the noise of {_percent(noise)}"
    )


def _constant_cells(constant: Calibrated) -> tuple[str, ...]:
    before, after = (quantity_text(value, KINDS[constant.unit], 3) for value in (constant.before, constant.after))
    spread = "not in these steps" if constant.uncertainty is None else _percent(constant.uncertainty)
    return constant.name, before, after, spread


def _step_cells(step: CalibratedStep) -> tuple[str, ...]:
    first, second = (f"{100 * (value / step.measured - 1):+.1f} %" for value in (step.before, step.after))
    measured, before, after = (f"{seconds:.4g}" for seconds in (step.measured, step.before, step.after))
    return step.source, step.layout, measured, _percent(step.noise), before, first, after, second


def _best_text(candidate: Candidate) -> str:
    return f"{candidate.title}, remat {candidate.remat}: {candidate.step_seconds:.4g} s"


def _best_json(candidate: Candidate | None) -> dict[str, Any] | None:
    return None if candidate is None else layout_json(candidate) | {"step_seconds": candidate.step_seconds}


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"
