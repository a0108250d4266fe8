"""What the planner predicts, beside what was published: step time, memory, and which of several plans is the fastest.

Takes any folder of CSV files with the columns of tests/data/truth/README.md. Rows that cannot be expressed are counted
by reason. The constants of the cost model were fitted on half of some files (--fit does it anew); those rows are left
out of every figure that is reported, but for ranks, which need all plans of a group.

Usage:
  python benchmarks/plan_accuracy.py --truth DIR [--json] [--fit]
"""

import argparse
import dataclasses
import json
import os
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

os.environ["JAX_PLATFORMS"] = "none_such"  # nothing here needs a device

import numpy as np  # noqa: E402

import published  # noqa: E402
import published_fit  # noqa: E402
import published_memory  # noqa: E402
from published_costs import DISPATCH_SECONDS, LOSS_PASSES, Case, cases, predicted  # noqa: E402
from published_ranks import ranks  # noqa: E402
from spanax.plan.cost.calibration import Assumptions  # noqa: E402

Found = tuple[list[published.Row], list[published_memory.Measured], dict[str, str], dict[str, str]]


def read_folder(folder: Path) -> Found:
    """Runs, memory, and why each of the other rows was skipped: of runs by id, of memory by id."""
    runs: list[published.Row] = []
    memory: list[published_memory.Measured] = []
    skipped: dict[str, str] = {}
    no_memory: dict[str, str] = {}
    for file, rows in published.files(folder):
        for at, text in enumerate(rows):
            id = text.get("id") or f"{file}-{at:04d}"
            if published_memory.is_compiled(rows):
                try:
                    memory += published_memory.compiled(text, id)
                except published.Skipped as reason:
                    no_memory[id] = str(reason)
            elif published.is_runs(rows):
                try:
                    runs.append(published.read(file, text, at))
                except published.Skipped as reason:
                    skipped[id] = str(reason)
                if text.get("mem_gib"):
                    try:
                        memory.append(published_memory.stated(text, file, at))
                    except published.Skipped as reason:
                        no_memory[id] = str(reason)
            else:
                skipped[id] = "a file of another kind"
    return runs, memory, skipped, no_memory


def summary(errors: np.ndarray) -> dict[str, float]:
    """Mean, median and 90th percentile of the absolute error, and the mean error."""
    sizes = np.abs(errors)
    return {
        "rows": int(errors.size),
        "mae": float(sizes.mean()),
        "median": float(np.median(sizes)),
        "p90": float(np.percentile(sizes, 90)),
        "bias": float(errors.mean()),
    }


def summaries(names: Sequence[str], errors: np.ndarray) -> dict[str, dict[str, float]]:
    """The summary of each name's errors, in order of name."""
    return {name: summary(errors[[name == other for other in names]]) for name in sorted(set(names))}


def measure(folder: Path, constants: published_fit.Constants | None = None, fit: bool = False) -> dict[str, Any]:
    """All that is printed, as one object."""
    runs, memory, skipped, no_memory = read_folder(folder)
    made, refused = cases(runs)
    skipped |= refused
    fitted = published_fit.fit(made) if fit else constants
    chosen = fitted or published_fit.Constants(Assumptions(), DISPATCH_SECONDS, LOSS_PASSES, {})
    seconds = predicted(made, chosen.given, chosen.dispatch_seconds, chosen.loss_passes, chosen.sustained)
    errors = seconds / np.asarray([case.measured_seconds for case in made]) - 1 if made else np.zeros(0)
    seen = np.asarray([published_fit.is_fitted(case) for case in made], bool)
    held_out = errors[~seen]
    result: dict[str, Any] = {
        "rows": [_row(*row) for row in zip(made, seconds, errors, seen, strict=True)],
        "files": summaries([case.row.file for case, yes in zip(made, seen, strict=True) if not yes], held_out),
        "held_out": summary(held_out) if held_out.size else None,
        "fitted": summary(errors[seen]) if seen.any() else None,
        "ranks": _ranks(made, seconds),
        "memory_rows": [dataclasses.asdict(one) | {"error": one.error} for one in memory],
        "memory": summaries([one.kind for one in memory], np.asarray([one.error for one in memory])),
        "skipped": dict(Counter(skipped.values()).most_common()),
        "skipped_rows": skipped,
        "memory_skipped": dict(Counter(no_memory.values()).most_common()),
    }
    if fitted is not None:
        result["constants"] = dataclasses.asdict(fitted)
    return result


def _row(case: Case, seconds: float, error: float, seen: bool) -> dict[str, Any]:
    return {
        "id": case.row.id,
        "file": case.row.file,
        "fitted": bool(seen),
        "measured": case.measured_seconds,
        "predicted": float(seconds),
        "error": float(error),
    }


def _ranks(made: list[Case], seconds: np.ndarray) -> dict[str, Any]:
    found = {}
    for file in sorted({case.row.file for case in made}):
        places = [at for at, case in enumerate(made) if case.row.file == file]
        if (of := ranks([made[at] for at in places], seconds[places])) is not None:
            found[file] = dataclasses.asdict(of)
    return found


def table(result: dict[str, Any], worst: int = 8) -> str:
    """The result in words."""
    line = "{:<46} {:>5} {:>7.1f} {:>7.1f} {:>7.1f} {:>+7.1f}"
    head = "{:<46} {:>5} {:>7} {:>7} {:>7} {:>7}".format("", "rows", "MAE %", "median", "P90", "bias")

    def rows(found: dict[str, Any]) -> list[str]:
        kinds = ("mae", "median", "p90", "bias")
        return [
            line.format(name, one["rows"], *(100 * one[key] for key in kinds)) for name, one in found.items() if one
        ]

    lines = ["Step time, rows that no constant was fitted on", head, *rows(result["files"])]
    lines += rows({"all of them together": result["held_out"], "(the rows that were fitted on)": result["fitted"]})
    bad = sorted((row for row in result["rows"] if not row["fitted"]), key=lambda row: -abs(row["error"]))[:worst]
    lines += ["", "The worst of them"]
    for row in bad:
        times = f"{row['measured']:9.3f} s, predicted {row['predicted']:9.3f} s"
        lines.append(f"  {row['id']:<36} {times}, {100 * row['error']:+5.0f} %")
    lines += ["", "Rank: runs of one model, batch and number of devices, four plans or more"]
    for file, of in result["ranks"].items():
        lines.append(
            f"  {file}: {of['groups']} groups of {of['plans']} plans; regret of the first choice, median "
            f"{100 * of['median_regret']:.1f} %, mean {100 * of['mean_regret']:.1f} %; first is best in "
            f"{100 * of['first_is_best']:.0f} %, first three hold it in {100 * of['top3_holds_best']:.0f} % "
            f"(at worst {100 * of['top3_worst_regret']:.1f} % off)"
        )
    lines += ["", "Memory of one device", head, *rows(result["memory"]), "", "Rows that are not expressed"]
    lines += [f"  {count:>5}  {reason}" for reason, count in result["skipped"].items()]
    lines += [f"  {count:>5}  {reason}" for reason, count in result["memory_skipped"].items()]
    if "constants" in result:
        lines += ["", "Fitted: " + json.dumps(result["constants"])]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--truth", type=Path, required=True, help="a folder of CSV files")
    parser.add_argument("--json", action="store_true", help="one object on stdout")
    parser.add_argument("--fit", action="store_true", help="fit the constants anew, and print and use them")
    args = parser.parse_args()
    if not args.truth.is_dir():
        sys.exit(f"there is no folder '{args.truth}'")
    result = measure(args.truth, fit=args.fit)
    print(json.dumps(result) if args.json else table(result))


if __name__ == "__main__":
    main()
