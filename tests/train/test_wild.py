"""Third-party models: results of one device, and no computation or array replicated without a note."""

import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import spanax
from spanax.check.parity.example_batches import example_batch
from spanax.trace.program import Program
from spanax.train.run import Run
from wild import WILD

SIZE, STEPS, TOLERANCE = 64, 2, 1e-5

LAYOUTS = {"sliced": "data=8", "chunked": "fsdp=4,model=2"}
SLOW = {
    "accumulated": "fsdp=4,model=2",
    "gaussian-process": "fsdp=4,model=2",
    "quantized": "model=8",
    "adversaries": "fsdp=4,model=2",
    "proximal": "fsdp=4,model=2",
    "fixed-point": "fsdp=4,model=2",
}


@functools.cache
def program(name: str, size: int = SIZE) -> Program:
    wild = WILD[name]
    return spanax.trace(
        build=wild.build,
        optimizer=wild.optimizer,
        batch=jax.eval_shape(lambda: wild.batch(size)),
        loss=wild.loss,
        train_step=wild.train_step,
    )


def started(name: str, mesh: str, size: int = SIZE) -> Run:
    plan = spanax.plan(program(name, size), spanax.cluster("cpu", spanax.MeshShape.of(mesh).size), mesh=mesh)
    return spanax.start(program(name, size), plan)


def trained(name: str, mesh: str) -> dict[str, np.ndarray]:
    run, rows = started(name, mesh), WILD[name].batch(STEPS * SIZE)
    parts = [{key: array[index * SIZE : (index + 1) * SIZE] for key, array in rows.items()} for index in range(STEPS)]
    losses = [float(run.step(part)["loss"]) for part in parts]
    params = {path: np.asarray(array) for path, array in run.params().items()}
    return {"loss": np.asarray(losses)} | params


alone = functools.cache(functools.partial(trained, mesh="data=1"))


def cases() -> list[Any]:
    return [
        *((name, mesh) for name, mesh in LAYOUTS.items()),
        *(pytest.param(name, mesh, marks=pytest.mark.slow) for name, mesh in SLOW.items()),
    ]


@pytest.mark.parametrize(("name", "mesh"), cases())
def test_a_third_party_model_equals_one_device(name: str, mesh: str) -> None:
    expected, result = alone(name), trained(name, mesh)
    off = {key: np.abs(result[key] - item).max() / max(np.abs(item).max(), 1e-3) for key, item in expected.items()}
    assert max(off.values()) < TOLERANCE, off


@pytest.mark.parametrize("name", WILD)
def test_all_computation_is_sharded_with_the_batch(name: str) -> None:
    axes = program(name).step.axes
    assert axes.coverage == 1.0 and not axes.unknown


def test_frozen_weights_are_stored_sharded_and_gathered_in_their_dtype() -> None:
    run = started("quantized", "fsdp=8", size=256)
    base = run.arrays("other")["layers.0.base"]
    assert base.sharding.shard_shape(base.shape) == (32, 16)
    gathered = re.findall(r"= (\w+)\[32,128\]\S* all-gather\(", run.lower().compile().as_text())
    assert gathered and set(gathered) <= {"s8", "u8"}


def test_tokens_are_exchanged_for_a_loop_over_parts_of_them_and_not_gathered() -> None:
    everything = 16 * 32 * 32  # the hidden states of all tokens
    text = started("chunked", "fsdp=4,model=2", size=16).lower().compile().as_text()
    sizes = re.findall(r"= \w+\[([\d,]+)\]\S* all-gather\(", text)
    assert max(np.prod([int(size) for size in shape.split(",")]) for shape in sizes) < everything / 4


class Offset(nnx.Module):
    """A table of NumPy's in double precision, which JAX has no wish for."""

    def __init__(self) -> None:
        self.scale, self.by = nnx.Param(jnp.ones(2)), nnx.data(np.arange(2.0))


def noisy(model: Any, batch: Any) -> Any:
    return jnp.mean(model.scale * jax.random.normal(batch["key"], (2,)) + model.by) * batch["weight"]


def test_tables_of_numpy_in_a_model_and_keys_and_plain_numbers_in_a_batch() -> None:
    batch = {"key": jax.random.key(0), "weight": 2.0, "y": np.ones((8, 2), np.float32)}
    program = spanax.trace(build=Offset, optimizer=optax.sgd(0.1), loss=noisy, batch=batch)
    assert {leaf.path: str(leaf.dtype) for leaf in program.leaves}["by"] == "float32"
    run = spanax.start(program, spanax.plan(program, spanax.cluster("cpu:1"), layout="data"))
    assert run.step(batch)["loss"].shape == () and example_batch(program, 0)["key"].dtype == batch["key"].dtype
