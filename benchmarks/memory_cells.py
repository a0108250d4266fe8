"""Peak memory of small programs, predicted and compiled: models of tests/byo and tests/zoo.py, and larger ones.

`--compile FOLDER` compiles each cell for its chip (needs libtpu or the `cuda12` extra and no accelerator, 5 to 60 s a
cell) and writes a JSON file per cell, and the compiler's dump below FOLDER/dumps; `--store FOLDER` then writes the
cells of the folder to tests/data/memory_cells.json. Predictions are compared with the figures of the folder, or with
the stored ones. `--unseen` has programs that no constant and no rule was chosen on.

Usage:
  python benchmarks/memory_cells.py [--compile FOLDER | --store FOLDER] [--unseen] [--only TEXT] [--json]
"""

import argparse
import dataclasses
import functools
import json
import os
import re
import shutil
import sys
import tempfile
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests"))

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
import optax  # noqa: E402
from flax import nnx  # noqa: E402

import spanax  # noqa: E402
import zoo  # noqa: E402
from byo import corpus  # noqa: E402
from spanax.check.compilers import compile as compiling  # noqa: E402
from spanax.check.compilers.lowered_step import lower  # noqa: E402
from spanax.check.compilers.target import target_of  # noqa: E402
from spanax.check.hlo.collectives import collectives, totals  # noqa: E402
from spanax.check.hlo.flops import program_flops  # noqa: E402
from spanax.check.hlo.module import read_module  # noqa: E402
from spanax.errors import SpanaxError  # noqa: E402
from spanax.models import unet  # noqa: E402
from spanax.models.workloads import WORKLOADS, load  # noqa: E402
from spanax.plan.evaluate import evaluate  # noqa: E402

ARGUMENTS = ("parameters", "optimizer", "other state", "batch", "padding of the state")
"""The groups of memory of a step's arguments."""

HALVES = {0: "fitted", 1: "held out"}

SMALL_BYTES = 1 << 28
"""Compiled programs below this are small: they depend on tables and workspaces more than on arrays."""

STORED = ROOT / "tests" / "data" / "memory_cells.json"


class Recommender(nnx.Module):
    """Embedding tables for categories and a tower over their concatenation and dense features."""

    def __init__(self, rngs: nnx.Rngs, rows: int = 100_000, tables: int = 8, dim: int = 32):
        self.tables = nnx.List([nnx.Embed(rows, dim, rngs=rngs) for _ in range(tables)])
        self.dense = nnx.Linear(13, dim, rngs=rngs)
        self.tower = nnx.Sequential(
            nnx.Linear((tables + 1) * dim, 256, rngs=rngs), nnx.relu, nnx.Linear(256, 1, rngs=rngs)
        )

    def __call__(self, ids: jax.Array, dense: jax.Array) -> jax.Array:
        looked_up = [table(ids[:, index]) for index, table in enumerate(self.tables)]
        return self.tower(jnp.concatenate([*looked_up, self.dense(dense)], -1))[:, 0]


def click_loss(model: Recommender, batch: dict[str, jax.Array]) -> jax.Array:
    return optax.sigmoid_binary_cross_entropy(model(batch["ids"], batch["dense"]), batch["click"]).mean()


def clicks(size: int) -> dict[str, jax.ShapeDtypeStruct]:
    shapes = {"ids": ((size, 8), "int32"), "dense": ((size, 13), "float32"), "click": ((size,), "float32")}
    return {name: jax.ShapeDtypeStruct(*each) for name, each in shapes.items()}


def unet32(size: int) -> spanax.Program:
    config = unet.UNetConfig(64, width=32)
    return spanax.trace(
        build=functools.partial(unet.UNet, config), optimizer=optax.adam(1e-3), loss=unet.loss,
        batch=unet.example_batch(size, 64),
    )  # fmt: skip


def recommender(size: int) -> spanax.Program:
    return spanax.trace(build=Recommender, optimizer=optax.adam(1e-3), loss=click_loss, batch=clicks(size))


def workload(name: str, dtype: str | None, size: int) -> spanax.Program:
    return load(name, batch_size=size).trace(learning_rate=1e-3, num_steps=100, compute_dtype=dtype)


def of_corpus(name: str, size: int) -> spanax.Program:
    case = corpus.model(name)
    step: dict[str, Any] = {"train_step": case.train_step} if hasattr(case, "train_step") else {"loss": case.loss}
    batch = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), case.batch(size))
    with corpus.under_its_mesh(case):
        return spanax.trace(build=case.build, optimizer=corpus.optimizer(name), batch=batch, **step)


LARGE: dict[str, Callable[[int], spanax.Program]] = {
    "unet32": unet32,
    "recommender": recommender,
}


@dataclasses.dataclass(frozen=True)
class Cell:
    """A model, the examples in a step, a preset and devices."""

    model: str
    batch_size: int
    preset: str
    cluster: str = "v5e:2x4"

    @property
    def name(self) -> str:
        return f"{self.model}.b{self.batch_size}-{self.preset}-{self.cluster.replace(':', '.')}"

    @functools.cached_property
    def program(self) -> spanax.Program:
        return traced(self.model, self.batch_size)

    def plan(self, mesh: str | None = None) -> spanax.Plan:
        return spanax.plan(self.program, spanax.cluster(self.cluster), layout=self.preset, mesh=mesh)


@functools.lru_cache(maxsize=4)
def traced(model: str, batch_size: int) -> spanax.Program:
    if model in LARGE:
        return LARGE[model](batch_size)
    return workload(model, "bfloat16", batch_size) if model in WORKLOADS else of_corpus(model, batch_size)


SMALL = [
    "diffusion", "graph_net", "gan", "convnext", "mobilenet", "vgg", "vqvae", "wavenet", "mamba", "nerf", "rwkv",
    "capsules", "swin", "actor_critic", "pixelcnn", "evoformer", "conformer", "unet", "rnn", "multitask", "resnet",
    "operator", "seq2seq", "perceiver", "lstm_lm", "moco", "mae", "flow", "solver", "t5",
]  # fmt: skip

CELLS = [
    *[Cell(*each) for each in (
        ("unet32", 128, "data"), ("recommender", 8192, "fsdp"), ("diffusion", 512, "data"), ("graph_net", 512, "fsdp"),
        ("gan", 512, "data"), ("recommender", 8192, "data"), ("gpt2", 64, "fsdp"), ("mobilenet", 512, "data"),
        ("wavenet", 512, "fsdp+tensor"), ("unet32", 512, "fsdp"), ("nerf", 512, "data"), ("vgg", 512, "fsdp"),
    )],
    *[Cell(name, 64, ("data", "fsdp", "fsdp+tensor")[index % 3]) for index, name in enumerate(SMALL)],
    *[Cell(name, 1024, ("fsdp", "fsdp+tensor", "data")[index % 3]) for index, name in enumerate(SMALL)],
    *[Cell(*each) for each in (
        ("gpt2", 64, "data"), ("resnet50", 256, "data"), ("vit-b16", 256, "fsdp"), ("recommender", 8192, "fsdp+tensor"),
        ("gpt2", 8, "fsdp"), ("gpt2", 64, "fsdp", "v5p:2x2x2"),
    )],
    *[Cell(name, 64, ("data", "fsdp", "fsdp+tensor")[index % 3], "h100:8") for index, name in enumerate(SMALL)],
    *[Cell(*each, "h100:8") for each in (
        ("unet32", 128, "data"), ("unet32", 512, "fsdp"), ("recommender", 8192, "data"), ("recommender", 8192, "fsdp"),
        ("gpt2", 64, "fsdp"), ("resnet50", 256, "data"), ("vit-b16", 256, "fsdp"), ("diffusion", 8192, "fsdp"),
        ("mobilenet", 8192, "data"), ("graph_net", 8192, "data"), ("swin", 8192, "fsdp"), ("mae", 8192, "data"),
    )],
]  # fmt: skip

OTHERS = sorted({*corpus.FILES, *zoo.ZOO} - {*SMALL})

UNSEEN = [
    *[Cell(name, 128, ("fsdp", "data", "fsdp+tensor")[index % 3], ("v5e:2x4", "v6e:2x4")[index % 2])
      for index, name in enumerate(OTHERS)],
    *[Cell(name, 128, ("data", "fsdp+tensor", "fsdp")[index % 3], "h100:8") for index, name in enumerate(OTHERS)],
    *[Cell(*each, "h100:8") for each in (
        ("qwen3-0.6b", 16, "fsdp"), ("llama3.2-1b", 16, "fsdp+tensor"), ("vit-l16", 256, "data"),
        ("gpt2-medium", 32, "data"), ("gpt2-large", 64, "fsdp"), ("vit-h14", 128, "fsdp"),
        ("llama3.2-3b", 32, "fsdp"), ("qwen2-0.5b", 32, "context"),
    )],
    *[Cell(*each) for each in (
        ("qwen3-0.6b", 16, "fsdp", "v5e:2x4"), ("llama3.2-1b", 16, "fsdp+tensor", "v6e:2x4"),
        ("vit-l16", 256, "data", "v5p:2x2x2"), ("gpt2-medium", 32, "data", "v5p:2x2x2"),
        ("gpt2-large", 64, "fsdp", "v5e:4x4"), ("vit-h14", 128, "fsdp", "v6e:2x4"),
        ("llama3.2-3b", 32, "fsdp", "v5p:2x2x2"), ("qwen2-0.5b", 32, "context", "v5e:4x4"),
    )],
]  # fmt: skip
"""Programs that were compiled once, after all constants and rules were chosen."""


def compiled(cell: Cell, folder: Path) -> dict[str, Any]:
    """Returns what the compiler of the cell's cluster allocates, with the folder of its dump."""
    machine = spanax.cluster(cell.cluster)
    target, dump = target_of(machine), folder / "dumps" / cell.name
    plan = cell.plan()
    lowered = lower(cell.program, plan, target.platform, devices=machine.platform)
    scratch = Path(tempfile.mkdtemp())
    compiling._write_request(scratch, target, lowered, plan.mesh, {}, False)
    compiling._run(scratch, target, compiling.TIMEOUT_SECONDS)
    result = compiling._result(scratch, target)
    dump.mkdir(parents=True, exist_ok=True)
    for path in (scratch / "dump").iterdir():
        if re.search(r"jit_step.*(memory-usage-report|buffer-assignment|after_optimizations).*\.txt$", path.name):
            shutil.copy(path, dump / path.name)
    shutil.rmtree(scratch)
    if result.needed_bytes is not None:
        return {"peak": result.needed_bytes, "fits": False, "dump": str(dump), "version": result.platform_version}
    module = read_module(result.module)
    return {
        "flops": program_flops(module),
        "peak": result.memory["assigned"],
        "argument_bytes": result.memory["arguments"],
        "output_bytes": None,
        "alias_bytes": None,
        "temp_bytes": result.memory["temporaries"],
        "other_bytes": result.memory["other"],
        "collectives": totals(collectives(module, plan.mesh)),
        "mesh": repr(plan.mesh),
        "jax": jax.__version__,
        "version": " ".join(result.platform_version.split()),
        "dump": str(dump),
    }


def compare(cell: Cell, truth: dict[str, Any]) -> dict[str, Any]:
    """Returns the predicted and the compiled bytes of a cell on the mesh for which it was compiled.

    `upper` is the upper estimate, by which it fits.
    """
    cost = evaluate(cell.program, cell.plan(truth["mesh"]), spanax.cluster(cell.cluster))
    groups = {name: int(values[0]) for name, values in cost.memory.groups.items()}
    return {
        "cell": cell.name,
        "group": f"{cell.cluster.split(':')[0]}, {'small' if truth['peak'] < SMALL_BYTES else 'at size'}",
        "half": zlib.crc32(cell.model.encode()) % 2,
        "predicted": round(cost.peak_bytes),
        "upper": float(cost.memory.upper_bytes[0]),
        "compiled": truth["peak"],
        "error": cost.peak_bytes / truth["peak"] - 1,
        "arguments": sum(groups.get(name, 0) for name in ARGUMENTS),
        "compiled_arguments": truth["argument_bytes"],
    }


def summary(rows: Sequence[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Returns, by chip and size, the mean absolute error and the shares of cells within bounds.

    The constants of plan/cost/memory/tables.py are fitted to half of the small programs of a v5e, by model; the other
    half is held out.
    """
    groups = {row["group"]: [row for row in rows if row["group"] == name] for row in rows for name in (row["group"],)}
    small = groups.get("v5e, small", [])
    groups |= {f"v5e, small, {name}": [row for row in small if row["half"] == half] for half, name in HALVES.items()}
    result = {}
    for name, members in sorted(groups.items()):
        if not members:
            continue
        errors = np.asarray([row["error"] for row in members])
        above = np.asarray([row["compiled"] > row["upper"] for row in members])
        result[name] = {
            "cells": errors.size,
            "mean": float(abs(errors).mean()),
            "median": float(np.median(errors)),
            "within_15": float((abs(errors) <= 0.15).mean()),
            "under_5": float((errors < -0.05).mean()),
            "largest_excess": float((1 / (1 + errors.min())) - 1),
            "above_upper": float(above.mean()),
            "upper_over_compiled": float(np.median([row["upper"] / row["compiled"] for row in members])),
        }
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--compile", type=Path, help="compile the cells that this folder does not have")
    parser.add_argument("--store", type=Path, help="store the figures of this folder in tests/data")
    parser.add_argument("--unseen", action="store_true", help="other programs than those of the stored figures")
    parser.add_argument("--only", default="", help="cells whose name contains this")
    parser.add_argument("--json", action="store_true")
    asked = parser.parse_args()
    cells = [cell for cell in (UNSEEN if asked.unseen else CELLS) if asked.only in cell.name]
    if asked.compile:
        spanax.simulate(8)  # a model of the corpus makes its mesh of these devices
        compile_into(cells, asked.compile)
    if asked.store:
        keys = ("peak", "argument_bytes", "temp_bytes", "other_bytes", "mesh", "jax", "version")
        facts = {cell.name: asked.store / f"{cell.name}.json" for cell in cells}
        read = {name: json.loads(path.read_text()) for name, path in facts.items() if path.exists()}
        stored = {name: {key: fact[key] for key in keys} for name, fact in read.items()}
        known = json.loads(STORED.read_text()) | stored
        STORED.write_text(json.dumps(known, indent=1) + "\n")
    else:
        truth = json.loads(STORED.read_text())
        if asked.compile:
            truth = {path.stem: json.loads(path.read_text()) for path in asked.compile.glob("*.json")}
        rows = [compare(cell, truth[cell.name]) for cell in cells if cell.name in truth]
        if asked.json:
            print(json.dumps({"rows": rows, "summary": summary(rows)}))
            return
        for row in rows:
            print(f"{row['cell']:<44} {row['predicted']:>13,} {row['compiled']:>13,} {100 * row['error']:+6.1f} %")
        for kind, result in summary(rows).items():
            print(kind, {name: round(value, 3) for name, value in result.items()})


def compile_into(cells: Sequence[Cell], folder: Path) -> None:
    for cell in cells:
        target = folder / f"{cell.name}.json"
        if target.exists():
            continue
        try:
            truth = compiled(cell, folder)
        except (SpanaxError, TypeError, ValueError, AssertionError) as error:  # not in this dtype, layout or platform
            print(cell.name, type(error).__name__, str(error)[:200], flush=True)
            continue
        target.write_text(json.dumps(truth, default=int))
        print(cell.name, truth["peak"], flush=True)


if __name__ == "__main__":
    main()
