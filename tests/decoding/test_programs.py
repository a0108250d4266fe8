"""Generation is planned as the compiler partitions it, and priced for numbers of sequences that were not traced."""

import json
from dataclasses import replace

import jax
import optax
import pytest

import spanax
from spanax import cli
from spanax.decoding.programs import generation_programs
from spanax.errors import DecodeError
from spanax.models.workloads import load
from spanax.plan.advice.generation import GenerationPrograms, generation_plan, most_sequences


def programs(num_sequences: int, name: str = "llama-nano") -> GenerationPrograms:
    return generation_programs(load(name, batch_size=num_sequences, seq_len=64))


@pytest.mark.parametrize("mesh", ["data=8", "data=4,model=2", "fsdp=4,model=2"])
def test_state_flops_and_collectives_are_those_of_the_compiled_step(mesh: str) -> None:
    """The logits, which the check returns replicated, are gathered in addition."""
    logits = 8 * 256 * 4
    for program in (programs(8).step, programs(8).prefill):
        plan = spanax.plan(program, "cpu:8", mesh=mesh)
        report = spanax.check(program, plan, "cpu:8", level=2)
        compiled = report.compiled
        assert compiled is not None
        assert (report.predicted.state_bytes, report.predicted.flops) == (compiled.state_bytes, compiled.flops)
        for axis, moved in compiled.collectives.items():
            predicted = report.predicted.collectives.get(axis, {})
            assert moved.get("all-reduce") == predicted.get("all-reduce")
            assert moved.get("all-gather", 0) - predicted.get("all-gather", 0) <= logits


def test_more_sequences_are_priced_as_if_they_were_traced() -> None:
    cluster = spanax.cluster("a100:8")
    traced = programs(8)
    plan = generation_plan(traced, cluster)
    best = plan.best
    assert best is not None
    assert best.step.memory["activations"] < best.cache_bytes  # a loop over layers updates the caches in place
    assert best.cache_bytes * cluster.num_devices == 8 * traced.cache_bytes
    most = most_sequences(plan)
    assert most is not None
    options = {"layout": best.step.layout, "mesh": str(best.step.whole_mesh)}
    scaled, again = (
        generation_plan(each, cluster, num_sequences=count, **options).best
        for each, count in ((traced, most), (programs(most), None))
    )
    assert scaled is not None
    assert again is not None
    assert scaled.upper_bytes == pytest.approx(again.upper_bytes, rel=1e-3)
    assert scaled.step.step_seconds == pytest.approx(again.step.step_seconds, rel=1e-6)
    too_many = generation_plan(traced, cluster, num_sequences=most + most // 64 // 8 * 8 + 8, **options)
    assert too_many.best is None
    assert too_many.nearest is not None


def test_layouts_that_store_parameters_are_those_that_do_not_gather_them() -> None:
    """`spanax.generate` gathers parameters once over the axes of the sequences, where they fit."""
    traced = programs(16)
    cluster = spanax.cluster("a100:8")
    assert not any(each.is_gathered for each in generation_plan(traced, cluster).layouts)
    data, requested = (generation_plan(traced, cluster, layout=name).best for name in ("data", "fsdp"))
    assert data is not None
    assert requested is not None
    assert requested.is_gathered
    assert requested.step.layout == "fsdp"
    assert requested.step.step_seconds == data.step.step_seconds
    assert requested.peak_bytes == data.peak_bytes
    small = replace(cluster, memory_bytes=1.9 * data.parameter_bytes)
    stored = generation_plan(traced, small, layout="fsdp")
    assert not (stored.best or stored.nearest).is_gathered
    with pytest.raises(spanax.SpanaxError, match="no layout divides"):
        generation_plan(traced, cluster, layout="pipeline")


def test_the_largest_batch_does_not_depend_on_the_requested_one(capsys: pytest.CaptureFixture[str]) -> None:
    """With one sequence, no dim is known to be that of the sequences."""
    found = set()
    for count in (1, 16):
        cli.main(["plan", "gpt2", "--on", "h100:1", "--generate", "--global-batch-size", str(count), "--json"])
        found.add(json.loads(capsys.readouterr().out)["largest_batch"])
    assert len(found) == 1


def test_parameters_have_the_requested_dtype() -> None:
    workload = load("gpt-nano", batch_size=8, seq_len=64)
    halves = generation_programs(workload, "bfloat16")
    assert halves.dtype == "bfloat16"
    assert 2 * halves.cache_bytes == generation_programs(workload).cache_bytes
    eager = generation_programs(replace(workload, eager_build=True))
    assert [leaf.shape for leaf in eager.step.leaves] == [leaf.shape for leaf in halves.step.leaves]


def test_a_batch_without_tokens_is_an_error() -> None:
    images = spanax.Workload(
        build=load("vit-nano").build, batch=jax.ShapeDtypeStruct((8, 4), "float32"), loss=len, optimizer=optax.sgd(0.1)
    )
    with pytest.raises(DecodeError, match="no tokens"):
        generation_programs(images)
