"""Eager builds: a `build` that reads values runs on the host, and its arrays are sharded onto the devices."""

import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import spanax
from sampling import sampled
from spanax.errors import SpanaxError

BATCH = np.random.default_rng(0).normal(size=(16, 16)).astype("float32")


class Reading(nnx.Module):
    """A model whose statics, arrays and layers depend on the values of its parameters."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.linear, self.dropout = nnx.Linear(16, 16, rngs=rngs), nnx.Dropout(0.5, rngs=rngs)
        kernel = np.asarray(self.linear.kernel[...])
        self.bound = float(np.abs(kernel).max())
        self.spectrum = np.linalg.svd(kernel)[1]
        shift = jnp.asarray(kernel.mean(0))
        self.shift = lambda x: x + shift  # a closure over an array
        if self.linear.kernel[...].sum() > 0:
            self.scale = nnx.Param(jnp.ones(16))
        else:
            self.scale = nnx.Param(jnp.full(16, 2.0))

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.dropout(self.shift(self.linear(x) * self.scale * self.spectrum)) / self.bound


def loss(model: Any, x: jax.Array) -> jax.Array:
    return ((model(x) - x) ** 2).mean()


def by_nnx(seed: int) -> list[float]:
    model = Reading(nnx.Rngs(seed))
    optimizer = nnx.Optimizer(model, optax.adamw(1e-2, eps=0.1), wrt=nnx.Param)

    @nnx.jit
    def step(model: Any, optimizer: Any, x: jax.Array) -> jax.Array:
        value, grads = nnx.value_and_grad(loss)(model, x)
        optimizer.update(model, grads)
        return value

    return [float(step(model, optimizer, BATCH)) for _ in range(3)]


def program(**changes: Any) -> spanax.Program:
    options: dict[str, Any] = {"build": Reading, "optimizer": optax.adamw(1e-2, eps=0.1), "batch": BATCH}
    return spanax.trace(**options | {"loss": loss, "eager_build": True} | changes)


def planned(traced: spanax.Program, layout: str = "fsdp") -> spanax.Plan:
    return spanax.plan(traced, spanax.cluster("cpu:8"), layout=layout)


@pytest.mark.parametrize("seed", sampled([0, 1], [1]))
def test_a_build_that_reads_values_trains_as_in_nnx(seed: int, tmp_path: Path) -> None:
    traced = program()
    run = spanax.start(traced, planned(traced), seed=seed)
    assert run.params()["linear.kernel"].sharding.shard_shape((16, 16)) == (2, 16)
    losses = [float(run.step(BATCH)["loss"])]
    run.save(tmp_path).wait()
    # The seed of the statics and closures comes from the checkpoint.
    resumed = spanax.restore(traced, planned(traced, "data"), tmp_path)
    losses += [float(resumed.step(BATCH)["loss"]) for _ in range(2)]
    np.testing.assert_allclose(losses, by_nnx(seed), rtol=1e-5)


def test_a_workload_builds_eagerly() -> None:
    workload = spanax.Workload(build=Reading, batch=BATCH, loss=loss, eager_build=True)
    traced = workload.trace(learning_rate=0.1, num_steps=10)
    run = spanax.start(traced, planned(traced, "data"))
    assert traced.num_params == 288 and np.isfinite(float(run.step(BATCH)["loss"]))


def test_variants_keep_the_seed() -> None:
    traced = program().variant(seed=1).rename({"features": "hidden"}).variant(microbatches=2, seed=1)
    assert traced.microbatches == 2 and traced.init.seed == 1 and traced.variant(seed=1) is traced
    assert "hidden" in {axis.name for axis in traced.variant(seed=2).axes} and traced.variant(seed=2).microbatches == 2


READS: dict[str, Callable[[jax.Array], Any]] = {
    "asarray": lambda kernel: np.asarray(kernel),
    "float": lambda kernel: float(kernel.sum()),
    "int": lambda kernel: int(kernel.sum()),
    "if": lambda kernel: 1 if kernel.sum() > 0 else 0,
    "index": lambda kernel: [1, 2][jnp.argmax(kernel) * 0],
    "mask": lambda kernel: kernel[kernel > 0],
    "item": lambda kernel: kernel.sum().item(),
}


@pytest.mark.parametrize("name", READS)
def test_an_error_names_the_line_that_reads(name: str) -> None:
    def build(rngs: nnx.Rngs) -> nnx.Linear:
        model = nnx.Linear(16, 16, rngs=rngs)
        READS[name](model.kernel[...])
        return model

    with pytest.raises(SpanaxError, match="`build` reads the value of a traced array") as caught:
        program(build=build, eager_build=False)
    (line,) = [f"{Path(__file__).name}:{frame.lineno}" for frame in traceback.extract_tb(caught.value.__cause__.__traceback__) if frame.filename == __file__][-1:]  # fmt: skip # noqa: E501
    assert f"where: {line}" in str(caught.value) and "eager_build=True" in str(caught.value)
    traced = program(build=build)
    assert traced.num_params == 272


def test_an_optimizer_that_reads_values_is_refused() -> None:
    def optimizer(model: Any) -> nnx.Optimizer:
        return nnx.Optimizer(model, optax.sgd(float(model.linear.bias[...].sum())), wrt=nnx.Param)

    with pytest.raises(SpanaxError, match="`optimizer` reads the value of a traced array"):
        program(optimizer=optimizer)


def test_an_array_in_a_closure_is_refused_where_build_is_traced() -> None:
    class Closed(nnx.Module):
        def __init__(self, rngs: nnx.Rngs) -> None:
            self.linear, scale = nnx.Linear(16, 16, rngs=rngs), jnp.full(16, 2.0)
            self.scaled = lambda x: x * scale

        def __call__(self, x: jax.Array) -> jax.Array:
            return self.scaled(self.linear(x))

    with pytest.raises(SpanaxError, match="the train step uses an array that `build` created and NNX does not track"):
        program(build=Closed, eager_build=False)
    traced = program(build=Closed)
    run = spanax.start(traced, planned(traced))
    assert float(run.step(BATCH)["loss"]) > float(run.step(BATCH)["loss"])


def test_arrays_that_are_not_numbers_are_refused() -> None:
    class Named(nnx.Module):
        def __init__(self) -> None:
            self.names = np.array(["a", "b"])

    with pytest.raises(SpanaxError, match=r"`names` is an array of <U1"):
        program(build=Named, eager_build=False)


def test_the_error_of_a_library_names_eager_build() -> None:
    """Libraries that restore checkpoints make arrays of concrete shards, and raise errors of their own for others."""

    def build() -> nnx.Module:
        model = nnx.Linear(16, 8, rngs=nnx.Rngs(0))
        shard, sharding = jnp.ones((16, 8)), jax.sharding.SingleDeviceSharding(jax.devices("cpu")[0])
        model.kernel[...] = jax.make_array_from_single_device_arrays((16, 8), sharding, [shard])
        return model

    def traced(**options: Any) -> spanax.Program:
        loss = lambda model, x: (model(x) ** 2).mean()  # noqa: E731
        return spanax.trace(build=build, optimizer=optax.sgd(0.1), batch=BATCH, loss=loss, **options)

    with pytest.raises(ValueError, match="concrete arrays") as caught:
        traced()
    assert any("eager_build=True" in note for note in caught.value.__notes__)
    program = traced(eager_build=True)
    run = spanax.start(program, spanax.plan(program, "cpu:8", layout="fsdp"))
    np.testing.assert_array_equal(run.params()["kernel"], np.ones((16, 8)))
