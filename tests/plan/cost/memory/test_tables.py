"""The memory of a TPU for tuples of buffers and scalars, counted in programs small enough to count by hand."""

from typing import Any

import jax
import numpy as np
import optax
import pytest
from flax import nnx

import spanax
from programs import array
from spanax.plan.cost.memory.state import State, state_of
from spanax.plan.cost.memory.tables import (
    COPIES,
    PER_COLLECTIVE,
    PER_KERNEL,
    SLOT_BYTES,
    WINDOW,
    WINDOW_OF_TWO,
    Counts,
    num_window_tuples,
    table_bytes,
)
from spanax.plan.cost.peak_memory import walk
from spanax.plan.cost.roofline import shard_counts
from spanax.plan.place import resolver_of
from spanax.plan.spmd.sharded_program import ShardedProgram
from spanax.plan.spmd.tiled_scatter import PartialSum


class Scaled(nnx.Module):
    """Two matmuls without biases, and a scalar."""

    def __init__(self, rngs: nnx.Rngs):
        self.up = nnx.Linear(32, 128, use_bias=False, rngs=rngs)
        self.down = nnx.Linear(128, 16, use_bias=False, rngs=rngs)
        self.scale = nnx.Param(jax.numpy.ones(()))

    def __call__(self, inputs: jax.Array) -> jax.Array:
        return self.down(nnx.relu(self.up(inputs))) * self.scale


def squared(model: Scaled, batch: jax.Array) -> jax.Array:
    return (model(batch) ** 2).mean()


def counted(layout: str, mesh: str, **arguments: Any) -> tuple[State, Counts]:
    program = spanax.trace(build=Scaled, optimizer=optax.adam(1e-3), loss=squared, batch=array(64, 32), **arguments)
    cluster = spanax.cluster("cpu", spanax.MeshShape.of(mesh).size)
    resolver = resolver_of(program, spanax.plan(program, cluster, layout=layout, mesh=mesh))
    return state_of(resolver), walk(ShardedProgram(resolver, program.step), is_tpu=True).counts


def slots(state: State, counts: Counts, free_share: float = 1.0) -> float:
    return float(table_bytes(state, counts, np.asarray(free_share), np.zeros(()))) / SLOT_BYTES


def test_scalars_of_the_state_are_not_copied() -> None:
    state, _ = counted("data", "data=1")
    assert (state.num_arrays, state.num_updated) == (3 * 2, 2)  # two kernels, each with two moments


def test_arrays_of_the_state_are_copied_while_there_is_room_on_the_chip() -> None:
    state, counts = counted("data", "data=1")
    copied = COPIES * state.num_arrays + state.num_updated
    assert slots(state, counts) - slots(state, counts, 0.0) == pytest.approx(copied)
    assert slots(state, counts) - slots(state, counts, 0.75) == pytest.approx(copied / 4)


def test_kernels_scalars_and_collectives_take_slots() -> None:
    state, counts = counted("data", "data=1")
    more = [counts + Counts(kernels=10), counts + Counts(scalars=10), counts + Counts(collectives=10)]
    added = [slots(state, each) - slots(state, counts) for each in more]
    assert added == pytest.approx([10 * PER_KERNEL, 10, 10 * PER_COLLECTIVE])


@pytest.mark.parametrize(
    "sizes, batch, tuples",
    [((8, 1), 64, 0), ((8, 1), 16384, 2 * WINDOW), ((4, 2), 16384, 0), ((2, 1), 16384, 0), ((1, 1), 16384, 0)],
)
def test_sums_that_are_scattered_by_permutes_take_tuples(sizes: tuple[int, int], batch: int, tuples: int) -> None:
    _, counts = counted("fsdp", "fsdp=8")
    assert len(counts.sums) == 2
    num_shards = shard_counts(np.asarray(sizes, float)[:, None])
    scale = np.asarray([batch / 64])
    assert num_window_tuples(counts.sums, num_shards, scale) == tuples


def test_a_small_sum_over_two_devices_takes_the_tuples_of_a_loop_with_one_permute() -> None:
    small = PartialSum(num_bytes=512, num_products=64, itemsize=4, over=1, unchanged=0)
    num_shards = shard_counts(np.asarray([[1.0, 2.0, 4.0]]))
    assert num_window_tuples([small], num_shards, np.ones(3)).tolist() == [0, WINDOW_OF_TWO, WINDOW]


def test_only_collectives_of_activations_are_counted() -> None:
    """With data parallelism only gradients are summed; with a sharded hidden dim, the output is."""
    (_, data), (_, tensor) = counted("data", "data=8"), counted("tensor", "model=8")
    assert data.collectives == 0 < tensor.collectives
    assert data.kernels > 0 and data.scalars > 0
    assert counted("data", "data=1")[1].scalars == data.scalars


def test_a_gpu_has_no_tables() -> None:
    program = spanax.trace(build=Scaled, optimizer=optax.adam(1e-3), loss=squared, batch=array(64, 32))
    resolver = resolver_of(program, spanax.plan(program, spanax.cluster("cpu", 1), layout="data", mesh="data=1"))
    assert walk(ShardedProgram(resolver, program.step)).counts == Counts()
