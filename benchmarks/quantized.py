"""Quantized training: equality with one device under every layout, losses after 100 steps, and predicted step times.

    python benchmarks/quantized.py parity|losses|steps [--write]

Each prints the rows of a table of docs/quantize.md; --write replaces them there.

Every layout adds float32 sums in another order, and rounding to 8 bits or fewer turns a difference in the last bit into
one of a whole step. Equality is therefore measured in float64, where no such difference reaches a step.
"""

import os

os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")

import argparse
import dataclasses
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import optax
import qwix  # noqa: F401  reads the dtypes of JAX when it is imported

import spanax
from generated_tables import write_table
from spanax.check.parity.parity import parity
from spanax.models.workloads import load
from spanax.plan.candidates.request import Request
from spanax.plan.choose import searched
from spanax.trace.program import Program
from spanax.trace.rewrites.quantized_matmul import RECIPES
from spanax.trace.workload import Workload
from spanax.train.config import TrainConfig
from spanax.train.trainer import train

PAGE = Path(__file__).resolve().parent.parent / "docs" / "quantize.md"

MESHES = {
    "data": "data=8", "fsdp": "fsdp=8", "hsdp": "data=2,fsdp=4", "tensor": "data=2,model=4",
    "fsdp+tensor": "fsdp=4,model=2", "context": "data=4,context=2", "ring": "data=4,context=2",
    "expert": "data=2,expert=4", "pipeline": "data=4,pipe=2", "pipeline+tensor": "data=2,pipe=2,model=2",
}  # fmt: skip

MACHINES = ("h100:8", "v5e:4x4", "v6e:4x4", "b200:8")


def attention(query: jax.Array, key: jax.Array, value: jax.Array, *, is_causal: bool = False) -> jax.Array:
    """Computes what `jax.nn.dot_product_attention` does, but no softmax in float32."""
    shared = query.shape[2] // key.shape[2]
    key, value = (jnp.repeat(array, shared, 2) for array in (key, value))
    scores = jnp.einsum("BTHK,BSHK->BHTS", query, key) / query.shape[-1] ** 0.5
    scores = jnp.where(jnp.tril(jnp.ones(scores.shape[-2:], bool)), scores, -jnp.inf) if is_causal else scores
    return jnp.einsum("BHTS,BSHK->BTHK", jax.nn.softmax(scores), value)


@contextmanager
def in_float64() -> Iterator[None]:
    """Computes in float64 what models compute in float32."""
    before = jnp.float32, jax.nn.dot_product_attention
    jax.config.update("jax_enable_x64", True)
    jnp.float32 = jnp.float64
    jax.nn.dot_product_attention = attention
    try:
        yield
    finally:
        jnp.float32, jax.nn.dot_product_attention = before
        jax.config.update("jax_enable_x64", False)


def difference(name: str, layout: str, recipe: str, **sizes: int) -> float:
    """Returns the largest relative difference between a layout and one device, after a step of the quantized model."""
    with in_float64():
        plan, program = planned(layout, recipe, load(name, batch_size=16, **sizes))
        return max(each.value for each in parity(program, plan, steps=1).differences)


def planned(layout: str, recipe: str, workload: Workload) -> tuple[spanax.Plan, Program]:
    """Returns the plan of a layout, and the program in float64."""
    workload = dataclasses.replace(workload, optimizer=optax.sgd(0.1))
    program = workload.trace(compute_dtype="float64", quantize=recipe)
    return spanax.plan(program, spanax.cluster("cpu:8"), layout=layout, mesh=MESHES[layout]), program


def parity_rows() -> Iterator[str]:
    """Yields the table of differences: layout by recipe."""
    yield f"| layout | mesh | {' | '.join(RECIPES)} |"
    yield "|---|---|" + "---|" * len(RECIPES)
    for layout, mesh in MESHES.items():
        name = "moe-nano" if layout == "expert" else "gpt-nano"
        cells = [f"{difference(name, layout, recipe):.0e}" for recipe in RECIPES]
        yield f"| {layout} | {mesh} | {' | '.join(cells)} |"


def loss_rows() -> Iterator[str]:
    """Yields the table of losses after 100 steps of `spanax train gpt-nano` on simulated devices."""
    yield "| matmuls of weights in | loss at step 100 | held-out loss |"
    yield "|---|---|---|"
    for recipe in (None, *RECIPES):
        with tempfile.TemporaryDirectory() as folder:
            config = TrainConfig(steps=100, quantize=recipe, output_dir=f"{folder}/run", layout="fsdp")
            last, held_out = _losses(config)
        yield f"| {recipe or 'float32'} | {last:.4f} | {held_out:.4f} |"


def _losses(config: TrainConfig) -> tuple[float, float]:
    """Returns the mean loss of the last ten steps, and the held-out loss."""
    events = list[dict]()
    train(partial(load, "gpt-nano"), config, jax.devices(), events.append)
    steps = [event["loss"] for event in events if event["event"] == "step"]
    return sum(steps[-10:]) / 10, next(event["val_loss"] for event in reversed(events) if "val_loss" in event)


def step_rows() -> Iterator[str]:
    """Yields the table of predicted step times of llama3-8b with 32 sequences."""
    yield f"| devices | bfloat16 | {' | '.join(RECIPES)} |"
    yield "|---|---|" + "---|" * len(RECIPES)
    for machine in MACHINES:
        cells = [_predicted(machine, recipe) for recipe in (None, *RECIPES)]
        yield f"| {machine} | {' | '.join(cells)} |"


def _predicted(machine: str, recipe: str | None) -> str:
    program = load("llama3-8b", batch_size=32).trace(quantize=recipe)
    try:
        found = searched(program, spanax.cluster(machine), Request())
    except spanax.SpanaxError:
        return "no rate"
    return "nothing fits" if found.best is None else f"{found.best.step_seconds:.2f} s"


TABLES = {"parity": parity_rows, "losses": loss_rows, "steps": step_rows}


def main() -> None:
    """Prints one table, and writes it to the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("table", choices=TABLES)
    parser.add_argument("--write", action="store_true")
    arguments = parser.parse_args()
    rows = list[str]()
    for row in TABLES[arguments.table]():
        rows.append(row)
        print(row, flush=True)
    if arguments.write:
        begin = next(line for line in PAGE.read_text().splitlines() if f"quantized.py {arguments.table}" in line)
        write_table(PAGE, begin, "\n".join(rows))


if __name__ == "__main__":
    main()
