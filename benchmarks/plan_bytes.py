"""What the plan says a step moves, beside what XLA's program moves: bytes a device by kind and mesh axis.

Every preset on three meshes of 8 simulated devices, compiled from shapes alone; nothing is run. Output bytes a device
and step, loops multiplied out. XLA writes a reduce-scatter on CPU as an all-reduce and a slice: both count as
all-reduce, with the bytes of the former.

Usage:
  python benchmarks/plan_bytes.py [gpt vit cnn moe] [--json] [--keep DIR]
"""

import argparse
import dataclasses
import functools
import hashlib
import json
import os
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import spanax

# What moves is decided before machine code is made, and only that is optimized less.
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_backend_optimization_level=0"
spanax.simulate(8)
sys.path.append(str(Path(__file__).resolve().parent.parent / "tests"))

import expert  # noqa: E402
import jax  # noqa: E402
from hlo_bytes import by_axis  # noqa: E402

from spanax.plan.choose import resolver_of  # noqa: E402
from spanax.plan.layout import Layout  # noqa: E402
from spanax.plan.presets import PRESETS  # noqa: E402
from spanax.plan.terms import KINDS, Terms, tally  # noqa: E402
from spanax.run.run import Run  # noqa: E402
from zoo import ZOO, Case  # noqa: E402

MODELS: dict[str, tuple[Case, int]] = {
    **{name: (case, 64) for name, case in ZOO.items()},
    **{name: (workload.case, workload.batch_size) for name, workload in expert.WORKLOADS.items()},
    "vit": (ZOO["vit-scan"], 64),
}
"""A model, and the size of its batch."""

TOLERANCE, NEGLIGIBLE_BYTES = 0.05, 1000
"""How far a figure may be off, as a share and in bytes: both must be exceeded to count."""

Moved = dict[tuple[str, str], float]
"""Bytes by (kind, mesh axes)."""


@dataclasses.dataclass(frozen=True)
class Cell:
    """A model under a preset on a mesh, with both figures; or why it was refused."""

    model: str
    layout: str
    mesh: str
    predicted: Moved
    compiled: Moved
    refused: str = ""

    @property
    def ratio(self) -> float:
        """Predicted over compiled, all in all."""
        return sum(self.predicted.values()) / (sum(self.compiled.values()) or 1.0)

    def off(self) -> list[tuple[str, str]]:
        """The kinds and axes that are off by more than the tolerance."""
        both = {*self.predicted, *self.compiled}
        return sorted(key for key in both if is_off(self.predicted.get(key, 0), self.compiled.get(key, 0)))


def is_off(predicted: float, compiled: float) -> bool:
    """Whether a figure is further from XLA's than it may be."""
    return abs(predicted - compiled) > max(TOLERANCE * compiled, NEGLIGIBLE_BYTES)


def layouts() -> Iterator[tuple[str, str]]:
    """Every preset with three meshes of 8 devices; of `data` there is but one."""
    for preset, parts in PRESETS.items():
        meshes = [(8,), (2, 4), (4, 2)]
        axes = parts if len(parts) == 2 else ("data", *parts)
        for sizes in meshes:
            named = zip(axes[-len(sizes) :], sizes, strict=True)
            mesh = ",".join(f"{axis}={size}" for axis, size in named)
            if len(sizes) == 1 and parts == ("fsdp", "model"):
                mesh = "data=2,fsdp=2,model=2"
            if parts != ("data",) or len(sizes) == 1:
                yield preset, mesh
                if "model" in parts:
                    yield f"{preset}+seq", mesh


@functools.cache
def program(model: str) -> spanax.Program:
    case, batch_size = MODELS[model]
    batch = jax.eval_shape(lambda: case.batch(batch_size))
    return spanax.trace(build=case.build, optimizer=expert.OPTIMIZER, batch=batch, loss=case.loss)


def predicted(terms: Terms, sizes: dict[str, int]) -> Moved:
    """Output bytes a device, as XLA writes the collectives on CPU."""
    moves, found = terms.moves, defaultdict[tuple[str, str], float](float)

    def ways(mask: int) -> int:
        return spanax.MeshShape.of(sizes).ways(axes(mask))

    def axes(mask: int) -> list[str]:
        return [axis for at, axis in enumerate(terms.axes) if mask >> at & 1 and sizes[axis] > 1]

    for row, at in enumerate(moves.kind):
        kind, over, kept = KINDS[at], int(moves.over[row]), int(moves.kept[row])
        num_bytes = moves.num_bytes[row] * moves.runs[row] / ways(kept)
        num_bytes /= ways(over) if kind == "all-to-all" else 1
        if ways(over) > 1:
            found["all-reduce" if kind == "reduce-scatter" else kind, "+".join(axes(over))] += float(num_bytes)
    return dict(found)


@functools.cache
def compiled(model: str, layout: Layout, mesh: str, keep: Path | None = None) -> str:
    """The text of XLA's program; kept in a folder, it is read from there the next time."""
    plan = planned(model, layout, mesh)
    kept = keep and keep / f"{model} {hashlib.sha256(plan.to_json().encode()).hexdigest()[:16]}.txt"
    if kept and kept.exists():
        return kept.read_text()
    text = Run(program(model), plan, plan.mesh.build(), state=[]).lower().compile().as_text()
    if kept:
        kept.parent.mkdir(parents=True, exist_ok=True)
        kept.write_text(text)
    return text


def planned(model: str, layout: str | Layout, mesh: str) -> spanax.Plan:
    return spanax.plan(program(model), spanax.cluster("cpu:8"), layout=layout, mesh=mesh)


def measure(model: str, layout: str, mesh: str, keep: Path | None = None) -> Cell:
    try:
        plan = planned(model, layout, mesh)
    except spanax.SpanaxError as error:
        return Cell(model, layout, mesh, {}, {}, str(error).splitlines()[0])
    sizes = dict(plan.mesh.axes)
    terms = tally(resolver_of(program(model), plan), program(model).step)
    moved = by_axis(compiled(model, dataclasses.replace(plan.layout, name="any"), mesh, keep), sizes)
    return Cell(model, layout, mesh, predicted(terms, sizes), dict(moved))


def as_json(cell: Cell) -> dict[str, Any]:
    both = sorted({*cell.predicted, *cell.compiled})
    rows = [
        {
            "kind": kind,
            "axes": axes,
            "predicted_bytes": cell.predicted.get((kind, axes), 0),
            "compiled_bytes": cell.compiled.get((kind, axes), 0),
        }
        for kind, axes in both
    ]
    return {"model": cell.model, "layout": cell.layout, "mesh": cell.mesh, "refused": cell.refused, "moved": rows}


def show(cell: Cell) -> None:
    name = f"{cell.model:8} {cell.layout:16} {cell.mesh:22}"
    if cell.refused:
        print(f"{name} refused: {cell.refused}", flush=True)
        return
    totals = [sum(moved.values()) / 1e3 for moved in (cell.predicted, cell.compiled)]
    print(f"{name} {totals[0]:12,.1f} {totals[1]:12,.1f} {cell.ratio:6.3f} {'off' if cell.off() else ''}", flush=True)
    for key in cell.off():
        ours, theirs = cell.predicted.get(key, 0) / 1e3, cell.compiled.get(key, 0) / 1e3
        print(f"    {key[0]:20} {key[1]:16} {ours:12,.1f} {theirs:12,.1f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", default=["gpt", "vit", "cnn", "moe"])
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--keep", type=Path)
    args = parser.parse_args()
    cells = []
    for model in args.models:
        for layout, mesh in layouts():
            cells.append(measure(model, layout, mesh, args.keep))
            if not args.json:
                show(cells[-1])
    if args.json:
        print(json.dumps([as_json(cell) for cell in cells]))


if __name__ == "__main__":
    main()
