"""Offloaded state in prices: its bytes leave the devices, and its transfers take the time of the host link."""

import functools
from dataclasses import replace
from typing import Any

import jax
import optax
import pytest
from flax import nnx

import programs
import spanax
import zoo
from spanax.hardware.chips import catalogue
from spanax.hardware.cluster import Cluster
from spanax.plan.advice.summary import summarize
from spanax.plan.candidate import plan_of
from spanax.plan.candidates import alternatives
from spanax.plan.candidates.request import Request
from spanax.plan.choose import searched
from spanax.plan.evaluate import Evaluation, evaluate
from spanax.plan.plan import Schedule
from spanax.show.search import search_json, search_text
from spanax.trace.program import Program


@functools.cache
def program() -> Program:
    case = zoo.ZOO["gpt"]
    return spanax.trace(build=case.build, optimizer=optax.adamw(1e-2), batch=case.batch(16), loss=case.loss)


def priced(machine: Cluster, **request: Any) -> Any:
    return searched(program(), machine, Request(layout="fsdp", **request))


@pytest.mark.parametrize(("name", "rate"), [("h100:8", 64e9), ("a100:8", 31.5e9 / 2), ("v5e:2x4", 15e9)])
def test_an_update_waits_for_its_state_to_be_copied_in_and_out(name: str, rate: float) -> None:
    machine = spanax.cluster(name)
    plain, offloaded = (priced(machine, mesh="fsdp=8", offload=offload) for offload in ((), ("optimizer",)))
    best = offloaded.best
    assert best.seconds["host transfers"] == pytest.approx(2 * best.host_bytes / rate)
    assert best.step_seconds == pytest.approx(sum(best.seconds.values()))
    plan = plan_of(offloaded, best)
    assert plan.schedule.offload == ("optimizer",) and plan.host_bytes == best.host_bytes > 0
    assert plain.best.host_bytes == 0 and "host transfers" not in plain.best.seconds
    assert plain.best.memory["optimizer"] > 4 * best.memory["optimizer"]
    assert plan_of(plain, plain.best).state_bytes("optimizer") == plan.host_bytes + plan.state_bytes("optimizer")


def test_a_plan_is_priced_as_its_search_priced_it() -> None:
    machine = spanax.cluster("h100:8")
    result = priced(machine, mesh="fsdp=8", offload=("optimizer",))
    candidate = evaluate(program(), plan_of(result, result.best), machine).candidate
    assert candidate.memory["optimizer"] == result.best.memory["optimizer"]
    assert candidate.host_bytes == result.best.host_bytes
    assert candidate.seconds["host transfers"] == result.best.seconds["host transfers"]
    prediction = evaluate(program(), plan_of(result, result.best), machine).prediction
    assert prediction is not None and prediction.host_bytes == candidate.host_bytes


def test_simulated_devices_have_the_memory_of_their_host() -> None:
    machine = spanax.cluster("cpu:8")
    plans = [
        spanax.plan(program(), machine, layout="fsdp", mesh="fsdp=8", offload=offload) for offload in ((), "optimizer")
    ]
    plain, offloaded = (evaluate(program(), plan, machine) for plan in plans)
    assert plain.peak_bytes == offloaded.peak_bytes
    assert plain.candidate.step_seconds == offloaded.candidate.step_seconds


def test_a_chip_without_a_known_host_link_is_refused() -> None:
    machine = spanax.cluster("h100:8")
    machine = replace(machine, chip=replace(machine.chip, host_bytes_per_second=None))
    with pytest.raises(spanax.SpanaxError, match="host memory is unknown") as caught:
        priced(machine, mesh="fsdp=8", offload=("optimizer",))
    assert 'host_rate = "64 GB/s"' in str(caught.value)


def test_an_open_search_offloads_where_nothing_fits_otherwise() -> None:
    deep = spanax.trace(
        build=lambda rngs: nnx.Sequential(*(nnx.Linear(4096, 4096, rngs=rngs) for _ in range(4))),
        optimizer=optax.adamw(1e-2),
        batch=jax.ShapeDtypeStruct((8, 4096), "float32"),
        loss=lambda model, x: (model(x) ** 2).mean(),
    )
    machine = spanax.cluster("h100:4")
    searches = [spanax.search(deep, machine, offload=offload, top=999) for offload in (("optimizer",), ())]
    leanest = [min(each.upper_bytes for each in result.candidates) for result in searches]
    assert leanest[0] < 0.8 * leanest[1]
    small = replace(machine, memory_bytes=sum(leanest) // 2)
    with pytest.raises(spanax.SpanaxError, match="no layout fits into the memory") as caught:
        spanax.plan(deep, small, offload="none")
    assert "--offload optimizer" in str(caught.value)
    plan = spanax.plan(deep, small)
    assert plan.schedule.offload == ("optimizer",) and plan.host_bytes > 0
    assert "the optimizer's state in host memory: no layout fits into the memory of the devices" in plan.why
    assert spanax.plan(deep, machine).schedule.offload == ()
    summary, why = summarize(searched(deep, small, Request())), plan.why.split(";")[0]
    lines, best = search_text(summary, 1).splitlines(), search_json(summary, 1)["best"]
    assert lines[0].endswith(", optimizer in host memory") and lines[1] == f"  why     {why}"
    assert best["offload"] == ["optimizer"] and best["padded"] == {} and best["why"] == [why]
    assert any(line.endswith(" of host memory per device") for line in lines)
    assert "host memory" not in search_text(summarize(searched(deep, machine, Request())), 1)
    unlinked = replace(small, chip=replace(small.chip, host_bytes_per_second=None))
    with pytest.raises(spanax.SpanaxError, match="no layout fits into the memory"):
        spanax.plan(deep, unlinked)


def test_where_nothing_fits_activations_are_in_host_memory_and_then_state() -> None:
    gpt = programs.workload("gpt-nano", batch_size=64)
    request = Request(attention="plain", loss_chunks=1, layout="fsdp", mesh="fsdp=8").scheduled(microbatches=1)
    machine = spanax.cluster("h100:8")
    roomy = searched(
        gpt, replace(machine, memory_bytes=1 << 40), replace(request, schedule=Schedule("full", microbatches=1))
    )
    full = roomy.best.upper_bytes

    def found(memory_bytes: int, **changes: Any) -> Any:
        return searched(gpt, replace(machine, memory_bytes=memory_bytes), replace(request, **changes))

    result = found(full - 1000)
    assert str(result.alternative) == "activations in host memory: no layout fits into the memory of the devices"
    assert "input.1@host" in result.best.remat and result.best.host_bytes > 0
    assert result.best.upper_bytes < full and result.best.seconds["host transfers"] >= 0
    assert found(full - 1000, offload=()).best is None
    simulated = replace(result, cluster=spanax.cluster("cpu:8"), candidates=())
    for each in (result, simulated):
        assert alternatives.with_host_memory(each, lambda: result) is each


def test_host_links_have_sources() -> None:
    for chip in catalogue().values():
        assert (chip.host_bytes_per_second is None) == ("host_bytes_per_second" not in chip.sources)


ON_HOST = "dot_general.1@host+dot_general.4-5@host"
"""What `dots` saves of a layer, in host memory."""


def remat(policy: str, name: str = "h100:8", rate: float = 64e9) -> Evaluation:
    """The cost of `gpt-nano` under a remat policy, on devices with another host link."""
    machine = spanax.cluster(name)
    machine = replace(machine, chip=replace(machine.chip, host_bytes_per_second=rate))
    gpt = programs.workload("gpt-nano", batch_size=64)
    plan = spanax.plan(
        gpt, machine, layout="fsdp", mesh="fsdp=8", attention="plain", loss_chunks=1,
        schedule=Schedule(remat=policy, microbatches=1),
    )  # fmt: skip
    return evaluate(gpt, plan, machine)


def test_offloaded_activations_are_in_host_memory() -> None:
    dots, offload = remat("dots"), remat(ON_HOST)
    step = offload.layout.sharded.traced
    loops = [op for op in step.graph.ops() if op.name == "scan"]
    stored = {value for op in loops for value in op.outputs if step.graph.is_on_host(value)}
    assert len(stored) == 3
    assert offload.candidate.host_bytes == sum(map(step.graph.num_bytes, stored)) / 8
    assert dots.candidate.host_bytes == 0
    # The copies of one layer are on the device.
    saved = dots.candidate.memory["activations"] - offload.candidate.memory["activations"]
    assert 0.5 * offload.candidate.host_bytes < saved <= offload.candidate.host_bytes


def test_copies_of_activations_overlap_with_the_layers() -> None:
    fast, slow, dots = remat(ON_HOST, rate=1e18), remat(ON_HOST, rate=1e3), remat("dots")
    assert fast.candidate.seconds["host transfers"] == 0
    copied = 2 * slow.candidate.host_bytes / 1e3
    assert slow.candidate.seconds["host transfers"] == pytest.approx(copied, rel=1e-4)
    assert slow.candidate.seconds["host transfers"] < copied
    assert "host transfers" not in dots.candidate.seconds
    rate = 2 * slow.candidate.host_bytes / dots.candidate.step_seconds
    every, first = remat(ON_HOST, rate=rate), remat(f"{ON_HOST}:2,dots", rate=rate)  # of four layers
    exposed, half = (each.candidate.seconds["host transfers"] for each in (every, first))
    assert exposed > 0 and half == pytest.approx(exposed / 2, rel=0.05), "only its own loop hides what a layer copies"


def test_activations_offloaded_on_simulated_devices_stay_in_their_memory() -> None:
    dots, offload = remat("dots", "cpu:8"), remat(ON_HOST, "cpu:8")
    assert offload.candidate.host_bytes == 0 and "host transfers" not in offload.candidate.seconds
    assert offload.peak_bytes == pytest.approx(dots.peak_bytes, rel=0.1)
