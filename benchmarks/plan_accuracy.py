"""What the planner predicts, compared with what was published: step time, memory, and which plan is the fastest.

Takes any folder of CSV files with the columns of tests/data/truth/README.md. Rows that cannot be expressed are counted
by reason. With --leave-one-out all constants are fitted again without each source, and predict it: the figure to trust.

Usage:
  python benchmarks/plan_accuracy.py --truth DIR [--json] [--fit [--record]] [--leave-one-out] [--cache FILE]
"""

import argparse
import dataclasses
import json
import os
import sys
from collections import Counter
from pathlib import Path
from typing import Any

os.environ["JAX_PLATFORMS"] = "none_such"  # nothing here needs a device

import numpy as np  # noqa: E402

from published import stored  # noqa: E402
from published.accuracy import accuracy, summaries, summary  # noqa: E402
from published.cases import Case  # noqa: E402
from published.constants import CONSTANTS, defaults  # noqa: E402
from published.fit import Fit  # noqa: E402
from published.folder import Folder, read_folder  # noqa: E402
from published.prediction import Prices  # noqa: E402
from published.ranks import ranks  # noqa: E402
from published.report import table  # noqa: E402

FITTED_ROWS = Path(__file__).parent / "published" / "fitted_rows.txt"


def fitted_rows() -> set[str]:
    """Returns the ids of the rows that the constants of Spanax were fitted on."""
    lines = FITTED_ROWS.read_text(encoding="utf-8").splitlines()
    return {line for line in lines if line and not line.startswith("#")}


def record(folder: Folder) -> None:
    """Writes the ids of the rows of a fit, which are then no longer held out."""
    head = FITTED_ROWS.read_text(encoding="utf-8").splitlines()[0]
    FITTED_ROWS.write_text("\n".join([head, *(case.row.id for case in folder.cases)]) + "\n", encoding="utf-8")


def measure(folder: Folder, fit: bool = False, leave_one_out: bool = False) -> dict[str, Any]:
    """Returns all that is printed, as one object."""
    prices = Prices(folder.cases)
    values = Fit(prices).all_sources() if fit and folder.cases else defaults()
    seconds = prices.seconds(values)
    errors = seconds / np.asarray([case.measured_seconds for case in folder.cases]) - 1
    seen = fitted_rows()
    fitted = np.asarray([case.row.id in seen for case in folder.cases], bool)
    held_out = errors[~fitted]
    files = [case.row.file for case in folder.cases]
    result: dict[str, Any] = {
        "rows": [_row(*row) for row in zip(folder.cases, seconds, errors, fitted, strict=True)],
        "files": summaries([file for file, yes in zip(files, fitted, strict=True) if not yes], held_out),
        "held_out": summary(held_out) if held_out.size else None,
        "fitted": summary(errors[fitted]) if fitted.any() else None,
        "ranks": _ranks(folder.cases, seconds),
        "memory_rows": [dataclasses.asdict(each) | {"error": each.error} for each in folder.memory],
        "memory": summaries([each.kind for each in folder.memory], np.asarray([m.error for m in folder.memory])),
        "skipped": dict(Counter(folder.skipped.values()).most_common()),
        "skipped_rows": folder.skipped,
        "memory_skipped": dict(Counter(folder.memory_skipped.values()).most_common()),
        "constants": _constants(values),
    }
    if leave_one_out:
        result["leave_one_out"] = _leave_one_out(prices)
    return result


def _leave_one_out(prices: Prices) -> dict[str, Any]:
    """Returns the accuracy on every source of constants that were fitted without it, and what they are."""
    if len({case.row.source for case in prices.cases}) < 2:
        return {"refused": "fewer than two sources"}
    fit = Fit(prices)
    values = fit.all_sources()
    held_out = fit.leave_one_out(values)
    seconds = np.nansum([held.seconds for held in held_out], axis=0)
    everything = prices.seconds(values)
    return dataclasses.asdict(accuracy(prices.cases, seconds)) | {
        "predictions": [_row(*row) for row in zip(
            prices.cases, seconds, seconds / np.asarray([case.measured_seconds for case in prices.cases]) - 1,
            [False] * len(prices.cases), strict=True,
        )],
        "ranks": _ranks(prices.cases, seconds),
        "regret": dataclasses.asdict(regret) if (regret := ranks(prices.cases, seconds)) else None,
        "fitted_on_all": dataclasses.asdict(accuracy(prices.cases, everything)),
        "constants": {held.source: held.values for held in held_out},
        "constants_of_all": values,
    }  # fmt: skip


def _constants(values: dict[str, float]) -> list[dict[str, Any]]:
    keys = ("name", "field", "chips", "compiler", "prior", "fitted_on", "source")
    return [{key: getattr(c, key) for key in keys} | {"value": values[c.name]} for c in CONSTANTS]


def _row(case: Case, seconds: float, error: float, fitted: bool) -> dict[str, Any]:
    return {
        "id": case.row.id,
        "file": case.row.file,
        "source": case.row.source,
        "runtime": dataclasses.asdict(case.runtime),
        "fitted": bool(fitted),
        "measured": case.measured_seconds,
        "predicted": float(seconds),
        "error": float(error),
    }


def _ranks(expressed: list[Case], seconds: np.ndarray) -> dict[str, Any]:
    result = {}
    for file in sorted({case.row.file for case in expressed}):
        indices = [index for index, case in enumerate(expressed) if case.row.file == file]
        if (of := ranks([expressed[index] for index in indices], seconds[indices])) is not None:
            result[file] = dataclasses.asdict(of)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--truth", type=Path, required=True, help="a folder of CSV files")
    parser.add_argument("--json", action="store_true", help="one object on stdout")
    parser.add_argument("--fit", action="store_true", help="fit the constants to all rows, and print and use them")
    parser.add_argument("--record", action="store_true", help="with --fit, list its rows as fitted on from now on")
    parser.add_argument("--leave-one-out", action="store_true", help="predict each source by a fit without it")
    parser.add_argument("--cache", type=Path, help="a file that stores the traced programs of the folder")
    args = parser.parse_args()
    if not args.truth.is_dir():
        sys.exit(f"there is no folder '{args.truth}'")
    if args.record and not args.fit:
        sys.exit("--record lists the rows of a fit: add --fit")
    key = stored.digest(args.truth) if args.cache else ""
    folder = stored.load(args.cache, key) if args.cache else None
    if folder is None:
        folder = read_folder(args.truth)
        if args.cache:
            stored.store(args.cache, key, folder)
    if args.record:
        record(folder)
    result = measure(folder, fit=args.fit, leave_one_out=args.leave_one_out)
    print(json.dumps(result) if args.json else table(result))


if __name__ == "__main__":
    main()
