"""How long the search takes, by the number of layouts and by the size of the program; and how that grows.

GPT-3 175B on 8 to 1,024 A100s, scanned; then a GPT whose layers are written out one after the other, on 16. Seconds are
of one process, the best of two searches after a first one (`--cold` adds the first). The slope is that of seconds
over size on logarithmic scales: 1 is linear. With `--commands`, the CPU-seconds of whole commands instead.

Usage:
  python benchmarks/search_speed.py [--json] [--svg FILE] [--cold]
  python benchmarks/search_speed.py --commands [--only TEXT]
"""

import argparse
import json
import math
import os
import resource
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

os.environ["JAX_PLATFORMS"] = "none_such"  # nothing here touches a device

import jax
import jax.numpy as jnp
import optax
from flax import nnx

import spanax
from spanax.models import gpt
from spanax.models.workloads import load
from spanax.trace.program import Program

NODES = (1, 4, 16, 64, 128)
DEPTHS = (6, 12, 24)
ROUNDS = 2

COMMANDS = (
    "gpt2 --on h100:8",
    "ddpm-cifar10 --on v5e:2x4",
    "gpt3-175b --on a100-80gb:128x8",
    "llama3-405b --on h100:2048x8",
    f"{__file__}:blocks --on h100:8",
)

WIDTH = 2560
NUM_BLOCKS = 32

Row = dict[str, Any]


class Block(nnx.Module):
    """An ordinary block, with the attention of Flax."""

    def __init__(self, rngs: nnx.Rngs):
        self.norm_attention = nnx.LayerNorm(WIDTH, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(num_heads=20, in_features=WIDTH, decode=False, rngs=rngs)
        self.norm_mlp = nnx.LayerNorm(WIDTH, rngs=rngs)
        self.up = nnx.Linear(WIDTH, 4 * WIDTH, rngs=rngs)
        self.down = nnx.Linear(4 * WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = x + self.attention(self.norm_attention(x), mask=nnx.make_causal_mask(x[..., 0]))
        return x + self.down(nnx.gelu(self.up(self.norm_mlp(x))))


class Blocks(nnx.Module):
    """A model as most people write it: blocks in a list, 2.65 billion parameters."""

    def __init__(self, rngs: nnx.Rngs):
        self.embed = nnx.Embed(50304, WIDTH, rngs=rngs)
        self.blocks = nnx.List([Block(rngs) for _ in range(NUM_BLOCKS)])
        self.norm = nnx.LayerNorm(WIDTH, rngs=rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.embed.attend(self.norm(x))


def blocks_loss(model: Blocks, tokens: jax.Array) -> jax.Array:
    """The mean cross-entropy of the next token."""
    return optax.softmax_cross_entropy_with_integer_labels(model(tokens[:, :-1]), tokens[:, 1:]).mean()


blocks = spanax.Workload(build=Blocks, batch=jax.ShapeDtypeStruct((64, 1025), jnp.int32), loss=blocks_loss)


def print_commands(only: str) -> None:
    """Prints the CPU-seconds of each command, in a process of its own."""
    for command in (command for command in COMMANDS if only in command):
        began = time.perf_counter()
        child = subprocess.Popen(  # noqa: S603
            [sys.executable, "-m", "spanax", "plan", *command.split()], stdout=subprocess.DEVNULL
        )
        _, status, used = os.wait4(child.pid, 0)
        child.returncode = os.waitstatus_to_exitcode(status)
        if child.returncode:
            sys.exit(child.returncode)
        seconds = used.ru_utime + used.ru_stime
        wall = time.perf_counter() - began
        print(f"{seconds:8.1f} CPU-seconds, {wall:8.1f} s: spanax plan {command}", flush=True)


def deep(num_layers: int) -> Program:
    """A GPT-2 whose layers are all in the program."""
    config = gpt.GPTConfig(
        vocab_size=50257, seq_len=1024, num_layers=num_layers, num_heads=12, embed_dim=768, scan_layers=False
    )
    workload = spanax.Workload(
        build=lambda rngs: gpt.GPT(config, rngs), batch=gpt.example_batch(batch_size=64, seq_len=1024), loss=gpt.loss
    )
    return workload.trace(learning_rate=1e-4, num_steps=10, compute_dtype=jnp.bfloat16)


def measured(trace: Any, cluster: str, **sizes: int) -> Row:
    """The first search, which also finds what no layout changes, and the best of the next ones."""
    began = time.perf_counter()
    program = trace()
    traced = time.perf_counter() - began
    found = spanax.search(program, spanax.cluster(cluster))
    first = found.search_seconds
    seconds = min(spanax.search(program, spanax.cluster(cluster)).search_seconds for _ in range(ROUNDS))
    return {
        **sizes,
        "cluster": cluster,
        "operations": sum(1 for _ in program.step.graph.ops()),
        "layouts": found.layouts_priced,
        "trace_seconds": traced + found.trace_seconds,
        "first_seconds": first,
        "seconds": seconds,
        "layouts_per_second": found.layouts_priced / seconds,
    }


def slope(rows: list[Row], size: str) -> float:
    """Least squares on logarithmic scales."""
    points = [(math.log(row[size]), math.log(row["seconds"])) for row in rows]
    middle_x, middle_y = (sum(values) / len(points) for values in zip(*points, strict=True))
    above = sum((x - middle_x) * (y - middle_y) for x, y in points)
    return above / sum((x - middle_x) ** 2 for x, _ in points)


def svg(panels: list[tuple[str, list[Row], str]]) -> str:
    """Seconds over size, a panel each, both scales logarithmic; dashed: linear growth to the last point."""
    width, height, margin = 360, 260, 50
    parts = []
    for which, (title, rows, size) in enumerate(panels):
        xs, ys = [math.log10(row[size]) for row in rows], [math.log10(row["seconds"]) for row in rows]
        low_x, high_x, low_y, high_y = min(xs), max(xs), min(*ys, ys[-1] - max(xs) + min(xs)), max(ys)

        def at(x: float, y: float, left: float = which * width, box: Any = (low_x, high_x, low_y, high_y)) -> str:
            across = margin + (x - box[0]) / (box[1] - box[0]) * (width - 2 * margin)
            return (
                f"{left + across:.1f},{height - margin - (y - box[2]) / (box[3] - box[2]) * (height - 2 * margin):.1f}"
            )

        line = " ".join(at(x, y) for x, y in zip(xs, ys, strict=True))
        straight = f"{at(low_x, ys[-1] - high_x + low_x)} {at(high_x, ys[-1])}"
        parts += [
            f'<polyline points="{straight}" fill="none" stroke="#999" stroke-dasharray="4"/>',
            f'<polyline points="{line}" fill="none" stroke="#06c" stroke-width="2"/>',
            f'<text x="{which * width + margin}" y="20">{title}</text>',
        ]
        for row, x, y in zip(rows, xs, ys, strict=True):
            spot = at(x, y)
            across, down = spot.split(",")
            parts.append(f'<circle cx="{across}" cy="{down}" r="3" fill="#06c"/>')
            parts.append(f'<text x="{across}" y="{float(down) - 8}" text-anchor="middle">{row["seconds"]:.2f} s</text>')
            parts.append(f'<text x="{across}" y="{height - 20}" text-anchor="middle">{row[size]:,}</text>')
    size_text = f'width="{width * len(panels)}" height="{height}" font-family="sans-serif" font-size="11"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size_text}>\n' + "\n".join(parts) + "\n</svg>\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--svg", type=Path)
    parser.add_argument("--cold", action="store_true")
    parser.add_argument("--commands", action="store_true")
    parser.add_argument("--only", default="")
    asked = parser.parse_args()
    if asked.commands:
        print_commands(asked.only)
        return
    by_layouts = []
    for nodes in NODES:
        large = load("gpt3-175b", batch_size=8 * nodes)
        by_layouts.append(
            measured(
                lambda large=large: large.trace(learning_rate=1e-4, num_steps=10, compute_dtype=jnp.bfloat16),
                f"a100-80gb:{nodes}x8",
                devices=8 * nodes,
            )
        )
    by_size = [measured(lambda depth=depth: deep(depth), "a100-80gb:2x8", layers=depth) for depth in DEPTHS]
    memory_bytes = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    slopes = {"layouts": slope(by_layouts, "layouts"), "operations": slope(by_size, "operations")}
    if asked.svg:
        panels = [("seconds by layouts", by_layouts, "layouts"), ("seconds by operations", by_size, "operations")]
        asked.svg.write_text(svg(panels))
    if asked.json:
        whole = {"by_layouts": by_layouts, "by_size": by_size, "slopes": slopes, "memory_bytes": memory_bytes}
        print(json.dumps(whole, indent=1))
        return
    columns = ["cluster", "operations", "layouts", "trace_seconds", "first_seconds", "seconds", "layouts_per_second"]
    shown = [name for name in columns if asked.cold or name != "first_seconds"]
    print("  ".join(f"{name:>18}" for name in shown))
    for row in (*by_layouts, *by_size):
        print(
            "  ".join(f"{row[name]:>18,.2f}" if isinstance(row[name], float) else f"{row[name]:>18}" for name in shown)
        )
    print(f"slope over layouts {slopes['layouts']:.2f}, over operations {slopes['operations']:.2f}; 1 is linear")
    print(f"largest memory of the process {memory_bytes / 2**20:,.0f} MiB")


if __name__ == "__main__":
    main()
