"""Cost: terms that add up, go the right way, and are the same one by one as all at once."""

import dataclasses
import functools
from typing import Any

import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import spanax
import zoo
from byo import corpus
from programs import array, small_gpt, workload
from spanax.errors import SpanaxError
from spanax.hardware.chips import chip_named
from spanax.plan.cost.calibration import Assumptions
from spanax.plan.cost.kernel_rates import VECTOR_SHARE
from spanax.plan.cost.roofline import TILE, matmul_seconds, shard_counts
from spanax.plan.cost.step_time import IDLE, Costs, Grid, price
from spanax.plan.place import resolver_of
from spanax.plan.search import search
from spanax.plan.spmd.count_terms import count_terms
from spanax.plan.spmd.sharded_program import ShardedProgram
from spanax.plan.spmd.terms import Matmuls, Terms
from spanax.trace.analysis.op_groups import contraction_flops
from spanax.trace.program import Program


@functools.cache
def terms(program: Program, layout: str, mesh: str) -> Terms:
    chips = spanax.cluster("cpu", spanax.MeshShape.of(mesh).size)
    return count_terms(
        ShardedProgram(resolver_of(program, spanax.plan(program, chips, layout=layout, mesh=mesh)), program.step)
    )


def grid(*meshes: tuple[int, ...], stages: int = 1, microbatches: int = 1, scale: float = 1.0, **rest: Any) -> Grid:
    count = len(meshes)
    return Grid(
        np.asarray(meshes, int).T,
        np.full(count, stages),
        np.full(count, microbatches),
        np.full(count, scale),
        **rest,
    )


def cost(program: Program, layout: str, mesh: str, cluster: spanax.Cluster | None = None, **arguments: Any) -> Costs:
    shape = spanax.MeshShape.of(mesh)
    each = grid(tuple(size for _, size in shape.axes), **arguments)
    return price(terms(program, layout, mesh), cluster or spanax.cluster("h100", shape.size), each)


# Ways


# Works


def test_local_flops_are_the_steps_over_the_devices() -> None:
    program = small_gpt()
    graph = program.step.graph
    total = sum(
        kind.runs * contraction_flops(graph, kind.op)
        for kind in program.step.op_groups
        if kind.op.name == "dot_general"
    )
    for layout, mesh in (("data", "data=8"), ("fsdp", "fsdp=8"), ("fsdp+tensor", "fsdp=4,model=2")):
        assert cost(program, layout, mesh).flops[0] == pytest.approx(total / 8)
    assert cost(program, "data", "data=4", stages=1, microbatches=4, scale=0.25).flops[0] == pytest.approx(total / 4)


def one_matmul(m: int, n: int, k: int, *, size_axes: tuple[int, ...] = (0, 0, 0, 0), dtype: str = "bf16") -> Matmuls:
    """A matmul of bf16 numbers of its own, for a cost by hand."""
    row = np.asarray
    return Matmuls(
        flops=row([2.0 * m * n * k]),
        work=row([0]),
        sizes=row([[m, n, k, 1.0]]),
        size_axes=row([size_axes]),
        batched=row([-1]),
        num_bytes=row([[2.0 * m * k, 2.0 * k * n, 2.0 * m * n]]),
        bytes_axes=row([[0, 0, 0]]),
        bytes_batched=row([[False, False, False]]),
        dtypes=(dtype,),
        runs=row([1.0]),
        phase=row([0]),
        in_layers=row([False]),
        scores=row([[False, False, False]]),
        fused=row([False]),
        ragged=row([-1]),
        groups=row([1.0]),
        expert_axes=row([0]),
    )


def seconds(chip: str, works: Matmuls, ways: int = 1) -> float:
    table = shard_counts(np.asarray([[ways]]))
    return float(matmul_seconds(works, table, np.ones(1), chip_named(chip), Assumptions())[0, 0])


def test_a_large_matmul_takes_its_flops_over_the_rate() -> None:
    chip = chip_named("v5p")
    assert chip.num_cores is None
    expected = 2 * 4096.0**3 / (chip.flops_per_second("bf16") * chip.sustained_share) + chip.kernel_start_seconds
    assert seconds("v5p", one_matmul(4096, 4096, 4096)) == pytest.approx(expected, rel=1e-6)
    # A part of a tile takes as long as all of it.
    assert seconds("v5p", one_matmul(4096 - TILE + 1, 4096, 4096)) == pytest.approx(expected, rel=1e-6)


def test_a_thin_matmul_takes_its_bytes_over_the_memorys_rate() -> None:
    chip = chip_named("v5p")
    assert chip.memory_bytes_per_second is not None
    num_bytes = 2 * (8 * 8192 + 8192 * 8192 + 8 * 8192)
    expected = num_bytes / (chip.memory_bytes_per_second * chip.memory_share) + chip.kernel_start_seconds
    assert seconds("v5p", one_matmul(8, 8192, 8192)) == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("dtype", ["fp8", "fp4", "bf16"])
def test_activations_are_cast_before_the_matmuls_with_weights(dtype: str) -> None:
    chip, n = chip_named("b200"), 8192
    assert chip.memory_bytes_per_second
    table = shard_counts(np.asarray([[1]]))
    added = {}
    for name, batched in (("weight", (True, False)), ("gradient of the weight", (True, True))):
        works = dataclasses.replace(one_matmul(n, n, n, dtype=dtype), bytes_batched=np.asarray([[*batched, True]]))
        cast, plain = (
            matmul_seconds(works, table, np.ones(1), chip, Assumptions(cast=share))[0, 0] for share in (3.0, 0.0)
        )
        added[name] = cast - plain
    bytes_cast = 0 if dtype == "bf16" else 3 * 2 * n * n
    by_hand = bytes_cast / (chip.memory_bytes_per_second * chip.memory_share)
    assert added == {"weight": pytest.approx(by_hand, abs=1e-9), "gradient of the weight": 0}


def test_a_depthwise_convolution_runs_on_vector_units_and_a_grouped_one_on_tensor_cores() -> None:
    chip, pixels, channels = chip_named("a100"), 2**22, 512
    assert chip.vector_flops_per_second
    works = {width: one_matmul(pixels, width, 49 * width) for width in (1, 32)}
    for width, each in works.items():
        each.sizes[0, 3] = channels / width
        each.num_bytes[:] = 2.0 * pixels * channels
    depthwise, grouped = (seconds("a100", each) for each in works.values())
    flops = 2 * pixels * 49 * channels
    assert depthwise == pytest.approx(flops / (VECTOR_SHARE * chip.vector_flops_per_second), rel=0.01)
    assert grouped > 32 * flops / chip.peak_flops["bf16"]


@pytest.mark.parametrize(("stride", "groups"), [(1, 1), (2, 1), (1, 4), (2, 16)])
def test_a_convolution_is_the_matmul_of_its_flops(stride: int, groups: int) -> None:
    def build(rngs: nnx.Rngs) -> nnx.Sequential:
        first = nnx.Conv(3, 16, (3, 3), rngs=rngs)
        return nnx.Sequential(first, nnx.Conv(16, 32, (3, 3), stride, feature_group_count=groups, rngs=rngs))

    program = spanax.trace(
        build=build, optimizer=optax.sgd(0.1), batch=array(8, 16, 16, 3), loss=lambda model, x: (model(x) ** 2).mean()
    )
    works = terms(program, "data", "data=8").matmuls
    assert len(works.flops) >= 5
    np.testing.assert_allclose(2 * works.sizes.prod(1), works.flops)
    if groups > 1:
        assert groups in works.sizes[:, 3]


# A complete step


CASES = [("data", "data=8"), ("fsdp", "fsdp=8"), ("fsdp+tensor", "fsdp=2,model=4"), ("tensor+seq", "model=8")]


@pytest.mark.parametrize(("layout", "mesh"), CASES)
@pytest.mark.parametrize("arguments", [{}, {"microbatches": 4, "scale": 0.25}])
def test_the_terms_add_up_to_the_step(layout: str, mesh: str, arguments: dict[str, Any]) -> None:
    result = cost(small_gpt(), layout, mesh, **arguments)
    assert sum(values[0] for values in result.terms.values()) == pytest.approx(result.step_seconds[0], rel=1e-12)
    assert all(np.isfinite(values).all() and (values >= 0).all() for values in result.terms.values())


def large() -> Program:
    return workload("gpt2", batch_size=64, num_layers=2)


def test_twice_the_devices_along_data_halve_the_matmuls_of_a_large_model() -> None:
    counts = (2, 4, 8)
    result = [cost(large(), "data", f"data={count}", spanax.cluster("a100", count)).terms for count in counts]
    for before, after in zip(result, result[1:], strict=False):
        assert after["matmuls"][0] == pytest.approx(before["matmuls"][0] / 2, rel=0.05)
        assert after["memory"][0] == pytest.approx(before["memory"][0] / 2, rel=0.05)
        assert after["update"][0] == pytest.approx(before["update"][0])
        assert after["gradient sync"][0] >= before["gradient sync"][0]


def test_twice_the_batch_takes_twice_as_long_in_matmuls_and_as_long_in_the_update() -> None:
    each, two = (cost(large(), "fsdp", "fsdp=8", scale=scale).terms for scale in (1.0, 2.0))
    assert two["matmuls"][0] == pytest.approx(2 * each["matmuls"][0], rel=0.05)
    assert two["update"][0] == each["update"][0] and two["gradient sync"][0] == each["gradient sync"][0]


def test_sharded_storage_updates_less_and_gathers_more() -> None:
    ddp, zero1, fsdp = (
        cost(large(), layout, mesh).terms
        for layout, mesh in (("data", "data=8"), ("zero1", "fsdp=8"), ("fsdp", "fsdp=8"))
    )
    assert fsdp["update"][0] < 0.3 * ddp["update"][0] and zero1["update"][0] < ddp["update"][0]
    assert ddp["weights between devices"][0] == 0 < fsdp["weights between devices"][0]
    assert fsdp["gradient sync"][0] < ddp["gradient sync"][0]
    assert zero1["weights between devices"][0] > 0  # what was updated in parts is gathered


def test_one_device_communicates_nothing() -> None:
    result = cost(small_gpt(), "data", "data=1").terms
    for name in ("gradient sync", "weights between devices", "activations between devices", *IDLE):
        assert result[name][0] == 0


# Pipelines


def test_stages_wait_for_each_other() -> None:
    program = small_gpt(num_layers=4)
    each = cost(program, "data", "data=2")
    staged = cost(program, "data", "data=2", spanax.cluster("h100:8"), stages=4, microbatches=4, scale=0.25)
    assert idle(each) == 0 < staged.terms["transfers between stages"][0] < idle(staged)
    many = cost(program, "data", "data=2", spanax.cluster("h100:8"), stages=4, microbatches=8, scale=0.125)
    share = [idle(result) / result.step_seconds[0] for result in (staged, many)]
    assert share[1] < share[0]
    # (p - 1) / m of the work in the layers, and hops: three quarters of that, and most of the work is there.
    work = sum(staged.terms[name][0] for name in ("matmuls", "memory", "kernel starts", "activations between devices"))
    assert 0.4 * work < idle(staged) < work


def idle(costs: Costs) -> float:
    return sum(float(costs.terms[name][0]) for name in IDLE)


# Collectives


# What a chip cannot


def test_a_chip_without_bfloat16_raises() -> None:
    case = zoo.ZOO["mlp"]
    program = spanax.trace(
        build=case.build, optimizer=optax.sgd(0.1), batch=case.batch(16), loss=case.loss, compute_dtype="bfloat16"
    )
    assert search(program, spanax.cluster("a100:8"), remat=()).best is not None
    with pytest.raises(SpanaxError, match="'v100-32gb' does not compute in bf16") as caught:
        search(program, spanax.cluster("v100:8"), remat=())
    assert "fp16" in str(caught.value) and len(str(caught.value).splitlines()) <= 4


def test_the_cpu_compiler_does_not_combine_collectives() -> None:
    cluster = spanax.cluster("cpu:8")
    combining = dataclasses.replace(cluster, chip=dataclasses.replace(cluster.chip, shared=False))
    apart, together = (
        spanax.search(workload("gpt-nano"), on, layout="fsdp", pipeline=False, microbatches=1, remat=("none",)).best
        for on in (cluster, combining)
    )
    assert apart is not None and together is not None
    start = cluster.chip.inside.start_seconds if cluster.chip.inside else 0.0
    name = "weights between devices"
    assert apart.seconds[name] > together.seconds[name] + 20 * start


def test_gradients_of_equal_blocks_in_a_list_are_one_message() -> None:
    seconds = []
    for count in (1, 16):
        program = spanax.trace(
            build=lambda rngs, count=count: nnx.Sequential(
                *(nnx.Linear(16, 16, use_bias=False, rngs=rngs) for _ in range(count))
            ),
            optimizer=optax.sgd(0.1),
            batch=array(64, 16),
            loss=lambda model, batch: jnp.square(model(batch)).mean(),
        )
        costs = cost(program, "data", "data=8")
        seconds.append(costs.terms["gradient sync"] + costs.hidden["gradient sync"])
    assert seconds[1] < 2 * seconds[0]  # 16 messages would take 16 times as long


def test_weights_inside_a_scan_without_a_layer_carry_have_finite_cost() -> None:
    chunked = corpus.program("multi_task").variant(loss_chunks=4)
    assert chunked.step.layer_carry == (None, 0)
    best = search(chunked, spanax.cluster("h100:2x8"), layout="fsdp+tensor", remat=()).best
    assert best is not None and np.isfinite(best.step_seconds)
