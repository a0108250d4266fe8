"""The upper estimate of the peak memory, which decides whether a layout fits, against compiled programs.

Compiled bytes are those that libtpu 0.0.52 assigns for v5e:2x4 (`spanax check --level 3`).
"""

import dataclasses
from collections.abc import Callable

import jax
import numpy as np
import optax
import pytest
from flax import nnx

import spanax
from programs import workload, zoo_program
from sampling import sampled
from spanax.plan.cost.memory.tiles import OnChip
from spanax.plan.evaluate import Evaluation, evaluate
from spanax.trace.program import Program

V5E = spanax.cluster("v5e:2x4")


class Convolutions(nnx.Module):
    def __init__(self, rngs: nnx.Rngs, width: int, depth: int, window: int):
        self.layers = nnx.List(
            [nnx.Conv(width if index else 3, width, (window, window), rngs=rngs) for index in range(depth)]
        )

    def __call__(self, images: jax.Array) -> jax.Array:
        for layer in self.layers:
            images = nnx.relu(layer(images))
        return images.mean((1, 2, 3))


class Tables(nnx.Module):
    def __init__(self, rngs: nnx.Rngs, rows: int, columns: int, count: int):
        self.tables = nnx.List([nnx.Embed(rows, columns, rngs=rngs) for _ in range(count)])

    def __call__(self, ids: jax.Array) -> jax.Array:
        return sum(table(ids[:, index]) for index, table in enumerate(self.tables)).sum(-1)


class Matmuls(nnx.Module):
    def __init__(self, rngs: nnx.Rngs, width: int, depth: int):
        self.layers = nnx.List([nnx.Linear(width, width, rngs=rngs) for _ in range(depth)])

    def __call__(self, inputs: jax.Array) -> jax.Array:
        for layer in self.layers:
            inputs = nnx.relu(layer(inputs))
        return inputs.mean(-1)


def traced(
    build: Callable[..., nnx.Module],
    shape: tuple[int, ...],
    optimizer: optax.GradientTransformation,
    dtype: str = "float32",
) -> Program:
    batch = jax.ShapeDtypeStruct(shape, dtype)
    return spanax.trace(
        build=build, optimizer=optimizer, batch=batch, compute_dtype="bfloat16",
        loss=lambda model, inputs: (model(inputs) ** 2).mean(),
    )  # fmt: skip


def images(size: int, width: int, depth: int, batch: int, window: int = 3) -> Program:
    return traced(lambda rngs: Convolutions(rngs, width, depth, window), (batch, size, size, 3), optax.adam(1e-3))


def tables(rows: int, columns: int, count: int, optimizer: optax.GradientTransformation) -> Program:
    return traced(lambda rngs: Tables(rngs, rows, columns, count), (4096, count), optimizer, "int32")


def matmuls(width: int, depth: int, batch: int) -> Program:
    return traced(lambda rngs: Matmuls(rngs, width, depth), (batch, width), optax.adam(1e-3))


COMPILED: dict[str, tuple[Callable[[], Program], str, int]] = {
    "an image per device, 32 channels": (lambda: images(256, 32, 4, 8), "data", 145_090_560),
    "the same, 128 channels": (lambda: images(256, 128, 4, 8), "data", 184_248_320),
    "four images": (lambda: images(256, 64, 4, 32), "data", 923_066_880),
    "windows of 5 x 5": (lambda: images(512, 16, 3, 8, window=5), "data", 1_232_827_392),
    "eight images": (lambda: images(256, 64, 4, 64), "data", 614_435_328),
    "64 images, sharded state": (lambda: images(128, 48, 4, 512), "fsdp", 1_038_213_120),
    "64 columns, Adagrad": (lambda: tables(300_000, 64, 8, optax.adagrad(1e-2)), "data", 2_692_501_504),
    "32 columns, Adagrad": (lambda: tables(300_000, 32, 8, optax.adagrad(1e-2)), "data", 2_001_457_152),
    "16 columns, Adam": (lambda: tables(300_000, 16, 8, optax.adam(1e-3)), "data", 577_199_104),
    "64 columns, Adam": (lambda: tables(300_000, 64, 8, optax.adam(1e-2)), "data", 2_230_197_248),
    "200 columns, Adam": (lambda: tables(500_000, 200, 3, optax.adam(1e-2)), "data", 8_466_246_656),
    "64 columns, Adafactor": (lambda: tables(500_000, 64, 4, optax.adafactor(1e-2)), "data", 2_432_831_488),
    "matmuls": (lambda: matmuls(2048, 6, 8192), "data", 482_679_296),
    "matmuls, large": (lambda: matmuls(4096, 8, 4096), "data", 3_076_889_088),
    "matmuls, sharded state": (lambda: matmuls(4096, 8, 4096), "fsdp", 719_003_136),
}  # fmt: skip


def evaluated(program: Program, layout: str) -> Evaluation:
    return evaluate(program, spanax.plan(program, V5E, layout=layout), V5E)


QUICK = (
    "an image per device, 32 channels",
    "windows of 5 x 5",
    "64 columns, Adagrad",
    "16 columns, Adam",
    "matmuls, large",
)


@pytest.mark.parametrize("name", sampled(COMPILED, QUICK))
def test_the_upper_estimate_covers_the_compiled_program(name: str) -> None:
    trace, layout, compiled = COMPILED[name]
    memory = evaluated(trace(), layout).memory
    assert compiled < memory.upper_bytes[0] < 3 * compiled


def test_the_upper_estimate_exceeds_the_prediction_and_grows_with_the_batch() -> None:
    scale = np.geomspace(1, 4096, 13)
    for name in ("mlp", "cnn"):
        for machine in (V5E, spanax.cluster("h100:8")):
            program = zoo_program(name)
            cost = evaluate(program, spanax.plan(program, machine, layout="data"), machine)
            uses = [cost.layout.memory([dataclasses.replace(cost.grid, scale=np.asarray([each]))])[0] for each in scale]
            upper = np.concatenate([use.upper_bytes for use in uses])
            assert (upper >= np.concatenate([use.peak_bytes for use in uses])).all()
            assert (np.diff(upper) >= 0).all()


def test_live_values_that_fill_the_chip_count_in_full() -> None:
    total = np.asarray([1e6, 80 << 20, 112 << 20, 1e9])
    assert OnChip(112 << 20).most_in_main_memory(total) == pytest.approx([1e5, 8 << 20, 112 << 20, 1e9])


def test_a_layout_fits_by_its_upper_estimate() -> None:
    program = zoo_program("mlp")
    best = spanax.search(program, V5E, layout="data").best
    assert best is not None

    def fitting(limit: float) -> bool:
        machine = dataclasses.replace(V5E, memory_bytes=int(limit))
        return any(each.remat == best.remat for each in spanax.search(program, machine, layout="data").candidates)

    assert fitting(best.upper_bytes) and not fitting(best.peak_bytes * 1.01)


def test_the_upper_estimate_is_never_below_the_prediction() -> None:
    program, cluster = workload("gpt-nano"), spanax.cluster("v5e:4x4")
    cost = evaluate(program, spanax.plan(program, cluster, layout="fsdp+tensor"), cluster)
    assert cost.memory.upper_bytes[0] >= cost.memory.peak_bytes[0]
