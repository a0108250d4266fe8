"""The price that a plan keeps: what is said of each array adds up to what is said of all, and it places nothing."""

import json
from dataclasses import replace

import pytest

from programs import zoo_program
from spanax.hardware.chip import Chip
from spanax.hardware.cluster import Cluster, cluster
from spanax.plan.candidate import Candidate
from spanax.plan.choose import plan
from spanax.plan.evaluate import evaluate
from spanax.plan.plan import Plan, path_pattern
from spanax.plan.search import search


@pytest.mark.parametrize(
    "name, mesh", [("gpt", "fsdp=8"), ("gpt", "data=4,model=2"), ("gpt", "pipe=2,data=4"), ("mlp", "data=8")]
)
def test_what_moves_of_each_parameter_adds_up(name: str, mesh: str) -> None:
    machine = cluster("cpu:8")
    built = plan(zoo_program(name), machine, mesh=mesh)
    price = evaluate(zoo_program(name), built, machine).prediction
    assert price is not None and price.moved_of.keys() == {leaf.path for leaf in built.leaves if leaf.kind == "param"}
    over = "fsdp" if "fsdp" in mesh else "data"
    for kind in ("all-gather", "reduce-scatter", "all-reduce"):
        of_each = sum(moved.get(over, {}).get(kind, 0) for moved in price.moved_of.values())
        in_all = price.moved.get(over, {}).get(kind, 0)
        # Beside parameters move the loss, the norm of the gradients, and a row of numbers of the batch.
        assert 0 <= in_all - of_each <= 4096, (kind, in_all, of_each)
    assert sum(price.moved[over].values()) > 1000


def test_equal_blocks_are_told_of_by_the_first() -> None:
    built = plan(zoo_program("gpt-unrolled"), cluster("cpu:8"), mesh="fsdp=8")
    price = evaluate(zoo_program("gpt-unrolled"), built, cluster("cpu:8")).prediction
    assert price is not None
    reported = {path_pattern(path) for path in price.moved_of}
    assert reported == {path_pattern(leaf.path) for leaf in built.leaves if leaf.kind == "param"}
    assert len(reported) == len(price.moved_of) < sum(leaf.kind == "param" for leaf in built.leaves)


def test_a_price_is_kept_and_makes_no_plan_another() -> None:
    machine = cluster("h100:8")
    built = plan(zoo_program("mlp"), machine, mesh="fsdp=8")
    with_price = replace(built, price=evaluate(zoo_program("mlp"), built, machine).prediction)
    read = Plan.from_json(with_price.to_json())
    assert read == with_price == built and hash(built) == hash(with_price) and not built.diff(with_price)
    assert read.price == with_price.price and read.price is not None
    assert read.price.step_seconds == pytest.approx(sum(read.price.seconds.values())) and read.price.cluster == "h100:8"
    assert "price" not in json.loads(built.to_json())
    broken = json.loads(with_price.to_json())
    broken["price"]["memory"] = {"parameters": "many"}
    with pytest.raises(ValueError, match="this is not a plan file"):
        Plan.from_json(json.dumps(broken))


def test_nobody_knows_how_long_a_step_takes_on_an_unknown_chip() -> None:
    machine = cluster("cpu:8")
    unknown = Cluster(Chip("odd"), 8)
    built = plan(zoo_program("mlp"), machine, mesh="data=8")
    assert evaluate(zoo_program("mlp"), built, unknown).prediction is None


def test_the_fastest_of_every_kind_of_layout_is_kept_where_it_is_asked_for() -> None:
    program, machine = zoo_program("mlp"), cluster("h100:8")
    every, few, kinds = (
        search(program, machine, **asked) for asked in ({"top": 100_000}, {"top": 3}, {"top": 3, "each": True})
    )

    def kind(candidate: Candidate) -> tuple[object, ...]:
        return (
            candidate.layout,
            candidate.storing,
            candidate.num_stages > 1,
            frozenset(axis for axis, size in candidate.mesh.axes if size > 1),
        )

    assert kinds.candidates[:3] == few.candidates == every.candidates[:3]
    assert set(map(kind, kinds.candidates)) == set(map(kind, every.candidates)) and len(kinds.candidates) > 10
    firsts = {kind(candidate): candidate for candidate in reversed(every.candidates)}
    assert all(candidate in few.candidates or candidate == firsts[kind(candidate)] for candidate in kinds.candidates)
    assert [candidate.step_seconds for candidate in kinds.candidates] == sorted(
        candidate.step_seconds for candidate in kinds.candidates
    )
