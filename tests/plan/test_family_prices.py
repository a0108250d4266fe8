"""The price of a layout in a search equals its price alone, whatever meshes it is priced with."""

import dataclasses
import functools
import random
from typing import Any

import pytest

import sampling
import spanax
from programs import workload, zoo_program
from spanax.plan.candidate import Candidate, Search, plan_of
from spanax.plan.evaluate import evaluate
from spanax.plan.search import search
from spanax.trace.program import Program

EVERYTHING = 1_000_000
SAMPLED = 14


def padded(name: str) -> Program:
    """A model with 8 heads, padded to 16: a mesh axis of 16 devices would not divide them."""
    program = zoo_program(name)
    return program.variant(dataclasses.replace(program.form, padded=(("heads", 16),)))


PLACES: dict[str, tuple[Any, str, dict[str, Any]]] = {
    "language model, GPUs": (lambda: workload("gpt-nano"), "a100:2x8", {}),
    "language model, TPUs": (lambda: workload("gpt-nano"), "v5e:2x4", {}),
    "language model in chunks": (
        lambda: chunked(workload("gpt-nano")),
        "v5e:2x2",
        {"pipeline": False, "remat": ("none",)},
    ),
    "tied table": (lambda: zoo_program("tied"), "v5e:2x4", {"remat": ("dots",)}),
    "experts, GPUs": (lambda: workload("moe-nano"), "a100:2x8", {"remat": ("none",)}),
    "experts, simulated": (lambda: workload("moe-nano"), "cpu:8", {"remat": ("full",)}),
    "convolutions, GPUs": (lambda: zoo_program("cnn"), "a100:2x8", {}),
    "convolutions, TPUs": (lambda: zoo_program("cnn"), "v5e:2x4", {}),
    "offloaded moments": (lambda: workload("gpt-nano"), "h100:8", {"offload": ("optimizer",), "remat": ("none",)}),
    "padded heads": (lambda: padded("gpt"), "a100:2x8", {"remat": ("none",)}),
}


QUICK = [place for place in PLACES if place not in ("language model, TPUs", "experts, GPUs", "convolutions, GPUs")]


def chunked(program: Program) -> Program:
    return program.variant(dataclasses.replace(program.form, loss_chunks=4))


@functools.cache
def searched(place: str) -> Search:
    make, cluster, options = PLACES[place]
    return search(make(), spanax.cluster(cluster), top=EVERYTHING, assign=False, **options)


def sampled(place: str) -> list[Candidate]:
    """Candidates at random, the same every time: of every remat policy, with and without stages and rings."""
    result = searched(place)
    ranked = [*result.candidates, *result.too_large]
    return random.Random(place).sample(ranked, min(SAMPLED, len(ranked)))


@pytest.mark.parametrize("place", sampling.sampled(PLACES, QUICK))
def test_the_price_of_a_candidate_equals_its_price_alone(place: str) -> None:
    result = searched(place)
    for candidate in sampled(place):
        program = result.program_of(candidate)
        alone = evaluate(program, plan_of(result, candidate), result.cluster).candidate
        where = (candidate.layout, candidate.mesh, candidate.stages_text, candidate.remat, candidate.microbatches)
        assert candidate.step_seconds == pytest.approx(alone.step_seconds, rel=1e-9), where
        assert candidate.flops == pytest.approx(alone.flops, rel=1e-9), where
        assert candidate.seconds == pytest.approx(alone.seconds, rel=1e-9, abs=1e-9 * alone.step_seconds), where
        assert candidate.hidden == pytest.approx(alone.hidden, rel=1e-9, abs=1e-9 * alone.step_seconds), where
        assert candidate.memory == pytest.approx(alone.memory, rel=1e-9, abs=1), where
        assert candidate.host_bytes == pytest.approx(alone.host_bytes, rel=1e-9, abs=1), where


def test_the_samples_have_stages_rings_and_every_policy() -> None:
    candidates = [candidate for place in QUICK for candidate in sampled(place)]
    assert {candidate.context for candidate in candidates} >= {"ring", "gathered"}
    assert {candidate.remat for candidate in candidates} >= {"none", "dots", "full"}
    assert {candidate.schedule for candidate in candidates} >= {"1f1b", "interleaved", "zero-bubble"}
    assert {axis for candidate in candidates for axis in candidate.mesh.names} == set(spanax_axes())
    assert any(candidate.sequence for candidate in candidates)


def spanax_axes() -> tuple[str, ...]:
    return ("data", "fsdp", "expert", "context", "model")
