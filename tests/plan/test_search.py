"""Search: an answer for every program and cluster, the same one each time, and one that can be planned."""

import dataclasses
import functools
import math
from typing import Any

import jax
import optax
import pytest
from flax import nnx

import spanax
import zoo
from programs import array, small_gpt, workload
from sampling import sampled
from spanax.errors import SpanaxError
from spanax.plan.candidate import Candidate, Search, shortfall
from spanax.plan.candidates.grids import SCHEDULES
from spanax.plan.candidates.request import Request, Scope
from spanax.plan.candidates.variants import REMAT
from spanax.plan.choose import largest_batch
from spanax.plan.plan import Plan, Schedule
from spanax.plan.reason import Code, Reason
from spanax.plan.search import search, search_in
from spanax.plan.space import layout_on
from spanax.trace.program import Program

EVERYTHING = 100_000
PLACES = [("gpt-nano", "cpu:8"), ("gpt-nano", "a100:2x8"), ("moe-nano", "cpu:8")]
FEW = sampled([(place,) for place in PLACES], [(PLACES[0],), (PLACES[2],)])


@functools.cache
def searched(name: str, cluster: str) -> Search:
    return search(workload(name), spanax.cluster(cluster), top=EVERYTHING, assign=False)


def with_memory(name: str, memory_bytes: int | None) -> spanax.Cluster:
    return dataclasses.replace(spanax.cluster(name), memory_bytes=memory_bytes)


def planned(program: Program, candidate: Candidate, cluster: str) -> Plan:
    """The plan of one stage: a pipeline's devices but one stage's are another copy of this mesh."""
    chips = spanax.cluster(cluster.split(":")[0], candidate.mesh.size)
    layout = layout_on(candidate.storing, candidate.sequence, candidate.mesh)
    return spanax.plan(program, chips, layout=layout, mesh=candidate.mesh)


def stored_bytes(plan: Plan, num_stages: int) -> dict[str, int]:
    """Bytes of the plan's placements by the groups of a candidate, stacked layers divided among the stages."""
    groups = {"param": "parameters", "optimizer": "optimizer", "other": "other state", "batch": "batch"}
    result = dict.fromkeys(groups.values(), 0)
    for leaf in plan.leaves + plan.batch:
        result[groups[leaf.kind]] += leaf.local_bytes // (num_stages if "layers" in leaf.axes else 1)
    return result


# Every candidate


@pytest.mark.parametrize("place", sampled([(place,) for place in PLACES], [(PLACES[2],)]))
def test_every_candidate_can_be_planned_with_its_state_bytes(place: tuple[str, str]) -> None:
    program, result = workload(place[0]), searched(*place)
    same_state: dict[Any, list[Candidate]] = {}
    assert len(result.candidates) == result.layouts_priced > 1000
    for each in result.candidates:
        same_state.setdefault((each.storing, each.sequence, each.mesh, each.num_stages), []).append(each)
    assert len(same_state) > 80
    for first, *others in list(same_state.values())[::3]:
        expected = stored_bytes(planned(program, first, place[1]), first.num_stages)
        for each in (first, *others):
            assert {group: each.memory[group] for group in expected} == expected, each


@pytest.mark.parametrize("place", FEW)
def test_every_candidate_is_sound(place: tuple[str, str]) -> None:
    result = searched(*place)
    for each in result.candidates:
        assert each.mesh.size * each.num_stages == result.cluster.num_devices
        assert result.batch_size % (each.microbatches * each.mesh.ways(("data", "fsdp", "expert"))) == 0
        assert each.schedule in SCHEDULES and (each.num_chunks > 1) == (each.schedule == "interleaved")
        assert each.microbatches >= each.num_stages
        assert each.num_stages > 1 or each.schedule == "1f1b"
        assert math.isfinite(each.step_seconds) and each.step_seconds > 0
        assert sum(each.seconds.values()) == pytest.approx(each.step_seconds, rel=1e-9)
        assert min(each.seconds.values()) >= 0 and min(each.memory.values()) >= 0
        assert each.peak_bytes == sum(each.memory.values())
        assert each.bottleneck.split(" goes to ")[1] == max(each.seconds, key=lambda name: each.seconds[name])


@pytest.mark.parametrize("place", FEW)
def test_candidates_come_by_time_and_no_two_are_the_same(place: tuple[str, str]) -> None:
    result = searched(*place)
    seconds = [round(each.step_seconds * (1.5 if each.repeats_most else 1), 9) for each in result.candidates]
    assert seconds == sorted(seconds) and result.best is result.candidates[0] and not result.nearest
    keys = {
        (c.storing, c.sequence, c.mesh, c.num_stages, c.schedule, c.num_chunks, c.remat, c.microbatches, c.context)
        for c in result.candidates
    }
    assert len(keys) == len(result.candidates)


def test_the_largest_batch_of_a_model_without_layers_is_that_of_the_best_policy() -> None:
    """Recomputation of single operations stores more than fused kernels do."""

    def loss(model: Any, batch: jax.Array) -> jax.Array:
        x = jax.nn.relu(model[1](jax.nn.gelu(model[0](batch))))
        return (jax.numpy.tanh(model[2](x)) * x).mean()

    def build(rngs: nnx.Rngs) -> Any:
        sizes = ((3, 64), (64, 64))
        return nnx.List([*(nnx.Conv(*size, (3, 3), rngs=rngs) for size in sizes), nnx.Linear(64, 64, rngs=rngs)])

    program = spanax.trace(build=build, optimizer=optax.adamw(1e-3), batch=array(8, 16, 16, 3), loss=loss)
    requests = (Request(layout="fsdp", schedule=remat and Schedule(remat=remat)) for remat in (None, "none", "dots"))
    cluster = with_memory("h100:8", 38 << 20)
    best, none, dots = (largest_batch(program, cluster, request) for request in requests)
    assert best and none and dots and best.batch_size == none.batch_size > dots.batch_size


def test_two_searches_are_equal() -> None:
    programs = workload("gpt-nano"), workload.__wrapped__("gpt-nano")
    once, again = (search(each, spanax.cluster("cpu:8"), remat=(), top=EVERYTHING) for each in programs)
    assert again.candidates == once.candidates and again.rejected == once.rejected


# Remat, batch and pipeline


def test_every_remat_policy_is_priced_and_reduces_memory() -> None:
    result = searched("gpt-nano", "cpu:8")
    by_policy = {
        each.remat: each
        for each in result.candidates
        if (each.layout, str(each.mesh), each.num_stages, each.microbatches) == ("fsdp", "fsdp=8", 1, 1)
    }
    full, dots, none = (by_policy[name] for name in ("full", "dots", "none"))
    assert full.memory["activations"] < dots.memory["activations"] < none.memory["activations"]
    assert full.flops > dots.flops > none.flops
    assert full.seconds["matmuls"] > none.seconds["matmuls"]
    assert none.flops * 8 == pytest.approx(result.model_flops)


def test_memory_determines_the_remat_policy() -> None:
    plenty = searched("gpt-nano", "cpu:8").best
    assert plenty is not None and plenty.remat == "none"
    tight = search(workload("gpt-nano"), with_memory("cpu:8", plenty.upper_bytes - plenty.peak_bytes // 2)).best
    assert tight is not None and tight.peak_bytes < plenty.peak_bytes * 0.6
    assert tight.step_seconds > plenty.step_seconds


def identities(candidates: tuple[Candidate, ...]) -> list[tuple[object, ...]]:
    return [
        (c.layout, c.mesh, c.num_stages, c.schedule, c.num_chunks, c.remat, c.microbatches, c.context, c.assigned)
        for c in candidates
    ]


def scope_of(program: Program) -> Scope:
    return Scope(batch_size=program.batch_size, ring=True, distinct=True, fits_first=True)


TIGHT, ROOMY = 45 << 20, 1 << 30
"""Bytes of a device: less than the fastest layout needs without remat, and more than every layout needs."""
REMAT_PLACES = [(TIGHT, True), (ROOMY, False)]


@functools.cache
def everything(memory_bytes: int, *policies: str) -> Search:
    cluster = with_memory("a100:2x4", memory_bytes)
    return search(workload("gpt-nano"), cluster, top=EVERYTHING, distinct=True, assign=False, remat=policies)


@pytest.mark.parametrize(("memory_bytes", "is_counted"), REMAT_PLACES)
def test_more_remat_is_priced_only_where_a_layout_does_not_fit(memory_bytes: int, is_counted: bool) -> None:
    program, cluster = workload("gpt-nano"), with_memory("a100:2x4", memory_bytes)
    scope = dataclasses.replace(scope_of(program), top=EVERYTHING, counts_stages=is_counted)
    result = search_in(program, cluster, scope, "auto")
    first = search(program, cluster, remat=("none",), pipeline=is_counted)
    is_short = Reason(Code.TOO_LARGE) in first.rejected
    assert is_short == (memory_bytes == TIGHT)
    policies = ("none", "dots", "full") if is_short else ("none",)
    expected = everything(memory_bytes, *policies)
    assert identities(result.candidates) == identities(expected.candidates)
    for priced, again in zip(result.candidates, expected.candidates, strict=True):
        assert priced.step_seconds == pytest.approx(again.step_seconds, rel=1e-9)
    assert tuple(result.programs) == policies
    assert (result.layouts_priced < expected.layouts_priced) == is_short


def test_candidates_that_are_not_priced_would_not_be_chosen() -> None:
    program, cluster = workload("gpt-nano"), with_memory("a100:2x4", TIGHT)
    every = everything(TIGHT, "none", "dots", "full")
    for top in (1, 8):
        first = search_in(program, cluster, dataclasses.replace(scope_of(program), top=top), "auto")
        assert identities(first.candidates) == identities(every.candidates[:top])
        assert first.layouts_priced < every.layouts_priced
    assert {(each.remat, each.context) for each in every.candidates[:8]} > {(first.best.remat, first.best.context)}


@pytest.mark.parametrize(
    ("memory_bytes", "batch_size", "is_priced"),
    [(TIGHT, 64, False), (34 << 20, 64, True)],
)
def test_ring_attention_is_priced_where_it_may_save_time(memory_bytes: int, batch_size: int, is_priced: bool) -> None:
    """Not with a kernel and whole examples on every device, where a layout fits without remat."""
    program = workload("gpt-nano").variant(compute_dtype="bfloat16")
    cluster = with_memory("a100:2x4", memory_bytes)
    scope = dataclasses.replace(scope_of(program), batch_size=batch_size)
    first = search_in(program, cluster, scope, "auto")
    every = search_in(program, cluster, dataclasses.replace(scope, remat=REMAT, fits_first=False), "auto")
    assert identities(first.candidates[:1]) == identities(every.candidates[:1])
    assert (Reason(Code.RING_SLOWER) not in first.rejected) == is_priced


def test_a_batch_of_another_size() -> None:
    result = search(workload("gpt-nano"), spanax.cluster("cpu:8"), batch_size=64, top=EVERYTHING)
    assert result.batch_size == 64 and result.model_flops == 2 * searched("gpt-nano", "cpu:8").model_flops
    small = {
        (c.layout, c.mesh, c.num_stages, c.schedule, c.remat, c.microbatches): c
        for c in searched("gpt-nano", "cpu:8").candidates
    }
    for each in result.candidates:
        other = small.get((each.layout, each.mesh, each.num_stages, each.schedule, each.remat, each.microbatches))
        if other is not None:
            assert each.flops == pytest.approx(2 * other.flops)
            assert each.memory["parameters"] == other.memory["parameters"]
            assert each.memory["activations"] > other.memory["activations"]


@pytest.mark.parametrize("batch_size", [0, -8])
def test_an_empty_batch_raises(batch_size: int) -> None:
    with pytest.raises(SpanaxError, match=f"the batch size is {batch_size}"):
        search(workload("gpt-nano"), spanax.cluster("cpu:8"), batch_size=batch_size)


def test_stages_divide_the_layers() -> None:
    """Four layers: two stages of two, or of two chunks of one; four stages of one."""
    plain = {(stages, schedule) for stages in (2, 4) for schedule in ("1f1b", "zero-bubble")}
    kinds = {(each.num_stages, each.schedule) for each in searched("gpt-nano", "cpu:8").candidates}
    assert kinds == plain | {(1, "1f1b"), (2, "interleaved")}
    unrolled = search(small_gpt(scan_layers=False), spanax.cluster("cpu:8"), remat=(), top=EVERYTHING)
    assert {each.num_stages for each in unrolled.candidates} == {1}


# What does not fit, or divide


def test_the_nearest_layouts_are_returned_where_nothing_fits() -> None:
    result = search(workload("gpt-nano"), with_memory("cpu:8", 2**20), assign=False)
    assert result.candidates == () and result.best is None
    assert 1 <= len(result.nearest) <= 3
    leanest = min(each.peak_bytes for each in searched("gpt-nano", "cpu:8").candidates)
    assert result.nearest[0].peak_bytes == pytest.approx(leanest, abs=8)
    assert [each.peak_bytes for each in result.nearest] == sorted(each.peak_bytes for each in result.nearest)
    assert result.rejected[Reason(Code.TOO_LARGE)] == result.layouts_priced
    assert "the layout with the lowest peak needs" in shortfall(result) and "a device has 1 MiB" in shortfall(result)


def test_layouts_that_do_not_fit_are_counted() -> None:
    everything = searched("gpt-nano", "cpu:8")
    uppers = [each.upper_bytes for each in everything.candidates]
    limit = sorted(uppers)[len(uppers) // 2]
    result = search(workload("gpt-nano"), with_memory("cpu:8", limit), top=EVERYTHING, assign=False)
    assert 0 < result.rejected[Reason(Code.TOO_LARGE)] == everything.layouts_priced - len(result.candidates)
    assert list(result.candidates) == [
        each for each, upper in zip(everything.candidates, uppers, strict=True) if upper <= limit
    ]


def test_an_odd_batch_excludes_meshes_that_do_not_divide_it() -> None:
    program = spanax.trace(build=zoo.MLP, optimizer=optax.adam(1e-3), batch=zoo.VECTORS(7), loss=zoo.squared_error)
    result = search(program, spanax.cluster("cpu:8"), top=EVERYTHING)
    assert result.candidates and result.rejected[Reason(Code.BATCH_NOT_DIVISIBLE)] > 0
    assert {each.mesh.ways(("data", "fsdp", "expert")) for each in result.candidates} == {1}


def squared(model: Any, x: jax.Array) -> jax.Array:
    return (model(x) ** 2).mean()


def test_an_indivisible_batch_raises_with_a_divisible_one() -> None:
    program = spanax.trace(
        build=lambda rngs: nnx.Linear(5, 3, rngs=rngs), optimizer=optax.adam(1e-3), batch=array(7, 5), loss=squared
    )
    with pytest.raises(SpanaxError, match="no layout shards a batch of 7 over 8 devices") as caught:
        search(program, spanax.cluster("cpu:8"))
    assert str(Reason(Code.BATCH_NOT_DIVISIBLE)) in str(caught.value) and "a batch of 8" in str(caught.value)


def test_one_device() -> None:
    result = search(workload("gpt-nano"), spanax.cluster("cpu:1"), top=EVERYTHING)
    assert {(each.layout, str(each.mesh), each.num_stages) for each in result.candidates} == {("data", "data=1", 1)}
    assert all(
        each.seconds["gradient sync"] == each.seconds["weights between devices"] == 0 for each in result.candidates
    )


def test_a_program_without_a_matmul() -> None:
    program = spanax.trace(
        build=lambda rngs: nnx.LayerNorm(64, rngs=rngs),
        optimizer=optax.sgd(0.1),
        batch=array(64, 64),
        loss=lambda model, x: (model(x) ** 2).mean(),
    )
    best = search(program, spanax.cluster("a100:8")).best
    assert best is not None and best.seconds["matmuls"] == 0 < best.seconds["memory"]


def test_if_no_mesh_divides_the_microbatches_nothing_is_priced() -> None:
    result = search(workload("gpt-nano"), spanax.cluster("cpu:8"), microbatches=3)
    assert result.best is None and result.layouts_priced == 0


def test_a_custom_train_step() -> None:
    def train_step(model: Any, optimizer: Any, batch: Any) -> dict[str, Any]:
        loss, grads = nnx.value_and_grad(zoo.squared_error)(model, batch)
        optimizer.update(model, grads)
        return {"loss": loss}

    program = spanax.trace(build=zoo.MLP, optimizer=optax.adam(1e-3), batch=zoo.VECTORS(16), train_step=train_step)
    result = search(program, spanax.cluster("cpu:8"), top=EVERYTHING)
    assert {each.remat for each in result.candidates} == {"as written"} and result.programs == {"as written": program}
    ours = spanax.trace(build=zoo.MLP, optimizer=optax.adam(1e-3), batch=zoo.VECTORS(16), loss=zoo.squared_error)
    same = search(ours, spanax.cluster("cpu:8"), remat=(), top=EVERYTHING, microbatches=1, pipeline=False)
    priced = [sorted((str(c.mesh), c.layout, c.microbatches, c.flops) for c in s.candidates) for s in (result, same)]
    assert priced[0] == priced[1]


class Square(nnx.Module):
    """Square layers with additions around them: a model axis can shard neither dim of their kernels."""

    def __init__(self, rngs: nnx.Rngs):
        self.first, self.last = nnx.Linear(32, 96, rngs=rngs), nnx.Linear(96, 8, rngs=rngs)
        self.blocks = nnx.List([nnx.Linear(96, 96, rngs=rngs) for _ in range(3)])

    def __call__(self, x: jax.Array) -> jax.Array:
        x = self.first(x)
        for block in self.blocks:
            x = x + nnx.gelu(block(x))
        return self.last(x)


def test_a_layout_that_repeats_most_flops_has_to_be_faster_by_a_margin() -> None:
    program = spanax.trace(
        build=Square, optimizer=optax.adam(1e-3), batch=jax.ShapeDtypeStruct((8, 32), "float32"),
        loss=lambda model, x: (model(x) ** 2).mean(),
    )  # fmt: skip
    result = spanax.search(program, "cpu:8")
    assert result.best is not None and result.best.layout == "data" and not result.best.repeats_most
    repeating = next(each for each in result.candidates if each.layout == "tensor")
    assert repeating.repeats_most and repeating.flops > 7 * result.best.flops
    assert repeating.step_seconds < result.best.step_seconds < 1.5 * repeating.step_seconds
    assert spanax.plan(program, "cpu:8").layout.name == "data"
    assert spanax.plan(program, "cpu:8", layout="tensor").layout.name == "tensor"
