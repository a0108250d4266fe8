"""What a step of Spanax costs beside the same step written by hand, and beside the usual NNX loop.

A GPT of 48 tiny blocks, unrolled: 2,300 arrays, so that what is spent on the host shows. Three loops take their
steps in turn, in one process; a ratio is the median over rounds of one loop's step time over another's.

  hand-written   split once; one jax.jit over the flat arrays, donated, shardings pinned
  spanax         run.step
  usual          nnx.jit over model and optimizer, as the guides have it

Usage:
  python benchmarks/step_overhead.py [--devices 8] [--rounds 100] [--blocks 48] [--json]
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any


def loops(num_devices: int, num_blocks: int) -> dict[str, Callable[[], float]]:
    """Each loop as a function that takes one step and returns its seconds."""
    import jax
    import numpy as np
    import optax
    from flax import nnx

    import spanax
    from spanax.models import gpt

    spanax.simulate(num_devices)
    config = gpt.GPTConfig(64, seq_len=8, num_layers=num_blocks, num_heads=2, embed_dim=16, scan_layers=False)
    tx = optax.adamw(1e-3)
    tokens = np.random.default_rng(0).integers(0, 64, (8, 9)).astype(np.int32)
    batch = {"inputs": tokens[:, :-1], "targets": tokens[:, 1:]}

    def train_step(model: Any, optimizer: Any, batch: Any) -> dict[str, Any]:
        loss, grads = nnx.value_and_grad(gpt.loss)(model, batch)
        optimizer.update(model, grads)
        return {"loss": loss}

    program = spanax.trace(build=lambda rngs: gpt.GPT(config, rngs), optimizer=tx, batch=batch, train_step=train_step)
    plan = spanax.plan(program, spanax.cluster("cpu", num_devices), layout="data")
    run = spanax.start(program, plan)
    placed = jax.device_put(batch, plan.batch[0].sharding(run.mesh))

    model = run.model()
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
    graphdef, state = nnx.split((model, optimizer))
    leaves, treedef = jax.tree.flatten(state)
    whole = jax.sharding.NamedSharding(run.mesh, jax.sharding.PartitionSpec())
    leaves = jax.device_put(leaves, whole)
    pinned = [whole] * len(leaves)

    def flat_step(leaves: list[Any], batch: Any) -> tuple[list[Any], dict[str, Any]]:
        model, optimizer = nnx.merge(graphdef, jax.tree.unflatten(treedef, leaves), copy=True)
        metrics = train_step(model, optimizer, batch)
        return jax.tree.leaves(nnx.split((model, optimizer))[1]), metrics

    by_hand = jax.jit(flat_step, donate_argnums=0, out_shardings=(pinned, whole))
    usual_step = nnx.jit(train_step, donate_argnums=(0, 1))
    usual_model = run.model()
    usual_optimizer = nnx.Optimizer(usual_model, tx, wrt=nnx.Param)
    held = {"leaves": leaves}

    def hand_written() -> Any:
        held["leaves"], metrics = by_hand(held["leaves"], placed)
        return metrics

    def timed(step: Callable[[], Any]) -> Callable[[], float]:
        def take() -> float:
            began = time.perf_counter()
            jax.block_until_ready(step())
            return time.perf_counter() - began

        return take

    steps = {
        "hand-written": hand_written,
        "spanax": lambda: run.step(placed),
        "usual": lambda: usual_step(usual_model, usual_optimizer, placed),
    }
    return {name: timed(step) for name, step in steps.items()}


def measure(num_devices: int, num_blocks: int, rounds: int) -> dict[str, Any]:
    """Median seconds a step of each loop, and the ratios round by round."""
    taken: dict[str, list[float]] = {}
    functions = loops(num_devices, num_blocks)
    for name, step in functions.items():
        for _ in range(3):
            step()
        taken[name] = []
    for turn in range(rounds):
        # Each goes first in turn: what one leaves to be freed, the next one pays for.
        for place in range(len(functions)):
            name = list(functions)[(turn + place) % len(functions)]
            taken[name].append(functions[name]())

    def ratio(over: str, under: str) -> float:
        return statistics.median(a / b for a, b in zip(taken[over], taken[under], strict=True))

    return {
        "devices": num_devices,
        "blocks": num_blocks,
        "rounds": rounds,
        "seconds": {name: statistics.median(values) for name, values in taken.items()},
        "ratio_to_hand_written": ratio("spanax", "hand-written"),
        "usual_over_spanax": ratio("usual", "spanax"),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", type=int, help="measure on so many; 1 and 8, each in a process, by default")
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--blocks", type=int, default=48)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    if args.devices is not None:
        print(json.dumps(measure(args.devices, args.blocks, args.rounds)))
        return
    results = []
    for num_devices in (1, 8):
        command = [sys.executable, __file__, "--devices", str(num_devices), "--rounds", str(args.rounds)]
        done = subprocess.run(
            [*command, "--blocks", str(args.blocks)], stdout=subprocess.PIPE, text=True, check=True, env=os.environ
        )
        results.append(json.loads(done.stdout.splitlines()[-1]))
    worst = max(result["ratio_to_hand_written"] for result in results)
    if args.json:
        print(json.dumps({"ratio_to_hand_written": worst, "results": results}))
        return
    for result in results:
        seconds = "  ".join(f"{name} {1e3 * value:.2f} ms" for name, value in result["seconds"].items())
        print(
            f"{result['devices']} devices: {seconds}; spanax / hand-written {result['ratio_to_hand_written']:.3f}, "
            f"usual / spanax {result['usual_over_spanax']:.2f}"
        )


if __name__ == "__main__":
    main()
