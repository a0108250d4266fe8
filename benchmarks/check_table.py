"""What the plan says of a step beside what the chips' own compilers say: state, FLOPs, collectives, peak memory.

Needs both extras (`pip install -e '.[tpu,cuda12]'`) and no accelerator; about a quarter of a minute a cell.

Usage:
  python benchmarks/check_table.py [--write notes/check-accuracy.md] [--json FILE] [--only TEXT]
"""

import argparse
import dataclasses
import json
import os
import statistics
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import spanax  # noqa: E402
from generated_tables import write_table  # noqa: E402
from spanax.check.report import Report  # noqa: E402
from spanax.models.workloads import load  # noqa: E402
from spanax.units import bytes_text  # noqa: E402

# model, examples in a step, devices, layout, mesh ("": the layout's usual one)
CELLS = [
    ("gpt2", 128, "v5e:4x4", "data", ""),
    ("gpt2", 128, "v5e:4x4", "fsdp", ""),
    ("gpt2", 128, "v5p:2x2x2", "fsdp", ""),
    ("gpt2", 128, "v6e:2x4", "zero2", ""),
    ("gpt2", 128, "h100:8", "fsdp", ""),
    ("gpt2", 128, "h200:8", "data", ""),
    ("gpt2-xl", 64, "v5e:4x4", "fsdp", ""),
    ("gpt2-xl", 64, "v6e:4x4", "hsdp", "data=4,fsdp=4"),
    ("gpt2-xl", 64, "h100:2x8", "hsdp", "data=2,fsdp=8"),
    ("gpt2-xl", 64, "h200:8", "fsdp", ""),
    ("llama3-8b", 64, "v5p:4x4x4", "fsdp", ""),
    ("llama3-8b", 64, "v5e:16x16", "fsdp+tensor", "fsdp=64,model=4"),
    ("llama3-8b", 64, "v6e:8x8", "fsdp+tensor+seq", "fsdp=16,model=4"),
    ("llama3-8b", 64, "v6e:8x8", "fsdp", ""),
    ("llama3-8b", 64, "h100:8x8", "fsdp", ""),
    ("llama3-8b", 32, "h100:2x8", "fsdp+tensor", "fsdp=4,model=4"),
    ("llama3-8b", 16, "h200:8", "fsdp", ""),
    ("gpt3-175b", 512, "v5p:8x8x8", "fsdp+tensor+seq", "fsdp=32,model=16"),
    ("gpt3-175b", 256, "h100:32x8", "fsdp+tensor+seq", "fsdp=32,model=8"),
    ("vit-b16", 512, "v5e:2x4", "data", ""),
    ("vit-b16", 512, "v6e:2x4", "fsdp", ""),
    ("vit-b16", 512, "h200:8", "fsdp", ""),
    ("mixtral-8x7b", 64, "v5p:4x4x4", "expert", "data=8,expert=8"),
    ("mixtral-8x7b", 64, "h200:8x8", "expert", "data=8,expert=8"),
    ("resnet50", 512, "v5e:2x4", "data", ""),
    ("resnet50", 512, "h100:8", "data", ""),
]

NEGLIGIBLE_BYTES = 1 << 20
"""Axes over which both say that less than this moves in a step are left out."""

BEGIN = "<!-- the table: benchmarks/check_table.py -->"


@dataclasses.dataclass(frozen=True)
class Cell:
    """One row: what was asked, and the report."""

    model: str
    batch_size: int
    report: Report

    @property
    def moved(self) -> dict[str, float]:
        """The relative error of the bytes over each set of mesh axes that matters."""
        ours, theirs = (
            {axes: sum(kinds.values()) for axes, kinds in (side.collectives or {}).items()}
            for side in (self.report.predicted, self.report.compiled)
        )
        found = {}
        for axes in sorted(ours.keys() | theirs.keys()):
            mine, said = ours.get(axes, 0), theirs.get(axes, 0)
            if max(mine, said) >= NEGLIGIBLE_BYTES:
                found[axes] = mine / said - 1 if said else float("inf")
        return found

    def error(self, name: str) -> float | None:
        return self.report.errors.get(name)


def measure(only: str) -> Iterator[Cell]:
    for model, batch_size, on, layout, mesh in CELLS:
        name = f"{model} {on} {layout} {mesh}"
        if only not in name:
            continue
        machine = spanax.cluster(on)
        workload = load(model, batch_size=batch_size)
        program = workload.trace(learning_rate=1e-3, num_steps=100, compute_dtype="bfloat16")
        plan = spanax.plan(program, machine, layout=layout, mesh=mesh or None)
        cell = Cell(model, batch_size, spanax.check(program, plan, machine, level=3))
        print(name, row(cell), file=sys.stderr, flush=True)
        yield cell


def percent(error: float | None) -> str:
    if error is None:
        return ""
    return "only predicted" if error > 100 else f"{100 * error:+.1f} %"


def row(cell: Cell) -> str:
    report = cell.report
    moved = ", ".join(f"{axes} {percent(error)}" for axes, error in cell.moved.items()) if report.fits else ""
    peak = bytes_text(report.compiled.peak_bytes or 0)
    parts = [
        f"{cell.model}, batch {cell.batch_size}",
        report.target,
        f"{report.layout} ({report.mesh})",
        percent(cell.error("flops")),
        moved,
        f"{percent(cell.error('peak_bytes'))} of {peak}" + ("" if report.fits else ", does not fit"),
    ]
    return "| " + " | ".join(parts) + " |"


def table(cells: Sequence[Cell]) -> str:
    """The rows, and what they come to."""
    head = ["cell", "devices", "layout", "FLOPs", "collectives by axes", "peak memory"]
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head), *map(row, cells), ""]
    state = [abs(error) for cell in cells if (error := cell.error("state_bytes")) is not None]
    flops = [abs(error) for cell in cells if (error := cell.error("flops")) is not None]
    peak = [abs(error) for cell in cells if (error := cell.error("peak_bytes")) is not None]
    moved = [abs(error) for cell in cells if cell.report.fits for error in cell.moved.values()]
    near = sum(error <= 0.05 for error in moved)
    versions = cells[-1].report.versions
    lines += [
        f"{len(cells)} cells. State: {sum(error == 0 for error in state)} of {len(state)} exact. "
        f"FLOPs: {sum(error <= 0.02 for error in flops)} of {len(flops)} within 2 %. "
        f"Collectives: {near} of {len(moved)} (cell, axes) within 5 %. "
        f"Peak memory: mean error {100 * statistics.mean(peak):.1f} %, median {100 * statistics.median(peak):.1f} %.",
        "",
        "Versions: " + ", ".join(f"{name} {version}" for name, version in versions.items() if name != "compiler") + ".",
    ]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", type=Path, help="put the table into this page")
    parser.add_argument("--json", type=Path, help="write every report to this file")
    parser.add_argument("--only", default="", help="cells whose name has this in it")
    asked = parser.parse_args()
    cells = list(measure(asked.only))
    text = table(cells)
    print(text)
    if asked.json:
        asked.json.write_text(json.dumps([json.loads(cell.report.to_json()) for cell in cells]))
    if asked.write:
        write_table(asked.write, BEGIN, text)


if __name__ == "__main__":
    main()
