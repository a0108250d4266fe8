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
    heads = ("measured", "layout", "steps", "step s", "+-", "before", "error", "after", "error", "expected +-")
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
        "best_before": None if before.best is None else _best_json(before.best),
        "best_after": None if after.best is None else _best_json(after.best),
    }


def _unchanged_text(steps: tuple[CalibratedStep, ...]) -> str:
    largest = max(abs(step.before / step.measured - 1) for step in steps)
    noise = max(step.noise for step in steps)
    return (
        f"not calibrated: predictions differ from the measured steps by at most {_percent(largest)}, "
        f"within the noise of {_percent(noise)}"
    )


def _constant_cells(constant: Calibrated) -> tuple[str, ...]:
    kind = KINDS[constant.unit]
    numbers = (quantity_text(value, kind, 3) for value in (constant.before, constant.after))
    is_fitted = constant.uncertainty is not None
    return (constant.name, *numbers, _percent(constant.uncertainty) if is_fitted else "not in these steps")  # type: ignore[arg-type]


def _step_cells(step: CalibratedStep) -> tuple[str, ...]:
    errors = (f"{100 * (value / step.measured - 1):+.1f} %" for value in (step.before, step.after))
    first, second = errors
    return (
        step.source,
        step.layout,
        str(step.num_steps),
        f"{step.measured:.4g}",
        _percent(step.noise),
        f"{step.before:.4g}",
        first,
        f"{step.after:.4g}",
        second,
        _percent(step.uncertainty),
    )


def _best_text(candidate: Candidate) -> str:
    return f"{candidate.title}, remat {candidate.remat}: {candidate.step_seconds:.4g} s"


def _best_json(candidate: Candidate) -> dict[str, Any]:
    return layout_json(candidate) | {"step_seconds": candidate.step_seconds}


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"
