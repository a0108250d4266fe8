"""Values that a search saves one by one: where, in how many layers, and what it traces for it."""

import functools
import itertools
import math
from dataclasses import replace
from typing import Any

import jax
import optax
import pytest

import spanax
from spanax.models import gpt
from spanax.plan.candidate import Candidate, Search
from spanax.plan.candidates import saved_values
from spanax.plan.candidates.request import Request
from spanax.plan.candidates.saved_values import with_saved_values
from spanax.plan.choose import chosen, searched
from spanax.plan.evaluate import evaluate
from spanax.plan.plan import Plan, Schedule
from spanax.plan.reason import Code, Reason
from spanax.trace.program import Program

MACHINE = spanax.cluster("v5e:2x4")
OPEN = Request(attention="plain", loss_chunks=1).scheduled(microbatches=1)
REQUEST = replace(OPEN, layout="fsdp", mesh="fsdp=8")
L = 8


@functools.cache
def program(num_layers: int = L) -> Program:
    config = gpt.GPTConfig(256, seq_len=512, num_layers=num_layers, num_heads=8, embed_dim=1024)
    tokens = {name: jax.ShapeDtypeStruct((64, 512), "int32") for name in ("inputs", "targets")}
    return spanax.trace(build=lambda rngs: gpt.GPT(config, rngs), optimizer=optax.sgd(0.1), batch=tokens, loss=gpt.loss)


@functools.cache
def under(remat: str) -> Candidate:
    """The cost under one policy, with enough memory."""
    machine = replace(MACHINE, memory_bytes=1 << 40)
    result = searched(program(), machine, REQUEST.scheduled(remat=remat))
    return evaluate(program(), chosen(result), machine).candidate


def upper_bytes(remat: str) -> int:
    return under(remat).upper_bytes


def searched_in(memory_bytes: int | None, request: Request = REQUEST) -> Search:
    return searched(program(), replace(MACHINE, memory_bytes=memory_bytes), request)


@functools.cache
def between() -> Search:
    """The search with the memory half-way between `dots`, which does not fit, and `full`, which does."""
    return searched_in((upper_bytes("dots") + upper_bytes("full")) // 2)


def test_what_is_saved_fits_and_is_faster_than_any_number_of_layers_under_a_policy() -> None:
    result, limit = between(), between().cluster.memory_bytes
    best, dots, full = result.best, under("dots"), under("full")
    assert "." in best.remat and 0.97 * limit < upper_bytes(best.remat) <= limit
    counts = (f"full:{count},dots" for count in range(1, L))
    assert best.step_seconds <= under(next(remat for remat in counts if upper_bytes(remat) <= limit)).step_seconds
    assert dots.step_seconds < best.step_seconds < full.step_seconds / (1 + saved_values.SAVED_VALUES_MARGIN)
    assert dots.flops < best.flops < full.flops
    assert result.candidates == (best,)  # not `full` of the same sharding


def test_a_candidate_costs_what_its_plan_does() -> None:
    best = between().best
    assert best == under(best.remat)
    plan = chosen(between())
    assert plan.schedule.remat == best.remat and Plan.from_json(plan.to_json()) == plan
    gain = f"{1 - best.step_seconds / under('full').step_seconds:.0%}"
    assert f"remat {best.remat}: a step takes {gain} less than with the fastest policy of all layers" in plan.why
    evaluation = evaluate(program(), plan, MACHINE)
    assert evaluation.peak_bytes == pytest.approx(best.peak_bytes, abs=8)


def test_an_open_search_chooses_what_a_requested_layout_gets() -> None:
    result = searched(program(), between().cluster, OPEN)
    assert result.best.remat == between().best.remat and result.saved_values == between().saved_values


def test_enough_memory_for_the_fastest_policy_traces_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(saved_values, "_traced", None)  # is not called
    result = searched_in(2 * upper_bytes("none"))
    assert result.best.remat == "none" and result.saved_values is None


def test_a_requested_policy_stays() -> None:
    result = searched_in(between().cluster.memory_bytes, replace(REQUEST, schedule=Schedule(remat="full")))
    assert result.best.remat == "full" and result.saved_values is None


def test_a_search_without_memory_limit_or_fitting_layout_is_unchanged(monkeypatch: pytest.MonkeyPatch) -> None:
    result, nothing = before(), searched_in(1)
    monkeypatch.setattr(saved_values, "_seeds", None)  # is not called
    unlimited = replace(result, cluster=replace(MACHINE, memory_bytes=None))
    for each in (unlimited, nothing):
        assert with_saved_values(each, 0.0) is each


@functools.cache
def before() -> Search:
    """The search without lists of values."""
    memory_bytes = between().cluster.memory_bytes
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(saved_values, "_seeds", lambda *_: [])
        return searched_in(memory_bytes)


def priced(result: Search, monkeypatch: pytest.MonkeyPatch, *, slower: float = 1.0) -> tuple[Search, list[str]]:
    """The search with lists of values, and those that were traced; they are `slower` than they are."""
    traced, price = list[str](), saved_values._priced

    def priced(result: Search, seed: Any, program: Program) -> Any:
        point = price(result, seed, program)
        if "." in program.remat:
            traced.append(program.remat)
            point = replace(point, candidate=replace(point.candidate, step_seconds=slower * point.seconds))
        return point

    monkeypatch.setattr(saved_values, "_priced", priced)
    return with_saved_values(result, 0.0), traced


def test_at_most_three_policies_are_traced(monkeypatch: pytest.MonkeyPatch) -> None:
    assert before().best.remat == "full"
    result, traced = priced(before(), monkeypatch)
    assert result.best == between().best and 1 <= len(traced) <= 3
    assert result.layouts_priced == before().layouts_priced + len(traced)
    assert result.rejected.get(Reason(Code.NOT_SAVED), 0) == len(traced) - 1
    assert result.search_seconds > before().search_seconds


def test_a_small_gain_is_not_traced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(saved_values, "SAVED_VALUES_MARGIN", 0.5)
    result, traced = priced(before(), monkeypatch)
    assert result is before() and traced == []


def test_values_in_host_memory_gain_what_the_best_of_all_choices_gains(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nine tenths of it, at least, of all ways to recompute, save, or copy each value; nothing where none fits."""
    found = list[saved_values._Values]()
    unlisted = before()
    monkeypatch.setattr(saved_values._Values, "within", lambda values, limit: found.append(values))
    with_saved_values(unlisted, 0.0, uses_host=True)
    monkeypatch.undo()
    useful = sorted(found[0]._around(math.inf, None)[0])[:7]
    num_bytes = {value: found[0].num_bytes[value] for value in useful}
    computing = (0.01, 0.02)
    host = saved_values._Host(2 * computing[0] / sum(num_bytes.values()), computing)  # hides half of them
    values = replace(found[0], num_bytes=num_bytes, num_layers=1000, host=host)
    places = [*itertools.product((0, 1, 2), repeat=len(num_bytes))]
    (carried,) = values.inputs.values()
    for share in (-0.5, 0.0, 0.3, 0.7, 1.0):
        limit = share * sum(num_bytes.values()) / 2
        least = math.inf
        for row, moves in itertools.product(places, (0, 1)):
            sizes = [(place, num_bytes[value]) for value, place in zip(num_bytes, row, strict=True)]
            kept = {value for value, place in zip(num_bytes, row, strict=True) if place}
            moved = sum(size for place, size in sizes if place == 2) + moves * carried
            if sum(size for place, size in sizes if place == 1) - moves * carried <= limit:
                least = min(least, values._seconds(kept) + host.exposed(moved))
        choice = values._fastest(values._around(limit + host.hidden_bytes, host), host, limit)
        assert (choice is None) == math.isinf(least)
        assert choice is None or values.full - choice.seconds >= 0.9 * (values.full - least)


def test_values_in_host_memory_must_make_a_step_faster_by_a_margin(monkeypatch: pytest.MonkeyPatch) -> None:
    """A link that hides all copies is used if that is worth the margin, and one that hides few is not."""
    fast, slow = (replace(between().cluster, chip=replace(MACHINE.chip, host_bytes_per_second=x)) for x in (1e15, 1e8))
    monkeypatch.setattr(saved_values, "HOST_MARGIN", 0.5)
    assert searched(program(), fast, REQUEST).best == between().best
    monkeypatch.setattr(saved_values, "HOST_MARGIN", 0.0)
    result = searched(program(), fast, REQUEST)
    assert "@host" in result.best.remat and result.best.host_bytes > 0
    assert result.best.step_seconds < between().best.step_seconds
    assert searched(program(), slow, REQUEST).best == between().best
