"""Peak memory of llama3-8b on long sequences: planned, and of the chips' own compilers.

Needs both extras (`pip install -e '.[tpu,cuda12]'`) and no accelerator.

Usage:
  python benchmarks/long_context.py [--write docs/context.md]
"""

import argparse
import os
from collections.abc import Iterator
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import spanax  # noqa: E402
from generated_tables import write_figures  # noqa: E402
from spanax.models.workloads import load  # noqa: E402

# sequences, their length, devices, layout, mesh
CELLS = [
    (2, 131_072, "v5p:2x2x4", "fsdp+context", "fsdp=2,context=8"),
    (2, 131_072, "v5p:2x2x4", "fsdp+ring", "fsdp=2,context=8"),
    (1, 1_048_576, "v5p:4x4x4", "context+tensor+seq", "context=8,model=8"),
    (1, 1_048_576, "h100:8x8", "context+tensor+seq", "context=16,model=4"),
]


def rows() -> Iterator[str]:
    """Yields the table."""
    yield "| sequences | devices | layout | GiB: plan, compiler |"
    yield "|---|---|---|---|"
    for number, length, on, layout, mesh in CELLS:
        machine = spanax.cluster(on)
        workload = load("llama3-8b", batch_size=number, seq_len=length)
        program = workload.trace(compute_dtype="bfloat16", remat="full")
        attention = None if "ring" in layout else "flash"
        plan = spanax.plan(program, machine, layout=layout, mesh=mesh, attention=attention, loss_chunks=16)
        report = spanax.check(program, plan, machine, level=3)
        sizes = ", ".join(f"{(side.peak_bytes or 0) / 2**30:.1f}" for side in (report.predicted, report.compiled))
        yield f"| {number} of {length:,} | {on} | `{layout}` on `{mesh}` | {sizes} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", type=Path, help="put the table into this page")
    asked = parser.parse_args()
    table = []
    for row in rows():
        table.append(row)
        print(row, flush=True)
    if asked.write:
        write_figures(asked.write, "python benchmarks/long_context.py", "\n".join(table))


if __name__ == "__main__":
    main()
