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
from spanax.errors import SpanaxError
from spanax.plan.candidate import RESERVE, Candidate, Search, shortfall
from spanax.plan.plan import Plan
from spanax.plan.presets import PRESETS
from spanax.plan.reason import Code, Reason
from spanax.plan.search import SCHEDULES, search
from spanax.plan.space import layout_on
from spanax.trace.program import Program

EVERYTHING = 100_000
PLACES = [("gpt-nano", "cpu:8"), ("gpt-nano", "a100:2x8"), ("moe-nano", "cpu:8")]


@functools.cache
def searched(name: str, cluster: str) -> Search:
    return search(workload(name), spanax.cluster(cluster), top=EVERYTHING)


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
    found = dict.fromkeys(groups.values(), 0)
    for leaf in plan.leaves + plan.batch:
        found[groups[leaf.kind]] += leaf.local_bytes // (num_stages if "layers" in leaf.axes else 1)
    return found


# Every candidate


@pytest.mark.parametrize("place", PLACES)
def test_every_candidate_can_be_planned_and_stores_what_it_says(place: tuple[str, str]) -> None:
    program, found = workload(place[0]), searched(*place)
    known: dict[Any, dict[str, int]] = {}
    assert len(found.candidates) == found.layouts_priced > 1000
    for one in found.candidates:
        key = (one.storing, one.sequence, one.mesh, one.num_stages)
        if key not in known:
            known[key] = stored_bytes(planned(program, one, place[1]), one.num_stages)
        assert {group: one.memory[group] for group in known[key]} == known[key], one
    assert len(known) > 80


@pytest.mark.parametrize("place", PLACES)
def test_every_candidate_is_sound(place: tuple[str, str]) -> None:
    found = searched(*place)
    for one in found.candidates:
        assert one.mesh.size * one.num_stages == found.cluster.num_devices
        assert found.batch_size % (one.microbatches * one.mesh.ways(("data", "fsdp", "expert"))) == 0
        assert one.schedule in SCHEDULES and one.num_chunks == (2 if one.schedule == "interleaved" else 1)
        assert one.microbatches >= one.num_stages
        assert one.num_stages > 1 or one.schedule == "1f1b"
        assert math.isfinite(one.step_seconds) and one.step_seconds > 0
        assert sum(one.seconds.values()) == pytest.approx(one.step_seconds, rel=1e-9)
        assert min(one.seconds.values()) >= 0 and min(one.memory.values()) >= 0
        assert one.peak_bytes == sum(one.memory.values())
        assert one.bottleneck.split(" goes to ")[1] == max(one.seconds, key=lambda name: one.seconds[name])


@pytest.mark.parametrize("place", PLACES)
def test_a_name_that_is_a_presets_means_that_preset(place: tuple[str, str]) -> None:
    names = set()
    for one in searched(*place).candidates:
        if one.layout.removesuffix("+seq") in PRESETS and one.layout not in names:
            names.add(one.layout)
            chips = spanax.cluster(place[1].split(":")[0], one.mesh.size)
            named = spanax.plan(workload(place[0]), chips, layout=one.layout, mesh=one.mesh)
            priced = planned(workload(place[0]), one, place[1])
            assert (named.layout, named.mesh, named.leaves) == (priced.layout, priced.mesh, priced.leaves)
    assert names >= {
        "data",
        "zero1",
        "zero2",
        "fsdp",
        "hsdp",
        "tensor",
        "data+tensor",
        "fsdp+tensor",
        "fsdp+tensor+seq",
    }


@pytest.mark.parametrize("place", PLACES)
def test_candidates_come_by_time_and_no_two_are_the_same(place: tuple[str, str]) -> None:
    found = searched(*place)
    seconds = [round(one.step_seconds, 9) for one in found.candidates]
    assert seconds == sorted(seconds) and found.best is found.candidates[0] and not found.nearest
    keys = {
        (c.storing, c.sequence, c.mesh, c.num_stages, c.schedule, c.remat, c.microbatches) for c in found.candidates
    }
    assert len(keys) == len(found.candidates)


def test_two_searches_are_equal() -> None:
    programs = workload("gpt-nano"), workload("gpt-nano"), workload.__wrapped__("gpt-nano")
    once, *others = (search(one, spanax.cluster("cpu:8"), remat=(), top=EVERYTHING) for one in programs)
    for other in others:
        assert other.candidates == once.candidates and other.rejected == once.rejected


# Remat, batch and pipeline


def test_every_remat_is_priced_and_does_what_it_is_for() -> None:
    found = searched("gpt-nano", "cpu:8")
    by_policy = {
        one.remat: one
        for one in found.candidates
        if (one.layout, str(one.mesh), one.num_stages, one.microbatches) == ("fsdp", "fsdp=8", 1, 1)
    }
    full, dots, none = (by_policy[name] for name in ("full", "dots", "none"))
    assert full.memory["activations"] < dots.memory["activations"] < none.memory["activations"]
    assert full.flops > dots.flops > none.flops
    assert full.seconds["matmuls"] > none.seconds["matmuls"]
    assert none.flops * 8 == pytest.approx(found.model_flops)


def test_only_the_remat_asked_for() -> None:
    found = search(workload("gpt-nano"), spanax.cluster("cpu:8"), remat=("full",), top=EVERYTHING)
    assert {one.remat for one in found.candidates} == {"full"} and set(found.programs) == {"full"}


def test_memory_decides_the_remat() -> None:
    plenty = searched("gpt-nano", "cpu:8").best
    assert plenty is not None and plenty.remat == "none"
    tight = search(workload("gpt-nano"), with_memory("cpu:8", int(plenty.peak_bytes * 0.6))).best
    assert tight is not None and tight.peak_bytes < plenty.peak_bytes * 0.6
    assert tight.step_seconds > plenty.step_seconds


def test_a_batch_of_another_size() -> None:
    found = search(workload("gpt-nano"), spanax.cluster("cpu:8"), batch_size=64, top=EVERYTHING)
    assert found.batch_size == 64 and found.model_flops == 2 * searched("gpt-nano", "cpu:8").model_flops
    small = {
        (c.layout, c.mesh, c.num_stages, c.schedule, c.remat, c.microbatches): c
        for c in searched("gpt-nano", "cpu:8").candidates
    }
    for one in found.candidates:
        other = small.get((one.layout, one.mesh, one.num_stages, one.schedule, one.remat, one.microbatches))
        if other is not None:
            assert one.flops == pytest.approx(2 * other.flops)
            assert one.memory["parameters"] == other.memory["parameters"]
            assert one.memory["activations"] > other.memory["activations"]


@pytest.mark.parametrize("batch_size", [0, -8])
def test_a_batch_of_nothing_is_refused(batch_size: int) -> None:
    with pytest.raises(SpanaxError, match=f"the batch size is {batch_size}"):
        search(workload("gpt-nano"), spanax.cluster("cpu:8"), batch_size=batch_size)


def test_without_a_pipeline() -> None:
    found = search(workload("gpt-nano"), spanax.cluster("cpu:8"), pipeline=False, top=EVERYTHING)
    alone = [one for one in searched("gpt-nano", "cpu:8").candidates if one.num_stages == 1]
    assert found.candidates == tuple(alone)


def test_stages_divide_the_layers() -> None:
    """Four layers: two stages of two, or of two chunks of one; four stages of one."""
    kinds = {(one.num_stages, one.schedule) for one in searched("gpt-nano", "cpu:8").candidates}
    assert kinds == {(1, "1f1b"), (2, "1f1b"), (4, "1f1b"), (2, "interleaved")}
    unrolled = search(small_gpt(scan_layers=False), spanax.cluster("cpu:8"), remat=(), top=EVERYTHING)
    assert {one.num_stages for one in unrolled.candidates} == {1}


# What does not fit, or divide


def test_where_nothing_fits_the_nearest_are_told() -> None:
    found = search(workload("gpt-nano"), with_memory("cpu:8", 2**20))
    assert found.candidates == () and found.best is None
    assert 1 <= len(found.nearest) <= 3
    leanest = min(one.peak_bytes for one in searched("gpt-nano", "cpu:8").candidates)
    assert found.nearest[0].peak_bytes == pytest.approx(leanest, abs=8)
    assert [one.peak_bytes for one in found.nearest] == sorted(one.peak_bytes for one in found.nearest)
    assert found.rejected[Reason(Code.TOO_LARGE)] == found.layouts_priced
    assert "the layout with the lowest peak needs" in shortfall(found) and "a device has 1 MiB" in shortfall(found)


def test_what_does_not_fit_is_counted() -> None:
    everything = searched("gpt-nano", "cpu:8")
    peaks = sorted(one.peak_bytes for one in everything.candidates)
    limit = int(peaks[len(peaks) // 2] / (1 - RESERVE))
    found = search(workload("gpt-nano"), with_memory("cpu:8", limit), top=EVERYTHING)
    assert 0 < found.rejected[Reason(Code.TOO_LARGE)] == everything.layouts_priced - len(found.candidates)
    assert list(found.candidates) == [one for one in everything.candidates if one.peak_bytes <= limit * (1 - RESERVE)]


def test_a_chip_of_which_no_memory_is_known_holds_everything() -> None:
    found = search(workload("gpt-nano"), with_memory("cpu:8", None), top=EVERYTHING)
    assert found.rejected == {}
    assert found.candidates == searched("gpt-nano", "cpu:8").candidates


def test_an_odd_batch_leaves_what_does_not_split_it() -> None:
    program = spanax.trace(build=zoo.MLP, optimizer=optax.adam(1e-3), batch=zoo.VECTORS(7), loss=zoo.squared_error)
    found = search(program, spanax.cluster("cpu:8"), top=EVERYTHING)
    assert found.candidates and found.rejected[Reason(Code.BATCH_NOT_DIVISIBLE)] > 0
    assert {one.mesh.ways(("data", "fsdp", "expert")) for one in found.candidates} == {1}


def squared(model: Any, x: jax.Array) -> jax.Array:
    return (model(x) ** 2).mean()


def test_where_nothing_divides_that_is_said_with_a_batch_that_does() -> None:
    program = spanax.trace(
        build=lambda rngs: nnx.Linear(5, 3, rngs=rngs), optimizer=optax.adam(1e-3), batch=array(7, 5), loss=squared
    )
    with pytest.raises(SpanaxError, match="no layout shards a batch of 7 over 8 devices") as caught:
        search(program, spanax.cluster("cpu:8"))
    assert str(Reason(Code.BATCH_NOT_DIVISIBLE)) in str(caught.value) and "a batch of 8" in str(caught.value)


def test_one_device() -> None:
    found = search(workload("gpt-nano"), spanax.cluster("cpu:1"), top=EVERYTHING)
    assert {(one.layout, str(one.mesh), one.num_stages) for one in found.candidates} == {("data", "data=1", 1)}
    assert all(one.seconds["gradient sync"] == one.seconds["weights between devices"] == 0 for one in found.candidates)


def test_a_program_without_a_matmul() -> None:
    program = spanax.trace(
        build=lambda rngs: nnx.LayerNorm(64, rngs=rngs),
        optimizer=optax.sgd(0.1),
        batch=array(64, 64),
        loss=lambda model, x: (model(x) ** 2).mean(),
    )
    best = search(program, spanax.cluster("a100:8")).best
    assert best is not None and best.seconds["matmuls"] == 0 < best.seconds["memory"]


def test_where_no_mesh_takes_the_microbatches_nothing_is_priced() -> None:
    found = search(workload("gpt-nano"), spanax.cluster("cpu:8"), microbatches=3)
    assert found.best is None and found.layouts_priced == 0


def test_a_step_of_the_users_own() -> None:
    def train_step(model: Any, optimizer: Any, batch: Any) -> dict[str, Any]:
        loss, grads = nnx.value_and_grad(zoo.squared_error)(model, batch)
        optimizer.update(model, grads)
        return {"loss": loss}

    program = spanax.trace(build=zoo.MLP, optimizer=optax.adam(1e-3), batch=zoo.VECTORS(16), train_step=train_step)
    found = search(program, spanax.cluster("cpu:8"), top=EVERYTHING)
    assert {one.remat for one in found.candidates} == {"as written"} and found.programs == {"as written": program}
    ours = spanax.trace(build=zoo.MLP, optimizer=optax.adam(1e-3), batch=zoo.VECTORS(16), loss=zoo.squared_error)
    same = search(ours, spanax.cluster("cpu:8"), remat=(), top=EVERYTHING, microbatches=1, pipeline=False)
    priced = [sorted((str(c.mesh), c.layout, c.microbatches, c.flops) for c in s.candidates) for s in (found, same)]
    assert priced[0] == priced[1]


def test_more_devices_are_never_slower_where_the_model_is_large() -> None:
    program = workload("gpt2", batch_size=32, num_layers=2)
    seconds = []
    for count in (1, 2, 4, 8):
        best = search(program, spanax.cluster("h100", count), remat=()).best
        assert best is not None
        seconds.append(best.step_seconds)
    assert all(later < 0.8 * earlier for earlier, later in zip(seconds, seconds[1:], strict=False))
