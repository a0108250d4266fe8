"""What our compiled step moves and needs, beside the same step as the guides have it and as an expert writes it.

Compiled for 8 simulated devices from shapes alone; nothing is run. kB a device and step, loops multiplied out.

Usage:
  python benchmarks/collective_bytes.py [gpt mlp cnn moe] [--json]
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import spanax

spanax.simulate(8)
sys.path.append(str(Path(__file__).resolve().parent.parent / "tests"))

import jax  # noqa: E402
from flax import nnx  # noqa: E402

import expert  # noqa: E402
from hlo_bytes import collectives  # noqa: E402
from spanax.run.run import Run  # noqa: E402


def our_step(workload: expert.Workload, sizes: dict[str, int]) -> jax.stages.Compiled:
    """The same model, un-annotated, under the layout that the mesh means by its names."""

    def train_step(model: nnx.Module, optimizer: nnx.Optimizer, batch: Any) -> dict[str, Any]:
        loss, grads = nnx.value_and_grad(workload.case.loss)(model, batch)
        optimizer.update(model, grads)
        return {"loss": loss}

    program = spanax.trace(
        build=workload.case.build,
        optimizer=expert.OPTIMIZER,
        batch=jax.eval_shape(lambda: workload.case.batch(workload.batch_size)),
        train_step=train_step,
    )
    plan = spanax.plan(program, spanax.cluster("cpu:8"), mesh=sizes)
    return Run(program, plan, plan.mesh.build(), state=[]).lower().compile()


def measure(name: str, layout: str) -> dict[str, Any]:
    """Bytes moved, by kind and in all, and temporaries of each step; and ours over the others'."""
    steps = expert.STEPS | {"spanax": our_step}
    row: dict[str, Any] = {"workload": name, "layout": layout}
    for step, build in steps.items():
        compiled = build(expert.WORKLOADS[name], expert.LAYOUTS[layout])
        moved = collectives(compiled.as_text())
        temporaries = compiled.memory_analysis().temp_size_in_bytes
        row[step] = {"collectives": moved, "moved_bytes": sum(moved.values()), "temporary_bytes": temporaries}
    ours = row["spanax"]
    for key in ("moved_bytes", "temporary_bytes"):
        row[f"{key}_over_expert"] = ours[key] / row["expert"][key]
        row[f"{key}_inputs_only_over_ours"] = row["inputs-only"][key] / ours[key]
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("workloads", nargs="*", default=list(expert.WORKLOADS))
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    rows = [measure(name, layout) for name in args.workloads for layout in expert.LAYOUTS]
    if args.json:
        print(json.dumps(rows))
        return
    print("| model | layout | inputs only: moved / temporaries, kB | by hand | Spanax | Spanax over by hand |")
    print("|---|---|---|---|---|---|")
    for row in rows:
        cells = [
            f"{row[step]['moved_bytes'] / 1e3:,.1f} / {row[step]['temporary_bytes'] / 1e3:,.1f}"
            for step in ("inputs-only", "expert", "spanax")
        ]
        ratio = f"{row['moved_bytes_over_expert']:.3f} / {row['temporary_bytes_over_expert']:.3f}"
        print(f"| {row['workload']} | {row['layout']} | {' | '.join(cells)} | {ratio} |")


if __name__ == "__main__":
    main()
