"""The predicted cost in a plan: the sum over arrays is the total, and it does not affect placement."""

import json
from dataclasses import replace

import pytest

from programs import zoo_program
from spanax.hardware.chip import Chip
from spanax.hardware.cluster import Cluster, cluster
from spanax.plan.candidate import Candidate
from spanax.plan.choose import plan
from spanax.plan.evaluate import evaluate
from spanax.plan.plan import Plan
from spanax.plan.search import search


@pytest.mark.parametrize(
    "name, mesh", [("gpt", "fsdp=8"), ("gpt", "data=4,model=2"), ("gpt", "pipe=2,data=4"), ("mlp", "data=8")]
)
def test_the_traffic_of_parameters_adds_up(name: str, mesh: str) -> None:
    machine = cluster("cpu:8")
    actual = plan(zoo_program(name), machine, mesh=mesh)
    price = evaluate(zoo_program(name), actual, machine).prediction
    assert price is not None and price.moved_of.keys() == {leaf.path for leaf in actual.leaves if leaf.kind == "param"}
    over = "fsdp" if "fsdp" in mesh else "data"
    for kind in ("all-gather", "reduce-scatter", "all-reduce"):
        of_each = sum(moved.get(over, {}).get(kind, 0) for moved in price.moved_of.values())
        in_all = price.moved.get(over, {}).get(kind, 0)
        # Also communicated: the loss, the gradient norm, and a row of the batch.
        assert 0 <= in_all - of_each <= 4096, (kind, in_all, of_each)
    assert sum(price.moved[over].values()) > 1000


def test_a_price_is_saved_and_does_not_change_equality() -> None:
    machine = cluster("h100:8")
    actual = plan(zoo_program("mlp"), machine, mesh="fsdp=8")
    with_price = replace(actual, price=evaluate(zoo_program("mlp"), actual, machine).prediction)
    read = Plan.from_json(with_price.to_json())
    assert read == with_price == actual and hash(actual) == hash(with_price) and not actual.diff(with_price)
    assert read.price == with_price.price and read.price is not None
    assert read.price.step_seconds == pytest.approx(sum(read.price.seconds.values())) and read.price.cluster == "h100:8"
    assert "price" not in json.loads(actual.to_json())
    broken = json.loads(with_price.to_json())
    broken["price"]["memory"] = {"parameters": "many"}
    with pytest.raises(ValueError, match="this is not a plan file"):
        Plan.from_json(json.dumps(broken))


def test_an_unknown_chip_has_no_prediction() -> None:
    machine = cluster("cpu:8")
    unknown = Cluster(Chip("odd"), 8)
    actual = plan(zoo_program("mlp"), machine, mesh="data=8")
    assert evaluate(zoo_program("mlp"), actual, unknown).prediction is None


def test_each_returns_the_fastest_of_every_kind_of_layout() -> None:
    program, machine = zoo_program("mlp"), cluster("h100:8")
    every, few, kinds = (
        search(program, machine, assign=False, **asked)
        for asked in ({"top": 100_000}, {"top": 3}, {"top": 3, "each": True})
    )

    def kind(each: Candidate) -> tuple[object, ...]:
        return (
            each.layout,
            each.storing,
            each.num_stages > 1,
            frozenset(axis for axis, size in each.mesh.axes if size > 1),
        )

    assert kinds.candidates[:3] == few.candidates == every.candidates[:3]
    assert set(map(kind, kinds.candidates)) == set(map(kind, every.candidates)) and len(kinds.candidates) > 10
    firsts = {kind(each): each for each in reversed(every.candidates)}
    assert all(each in few.candidates or each == firsts[kind(each)] for each in kinds.candidates)
    assert [each.step_seconds for each in kinds.candidates] == sorted(each.step_seconds for each in kinds.candidates)
