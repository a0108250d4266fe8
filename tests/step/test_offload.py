"""Offloaded state: it is in host memory between steps, and the numbers are those of a step without offload."""

import functools
import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import pytest

import spanax
import zoo
from spanax.plan.plan import Plan, Schedule
from spanax.step.guard import Guard
from spanax.trace.program import Program
from spanax.train.run import Run

LAYOUTS = {
    "fsdp": {"layout": "fsdp", "mesh": "fsdp=8"},
    "stages": {"layout": "pipeline", "mesh": "pipe=2,data=2", "schedule": Schedule(num_stages=2, microbatches=4)},
}


@functools.cache
def program() -> Program:
    case = zoo.ZOO["gpt"]
    return spanax.trace(build=case.build, optimizer=optax.adamw(1e-2), batch=case.batch(16), loss=case.loss)


def planned(offload: str | None, layout: str = "fsdp") -> Plan:
    request: dict[str, Any] = LAYOUTS[layout]
    devices = spanax.MeshShape.of(request["mesh"]).size
    return spanax.plan(program(), spanax.cluster("cpu", devices), offload=offload, **request)


def batch() -> Any:
    return zoo.ZOO["gpt"].batch(16)


def kinds(run: Run) -> dict[str, set[str]]:
    """The memory kinds of the state's arrays, by kind of leaf; scalars apart."""
    result: dict[str, set[str]] = {}
    for leaf, array in zip(run.program.leaves, run.state, strict=True):
        result.setdefault(leaf.kind if leaf.shape else "scalar", set()).add(array.sharding.memory_kind or "device")
    return result


def values(run: Run) -> list[np.ndarray]:
    return [np.asarray(array) for array in run.arrays().values()]


def is_equal(first: Run, second: Run) -> bool:
    return all(np.array_equal(a, b) for a, b in zip(values(first), values(second), strict=True))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_steps_are_equal_bit_for_bit_and_state_stays_in_host_memory(layout: str) -> None:
    guard = Guard("skip") if layout == "fsdp" else None
    plain, offloaded = (
        spanax.start(program(), planned(offload, layout), seed=3, guard=guard) for offload in (None, "optimizer")
    )
    assert kinds(offloaded) == {"param": {"device"}, "optimizer": {"pinned_host"}, "scalar": {"device"}}
    before = offloaded.state
    for _ in range(2):
        assert offloaded.step(batch())["loss"] == plain.step(batch())["loss"]
    assert all(array.is_deleted() for array in before)  # donated
    assert kinds(offloaded) == {"param": {"device"}, "optimizer": {"pinned_host"}, "scalar": {"device"}}
    assert is_equal(plain, offloaded)
    assert offloaded.evaluate(batch())["loss"] == plain.evaluate(batch())["loss"]
    assert offloaded.unsound() == []


def test_several_steps_of_one_call_are_equal_to_those_without_offload() -> None:
    plain, offloaded = (spanax.start(program(), planned(offload), seed=3) for offload in (None, "optimizer"))
    expected, result = (run.steps([batch()] * 3)["loss"] for run in (plain, offloaded))
    assert np.array_equal(expected, result) and is_equal(plain, offloaded)
    assert kinds(offloaded)["optimizer"] == {"pinned_host"}


@pytest.mark.parametrize(
    ("saved", "restored"),
    [("optimizer", None), (None, "optimizer"), pytest.param("optimizer", "optimizer", marks=pytest.mark.slow)],
)
def test_a_checkpoint_is_restored_to_the_memory_of_its_plan(
    saved: str | None, restored: str | None, tmp_path: Path
) -> None:
    run = spanax.start(program(), planned(saved), seed=3)
    run.step(batch())
    run.save(tmp_path).wait()
    resumed = spanax.restore(program(), planned(restored), tmp_path)
    assert is_equal(run, resumed)
    assert kinds(resumed)["optimizer"] == {"pinned_host" if restored else "device"}
    assert resumed.step(batch())["loss"] == run.step(batch())["loss"]


def test_a_plan_records_the_memory_of_every_array() -> None:
    plain, offloaded = planned(None), planned("optimizer")
    assert "memory_kind" not in plain.to_json() and "offload" not in json.loads(plain.to_json())["schedule"]
    assert Plan.from_json(offloaded.to_json()) == offloaded
    scalars = sum(leaf.local_bytes for leaf in offloaded.leaves if leaf.kind == "optimizer" and not leaf.shape)
    assert offloaded.state_bytes("optimizer") == scalars
    assert offloaded.host_bytes + scalars == plain.state_bytes("optimizer") and plain.host_bytes == 0
    assert offloaded.state_bytes() + offloaded.host_bytes == plain.state_bytes()
    assert "in host memory" in str(offloaded) and "in host memory" not in str(plain)
    assert plain.diff(offloaded)[0] == "offload: () -> ('optimizer',)"


def test_a_plan_file_with_an_array_in_memory_that_it_does_not_offload_is_refused() -> None:
    data = json.loads(planned("optimizer").to_json())
    del data["schedule"]["offload"]
    with pytest.raises(spanax.SpanaxError, match="not a plan file") as caught:
        Plan.from_json(json.dumps(data))
    assert "memory kind 'pinned_host'" in str(caught.value)


@pytest.mark.parametrize(
    ("offload", "match"),
    [
        ("optimiser", "did you mean 'optimizer'"),
        ("activations", "--remat dot_general.1-3@host"),
        ("param", "unknown kind"),
    ],
)
def test_other_kinds_of_state_are_refused(offload: str, match: str) -> None:
    with pytest.raises(spanax.SpanaxError) as caught:
        planned(offload)
    assert match in str(caught.value)


def test_an_optimizer_without_arrays_is_refused() -> None:
    case = zoo.ZOO["mlp"]
    plain = spanax.trace(build=case.build, optimizer=optax.sgd(0.1), batch=case.batch(16), loss=case.loss)
    with pytest.raises(spanax.SpanaxError, match="no arrays to store in host memory"):
        spanax.plan(plain, spanax.cluster("cpu:8"), layout="fsdp", mesh="fsdp=8", offload="optimizer")


def test_evaluations_of_fewer_examples_read_host_memory() -> None:
    plain, offloaded = (spanax.start(program(), planned(offload), seed=3) for offload in (None, "optimizer"))
    small = jax.tree.map(lambda array: array[:8], batch())
    assert offloaded.evaluate(small)["loss"] == plain.evaluate(small)["loss"]
