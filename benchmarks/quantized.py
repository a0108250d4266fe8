"""Quantized matmuls, and adapters of frozen weights: equality with one device, losses, predictions beside compilers.

    python benchmarks/quantized.py TABLE [--write]

Prints the rows of a table of docs/quantize.md or docs/fine-tune.md; --write replaces them there. The tables `compiled`
need no accelerator, but its compilers: `pip install -e '.[tpu,cuda12]'`.

Every layout adds float32 sums in another order, and rounding to 8 bits or fewer turns a difference in the last bit into
one of a whole step. Equality is therefore measured in float64, where no such difference reaches a step.
"""

import os

os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")

import argparse
import dataclasses
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import optax
import qwix  # noqa: F401  reads the dtypes of JAX when it is imported

import spanax
from generated_tables import write_figures
from spanax.adapters.packed import FORMATS
from spanax.check.parity.parity import parity
from spanax.models.workloads import load
from spanax.plan.candidates.request import Request
from spanax.plan.choose import searched
from spanax.trace.optimizers.recipe import AS_DEFINED, Recipe
from spanax.trace.rewrites.quantized_matmul import RECIPES
from spanax.train.config import TrainConfig
from spanax.train.trainer import train
from spanax.units import bytes_text

DOCS = Path(__file__).resolve().parent.parent / "docs"
PAGES = (DOCS / "quantize.md", DOCS / "fine-tune.md")

MESHES = {
    "data": "data=8", "zero1": "fsdp=8", "zero2": "fsdp=8", "fsdp": "fsdp=8", "hsdp": "data=2,fsdp=4",
    "tensor": "data=2,model=4", "data+tensor": "data=4,model=2", "fsdp+tensor": "fsdp=4,model=2",
    "context": "data=4,context=2", "ring": "data=4,context=2", "expert": "data=2,expert=4",
    "fsdp+expert": "fsdp=2,expert=4", "pipeline": "data=4,pipe=2", "pipeline+tensor": "pipe=2,model=4",
    "3d": "data=2,pipe=2,model=2",
}  # fmt: skip
"""Every preset, and a mixture of experts whose weights are also stored in parts."""

PARITY = {"parity": (tuple(RECIPES), AS_DEFINED), "adapters": ((None, *FORMATS), Recipe(lora="rank=4"))}
"""By table: what is quantized, matmuls or frozen weights, and the recipe."""

MACHINES = ("h100:8", "v5e:4x4", "v6e:4x4", "b200:8")

COMPILED = [
    ("gpt2", "h100:8", None),
    ("gpt2", "h100:8", "fp8"),
    ("gpt2", "h100:8", "int8"),
    ("gpt2", "v5e:4x4", None),
    ("gpt2", "v5e:4x4", "int8"),
    ("gpt2", "v6e:2x4", "fp8"),
]
"""Model, devices, and what matmuls of weights are quantized to; 128 sequences, under fsdp."""

COMPILED_ADAPTERS = [
    ("llama3-8b", "v5e:4x4", "nf4"),
    ("llama3-8b", "v5e:4x4", "int8"),
    ("llama3-8b", "v5e:4x4", None),
    ("llama3-8b", "v5p:2x2x1", "nf4"),
    ("llama3-8b", "h100:8", "nf4"),
    ("llama3-8b", "l4:1", "nf4"),
    ("llama3-8b", "rtx4090:1", "nf4"),
    ("llama3-70b", "v5e:8x8", "nf4"),
    ("llama3-70b", "v5p:2x2x2", "nf4"),
    ("llama3-70b", "v5p:2x2x2", "int8"),
    ("llama3-70b", "v5p:2x2x2", None),
    ("llama3-70b", "h100:8", "nf4"),
    ("llama3-70b", "l4:8", "nf4"),
    ("llama3-70b", "rtx4090:8", "nf4"),
]
"""Model, devices, and what frozen weights are stored in; a sequence of 1,024 for each device."""


def attention(
    query: jax.Array, key: jax.Array, value: jax.Array, *, mask: None = None, is_causal: bool = False
) -> jax.Array:
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


def difference(layout: str, quantize: str | None, recipe: Recipe = AS_DEFINED) -> float:
    """Returns the largest relative difference between a layout and one device, of a loss, a gradient or a parameter.

    After a step, or with adapters after three: of their two factors one is zero at first, so the other has no gradient.
    """
    model = "moe-nano" if "expert" in layout else "gpt-nano"
    with in_float64():
        workload = load(model, batch_size=16, seq_len=16, num_layers=2)
        workload = dataclasses.replace(workload, optimizer=optax.sgd(0.1, 0.9))
        program = workload.trace(compute_dtype="float64", quantize=quantize, recipe=recipe)
        plan = spanax.plan(program, spanax.cluster("cpu:8"), layout=layout, mesh=MESHES[layout])
        return max(each.value for each in parity(program, plan, steps=3 if recipe.lora else 1).differences)


def parity_rows(formats: Sequence[str | None], recipe: Recipe = AS_DEFINED) -> Iterator[str]:
    """Yields the table of differences: layout by what is quantized."""
    yield f"| layout | mesh | {' | '.join(each or 'none' for each in formats)} |"
    yield "|---|---|" + "---|" * len(formats)
    for layout, mesh in MESHES.items():
        cells = [f"{difference(layout, quantize, recipe):.0e}" for quantize in formats]
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


def compiled_rows(cells: Sequence[tuple[str, str, str | None]], recipe: Recipe = AS_DEFINED) -> Iterator[str]:
    """Yields the table of what the plan says of a step, and the compilers of the chips."""
    yield "| step | state | peak memory: plan, compiler | all-gathers: plan, compiler |"
    yield "|---|---|---|---|"
    for model, on, quantize in cells:
        report = checked(model, spanax.cluster(on), quantize, recipe)
        sides = (report.predicted, report.compiled)
        state, peak = ([getattr(side, f"{name}_bytes") for side in sides] for name in ("state", "peak"))
        gathered = [sum(kinds.get("all-gather", 0) for kinds in side.collectives.values()) for side in sides]
        step = f"{model}, {quantize or 'bfloat16'}, {on}"
        yield f"| {step} | {_several(state)} | {_several(peak)} | {_several(gathered)} |"


def checked(model: str, machine: spanax.Cluster, quantize: str | None, recipe: Recipe) -> spanax.Report:
    """Returns the report of a step of a model under fsdp, or on one device."""
    sizes = {"batch_size": machine.num_devices, "seq_len": 1024} if recipe.lora else {"batch_size": 128}
    workload = load(model, **sizes)
    remat = "full" if recipe.lora else None
    program = workload.trace(compute_dtype="bfloat16", quantize=quantize, remat=remat, recipe=recipe)
    layout = "fsdp" if machine.num_devices > 1 else None
    return spanax.check(program, spanax.plan(program, machine, layout=layout), machine, level=3)


def _several(sizes: Sequence[int]) -> str:
    """Returns sizes as text; equal ones once."""
    return ", ".join(dict.fromkeys(map(bytes_text, sizes)))


TABLES: dict[str, Callable[[], Iterator[str]]] = {
    **{name: partial(parity_rows, *cells) for name, cells in PARITY.items()},
    "losses": loss_rows,
    "steps": step_rows,
    "compiled": partial(compiled_rows, COMPILED),
    "compiled-adapters": partial(compiled_rows, COMPILED_ADAPTERS, Recipe(lora="rank=16")),
}
"""The tables by the name of the command."""


def main() -> None:
    """Prints one table, and writes it to its page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("table", choices=TABLES)
    parser.add_argument("--write", action="store_true")
    arguments = parser.parse_args()
    rows = list[str]()
    for row in TABLES[arguments.table]():
        rows.append(row)
        print(row, flush=True)
    if not arguments.write:
        return
    command = f"python benchmarks/quantized.py {arguments.table}"
    for page in PAGES:
        if f"{command}," in page.read_text():
            write_figures(page, command, "\n".join(rows))


if __name__ == "__main__":
    main()
