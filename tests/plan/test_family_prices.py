"""The price of a layout in a search equals its price alone, whatever meshes it is priced with."""

import functools
import random
import sys
from collections import Counter
from typing import Any

import jax
import optax
import pytest
from flax import nnx

import spanax
import zoo
from byo import corpus
from programs import workload, zoo_program
from spanax.plan.candidate import Candidate, Search, plan_of
from spanax.plan.evaluate import evaluate
from spanax.plan.search import search
from spanax.plan.space import Rejections, families
from spanax.plan.spmd.sharded_program import joined_step
from spanax.trace.program import Program

EVERYTHING = 1_000_000
SAMPLED = 10


def padded(name: str) -> Program:
    """A model with 8 heads, padded to 16: a mesh axis of 16 devices would not divide them."""
    program = zoo_program(name)
    return program.variant(padded=(("heads", 16),))


@functools.cache
def in_a_list(block: Any, width: int, count: int) -> Program:
    """A model whose equal blocks are in a list: each has classes of its own."""
    build = lambda rngs: zoo.Decoder(rngs, [block] * count, width)  # noqa: E731
    return spanax.trace(build=build, optimizer=optax.adamw(1e-3), batch=zoo.TEXT(16), loss=zoo.cross_entropy)


@functools.cache
def in_a_chain() -> Program:
    """Matrices one after the other, of which a layout shards every other one."""
    build = lambda rngs: nnx.List([nnx.Linear(64, 64, rngs=rngs) for _ in range(8)])  # noqa: E731
    loss = lambda layers, batch: (functools.reduce(lambda x, layer: layer(x), layers, batch) ** 2).mean()  # noqa: E731
    batch = jax.ShapeDtypeStruct((16, 64), "float32")
    return spanax.trace(build=build, optimizer=optax.adamw(1e-3), batch=batch, loss=loss)


PLACES: dict[str, tuple[Any, str, dict[str, Any]]] = {
    "language model, GPUs": (lambda: workload("gpt-nano"), "a100:2x8", {}),
    "language model in chunks": (
        lambda: chunked(workload("gpt-nano")),
        "v5e:2x2",
        {"pipeline": False, "remat": ("none",)},
    ),
    "experts, simulated": (lambda: workload("moe-nano"), "cpu:8", {"remat": ("full",)}),
    "convolutions, TPUs": (lambda: zoo_program("cnn"), "v5e:2x4", {}),
    "offloaded moments": (lambda: workload("gpt-nano"), "h100:8", {"offload": ("optimizer",), "remat": ("none",)}),
    "blocks in a list, GPUs": (lambda: in_a_list(zoo.LlamaBlock, 64, 4), "a100:2x8", {"remat": ("none",)}),
    "layers in a chain": (in_a_chain, "v5e:2x4", {"remat": ("none",)}),
    "padded heads": (lambda: padded("gpt"), "a100:2x8", {"remat": ("none",)}),
}


def chunked(program: Program) -> Program:
    return program.variant(loss_chunks=4)


@functools.cache
def searched(place: str) -> Search:
    make, cluster, options = PLACES[place]
    return search(make(), spanax.cluster(cluster), top=EVERYTHING, assign=False, **options)


def sampled(place: str) -> list[Candidate]:
    """Candidates at random, the same every time: of every remat policy, with and without stages and rings.

    The first one with `groups`, of which there are few, is always among them.
    """
    result = searched(place)
    ranked = [*result.candidates, *result.too_large]
    grouped = [candidate for candidate in ranked if "groups" in candidate.mesh.names]
    return [*random.Random(place).sample(ranked, min(SAMPLED, len(ranked))), *grouped[:1]]


@pytest.mark.parametrize("place", PLACES)
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


@pytest.mark.slow
def test_meshes_on_which_experts_are_sent_rows_are_priced_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two choices of four devices are sent, and tokens gathered for two."""
    model = corpus.model("sorted_moe")
    monkeypatch.setattr(sys.modules[model.build.__module__], "EXPERTS", 16)
    program = spanax.trace(build=model.build, optimizer=optax.sgd(0.1), batch=model.batch(64), loss=model.loss)
    options: dict[str, Any] = {"remat": ("none",), "pipeline": False}
    result = search(program, spanax.cluster("h100:8"), top=EVERYTHING, assign=False, **options)
    sharded = [each for each in (*result.candidates, *result.too_large) if each.mesh.ways(["expert"]) > 1]
    assert {each.mesh.ways(["expert"]) for each in sharded} >= {2, 4}
    for candidate in sharded:
        alone = evaluate(result.program_of(candidate), plan_of(result, candidate), result.cluster).candidate
        assert candidate.step_seconds == pytest.approx(alone.step_seconds, rel=1e-9), candidate.mesh


@pytest.mark.parametrize(("place", "share"), [("blocks in a list, GPUs", 2), ("layers in a chain", 2)])
def test_equal_layers_are_priced_once(place: str, share: int) -> None:
    (program,) = searched(place).programs.values()
    rejected: Rejections = Counter()
    resolvers = [family.resolver for family in families(program, spanax.cluster("a100:8"), 16, rejected)]
    assert len(joined_step(program, resolvers).op_groups) * share < len(program.step.op_groups)


def test_the_samples_have_stages_rings_and_every_policy() -> None:
    candidates = [candidate for place in PLACES for candidate in sampled(place)]
    assert {candidate.context for candidate in candidates} >= {"ring", "gathered"}
    assert {candidate.remat for candidate in candidates} >= {"none", "dots", "full"}
    assert {candidate.schedule for candidate in candidates} >= {"1f1b", "interleaved", "zero-bubble"}
    assert {axis for candidate in candidates for axis in candidate.mesh.names} == set(spanax_axes())
    assert any(candidate.sequence for candidate in candidates)


def spanax_axes() -> tuple[str, ...]:
    return ("data", "fsdp", "expert", "context", "model", "groups")
