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
import re
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import spanax

# What moves is decided before machine code is made, and only that is optimized less.
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_backend_optimization_level=0"
if __name__ == "__main__":
    spanax.simulate(8)
sys.path.append(str(Path(__file__).resolve().parent.parent / "tests"))

import jax  # noqa: E402
from flax import nnx  # noqa: E402

import expert  # noqa: E402
from hlo_bytes import by_axis  # noqa: E402
from spanax.plan.layout import Layout  # noqa: E402
from spanax.plan.place import resolver_of  # noqa: E402
from spanax.plan.presets import PRESETS  # noqa: E402
from spanax.plan.spmd.count_terms import count_terms  # noqa: E402
from spanax.plan.spmd.sharded_program import ShardedProgram  # noqa: E402
from spanax.train.run import Run  # noqa: E402
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

KNOWN: list[tuple[str, str, int, str]] = [
    (
        r"gpt fsdp\+tensor\+seq fsdp=4,model=2",
        "all-to-all model",
        1_100_000,
        "XLA exchanges the sequence for the batch before it gathers it, on the way to the gradient of the embedding",
    ),
    (
        r"moe fsdp\+tensor\+seq data=2,fsdp=2,model=2",
        r"all-reduce data\+model",
        1_100,
        "XLA sums what is left of the router's gradient over data and model at once, and not one after the other",
    ),
    (
        r"(cnn|moe|vit) fsdp\+tensor(\+seq)? (data=2,fsdp=2,model=2|fsdp=2,model=4)",
        "collective-permute .*|all-reduce (data|fsdp|data\\+fsdp)",
        3_000,
        "XLA divides the gradient of a weight that `model` leaves whole (router, head) among devices that would repeat "
        "it, sums the parts, and swaps them into place",
    ),
    (
        "vit .*tensor.*",
        "all-gather model",
        4_200,
        "where the largest of split classes is looked for XLA gathers every device's largest and its number; the plan "
        "counts a sum of the result",
    ),
]
"""Where XLA does otherwise: the cells (model, layout and mesh), the kinds and axes, the most bytes, what it does."""


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

    def off(self) -> dict[tuple[str, str], str]:
        """The kinds and axes that are off by more than the tolerance, each with the cause where it is known."""
        found = {}
        for key in sorted({*self.predicted, *self.compiled}):
            ours, theirs = self.predicted.get(key, 0), self.compiled.get(key, 0)
            if abs(ours - theirs) > max(TOLERANCE * theirs, NEGLIGIBLE_BYTES):
                found[key] = self._cause(" ".join(key), abs(ours - theirs))
        return found

    def _cause(self, what: str, num_bytes: float) -> str:
        name = f"{self.model} {self.layout} {self.mesh}"
        for cells, kinds, most_bytes, why in KNOWN:
            if re.fullmatch(cells, name) and re.fullmatch(kinds, what) and num_bytes <= most_bytes:
                return why
        return ""


def layouts() -> Iterator[tuple[str, str]]:
    """Every preset with three meshes of 8 devices; of `data` there is but one."""
    for preset, parts in PRESETS.items():
        if "pipe" in parts:  # what stages send is a schedule's: benchmarks/pipeline.py
            continue
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
    optimizer = functools.partial(nnx.Optimizer, tx=expert.OPTIMIZER, wrt=case.wrt)
    return spanax.trace(build=case.build, optimizer=optimizer, batch=batch, loss=case.loss)


def as_on_cpu(moved: Moved, mesh: spanax.MeshShape) -> Moved:
    """With reduce-scatters as XLA writes them on CPU: the sum of all, on every device."""
    found = defaultdict[tuple[str, str], float](float)
    for (kind, axes), num_bytes in moved.items():
        if kind == "reduce-scatter":
            kind, num_bytes = "all-reduce", num_bytes * mesh.ways(axes.split("+"))
        found[kind, axes] += num_bytes
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
    terms = count_terms(ShardedProgram(resolver_of(program(model), plan), program(model).step))
    moved = by_axis(compiled(model, dataclasses.replace(plan.layout, name="any"), mesh, keep), dict(plan.mesh.axes))
    return Cell(model, layout, mesh, as_on_cpu(terms.moved_bytes(plan.mesh), plan.mesh), moved)


def as_json(cell: Cell) -> dict[str, Any]:
    causes = cell.off()
    rows = [
        {
            "kind": kind,
            "axes": axes,
            "predicted_bytes": cell.predicted.get((kind, axes), 0),
            "compiled_bytes": cell.compiled.get((kind, axes), 0),
            "is_off": (kind, axes) in causes,
            "cause": causes.get((kind, axes), ""),
        }
        for kind, axes in sorted({*cell.predicted, *cell.compiled})
    ]
    return {"model": cell.model, "layout": cell.layout, "mesh": cell.mesh, "refused": cell.refused, "moved": rows}


def show(cell: Cell) -> None:
    name = f"| {cell.model} | {cell.layout} | {cell.mesh} |"
    if cell.refused:
        print(f"{name} refused: {cell.refused} | | | |", flush=True)
        return
    ours, theirs = (sum(moved.values()) / 2**10 for moved in (cell.predicted, cell.compiled))
    causes = cell.off()
    verdict = "XLA differs" if causes and all(causes.values()) else "off" if causes else "same"
    print(f"{name} {ours:,.1f} | {theirs:,.1f} | {cell.ratio:.3f} | {verdict} |", flush=True)


def show_off(cells: list[Cell]) -> None:
    """What is off, by cell, with the cause; and how many cells are what."""
    for cell in cells:
        for key, why in cell.off().items():
            ours, theirs = cell.predicted.get(key, 0) / 2**10, cell.compiled.get(key, 0) / 2**10
            print(f"{cell.model} {cell.layout} {cell.mesh}: {' '.join(key)} {ours:,.1f} KiB, and XLA {theirs:,.1f}")
            print(f"    {why or 'nobody knows why'}")
    priced = [cell for cell in cells if not cell.refused]
    unknown = sum(not all(cell.off().values()) for cell in priced)
    differs = sum(bool(cell.off()) for cell in priced) - unknown
    worst = max((abs(cell.ratio - 1) for cell in priced), default=0.0)
    print(
        f"{len(priced)} cells: {len(priced) - differs - unknown} the same within {TOLERANCE:.0%} by kind and axes, "
        f"{differs} where XLA differs, {unknown} off; {len(cells) - len(priced)} refused; "
        f"in all, none further than {worst:.1%}"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "models", nargs="*", default=["gpt", "vit", "cnn", "moe"], metavar="model", help=", ".join(MODELS)
    )
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--keep", type=Path, help="a folder for XLA's programs, which are read from there again")
    args = parser.parse_args()
    cells = []
    if not args.json:
        print("| model | layout | mesh | predicted, KiB | compiled, KiB | ratio | by kind and axes |")
        print("|---|---|---|---|---|---|---|")
    for model in args.models:
        for layout, mesh in layouts():
            cells.append(measure(model, layout, mesh, args.keep))
            if not args.json:
                show(cells[-1])
    if args.json:
        print(json.dumps([as_json(cell) for cell in cells]))
    else:
        show_off(cells)
    return int(any(not all(cell.off().values()) for cell in cells))


if __name__ == "__main__":
    sys.exit(main())
