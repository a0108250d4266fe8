"""The constants of the cost model, fitted on half of some published runs; the other half, and all others, report.

One set of constants for all chips, models and sources; the only ones of a chip are `sustained_share` of the A100, of
the H100 (and of what is like it) and of the TPUs, and the only ones of a kind of framework are what its host takes to
dispatch a kernel and how often it goes over the logits.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from scipy.optimize import minimize

from published_costs import DISPATCH_SECONDS, LOSS_PASSES, Case, predicted
from spanax.hardware.chips import catalogue
from spanax.plan.cost.calibration import Assumptions

FITTED = {"vtrain_single_node": 10, "vtrain_multi_node": 4, "mosaic_llmfoundry_mpt": 4, "maxtext_readme": 2}
"""Files of which rows are fitted on: those whose number in the id is a multiple, which is every second one we have."""

CONSTANTS = ("idle_rounds", "score_products", "touched", "attention", "start")
SHARES = {"start"}
"""Constants that are shares, from 0 to 1."""
SUSTAINED = {
    "a100": ("a100-80gb", "a100-40gb"),
    "h100": ("h100", "h200", "b200", "gb200"),
    "tpu": ("v3", "v4", "v5e", "v5p", "v6e", "v7"),
}


@dataclass(frozen=True)
class Constants:
    """What is fitted."""

    given: Assumptions
    dispatch_seconds: float
    loss_passes: float
    sustained: dict[str, float]


def is_fitted(case: Case) -> bool:
    """Whether the constants have seen a row."""
    tail = case.row.id.rsplit("-", 1)[-1]
    return case.row.file in FITTED and tail.isdigit() and int(tail) % FITTED[case.row.file] == 0


def fit(cases: Sequence[Case], evaluations: int = 1500) -> Constants:
    """The constants with the least mean |log(predicted / measured)|, each file counting as the root of its rows.

    Args:
      cases: of which those that `is_fitted` are used.
      evaluations: of the whole, at most.
    """
    seen = [case for case in cases if is_fitted(case)]
    files = [case.row.file for case in seen]
    weights = np.asarray([files.count(file) ** -0.5 for file in files])
    weights = weights / weights.sum()
    measured = np.asarray([case.measured_seconds for case in seen])
    begin = start()

    def loss(point: np.ndarray) -> float:
        of = at(point)
        seconds = predicted(seen, of.given, of.dispatch_seconds, of.loss_passes, of.sustained)
        return float((weights * np.abs(np.log(seconds / measured))).sum())

    point, best = begin, np.inf
    for method in ("Nelder-Mead", "Powell", "Nelder-Mead"):
        options = {"maxfev": evaluations // 3} | ({"adaptive": True} if method == "Nelder-Mead" else {})
        found = minimize(loss, point, method=method, options=options)
        if found.fun < best:
            point, best = found.x, found.fun
    return at(point)


def start() -> np.ndarray:
    """The constants as they are, as a point."""
    given = Assumptions()
    values = [_free(name, getattr(given, name)) for name in CONSTANTS]
    chips = [catalogue()[names[0]].sustained_share for names in SUSTAINED.values()]
    of_software = [np.log(DISPATCH_SECONDS), np.log(LOSS_PASSES)]
    return np.asarray([*values, *of_software, *(_free("share", share, True) for share in chips)])


def at(point: np.ndarray) -> Constants:
    """The constants of a point."""
    values = {name: _bound(name, x) for name, x in zip(CONSTANTS, point, strict=False)}
    dispatch, passes, *shares = point[len(CONSTANTS) :]
    sustained = {
        chip: _bound("share", x, True) for names, x in zip(SUSTAINED.values(), shares, strict=True) for chip in names
    }
    return Constants(replace(Assumptions(), **values), float(np.exp(dispatch)), float(np.exp(passes)), sustained)


def _free(name: str, value: float, is_share: bool = False) -> float:
    """A constant on the whole line: a share by its logit, another by its logarithm."""
    if is_share or name in SHARES:
        value = min(max(value, 1e-3), 1 - 1e-3)
        return float(np.log(value / (1 - value)))
    return float(np.log(value))


def _bound(name: str, value: float, is_share: bool = False) -> float:
    return float(1 / (1 + np.exp(-value))) if is_share or name in SHARES else float(np.exp(value))
