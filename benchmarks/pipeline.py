"""A pipeline's bubble: by the formula of its schedule, by the table that runs, and in step times.

The same microbatches of a GPT run in stages, and data-parallel on as many simulated devices, in turn in one process.
The devices share the machine's cores: what a step should take follows from the table alone, tick by tick, for a stage
that waits leaves its core to another. With as many cores as stages that is the bubble itself. What more microbatches
cost in memory is counted in residuals of one: as many as the table keeps more of them.

Usage:
  python benchmarks/pipeline.py [--stages 2 4] [--microbatches 4 8 16] [--rounds 10] [--json]
"""

import argparse
import json
import math
import os
import statistics
import time
from typing import Any

SCHEDULES = {"gpipe": 1, "1f1b": 1, "interleaved": 2, "zero-bubble": 1}
"""Each with its chunks on a stage."""


def expected(table: Any, num_cores: int) -> float:
    """Time of the unpipelined work over that of the table, if a task takes one tick of one core."""
    work = sum(task is not None for row in table.tasks for task in row)
    taken = sum(max(1.0, sum(task is not None for task in row) / num_cores) for row in table.tasks)
    return work / min(num_cores, table.num_stages) / taken


def residual_bytes(run: Any, schedule: Any) -> int:
    """What the layers of one stage leave of one microbatch, by the shapes of the traced program."""
    from spanax.plan.pipeline.ticks import ticks_of
    from spanax.step.pipeline.residual_buffers import BufferSpec
    from spanax.step.replay.replay import Replay
    from spanax.trace.pipeline.partition import pipeline_partition

    traced = run.program.step
    pieces = pipeline_partition(traced, schedule.microbatches)
    storage = BufferSpec(Replay(traced.graph, [], {}, run.mesh), pieces, ticks_of(schedule), None)
    avals = [traced.graph.avals[value] for value in storage.residuals]
    return sum(math.prod(aval.shape) * aval.dtype.itemsize for aval in avals) // schedule.num_stages


def measure(schedule: str, stages: int, count: int, rounds: int) -> dict[str, Any]:
    """One schedule beside the unpipelined step."""
    import jax
    import numpy as np
    import optax

    import spanax
    from spanax.models import gpt
    from spanax.plan.pipeline.bubble import bubble_seconds
    from spanax.plan.pipeline.ticks import ticks_of
    from spanax.plan.plan import Schedule

    chunks = SCHEDULES[schedule]
    config = gpt.GPTConfig(64, seq_len=128, num_layers=8, num_heads=4, embed_dim=256)
    shapes = gpt.example_batch(stages * count, 128)
    program = spanax.trace(
        build=lambda rngs: gpt.GPT(config, rngs), optimizer=optax.sgd(0.1), batch=shapes, loss=gpt.loss,
        microbatches=count,
    )  # fmt: skip
    machine = spanax.cluster("cpu", stages)
    asked = Schedule(pipeline=schedule, microbatches=count, num_chunks=chunks)
    plans = {
        "pipelined": spanax.plan(program, machine, mesh={"pipe": stages}, schedule=asked),
        "unpipelined": spanax.plan(program, machine, mesh={"data": stages}, layout="data"),
    }
    rows = np.random.default_rng(0).integers(0, 64, (stages * count, 129)).astype(np.int32)
    batch = {"inputs": rows[:, :-1], "targets": rows[:, 1:]}
    runs = {name: spanax.start(program, plan, devices=jax.devices()[:stages]) for name, plan in plans.items()}
    temporaries = {name: run.compile().memory_analysis().temp_size_in_bytes for name, run in runs.items()}
    taken: dict[str, list[float]] = {name: [] for name in runs}
    for turn in range(rounds + 1):
        for name in list(runs) if turn % 2 else reversed(runs):
            began = time.perf_counter()
            jax.block_until_ready(runs[name].step(batch))
            taken[name].append(time.perf_counter() - began)
    table = ticks_of(plans["pipelined"].schedule)
    ratio = statistics.median(a / b for a, b in zip(taken["unpipelined"][1:], taken["pipelined"][1:], strict=True))
    weights = 1.0 if table.is_split else 0.0
    over = bubble_seconds(schedule, stages, count, weight_seconds=weights) / (count * chunks * (2 + weights))
    idle = table.num_ticks - chunks * count * (3 if table.is_split else 2)
    return {
        "schedule": schedule,
        "stages": stages,
        "microbatches": count,
        "ticks": table.num_ticks,
        "idle_ticks": list(table.num_idle),
        "idle_ticks_are_the_formulas": list(table.num_idle) == [idle] * stages,
        "efficiency_formula": 1 / (1 + float(over)),
        "efficiency_table": 1 - table.bubble_fraction,
        "efficiency_on_these_cores": expected(table, os.cpu_count() or 1),
        "efficiency_measured": ratio,
        "seconds": {name: statistics.median(values[1:]) for name, values in taken.items()},
        "activations_in_flight": table.num_in_flight,
        "residual_bytes_per_microbatch": residual_bytes(runs["pipelined"], plans["pipelined"].schedule),
        "temporary_bytes": temporaries,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stages", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--microbatches", type=int, nargs="+", default=[4, 8, 16])
    parser.add_argument("--schedules", nargs="+", default=list(SCHEDULES))
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    import spanax

    spanax.simulate(max(args.stages))
    found = []
    for schedule in args.schedules:
        for stages in args.stages:
            before: dict[str, Any] | None = None
            for count in args.microbatches:
                one = measure(schedule, stages, count, args.rounds)
                if before is not None:
                    more = one["temporary_bytes"]["pipelined"] - before["temporary_bytes"]["pipelined"]
                    one["in_flight_more_measured"] = more / one["residual_bytes_per_microbatch"]
                    one["in_flight_more_table"] = one["activations_in_flight"] - before["activations_in_flight"]
                found.append(one)
                before = one
                if not args.json:
                    print(
                        f"{schedule:12} {stages} stages {count:3} microbatches: {one['ticks']} ticks, efficiency "
                        f"{one['efficiency_formula']:.3f} by formula, {one['efficiency_table']:.3f} by table, "
                        f"{one['efficiency_on_these_cores']:.3f} on {os.cpu_count()} cores, "
                        f"{one['efficiency_measured']:.3f} measured; {one['activations_in_flight']} in flight"
                        + (f" (memory: {one['in_flight_more_measured']:+.2f} more)" if "in_flight_more_measured" in one
                           else ""),
                        flush=True,
                    )  # fmt: skip
    if args.json:
        print(json.dumps(found))


if __name__ == "__main__":
    main()
