"""Compare: every legal layout runs as priced, in rounds, and is compared with its predicted cost."""

import dataclasses
import json
import re
from typing import Any

import jax
import optax
import pytest

import spanax
import zoo
from programs import zoo_program
from spanax.check.measure import compare as module
from spanax.check.measure.compare import (
    PRUNED,
    Compared,
    Comparison,
    compare,
    layouts,
    pruned,
)
from spanax.commands.compare import CompareCommand, compared
from spanax.displays import told_to
from spanax.errors import SpanaxError
from spanax.plan.candidate import Search
from spanax.plan.reason import Code, Reason
from spanax.show.compare import compared_text

ASKED = CompareCommand("mlp", mesh="fsdp=8", steps=2)

MINE = """
import jax, spanax
from flax import nnx
mine = spanax.Workload(
    build=lambda rngs: nnx.Linear(16, 32, rngs=rngs),
    batch=jax.ShapeDtypeStruct((8, 16), "float32"),
    loss=lambda model, x: (model(x) ** 2).mean(),
)
"""


def mlp(**sizes: int) -> spanax.Workload:
    case = zoo.ZOO["mlp"]
    return spanax.Workload(build=case.build, batch=case.batch(16), loss=case.loss, optimizer=case.optimizer)


def layouts_on(mesh: str = "fsdp=8") -> Search:
    return layouts(zoo_program("mlp"), spanax.cluster("cpu:8"), mesh=spanax.MeshShape.of(mesh))


@pytest.fixture(scope="module")
def answered() -> tuple[str, dict[str, Any]]:
    return compared(ASKED, mlp, jax.devices())


def test_all_legal_layouts_of_a_mesh_are_run() -> None:
    everything = layouts(zoo_program("mlp"), spanax.cluster("cpu:8"), every=True)
    assert all(candidate.num_stages == candidate.microbatches == 1 for candidate in everything.candidates)
    assert {candidate.layout for candidate in layouts_on().candidates} == {"fsdp", "zero1", "zero2"}
    assert {candidate.mesh for candidate in everything.candidates} > {
        candidate.mesh for candidate in layouts_on().candidates
    }
    assert len({(candidate.layout, candidate.mesh) for candidate in everything.candidates}) == len(
        everything.candidates
    )
    assert len(layouts(zoo_program("mlp"), spanax.cluster("cpu:8"), top=3).candidates) == 3


def test_by_default_the_cheapest_and_each_single_strategy_are_run() -> None:
    program, here = zoo_program("gpt"), spanax.cluster("cpu:8")
    everything, few = layouts(program, here, every=True), layouts(program, here)
    assert PRUNED not in everything.rejected
    assert few.rejected[PRUNED] == len(everything.candidates) - len(few.candidates) > len(few.candidates)
    assert few.candidates == pruned(everything.candidates)
    assert few.candidates[: module.CHEAPEST] == everything.candidates[: module.CHEAPEST]
    first = {candidate.layout: candidate for candidate in reversed(everything.candidates)}
    singles = {"data", "zero1", "zero2", "fsdp", "hsdp", "tensor", "context"}
    assert singles == {name for name in first if "+" not in name}
    chosen = [*everything.candidates[: module.CHEAPEST], *(first[name] for name in singles)]
    assert {(candidate.layout, candidate.mesh) for candidate in few.candidates} == {
        (item.layout, item.mesh) for item in chosen
    }
    with pytest.raises(SpanaxError, match="--all compares all"):
        layouts(program, here, top=3, every=True)


def test_a_layout_that_cannot_be_planned_is_excluded_with_a_reason() -> None:
    program = spanax.trace(
        build=zoo.ZOO["mlp"].build, optimizer=optax.sgd(0.1), batch=zoo.VECTORS(16), loss=zoo.squared_error
    )
    here = layouts(program, spanax.cluster("cpu:8"), mesh=spanax.MeshShape.of("fsdp=8"))
    assert "zero1" not in {candidate.layout for candidate in here.candidates} and here.candidates
    assert here.rejected[Reason(Code.NOTHING_STORED)] > 0


def test_the_json_output_has_its_documented_keys(answered: tuple[str, dict[str, Any]]) -> None:
    data = json.loads(json.dumps(answered[1]))
    planned = {"layout", "mesh", "remat", "microbatches", "step_seconds", "seconds", "memory", "collectives", "mfu"}
    measured = {"step_seconds", "seconds", "core_seconds", "state_bytes", "peak_bytes", "collectives"}
    assert len(data["rows"]) == 3 and {row["layout"] for row in data["rows"]} == {"fsdp", "zero1", "zero2"}
    for row in data["rows"]:
        assert planned <= row.keys() and measured == row["measured"].keys()
        assert len(row["measured"]["seconds"]) == 2 and row["measured"]["collectives"]["fsdp"]["all-gather"] > 0
        # The inputs are exactly the state and the batch.
        assert row["measured"]["state_bytes"] == row["state_bytes"] + row["memory"]["batch"]
        assert row["measured"]["peak_bytes"] > row["measured"]["state_bytes"]
    ratios = [row["ratio"] for row in data["rows"]]
    assert ratios == sorted(ratios) and min(ratios) <= 1.0
    assert data["choice_ratio"] in ratios and data["best"]["layout"] == data["rows"][0]["layout"]


def test_the_text_output(answered: tuple[str, dict[str, Any]]) -> None:
    text = answered[0]
    assert "the planner's choice (*)" in text and "fsdp=8" in text and "moved" in text
    lines = text.splitlines()
    assert lines[0] == "3 layouts on cpu:8: batch 16, float32, remat none"
    assert lines[2].startswith("layout") and sum(" * " in line for line in lines) == 1
    assert re.search(r"rank correlation of the predicted and the measured order: -?\d\.\d\d, over 3 layouts\n", text)
    assert (answered[1]["layouts_compared"], answered[1]["layouts_left_out"]) == (3, 0)
    assert (answered[1]["sequence_lengths"], answered[1]["dtypes"], answered[1]["attention"]) == ([], ["float32"], [])


def test_the_rank_correlation_counts_the_layouts_that_were_left_out() -> None:
    searched = dataclasses.replace(layouts_on(), rejected={PRUNED: 49})
    assert ", over 1 of 50 layouts (--all compares all)\n" in compared_text(Comparison(searched, (row(1, 1),)))


def test_a_layout_that_is_slow_comes_last(monkeypatch: pytest.MonkeyPatch) -> None:
    """Time is the run's own: a step that waits is seen to wait, in every round."""
    slow, times = "zero1", iter(range(10**6))

    def took(run: spanax.Run, batch: Any) -> float:
        run.step(batch)
        return 10.0 + next(times) % 2 if run.plan.layout.name == slow else 1.0 + next(times) % 2 / 10

    monkeypatch.setattr(module, "_step_seconds", took)
    rows = compare(layouts_on(), steps=3)
    assert rows[-1].candidate.layout == slow and rows[-1].ratio > 8
    assert all(len(row.seconds) == 3 for row in rows)


def test_every_layout_takes_every_step_from_the_same_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    losses: dict[str, list[float]] = {}

    def took(run: spanax.Run, batch: Any) -> float:
        losses.setdefault(run.plan.layout.name, []).append(float(run.step(batch)["loss"]))
        return 1.0

    monkeypatch.setattr(module, "_step_seconds", took)
    compare(layouts_on(), steps=2)
    assert {name: len(values) for name, values in losses.items()} == dict.fromkeys(losses, 2 + module.WARM_UP)
    first, *others = losses.values()
    assert all(other == pytest.approx(first, rel=1e-5) for other in others) and first[0] > first[-1]


def row(priced: float, ratio: float) -> Compared:
    candidate = dataclasses.replace(layouts_on().candidates[0], step_seconds=priced)
    return Compared(candidate, 0, (ratio,), (2 * ratio,), ratio, 0, 0, {}, {})


def test_the_choice_and_the_ranking_are_evaluated() -> None:
    result = Comparison(layouts_on(), (row(1, 1.2), row(2, 1.0)))
    assert result.choice.ratio == result.choice_core_ratio == 1.2
    for ratios, correlation in (((1, 2, 5), 1), ((9, 2, 1), -1)):
        rows = tuple(row(priced, ratio) for priced, ratio in enumerate(ratios))
        assert Comparison(layouts_on(), rows).rank_correlation == pytest.approx(correlation)
    assert Comparison(layouts_on(), (row(1, 9),)).rank_correlation is None


def test_layouts_that_exceed_the_memory_raise(monkeypatch: pytest.MonkeyPatch) -> None:
    searched = layouts_on()
    monkeypatch.setattr(module, "free_bytes", lambda: 40_000.0)
    with pytest.raises(SpanaxError, match=r"3 layouts need .* at once(.|\n)*--top 1"):
        compare(searched, steps=1)


def test_a_comparison_tells_what_it_does() -> None:
    seen: list[str] = []
    with told_to(seen.append):
        compare(layouts_on(), steps=2)
    assert re.fullmatch(r"compiling 1 of 3: \w+ on \S+", seen[-5]) and seen[-2:] == ["step 1 of 2", "step 2 of 2"]
