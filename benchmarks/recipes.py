"""Compares the best plan of well-known runs with the layout and throughput that their authors published.

Each run is planned by `spanax plan` with its defaults, from a laptop: no accelerator is used. Throughput is per device.
Published runs use other software, so a ratio of 1 is not a target. The notes explain large ratios.

Usage:
  python benchmarks/recipes.py [--write notes/recipes.md] [--only TEXT]
"""

import argparse
import json
import os
import resource
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from generated_tables import write_table

BEGIN = "<!-- the table: benchmarks/recipes.py -->"


@dataclass(frozen=True)
class Recipe:
    """A published run.

    Attributes:
      name: the run in words.
      options: the arguments of `spanax plan`.
      practice: the published layout.
      rate: published tokens (or images) per second and device; None if the source states none.
      note: what differs from the planned program.
      source: the publication.
    """

    name: str
    options: str
    practice: str
    rate: float | None
    note: str
    source: str


RECIPES = (
    Recipe(
        "Llama 3 405B on 16,384 H100",
        "llama3-405b --on h100:2048x8 --global-batch-size 2048 --seq-len 8192",
        "tensor 8, pipeline 16, data 128",
        400e12 / (6 * 405.9e9 + 12 * 126 * 16384 * 8192 / 2),
        "400 TFLOP/s per device, counted as 6 FLOPs per parameter and causal attention",
        "arXiv 2407.21783, table 4",
    ),
    Recipe(
        "Llama 70B on 512 v5p",
        "llama3-70b --on v5p:8x8x8 --global-batch-size 1024 --seq-len 4096",
        "FSDP",
        692.0,
        "published for Llama 2 70B; its batch is not stated",
        "MaxText, optimized models tiering",
    ),
    Recipe(
        "GPT-3 175B on 1,024 A100",
        "gpt3-175b --on a100-80gb:128x8 --global-batch-size 1536",
        "tensor 8, pipeline 16, data 8",
        140e12 / (8 * 174.6e9 * (1 + 2048 / (6 * 12288) + 51200 / (16 * 96 * 12288))),
        "140 TFLOP/s per device with full recomputation, counted with it; attention without a fused kernel",
        "arXiv 2104.04473, section 5.1",
    ),
    Recipe(
        "Mixtral 8x7B on 256 v6e",
        "mixtral-8x7b --on v6e:16x16 --global-batch-size 3072",
        "FSDP, activations offloaded to the host",
        3645.2,
        "capacity factor 1.25",
        "AI-Hypercomputer/tpu-recipes @e008533, Mixtral-8x7B-MaxText",
    ),
    Recipe(
        "Qwen3-30B-A3B on 16 H100",
        "qwen3-30b-a3b --on h100:2x8 --global-batch-size 512 --seq-len 4096",
        "pipeline 2, expert 8",
        5275.0,
        "capacity factor 1.25; published without, in fp8",
        "NVIDIA-NeMo/Megatron-Bridge, performance summary 25.11",
    ),
    Recipe(
        "Llama 3 8B at 131,072 tokens on 8 H100",
        "llama3-8b --on h100:8 --global-batch-size 2 --seq-len 131072",
        "FSDP 2, context 4",
        1071.0,
        "published in fp8, on devices with a lower power limit and slower memory",
        "pytorch/torchtitan, benchmarks of December 2024, table 2",
    ),
    Recipe(
        "Llama 3 8B at 1,048,576 tokens on 256 H100",
        "llama3-8b --on h100:32x8 --global-batch-size 4 --seq-len 1048576",
        "tensor 8, context 32",
        536e12 / (6 * 6.74e9 + 12 * 32 * 4096 * 1048576 / 2),
        "published for Llama 2 7B in fp8 on 1,024 devices; causal attention is assumed in its FLOPs",
        "NeMo 24.12, long sequence performance",
    ),
    Recipe(
        "ResNet-50 on 8 A100",
        "resnet50 --on a100-80gb:8 --global-batch-size 2048",
        "data 8",
        16621 / 8,
        "images, with the host's image decoding; one device alone trains 2,470 per second",
        "NVIDIA/DeepLearningExamples @291f0d0, resnet50v1.5",
    ),
)


def planned(recipe: Recipe) -> tuple[dict[str, Any], float]:
    """Returns the JSON of `spanax plan`, and its CPU seconds, the start of Python included."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    command = [sys.executable, "-m", "spanax", "plan", *recipe.options.split(), "--json"]
    environment = os.environ | {"JAX_PLATFORMS": "none_such"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    if done.returncode:
        sys.exit(f"{' '.join(command)}: exit {done.returncode}\n{done.stderr}")
    return json.loads(done.stdout), after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def row(recipe: Recipe) -> str:
    """Returns a row of the table."""
    result, cpu_seconds = planned(recipe)
    best = result["best"]
    mesh = ", ".join(f"{axis} {size}" for axis, size in best["mesh"].items())
    stages = f"; {best['stages']} stages, {best['schedule']}" if best["stages"] > 1 else ""
    chunks = f" with {best['chunks']} chunks" if best["chunks"] > 1 else ""
    steps = f"; {best['microbatches']} microbatches" if best["microbatches"] > 1 else ""
    rate = (best["tokens_per_second"] or best["examples_per_second"]) / result["devices"]
    published = "" if recipe.rate is None else f"{recipe.rate:,.0f}"
    ratio = "" if recipe.rate is None else f"{rate / recipe.rate:.2f}"
    cells = [
        recipe.name,
        f"{best['layout']} ({mesh}{stages}{chunks}{steps}), remat {best['remat']}",
        recipe.practice,
        f"{best['step_seconds']:.2f} s",
        "" if best["mfu"] is None else f"{100 * best['mfu']:.0f} %",
        f"{rate:,.0f}",
        published,
        ratio,
        f"{cpu_seconds:.1f}",
        f"{recipe.note} ({recipe.source})",
    ]
    return "| " + " | ".join(cells) + " |"


def rows(only: str) -> Iterator[str]:
    for recipe in RECIPES:
        if only in recipe.name:
            line = row(recipe)
            print(line, flush=True)
            yield line


def table(lines: Sequence[str]) -> str:
    head = [
        "run", "planned", "practice", "step", "MFU", "planned per second and device", "published", "ratio",
        "CPU seconds", "notes",
    ]  # fmt: skip
    return "\n".join(["| " + " | ".join(head) + " |", "|" + "---|" * len(head), *lines])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", type=Path, help="put the table into this page")
    parser.add_argument("--only", default="", help="runs whose name has this in it")
    arguments = parser.parse_args()
    text = table(list(rows(arguments.only)))
    if arguments.write:
        write_table(arguments.write, BEGIN, text)


if __name__ == "__main__":
    main()
