"""What our compiled step moves and needs, beside the same step as the guides have it and as an expert writes it.

Compiled for 8 simulated devices from shapes alone, or by the compiler of 8 TPUs; nothing is run. KiB a device and step,
loops multiplied out: what it sends around rings, as the partitioner has it (an all-reduce of which a device keeps its
part is a reduce-scatter), and the most that it holds by XLA's own account.

Usage:
  python benchmarks/collective_bytes.py [gpt vit moe lora mlp cnn] [--presets fsdp,hsdp] [--on v5e:2x4] [--json]
"""

import argparse
import io
import json
import sys
import tempfile
from collections import defaultdict
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import spanax

if __name__ == "__main__":
    spanax.simulate(8)
sys.path.append(str(Path(__file__).resolve().parent.parent / "tests"))

import jax  # noqa: E402
from flax import nnx  # noqa: E402

import expert  # noqa: E402
from expert_rules import PRESETS, Preset  # noqa: E402
from sent_bytes import sent_bytes  # noqa: E402
from spanax.check.compilers.compile import compile_for  # noqa: E402
from spanax.check.compilers.lowered_step import Lowered  # noqa: E402
from spanax.check.compilers.target import target_of  # noqa: E402
from spanax.check.hlo.collectives import collectives  # noqa: E402
from spanax.check.hlo.flops import program_flops  # noqa: E402
from spanax.check.hlo.module import read_module  # noqa: E402
from spanax.hardware.mesh import MeshShape  # noqa: E402
from spanax.train.run import Run  # noqa: E402

COMPARED = ("sent_bytes", "argument_bytes", "peak_bytes")
"""What is compared with the step by hand: what is sent, what the arguments take, and the most that is held."""


def our_step(workload: expert.Workload, layout: str, preset: Preset, machine: spanax.Cluster) -> jax.stages.Lowered:
    """The same model, un-annotated, under the layout of the same name."""

    def train_step(model: nnx.Module, optimizer: nnx.Optimizer, batch: Any) -> dict[str, Any]:
        loss, grads = nnx.value_and_grad(workload.case.loss, argnums=nnx.DiffState(0, workload.case.wrt))(model, batch)
        optimizer.update(model, grads)
        return {"loss": loss}

    program = spanax.trace(
        build=workload.case.build,
        optimizer=partial(nnx.Optimizer, tx=expert.OPTIMIZER, wrt=workload.case.wrt),
        batch=jax.eval_shape(lambda: workload.case.batch(workload.batch_size)),
        train_step=train_step,
    )
    plan = spanax.plan(program, machine, layout=layout.partition("/")[0], mesh=preset.sizes)
    return Run(program, plan, expert.make_mesh(preset.sizes, machine.platform), state=[]).lower(machine.platform)


def dumped(lowered: jax.stages.Lowered) -> tuple[jax.stages.Compiled, bytes]:
    """The compiled program, and what it was right after the partitioner."""
    name = "jax_persistent_cache_min_compile_time_secs"
    before = getattr(jax.config, name)
    jax.config.update(name, 1e9)  # a program that JAX keeps is not compiled again, and then nothing of it is dumped
    try:
        with tempfile.TemporaryDirectory() as folder:
            dumps = {"xla_dump_to": folder, "xla_dump_hlo_pass_re": "spmd-partitioning", "xla_dump_hlo_as_proto": True}
            compiled = lowered.compile(compiler_options=dumps)
            (partitioned,) = Path(folder).glob("*after_spmd-partitioning*.hlo.pb")
            return compiled, partitioned.read_bytes()
    finally:
        jax.config.update(name, before)


def measured(lowered: jax.stages.Lowered, mesh: MeshShape, machine: spanax.Cluster) -> dict[str, Any]:
    """Bytes that a step sends, by kind and in all, what one device holds, arguments and the most in all, and FLOPs."""
    if machine.platform == "cpu":
        compiled, program = dumped(lowered)
        (optimized,) = compiled.runtime_executable().hlo_modules()
        final = optimized.as_serialized_hlo_module_proto()
        memory = compiled.memory_analysis()
        held = memory.argument_size_in_bytes
        peak = held + memory.output_size_in_bytes - memory.alias_size_in_bytes + memory.temp_size_in_bytes
    else:
        code = io.BytesIO()
        lowered.compiler_ir().operation.write_bytecode(code)
        there = compile_for(target_of(machine), Lowered(None, code.getvalue(), ""), mesh)
        program = final = there.module
        held, peak = there.memory["arguments"], there.memory["assigned"]
    sent: dict[str, float] = defaultdict(float)
    for one in collectives(program, mesh):
        sent[one.kind] += sent_bytes(one)
    moved = {"sent": dict(sent), "sent_bytes": sum(sent.values())}
    return moved | {"argument_bytes": held, "peak_bytes": peak, "flops": program_flops(read_module(final))}


def measure(
    name: str, layout: str, by_hand: Sequence[str] = tuple(expert.STEPS), machine: spanax.Cluster | None = None
) -> dict[str, Any]:
    """What each step moves and holds, and ours over that by hand."""
    workload, preset = expert.WORKLOADS[name], PRESETS[layout]
    machine = machine or spanax.cluster("cpu:8")
    row: dict[str, Any] = {"workload": name, "layout": layout}
    mesh = MeshShape.of(preset.sizes)
    for step in by_hand:
        row[step] = measured(expert.STEPS[step](workload, preset, machine.platform), mesh, machine)
    ours = row["spanax"] = measured(our_step(workload, layout, preset, machine), mesh, machine)
    for key in COMPARED:
        row[f"{key}_over_expert"] = ours[key] / max(1, row["expert"][key])
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("workloads", nargs="*", default=list(expert.WORKLOADS))
    parser.add_argument("--presets", help="only these, with commas between them")
    parser.add_argument("--on", default="cpu:8", help="8 TPUs, whose compiler is installed")
    parser.add_argument("--json", action="store_true", help="one object a line")
    args = parser.parse_args()
    wanted = args.presets.split(",") if args.presets else list(PRESETS)
    if not args.json:
        print("| model | layout | inputs only: sent / memory, KiB | annotated | Spanax | sent / arguments / memory |")
        print("|---|---|---|---|---|---|", flush=True)
    for name in args.workloads:
        for layout in (each for each in expert.WORKLOADS[name].presets if each in wanted):
            row = measure(name, layout, machine=spanax.cluster(args.on))
            if args.json:
                print(json.dumps(row), flush=True)
                continue
            cells = [
                f"{row[step]['sent_bytes'] / 2**10:,.1f} / {row[step]['peak_bytes'] / 2**10:,.1f}"
                for step in ("inputs-only", "expert", "spanax")
            ]
            ratio = " / ".join(f"{row[f'{key}_over_expert']:.3f}" for key in COMPARED)
            print(f"| {name} | {layout} | {' | '.join(cells)} | {ratio} |", flush=True)


if __name__ == "__main__":
    main()
