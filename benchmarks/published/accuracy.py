"""How near predictions are to measurements: summaries by source and by group, over rows and over sources."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from published.alternatives import measurements, nearest
from published.cases import Case

LONG = 32_768
"""Tokens of a sequence from which on it counts as long."""


def summary(errors: np.ndarray) -> dict[str, float]:
    """Returns mean, median and 90th percentile of the absolute error, and the mean error."""
    sizes = np.abs(errors)
    return {
        "rows": int(errors.size),
        "mae": float(sizes.mean()),
        "median": float(np.median(sizes)),
        "p90": float(np.percentile(sizes, 90)),
        "bias": float(errors.mean()),
    }


def summaries(names: Sequence[str], errors: np.ndarray) -> dict[str, dict[str, float]]:
    """Returns the summary of each name's errors, in order of name."""
    return {name: summary(errors[[name == other for other in names]]) for name in sorted(set(names))}


def groups_of(case: Case) -> list[str]:
    """Returns the groups that a case belongs to: chip, communication, dtype and length."""
    row, per_node = case.row, case.cluster.chip.devices_per_host or 8
    one_node = case.cluster.num_devices <= per_node
    groups = [f"chip {case.cluster.chip.name}", f"compiler {case.runtime.compiler}"]
    if row.tensor > 1:
        groups.append("tensor parallel on one node" if one_node else "tensor parallel over nodes")
    if case.sizes[1] > 1 and not one_node and row.zero_stage not in (1, 2):
        groups.append("FSDP over nodes")
    if "fp8" in case.terms.matmuls.dtypes:
        groups.append("fp8")
    if row.seq_len >= LONG:
        groups.append("long sequence")
    if case.shape.is_mixture:
        groups.append("mixture of experts")
    return groups


@dataclass(frozen=True)
class Accuracy:
    """Errors of predictions of some cases; alternatives of one measurement count as the nearest of them."""

    rows: dict[str, float] | None
    sources: dict[str, dict[str, float]]
    mean_over_sources: float | None
    xla: dict[str, float] | None
    groups: dict[str, dict[str, float]]


def accuracy(cases: Sequence[Case], seconds: np.ndarray) -> Accuracy:
    """Returns the accuracy of predicted seconds of a step."""
    errors = seconds / np.asarray([case.measured_seconds for case in cases]) - 1
    counted = np.flatnonzero(nearest(measurements(cases), np.abs(errors)))
    chosen, errors = [cases[index] for index in counted], errors[counted]
    sources = summaries([case.row.source for case in chosen], errors)
    is_xla = np.asarray([case.runtime.compiler == "xla" for case in chosen], bool)
    members = [groups_of(case) for case in chosen]
    groups = {
        name: summary(errors[[name in names for names in members]])
        for name in sorted({name for names in members for name in names})
    }
    return Accuracy(
        rows=summary(errors) if errors.size else None,
        sources=sources,
        mean_over_sources=float(np.mean([of["mae"] for of in sources.values()])) if sources else None,
        xla=summary(errors[is_xla]) if is_xla.any() else None,
        groups=groups,
    )
