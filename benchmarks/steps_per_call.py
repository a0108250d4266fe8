"""What a step of a small model costs, one a call and several a call, beside a bare `jax.jit` call and `nnx.jit`.

Each loop takes 64 steps in turn and waits for the last; microseconds a step are the median over rounds, and ratios are
to the bare call of the same compiled step on the same arrays, round by round.

  bare jit    the compiled step itself, called on flat arrays, donated
  spanax      run.step, and run.steps of 16 batches
  nnx.jit     the usual loop

Usage:
  python benchmarks/steps_per_call.py [--rounds 30] [--json]
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

STEPS = 64
MODELS = {"linear, 8 leaves": 0, "GPT, 2 layers of 16, 50 leaves": 16}
"""How wide each is; 0 is a single linear layer."""


def loops(width: int) -> dict[str, Callable[[], Any]]:
    """Each loop as a function that takes its steps and returns what to wait for."""
    import jax
    import numpy as np
    import optax
    from flax import nnx

    import spanax
    from spanax.models import gpt

    def plain_loss(model: Any, batch: Any) -> Any:
        return (model(batch["x"]) ** 2).mean()

    random = np.random.default_rng(0)
    if width:
        config = gpt.GPTConfig(64, seq_len=8, num_layers=2, num_heads=2, embed_dim=width)
        build, loss = partial(gpt.GPT, config), gpt.loss
        tokens = random.integers(0, 64, (STEPS, 4, 9)).astype(np.int32)
        given = [{"inputs": each[:, :-1], "targets": each[:, 1:]} for each in tokens]
    else:
        build, loss = (lambda rngs: nnx.Linear(8, 8, rngs=rngs)), plain_loss
        given = [{"x": each} for each in random.normal(size=(STEPS, 4, 8)).astype(np.float32)]
    tx = optax.adamw(1e-3)
    program = spanax.trace(build=build, optimizer=tx, batch=given[0], loss=loss)
    plan = spanax.plan(program, spanax.local(), layout="data")
    runs = {count: spanax.start(program, plan) for count in (0, 1, 16)}
    placed = [jax.device_put(batch, plan.batch[0].sharding(runs[0].mesh)) for batch in given]
    flat = [jax.tree.leaves(batch) for batch in placed]
    compiled = runs[0].compile()
    held = {"state": runs[0].state}

    def bare() -> Any:
        for leaves in flat:
            held["state"], metrics = compiled(held["state"], leaves)
        return metrics

    def singly() -> Any:
        return [runs[1].step(batch) for batch in placed][-1]

    def together(count: int) -> Any:
        return [runs[count].steps(placed[at : at + count]) for at in range(0, STEPS, count)][-1]

    def train_step(model: Any, optimizer: Any, batch: Any) -> Any:
        value, gradients = nnx.value_and_grad(loss)(model, batch)
        optimizer.update(model, gradients)
        return value

    model = runs[1].model()
    optimizer, usual_step = nnx.Optimizer(model, tx, wrt=nnx.Param), nnx.jit(train_step, donate_argnums=(0, 1))
    usual = lambda: [usual_step(model, optimizer, batch) for batch in placed][-1]  # noqa: E731
    return {"bare jit": bare, "spanax": singly, "spanax, 16 a call": partial(together, 16), "nnx.jit": usual}


def measure(width: int, rounds: int) -> dict[str, dict[str, float]]:
    """Microseconds a step of each loop, and the ratio to the first."""
    import jax

    functions = loops(width)
    taken: dict[str, list[float]] = {name: [] for name in functions}
    for turn in range(-2, rounds):
        for place in range(len(functions)):
            name = list(functions)[(turn + place) % len(functions)]
            began = time.perf_counter()
            jax.block_until_ready(functions[name]())
            if turn >= 0:
                taken[name].append(1e6 * (time.perf_counter() - began) / STEPS)
    return {
        name: {
            "microseconds": statistics.median(values),
            "ratio": statistics.median(a / b for a, b in zip(values, taken["bare jit"], strict=True)),
        }
        for name, values in taken.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    import spanax

    spanax.simulate(1)
    for model, width in MODELS.items():
        found = measure(width, args.rounds)
        if args.json:
            print(json.dumps({"model": model, "steps": found}))
            continue
        print(model)
        for name, one in found.items():
            print(
                f"  {name:20} {one['microseconds']:8.1f} us a step, {one['ratio']:.2f} times the bare call", flush=True
            )


if __name__ == "__main__":
    main()
