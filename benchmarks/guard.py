"""What watching the numbers costs: the same step without a guard, and with each policy.

Loops with and without take their steps in turn, in one process; each step is told to the host and judged there, as
`spanax train` does. A ratio is the median over rounds of what one loop's step takes over what that of the loop without
a guard does, in time and in the time of all processor cores, which others on the machine disturb less; `again` is a
second loop without one, which says how far a ratio of nothing goes. `deciding` is what a guard with a full history does
on the host each step. The memory is what XLA counts for
the compiled step on one device: its temporaries, beside state and batch.

  halt      of a step that tells its gradient norm; rollback compiles to the same
  skip      the compiled step keeps the old state where its numbers are bad
  own halt  a train step of one's own that returns a loss only: its parameters are looked at

Usage:
  python benchmarks/guard.py [--devices 8] [--layout fsdp] [--rounds 60] [--embed 128] [--layers 4] [--batch 16]
                             [--own] [--json]
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from typing import Any

SPIKE = 1000.0  # one batch again and again makes a gradient that rises and falls


def programs(num_layers: int, embed_dim: int, batch_size: int) -> tuple[Any, Any, dict[str, Any]]:
    """A GPT under AdamW with a step of Spanax, the same with one of its own, and a batch."""
    import numpy as np
    import optax
    from flax import nnx

    import spanax
    from spanax.models import gpt

    config = gpt.GPTConfig(256, seq_len=64, num_layers=num_layers, num_heads=4, embed_dim=embed_dim)
    tokens = np.random.default_rng(0).integers(0, 256, (batch_size, 65)).astype(np.int32)
    batch = {"inputs": tokens[:, :-1], "targets": tokens[:, 1:]}

    def own_step(model: Any, optimizer: Any, batch: Any) -> dict[str, Any]:
        loss, grads = nnx.value_and_grad(gpt.loss)(model, batch)
        optimizer.update(model, grads)
        return {"loss": loss}

    given = {"build": lambda rngs: gpt.GPT(config, rngs), "optimizer": optax.adamw(1e-3), "batch": batch}
    return spanax.trace(loss=gpt.loss, **given), spanax.trace(train_step=own_step, **given), batch


def loops(args: argparse.Namespace) -> dict[str, tuple[Any, Any, str]]:
    """Each loop as a run, its batch, and the name of the loop that it is held against."""
    import spanax
    from spanax.step.guard import Guard

    devices = spanax.simulate(args.devices)
    program, own, batch = programs(args.layers, args.embed, args.batch)
    cluster = spanax.cluster("cpu", args.devices)

    def run(program: Any, guard: Guard | None) -> Any:
        return spanax.start(program, spanax.plan(program, cluster, layout=args.layout), devices=devices, guard=guard)

    asked = {
        "none": (program, None, "none"),
        "again": (program, None, "none"),
        "halt": (program, Guard("halt", spike=SPIKE), "none"),
        "skip": (program, Guard("skip", spike=SPIKE), "none"),
        "own none": (own, None, "own none"),
        "own halt": (own, Guard("halt", spike=SPIKE), "own none"),
        "own skip": (own, Guard("skip", spike=SPIKE), "own none"),
    }
    wanted = [name for name in asked if args.own or not name.startswith("own")]
    return {name: (run(*asked[name][:2]), batch, asked[name][2]) for name in wanted}


def taken(run: Any, batch: Any) -> Callable[[], tuple[float, float]]:
    """A function that takes a step, judges its metrics on the host, and returns seconds: the clock's, the cores'."""
    import numpy as np

    def take() -> tuple[float, float]:
        began, cores = time.perf_counter(), time.process_time()
        metrics = run.step(batch)
        values = {name: np.asarray(value).tolist() for name, value in metrics.items()}
        if run.judge(run.num_steps, values) is not None:
            raise RuntimeError(f"step {run.num_steps} is bad: {values}")
        return time.perf_counter() - began, time.process_time() - cores

    return take


def deciding() -> float:
    """Seconds that a guard takes on the host for one step, when its history is full."""
    from spanax.step.guard import Guard, History

    guard, history, values = Guard("skip", spike=SPIKE), History(), {"loss": 2.5, "grad_norm": 1.5}
    for step in range(1, 100):
        history = guard.seen(history, step, values)
    began = time.perf_counter()
    for step in range(100, 300):
        for name in values:
            guard.limit(history, step, name)
        guard.reason(history, step, values)
        history = guard.seen(history, step, values)
    return (time.perf_counter() - began) / 200


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Seconds, ratios and bytes of each loop."""
    found = loops(args)
    memory = {name: run.compile().memory_analysis() for name, (run, _, _) in found.items()}
    functions = {name: taken(run, batch) for name, (run, batch, _) in found.items()}
    seconds: dict[str, list[tuple[float, float]]] = {name: [] for name in functions}
    for function in functions.values():
        for _ in range(20):  # a guard knows its limits after 16 good steps
            function()
    for turn in range(args.rounds):
        # Each goes first in turn: what one leaves to be freed, the next one pays for.
        for place in range(len(functions)):
            name = list(functions)[(turn + place) % len(functions)]
            seconds[name].append(functions[name]())

    def ratio(name: str, against: str, of: int) -> float:
        return statistics.median(a[of] / b[of] for a, b in zip(seconds[name], seconds[against], strict=True))

    some = next(iter(found.values()))[0]
    some.unsound()
    began = time.perf_counter()
    some.unsound()
    return {
        "devices": args.devices,
        "layout": args.layout,
        "rounds": args.rounds,
        "state_bytes": some.plan.state_bytes(),
        "invalid_leaves_seconds": time.perf_counter() - began,
        "deciding_seconds": deciding(),
        "loops": {
            name: {
                "seconds": statistics.median(wall for wall, _ in seconds[name]),
                "ratio": ratio(name, against, 0),
                "ratio_of_cores": ratio(name, against, 1),
                "temporary_bytes": memory[name].temp_size_in_bytes,
            }
            for name, (_, _, against) in found.items()
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", type=int, default=8)
    parser.add_argument("--layout", default="fsdp")
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--embed", type=int, default=128)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--batch", type=int, default=16, help="examples of 64 tokens")
    parser.add_argument("--own", action="store_true", help="a train step of one's own, too")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    result = measure(args)
    if args.json:
        print(json.dumps(result))
        return
    print(f"{args.devices} devices, {args.layout}, {args.rounds} rounds; {result['state_bytes']:,} bytes of state each")
    print(f"{'':14}ms   time  cores  temporary bytes")
    for name, one in result["loops"].items():
        ratios = f"{one['ratio']:.3f}  {one['ratio_of_cores']:.3f}"
        print(f"{name:10}{1e3 * one['seconds']:6.0f}  {ratios}  {one['temporary_bytes']:>15,}")
    print(f"a look at the whole state before a save: {1e3 * result['invalid_leaves_seconds']:.2f} ms")
    print(f"deciding: {1e6 * result['deciding_seconds']:.0f} us a step")


if __name__ == "__main__":
    main()
