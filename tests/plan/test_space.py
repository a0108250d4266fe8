"""Space: every mesh is there once, can be planned, and resolves as the family it is priced with."""

import functools
from collections import Counter

import jax
import numpy as np
import optax
import pytest
from flax import nnx

import spanax
from programs import array, workload
from spanax.plan.cost.memory.state import state_of
from spanax.plan.cost.peak_memory import Meshes, memory_use, walk
from spanax.plan.cost.step_time import Grid, price
from spanax.plan.reason import Code, Reason
from spanax.plan.sharding.resolve import Resolver
from spanax.plan.space import Family, families, mesh_of
from spanax.plan.spmd.count_terms import count_terms
from spanax.plan.spmd.sharded_program import ShardedProgram
from spanax.trace.program import Program

PLACES = [("gpt-nano", "cpu:8"), ("gpt-nano", "a100:2x8"), ("moe-nano", "cpu:8"), ("moe-nano", "a100:2x8")]


@functools.cache
def space(name: str, cluster: str, batch_size: int = 32) -> tuple[list[Family], Counter[str]]:
    rejected = Counter[str]()
    return families(workload(name), spanax.cluster(cluster), batch_size, rejected), rejected


def members(result: list[Family]) -> list[tuple[Family, int]]:
    return [(family, column) for family in result for column in range(family.num_stages.size)]


@pytest.mark.parametrize("place", PLACES)
def test_every_mesh_uses_all_devices_and_is_listed_once(place: tuple[str, str]) -> None:
    result, _ = space(*place)
    num_devices = spanax.cluster(place[1]).num_devices
    seen = set()
    for family, column in members(result):
        sizes = family.sizes[:, column]
        assert family.num_stages[column] * np.prod(sizes) == num_devices
        assert mesh_of(sizes).size * family.num_stages[column] == num_devices
        seen.add((family.storing, family.sequence, int(family.num_stages[column]), *sizes.tolist()))
    assert len(seen) == len(members(result))


def test_the_space_of_a_gpt_on_8_devices_by_hand() -> None:
    """2**3 over data, fsdp, context and model, after 1, 2 or 4 stages of its 4 layers."""
    result, rejected = space("gpt-nano", "cpu:8")
    of_storing = Counter((family.storing, family.sequence) for family, _ in members(result))
    # Ways to hand out three factors of two to four axes: 20, 10 to two are left and 4 to one.
    assert of_storing["fsdp", False] == 20 + 10 + 4
    # fsdp takes one factor at least; with +seq, model does.
    assert of_storing["zero1", False] == of_storing["zero2", False] == 10 + 4 + 1
    assert of_storing["fsdp", True] == 10 + 4 + 1
    assert of_storing["zero1", True] == of_storing["zero2", True] == 4 + 1
    assert not rejected


def priced(
    program: Program, cluster: spanax.Cluster, resolver: Resolver, family: Family, index: int
) -> tuple[float, float]:
    """Seconds and bytes of one mesh of a family under a resolver."""
    each = np.ones(1, int)
    stages = family.num_stages[index : index + 1]
    grid = Grid(family.sizes[:, index : index + 1], stages, each, each)
    seconds = price(count_terms(ShardedProgram(resolver, program.step)), cluster, grid).step_seconds
    memory = memory_use(
        state_of(resolver),
        walk(ShardedProgram(resolver, program.step)),
        Meshes(grid.sizes, num_stages=stages, num_microbatches=each, in_flight=each, scale=each),
    )
    return float(seconds[0]), float(memory.peak_bytes[0])


class Padded(nnx.Module):
    """Stacked layers whose stored dims divide by 2 and 4, and by 8 only along the layers."""

    def __init__(self, rngs: nnx.Rngs):
        self.weights = nnx.Param(jax.random.normal(rngs.params(), (8, 12, 12)))

    def __call__(self, x: jax.Array) -> jax.Array:
        return jax.lax.scan(lambda x, w: (jax.nn.relu(x @ w), None), x, self.weights[...])[0]


def squared(model: nnx.Module, x: jax.Array) -> jax.Array:
    return (model(x) ** 2).mean()


def test_meshes_that_store_a_leaf_along_its_layers_are_a_separate_family() -> None:
    program = spanax.trace(build=Padded, optimizer=optax.adam(1e-3), batch=array(8, 12), loss=squared)
    result = families(program, spanax.cluster("cpu:8"), 8, Counter())
    by_fsdp = {
        int(family.sizes[1, column]): id(family)
        for family, column in members(result)
        if (family.storing, family.sequence, int(family.num_stages[column])) == ("fsdp", False, 1)
        and family.sizes[4, column] == 1
    }
    assert sorted(by_fsdp) == [1, 2, 4, 8]
    assert by_fsdp[2] == by_fsdp[4] != by_fsdp[8]


def test_impossible_layouts_are_counted_by_reason() -> None:
    _, rejected = space("gpt-nano", "cpu:8", batch_size=4)
    batch = Reason(Code.BATCH_NOT_DIVISIBLE)
    assert set(rejected) == {batch} and rejected[batch] > 0
    program = spanax.trace(
        build=lambda rngs: nnx.Linear(6, 6, rngs=rngs), optimizer=optax.sgd(0.1), batch=array(8, 6), loss=squared
    )
    rejected = Counter()
    result = families(program, spanax.cluster("cpu:8"), 8, rejected)
    assert result and {reason.code for reason in rejected} <= {
        Code.IDLE_AXIS, Code.SIZE_NOT_DIVISIBLE, Code.NOTHING_STORED,
    } and rejected  # fmt: skip


def test_an_annotation_that_does_not_divide_is_a_reason() -> None:
    init = nnx.with_partitioning(nnx.initializers.ones_init(), ("fsdp", None))

    def build(rngs: nnx.Rngs) -> nnx.Linear:
        with nnx.use_eager_sharding(False):
            return nnx.Linear(12, 16, kernel_init=init, rngs=rngs)

    program = spanax.trace(build=build, optimizer=optax.adam(0.1), batch=array(8, 12), loss=squared)
    rejected = Counter[str]()
    result = families(program, spanax.cluster("cpu:8"), 8, rejected)
    assert {int(size) for family in result for size in family.sizes[1]} == {1, 2, 4}
    assert rejected[Reason(Code.SIZE_NOT_DIVISIBLE)] == 3


def test_layouts_that_store_nothing_sharded_are_rejected() -> None:
    program = spanax.trace(
        build=lambda rngs: nnx.Linear(16, 32, rngs=rngs), optimizer=optax.sgd(0.1),
        batch=jax.ShapeDtypeStruct((8, 16), "float32"), loss=lambda model, x: (model(x) ** 2).mean(),
    )  # fmt: skip
    rejected = Counter[str]()
    result = families(program, spanax.cluster("cpu:8"), 8, rejected)
    assert {family.storing for family in result} == {"fsdp"} and rejected[Reason(Code.NOTHING_STORED)] > 0
    odd = spanax.trace(
        build=lambda rngs: nnx.Linear(15, 31, rngs=rngs), optimizer=optax.adam(0.1),
        batch=jax.ShapeDtypeStruct((8, 15), "float32"), loss=lambda model, x: (model(x) ** 2).mean(),
    )  # fmt: skip
    result = families(odd, spanax.cluster("cpu:8"), 8, Counter())
    assert result and all((family.sizes[1] == 1).all() for family in result)
