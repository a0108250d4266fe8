"""What a planned step sends, beside the naive program: the same step under `jax.jit` with the shardings of its inputs.

Every model of tests/byo and tests/zoo.py under presets, compiled for 8 simulated devices or, with `--on v5e:2x4`, for
that TPU (needs libtpu and no accelerator). Nothing is run. Counted are the bytes that a device sends around rings in a
step, loops multiplied out. `--store FOLDER` keeps a JSON file per cell and compiles only those that it does not have;
`--write PAGE` puts the table into the page.

Usage:
  python benchmarks/naive_bytes.py [--on CLUSTER] [--only TEXT] [--presets NAMES] [--store FOLDER] [--write PAGE]
"""

import argparse
import functools
import json
import statistics
import subprocess
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import spanax
from generated_tables import write_table
from memory_cells import ROOT, corpus, traced
from sent_bytes import sent_bytes
from spanax.errors import SpanaxError

SIZE = 64
"""The examples of a step."""

PRESETS = ("data", "fsdp", "hsdp", "tensor", "fsdp+tensor")

ROUNDED = 1.005
"""Up to this, a ratio is printed as 1.00."""

PAIRS = "logits of all pairs are exchanged to be transposed: the naive program reduces their columns"

BAGS = "looked-up rows are exchanged, or reduced, before their weighted sum, not after it"

ABOVE = {
    "clip data": PAIRS,
    "clip fsdp": PAIRS,
    "multitask fsdp": BAGS,
    "multitask fsdp+tensor": BAGS,
    "multitask hsdp": BAGS,
    "pixelcnn tensor": "the naive program shards images along their height between convolutions",
}
"""The cells that send more than the naive program on 8 simulated devices, each with the reason."""

BEGIN = "<!-- the table of naive programs: benchmarks/naive_bytes.py -->"


def cells() -> list[tuple[str, str]]:
    return [(name, preset) for name in (*corpus.FILES, *corpus.zoo.ZOO) for preset in PRESETS]


@functools.cache
def commit() -> str:
    """Returns the commit of this checkout, marked if files differ from it."""
    command = ["git", "-C", str(ROOT), "describe", "--always", "--abbrev=8", "--dirty", "--exclude=*"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def compared(name: str, preset: str, cluster: str = "cpu:8") -> dict[str, Any]:
    """Returns the bytes that a device sends, as planned and in the naive program; or why there is no such plan."""
    machine = spanax.cluster(cluster)
    program = traced(name, SIZE)
    try:
        plan = spanax.plan(program, machine, layout=preset)
    except SpanaxError as error:
        return {"cell": f"{name} {preset}", "refused": str(error).splitlines()[0]}
    level = 2 if machine.platform == "cpu" else 3
    ours, naive = (spanax.check(program, plan, machine, level=level, inputs_only=only) for only in (False, True))
    totals = (
        sum(sum(kinds.values()) for kinds in figures.collectives.values())
        for figures in (ours.predicted, ours.compiled)
    )
    predicted, compiled = totals
    return {
        "cell": f"{name} {preset}",
        "mesh": repr(plan.mesh),
        "sent": sum(map(sent_bytes, ours.collectives)),
        "naive": sum(map(sent_bytes, naive.collectives)),
        "predicted": predicted,
        "compiled": compiled,
        "commit": commit(),
        "versions": {package: ours.versions[package] for package in ("jax", "jaxlib", "flax")},
    }


def ratio(row: Mapping[str, Any]) -> float:
    """Returns what a device sends over what it sends in the naive program."""
    return float(row["sent"] / row["naive"]) if row["naive"] else 1.0 + (row["sent"] > 0)


def table(rows: Sequence[Mapping[str, Any]], cluster: str) -> str:
    """Returns the ratios by preset: their median, and the largest with its model."""
    by_cell = {row["cell"]: row for row in rows if "refused" not in row}
    lines = [f"| {SIZE} examples on {cluster} | models | median | largest |", "|---|---|---|---|"]
    for preset in PRESETS:
        found = {cell.split()[0]: ratio(row) for cell, row in by_cell.items() if cell.split()[1] == preset}
        if found:
            largest = max(found, key=found.__getitem__)
            median = statistics.median(found.values())
            lines.append(f"| {preset} | {len(found)} | {median:.2f} | {found[largest]:.2f} ({largest}) |")
    ratios = [ratio(row) for row in by_cell.values()]
    above = sum(each > ROUNDED for each in ratios)
    figures = f"median {statistics.median(ratios):.2f}, largest {max(ratios):.2f}"
    origins = Counter(f"{row['commit']} ({versions(row)})" for row in by_cell.values())
    commits = ", ".join(f"{count} of {origin}" for origin, count in origins.most_common())
    refused = len(rows) - len(ratios)
    counted = f"{len(ratios)} of {len(cells())} cells, {refused} more refused; {above} above 1.00, {figures}."
    return "\n".join([*lines, "", counted, "", f"Commits: {commits}."])


def versions(row: Mapping[str, Any]) -> str:
    return ", ".join(f"{package} {version}" for package, version in row["versions"].items())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--on", default="cpu:8", help="the devices to compile for")
    parser.add_argument("--only", default="", help="cells whose name contains this")
    parser.add_argument("--presets", default=",".join(PRESETS))
    parser.add_argument("--store", type=Path, help="a folder with a JSON file per cell")
    parser.add_argument("--write", type=Path, help="put the table into this page")
    asked = parser.parse_args()
    rows = []
    for name, preset in cells():
        if asked.only not in f"{name} {preset}" or preset not in asked.presets.split(","):
            continue
        path = asked.store and asked.store / f"{name}-{preset}-{asked.on.replace(':', '.')}.json"
        if path and path.exists():
            rows.append(json.loads(path.read_text()))
            continue
        try:
            row = compared(name, preset, asked.on)
        except (SpanaxError, TypeError, ValueError) as error:  # of the naive program's compiler, or another batch size
            row = {"cell": f"{name} {preset}", "refused": f"{type(error).__name__}: {error}".splitlines()[0]}
        rows.append(row)
        print(json.dumps(row | ({} if "refused" in row else {"ratio": round(ratio(row), 3)})), flush=True)
        if path:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(row))
    text = table(rows, asked.on)
    print(text)
    if asked.write:
        write_table(asked.write, BEGIN, text)


if __name__ == "__main__":
    main()
