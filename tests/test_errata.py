"""docs/pitfalls.md: what its errata say is right is computed here, formula by formula and layout by layout."""

import functools
import inspect
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from spanax.hardware.cluster import cluster
from spanax.hardware.mesh import MeshShape
from spanax.models.workloads import load
from spanax.plan.evaluate import evaluated
from spanax.plan.pipeline.bubble import bubble_over_ideal, num_in_flight
from spanax.plan.search import search
from spanax.trace.program import Program


@functools.cache
def gpt3(batch_size: int) -> Program:
    return load("gpt3-175b", batch_size=batch_size).trace(learning_rate=1e-4, num_steps=10, compute_dtype=jnp.bfloat16)


@functools.cache
def gpt3_on(layout: str, mesh: str, remat: str = "full", stages: int = 1, microbatches: int = 1) -> dict[str, float]:
    """What one device holds (GiB) and gathers (GB) of GPT-3 175B, an example a device and microbatch."""
    shape = MeshShape.of(mesh)
    devices = shape.size * stages
    search_result = search(
        gpt3(devices), cluster("a100-80gb:8x8"), layout=layout, mesh=shape, remat=(remat,), microbatches=microbatches,
        pipeline=stages > 1, top=1000,
    )  # fmt: skip
    item = next(entry for entry in (*search_result.candidates, *search_result.nearest) if entry.num_stages == stages)
    held = {name: size / 2**30 for name, size in item.memory.items()}
    gathered = sum(kinds.get("all-gather", 0) for kinds in evaluated(search_result, item).collectives.values()) / 1e9
    return held | {"all": item.peak_bytes / 2**30, "gathered": gathered}


PAGE = Path(__file__).resolve().parents[1] / "docs" / "pitfalls.md"
FORMULA = re.compile(r"`([^`]+)` = (\d[\d,]*(?:\.\d+)?)")


def test_the_page_has_formulas() -> None:
    assert len(FORMULA.findall(PAGE.read_text())) >= 15


@pytest.mark.parametrize("formula, output", FORMULA.findall(PAGE.read_text()))
def test_a_formula_equals_the_page(formula: str, output: str) -> None:
    result = eval(formula, {"bubble_over_ideal": bubble_over_ideal, "num_in_flight": num_in_flight, "gpt3_on": gpt3_on})
    digits = len(output.partition(".")[2])
    assert f"{result:.{digits}f}" == output


@pytest.fixture
def mesh(devices: list[jax.Device]) -> Mesh:
    return MeshShape.of("data=4,model=2").build()


def put(mesh: Mesh, seed: int, shape: tuple[int, int], *spec: str | None) -> jax.Array:
    values = np.random.default_rng(seed).standard_normal(shape).astype(np.float32)
    return jax.device_put(values, NamedSharding(mesh, P(*spec)))


def collectives(text: str) -> set[str]:
    return set(re.findall(r" (all-gather|all-reduce|reduce-scatter|all-to-all|collective-permute)(?:-start)?\(", text))


def test_weights_sharded_over_data_give_the_same_numbers(mesh: Mesh) -> None:
    x, w = put(mesh, 0, (16, 32), "data"), put(mesh, 1, (32, 64), "data")
    multiply = jax.jit(jnp.matmul, out_shardings=NamedSharding(mesh, P("data")))
    assert collectives(multiply.lower(x, w).compile().as_text()) == {"all-gather"}
    replicated = jax.device_put(np.asarray(w), NamedSharding(mesh, P()))
    np.testing.assert_array_equal(multiply(x, w), multiply(x, replicated))


def test_a_column_sharded_matmul_gathers_and_a_row_sharded_one_reduces(mesh: Mesh) -> None:
    x = put(mesh, 0, (16, 32), "data", "model")
    column, row = put(mesh, 1, (32, 64), None, "model"), put(mesh, 1, (32, 64), "model", None)
    to_columns = jax.jit(jnp.matmul, out_shardings=NamedSharding(mesh, P("data", "model")))
    to_rows = jax.jit(jnp.matmul, out_shardings=NamedSharding(mesh, P("data")))
    assert collectives(to_columns.lower(x, column).compile().as_text()) == {"all-gather"}
    assert collectives(to_rows.lower(x, row).compile().as_text()) == {"all-reduce"}


def test_two_column_sharded_matmuls_gather_between_them(mesh: Mesh) -> None:
    x, first = put(mesh, 0, (16, 32), "data"), put(mesh, 1, (32, 64), None, "model")
    column, row = put(mesh, 2, (64, 32), None, "model"), put(mesh, 2, (64, 32), "model", None)
    pair = jax.jit(lambda x, a, b: (x @ a) @ b)
    assert "all-gather" in collectives(pair.lower(x, first, column).compile().as_text())
    assert collectives(pair.lower(x, first, row).compile().as_text()) == {"all-reduce"}


def test_the_optimizer_takes_the_model() -> None:
    assert list(inspect.signature(nnx.Optimizer.update).parameters)[:3] == ["self", "model", "grads"]
    assert inspect.signature(nnx.Optimizer.__init__).parameters["wrt"].default is inspect.Parameter.empty
