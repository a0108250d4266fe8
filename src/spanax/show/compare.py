"""Formats measured next to predicted step times of layouts, fastest first, as text and JSON."""

from typing import Any

import jax

from spanax.check.measure.compare import PRUNED, Compared, Comparison, Moved
from spanax.plan.candidate import Search
from spanax.show.search import candidate_json, layout_json
from spanax.show.tables import table_text
from spanax.units import bytes_text

MEMORY_SOURCE = "XLA's memory analysis of the step compiled for the devices present"


def compared_json(comparison: Comparison) -> dict[str, Any]:
    """Returns the rows of `spanax compare --json`: each a candidate of `spanax plan --json` with `measured`."""
    search = comparison.search
    rows = comparison.rows
    return {
        "cluster": str(search.cluster),
        "devices": search.cluster.num_devices,
        "size": search.cluster.size,
        "device_kind": comparison.device_kind,
        "jax": jax.__version__,
        "fingerprint": next(iter(search.programs.values())).fingerprint,
        "batch": search.batch_size,
        "sequence_lengths": list(search.setting.sequence_lengths),
        "dtypes": list(search.setting.dtypes),
        "attention": list(search.setting.attention),
        "layouts_compared": len(rows),
        "layouts_left_out": search.rejected.get(PRUNED, 0),
        "best": layout_json(rows[0].candidate),
        "choice": layout_json(search.candidates[0]),
        "choice_ratio": comparison.choice.ratio,
        "choice_core_ratio": comparison.choice_core_ratio,
        "rank_correlation": comparison.rank_correlation,
        "memory_from": MEMORY_SOURCE,
        "rows": [_row_json(search, row) for row in rows],
    }


def _row_json(search: Search, row: Compared) -> dict[str, Any]:
    return candidate_json(search, row.candidate) | {
        "collectives": row.collectives,
        "state_bytes": row.state_bytes,
        "ratio": row.ratio,
        "measured": {
            "step_seconds": row.step_seconds,
            "seconds": list(row.seconds),
            "core_seconds": list(row.core_seconds),
            "state_bytes": row.compiled_state_bytes,
            "peak_bytes": row.compiled_peak_bytes,
            "collectives": {axes: dict(sizes) for axes, sizes in row.moved.items()},
        },
    }


def compared_text(comparison: Comparison) -> str:
    """Returns one row per layout, the fastest first: measured, then predicted."""
    search = comparison.search
    rows = comparison.rows
    choice = search.candidates[0]
    core_ratio = comparison.choice_core_ratio
    is_shared = core_ratio is not None
    heads = ["layout", "mesh", "step s", "x best", *["core s"] * is_shared, "predicted s", "x best"]
    heads += ["peak", "predicted", "moved", "predicted"]
    cells = [
        (
            candidate.layout + (" *" if candidate is choice else ""),
            str(candidate.whole_mesh),
            f"{row.step_seconds:.4g}",
            f"{row.ratio:.3f}",
            *[f"{row.step_core_seconds:.4g}"] * is_shared,
            f"{candidate.step_seconds:.4g}",
            f"{candidate.step_seconds / choice.step_seconds:.3f}",
            bytes_text(row.compiled_peak_bytes),
            bytes_text(candidate.peak_bytes),
            _total(row.moved),
            _total(row.collectives),
        )
        for row, candidate in ((row, row.candidate) for row in rows)
    ]
    best = rows[0].candidate
    num_pruned = search.rejected.get(PRUNED, 0)
    by_cores = "" if core_ratio is None else f"; by core seconds {core_ratio:.3f} times"
    return "\n".join(
        [
            f"{_num_layouts(len(rows))} on {search.cluster}: {search.setting}, remat {choice.remat}",
            "",
            table_text(heads, cells),
            "",
            f"the planner's choice (*), {choice.title}, takes {comparison.choice.ratio:.3f} times "
            f"the time of the fastest, {best.title}{by_cores}",
            _correlation_text(comparison.rank_correlation, len(rows), num_pruned),
            *["core s: CPU seconds of all cores together, independent of other load on the machine"] * is_shared,
            f"peak: {MEMORY_SOURCE}; moved: bytes of results per device and step",
        ]
    )


def _correlation_text(correlation: float | None, count: int, num_pruned: int) -> str:
    layouts = f"{count} of {count + num_pruned} layouts (--all compares all)" if num_pruned else _num_layouts(count)
    value = "none" if correlation is None else f"{correlation:.2f}"
    return f"rank correlation of the predicted and the measured order: {value}, over {layouts}"


def _num_layouts(count: int) -> str:
    return f"{count} layout{'s' if count > 1 else ''}"


def _total(moved: Moved) -> str:
    return bytes_text(sum(size for kinds in moved.values() for size in kinds.values()))
