"""Deferred sums: XLA reduces gradients once per step for any number of microbatches, with equal results."""

import functools

import numpy as np
import optax
import pytest

import hlo_bytes
import spanax
import zoo
from spanax.models import gpt
from spanax.step.replay.partial_sums import split_contracted_dims
from spanax.trace.program import Program
from spanax.train.run import Run

GPT = gpt.GPTConfig(32, seq_len=8, num_layers=2, num_heads=2, embed_dim=16, dropout=0.1, remat=True)
CASES = {
    "gpt": zoo.Case(
        lambda rngs: gpt.GPT(GPT, rngs), gpt.loss, zoo.batches(inputs=zoo.ints(32, 8), targets=zoo.ints(32, 8))
    ),
    "cnn": zoo.ZOO["cnn"],
}
# Scalars of metrics and of the gradient norm are not linear in a sum, and are reduced in every iteration.
FEW_BYTES = 256


@functools.cache
def program(name: str, microbatches: int = 4) -> Program:
    case = CASES[name]
    optimizer = optax.adamw(1e-2, eps=0.1)  # rounding of gradients near zero is not blown up
    return spanax.trace(
        build=case.build, optimizer=optimizer, batch=case.batch(32), loss=case.loss, microbatches=microbatches,
        accumulate="mean" if name == "cnn" else "exact",  # it has batch norm
    )  # fmt: skip


def planned(name: str, layout: str, mesh: str, microbatches: int = 4) -> tuple[Program, spanax.Plan]:
    traced = program(name, microbatches)
    cluster = spanax.cluster("cpu", spanax.MeshShape.of(mesh).size)
    return traced, spanax.plan(traced, cluster, layout=layout, mesh=mesh)


@functools.cache
def moved(name: str, layout: str, mesh: str, microbatches: int) -> dict[tuple[str, str], int]:
    traced, plan = planned(name, layout, mesh, microbatches)
    text = Run(traced, plan, plan.mesh.build(), state=[]).lower().compile().as_text()
    return hlo_bytes.by_axis(text, dict(plan.mesh.axes))


def trained(name: str, layout: str, mesh: str) -> dict[str, np.ndarray]:
    traced, plan = planned(name, layout, mesh)
    run = spanax.start(traced, plan, seed=3)
    losses = [float(run.step(CASES[name].batch(32))["loss"]) for _ in range(3)]
    return {"loss": np.asarray(losses)} | {path: np.asarray(array) for path, array in run.params().items()}


@functools.cache
def on_one_device(name: str) -> dict[str, np.ndarray]:
    return trained(name, "data", "data=1")


@pytest.mark.parametrize(
    ("layout", "mesh"),
    [("data", "data=8"), pytest.param("data+tensor", "data=4,model=2", marks=pytest.mark.slow)],
)
def test_gradients_are_summed_once_a_step(layout: str, mesh: str) -> None:
    sums = [moved("gpt", layout, mesh, microbatches)["all-reduce", "data"] for microbatches in (1, 4)]
    assert sums[0] > 10 * FEW_BYTES
    assert sums[1] <= sums[0] + FEW_BYTES


@pytest.mark.parametrize(
    ("name", "layout", "mesh"),
    [
        pytest.param("gpt", "context", "data=2,context=4", marks=pytest.mark.slow),
        pytest.param("gpt", "hsdp", "data=2,fsdp=4", marks=pytest.mark.slow),
        ("cnn", "data+tensor", "data=4,model=2"),
    ],
)
def test_the_numbers_are_those_of_one_device(name: str, layout: str, mesh: str) -> None:
    expected, result = on_one_device(name), trained(name, layout, mesh)
    apart = {
        path: np.abs(result[path] - value).max() / max(np.abs(value).max(), 1e-3) for path, value in expected.items()
    }
    assert {path: much for path, much in apart.items() if much > 1e-5} == {}


def test_a_deferred_sum_is_divided_along_more_axes() -> None:
    """What has a part for each of `data` is divided along `expert` too, wherever that stands in the mesh."""
    parts = np.arange(4 * 6.0).reshape(4, 6)
    split, ways = ((0, ("expert",)),), {"data": 4, "expert": 2}
    expected = parts.reshape(4, 2, 3)
    np.testing.assert_array_equal(split_contracted_dims(parts, ("data",), split, ("data", "expert"), ways), expected)
    np.testing.assert_array_equal(
        split_contracted_dims(parts, ("data",), split, ("expert", "data"), ways), expected.swapaxes(0, 1)
    )
