"""One GPU on paper: what XLA's GPU compiler makes of Spanax's step and of the hand-written one; no GPU is needed.

The models of gpu.py, attention as it is written (a kernel is not there to be counted). Of each program as compiled for
one H200: FLOPs of its matmuls, kernels, bytes that they read and write (of a loop, one turn), and memory beside its
arguments. Nothing is timed. Needs `pip install 'spanax[cuda12]'`; the compiler chooses no kernels by trying them.

    python benchmarks/gpu_programs.py [--sizes gpt2 gpt2-medium 1b] [--scan] [--on h200:1] [--json]
"""

import argparse
import json
import os
import sys
from functools import partial
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE / "peers")]

from gpu import HAND, OURS, SIZES  # noqa: E402
from peers.shape import Shape  # noqa: E402

ALREADY_THERE = {"parameter", "constant", "get-tuple-element", "tuple", "bitcast", "while", "async-done", "copy-done"}
"""Instructions that start no kernel."""


def lowered_by_hand(shape: Shape, mesh: Any, is_scanned: bool) -> Any:
    """The hand-written step, lowered for a GPU."""
    import jax
    from jax.sharding import NamedSharding, PartitionSpec

    from by_hand import optimizer_of, step_of

    tx, whole = optimizer_of(shape), NamedSharding(mesh, PartitionSpec())
    weights = {name: jax.ShapeDtypeStruct(array.shape, array.dtype) for name, array in shape.weights().items()}
    state = (weights, jax.eval_shape(tx.init, weights))
    step = step_of(shape, tx, jax.tree.map(lambda _: whole, weights), is_scanned)
    tokens_BT = jax.ShapeDtypeStruct((shape.batch_size, shape.seq_len + 1), "int32")
    jitted = jax.jit(step, donate_argnums=0, in_shardings=whole, out_shardings=whole)
    return jitted.trace(state, tokens_BT).lower(lowering_platforms=("cuda",))


def lowered_by_spanax(shape: Shape, mesh: Any, is_scanned: bool, on: str) -> Any:
    """Spanax's step of the plain NNX model, lowered for a GPU."""
    import spanax
    from by_hand import optimizer_of
    from spanax.models import gpt
    from spanax.train.run import Run
    from with_spanax import config_of

    program = spanax.trace(
        build=partial(gpt.GPT, config_of(shape, is_scanned)),
        optimizer=optimizer_of(shape),
        batch=gpt.example_batch(shape.batch_size, shape.seq_len),
        loss=gpt.loss,
        compute_dtype=shape.dtype,
    )
    plan = spanax.plan(program, spanax.cluster(on), layout="data")
    return Run(program, plan, mesh, []).lower("cuda")


def facts(lowered: Any) -> dict[str, float]:
    """What XLA made of a program."""
    from spanax.check.hlo.flops import program_flops
    from spanax.check.hlo.module import read_module

    compiled = lowered.compile(compiler_options={"xla_gpu_autotune_level": "0"})
    module = read_module(compiled.runtime_executable().hlo_modules()[0].as_serialized_hlo_module_proto())
    instructions = (one for each in module.computations.values() for one in each.instructions.values())
    called = [at for one in instructions if one.opcode == "while" for at in one.called]
    bodies = [module.entry, *(module.computations[at] for at in called)]
    kernels = [(body, one) for body in bodies for one in body.instructions.values() if one.opcode not in ALREADY_THERE]
    moved = [one.shape.num_bytes + sum(body.instructions[at].shape.num_bytes for at in one.operands)
             for body, one in kernels]  # fmt: skip
    temporaries = compiled.memory_analysis().temp_size_in_bytes
    return {
        "flops": program_flops(module), "kernels": len(kernels), "moved_bytes": sum(moved), "held_bytes": temporaries,
    }  # fmt: skip


def main() -> None:
    """Compile each size both ways."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="*", default=["gpt2", "gpt2-medium", "1b"], choices=[*SIZES])
    parser.add_argument("--scan", action="store_true")
    parser.add_argument("--on", default="h200:1")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    os.environ["JAX_PLATFORMS"] = "cpu"
    import jax
    import numpy as np
    from jax.experimental import topologies

    import spanax
    from spanax.check.compilers.target import install_command, target_of

    if line := install_command("cuda"):
        sys.exit(f"XLA's GPU compiler is not installed: {line}")
    target = target_of(spanax.cluster(args.on))
    there = topologies.get_topology_desc("", platform="cuda", topology=target.topology, **target.options)
    auto = (jax.sharding.AxisType.Auto,)
    mesh = jax.sharding.Mesh(np.array(there.devices), ("data",), axis_types=auto)
    for size in args.sizes:
        shape = SIZES[size]
        by_hand = facts(lowered_by_hand(shape, mesh, args.scan))
        ours = facts(lowered_by_spanax(shape, mesh, args.scan, args.on))
        if ours["flops"] != by_hand["flops"]:
            sys.exit(f"{size}: not the same work, {ours['flops']:.6g} FLOPs and by hand {by_hand['flops']:.6g}")
        if args.json:
            print(json.dumps({"size": size, "scan": args.scan, "on": args.on, HAND: by_hand, OURS: ours}), flush=True)
            continue
        told = ", ".join(f"{name} {ours[name]:.4g} / {by_hand[name]:.4g} = {ours[name] / by_hand[name]:.3f}"
                         for name in ours)  # fmt: skip
        print(f"{size}: {OURS} / {HAND}: {told}", flush=True)


if __name__ == "__main__":
    main()
