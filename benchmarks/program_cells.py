"""Bytes moved and FLOPs of small programs, predicted and compiled: models of tests/byo and tests/zoo.py on v5e:2x4.

`--compile FOLDER` compiles each cell for its TPU (needs libtpu and no accelerator, 5 to 60 s a cell) and writes a JSON
file per cell; `--store FOLDER` then writes tests/data/program_cells.json. Without them, the stored figures are compared
with predictions; `--write notes/check-accuracy.md` puts the table into the page.

Usage:
  python benchmarks/program_cells.py [--compile FOLDER | --store FOLDER] [--only TEXT] [--json | --write PAGE]
"""

import argparse
import json
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import spanax
from generated_tables import write_table
from memory_cells import CELLS as MEMORY_CELLS
from memory_cells import ROOT, Cell, compile_into
from spanax.plan.evaluate import evaluate

STORED = ROOT / "tests" / "data" / "program_cells.json"

BEGIN = "<!-- the table of small programs: benchmarks/program_cells.py -->"

NAMES = {"bytes": "bytes of collectives", "flops": "FLOPs"}

NEAR, BROAD = 0.05, 0.1
"""The tolerances within which cells are counted."""

CELLS = [
    *MEMORY_CELLS,
    *[Cell(*each) for each in (
        ("cnn", 64, "fsdp"), ("cnn", 32, "data"), ("mixer", 64, "fsdp"), ("convnext", 64, "fsdp"), ("unet", 32, "fsdp"),
        ("vgg", 64, "data"), ("gan", 32, "fsdp"), ("nerf", 64, "tensor"), ("swin", 64, "fsdp+tensor"),
        ("diffusion", 64, "fsdp"), ("vae", 64, "zero1"), ("mlp", 64, "fsdp"), ("mae", 64, "fsdp"),
        ("multitask", 64, "fsdp+tensor"), ("operator", 64, "fsdp+tensor"), ("perceiver", 64, "fsdp"),
        ("capsules", 64, "tensor"), ("lru", 64, "data"), ("moco", 64, "zero1"),
    )],
]  # fmt: skip


def compare(cell: Cell, truth: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the predicted and the compiled bytes, by mesh axes and in all, and FLOPs of a cell."""
    machine = spanax.cluster(cell.cluster)
    plan = spanax.plan(cell.program, machine, layout=cell.preset, mesh=truth["mesh"])
    cost = evaluate(cell.program, plan, machine, adds_first=True)
    predicted = {axes: sum(kinds.values()) for axes, kinds in cost.collectives.items()}
    compiled = {axes: sum(kinds.values()) for axes, kinds in truth["collectives"].items()}
    moved, read = sum(predicted.values()), sum(compiled.values())
    return {
        "cell": cell.name,
        "mesh": truth["mesh"],
        "predicted_bytes": moved,
        "compiled_bytes": read,
        "bytes_error": moved / read - 1 if read else float(moved > 0),
        "axes": {axes: [predicted.get(axes, 0), compiled.get(axes, 0)] for axes in sorted({*predicted, *compiled})},
        "predicted_flops": cost.matmul_flops,
        "compiled_flops": truth["flops"],
        "flops_error": cost.matmul_flops / truth["flops"] - 1 if truth["flops"] else float(cost.matmul_flops > 0),
    }


def table(rows: Sequence[Mapping[str, Any]], version: str) -> str:
    """Returns the number of cells within the tolerances, and their errors."""
    lines = [
        f"{len(rows)} cells, compiled by {version}:",
        "",
        f"| | within {100 * NEAR:.0f} % | within {100 * BROAD:.0f} % | median error | mean error | largest error |",
        "|---|---|---|---|---|---|",
    ]
    for name in ("bytes", "flops"):
        errors = [abs(row[f"{name}_error"]) for row in rows]
        near, broad = (sum(error <= tolerance for error in errors) for tolerance in (NEAR, BROAD))
        figures = (statistics.median(errors), statistics.mean(errors), max(errors))
        texts = [f"{100 * error:.1f} %" for error in figures]
        lines.append(f"| {NAMES[name]} | {near} | {broad} | " + " | ".join(texts) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--compile", type=Path, help="compile the cells that this folder does not have")
    parser.add_argument("--store", type=Path, help="store the figures of this folder in tests/data")
    parser.add_argument("--only", default="", help="cells whose name contains this")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--write", type=Path, help="put the table into this page")
    asked = parser.parse_args()
    cells = [cell for cell in CELLS if asked.only in cell.name]
    if asked.compile:
        compile_into(cells, asked.compile)
        return
    if asked.store:
        files = {cell.name: asked.store / f"{cell.name}.json" for cell in cells}
        read = {name: json.loads(path.read_text()) for name, path in files.items() if path.exists()}
        keys = ("flops", "collectives", "mesh", "version")
        stored = {name: {key: fact[key] for key in keys} for name, fact in read.items() if "flops" in fact}
        STORED.write_text(json.dumps(stored, indent=1) + "\n")
        return
    truth = json.loads(STORED.read_text())
    rows = [compare(cell, truth[cell.name]) for cell in cells if cell.name in truth]
    if asked.json:
        print(json.dumps(rows))
        return
    text = table(rows, next(iter(truth.values()))["version"])
    print(text)
    if asked.write:
        write_table(asked.write, BEGIN, text)


if __name__ == "__main__":
    main()
