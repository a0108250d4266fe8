"""Searches with a sharded sequence: rings are tried, with and without a kernel, and no kernel is repeated."""

from dataclasses import replace

import pytest

import spanax
from spanax.models.workloads import load
from spanax.plan.candidates.request import Request, Scope
from spanax.plan.choose import searched
from spanax.plan.reason import Code, Reason
from spanax.plan.search import search_in


def test_a_sequence_is_sharded_in_blocks_of_a_kernel_and_no_kernel_is_repeated() -> None:
    """16 devices divide neither the one example nor the 8 heads of keys; rings without a kernel are slower."""
    workload = load("llama3-8b", batch_size=1, seq_len=65536, num_layers=2)
    program = workload.trace(learning_rate=1e-3, num_steps=4)
    result = searched(program, spanax.cluster("h100:2x8"), Request(), top=1000)
    assert result.best is not None and result.best.mesh.ways(["context"]) > 1
    assert (result.best.context, {each.context for each in result.candidates}) == ("cudnn", {"cudnn", "ring"})
    assert result.rejected[Reason(Code.KERNEL_REPEATED)] > 0
    presets = [each for each in result.candidates if each.assigned is None]
    names = [(each.storing, each.sequence, each.mesh, each.num_stages, each.context) for each in presets]
    assert len(set(names)) == len(names)


def test_a_ring_may_recompute_more_than_any_other_layout() -> None:
    workload = load("llama3-8b", batch_size=1, seq_len=262144, num_layers=2, vocab_size=1024)
    program = workload.trace(learning_rate=1e-3, num_steps=4, compute_dtype="bfloat16")
    cluster = replace(spanax.cluster("h100:8x8"), memory_bytes=8 << 30)
    scope = Scope(batch_size=program.batch_size, ring=True, distinct=True, top=3)
    result = search_in(program, cluster, replace(scope, fits_first=True), "auto")
    every = search_in(program, cluster, replace(scope, remat=("none", "dots", "full")), "auto")
    assert [(each.mesh, each.remat, each.context) for each in result.candidates] == [
        (each.mesh, each.remat, each.context) for each in every.candidates
    ]
    assert {each.context for each in result.candidates} == {"cudnn", "ring"}
    assert "none" not in {each.remat for each in result.candidates}


def test_a_ring_computes_slower_than_a_kernel_that_exchanges_heads() -> None:
    """Its blocks are compiled, and their scores pass through memory; FLOPs are nearly equal for a causal mask."""
    workload = load("llama3-8b", batch_size=1, seq_len=65536, num_layers=2)
    program = workload.trace(learning_rate=1e-3, num_steps=4, compute_dtype="bfloat16")
    machine = spanax.cluster("h100:8")
    kernel, ring = (
        spanax.search(program, machine, layout=layout, mesh="context=8", attention=attention, remat=("full",)).best
        for layout, attention in (("context", "flash"), ("ring", None))
    )
    assert kernel is not None and ring is not None
    assert ring.seconds["matmuls"] > 2 * kernel.seconds["matmuls"]
    assert abs(ring.flops / kernel.flops - 1) < 0.15


@pytest.mark.parametrize("layout", ["context", "ring"])
def test_a_requested_layout_gets_a_mesh_that_divides_the_batch(layout: str) -> None:
    workload = load("llama3-8b", batch_size=1, seq_len=8192, num_layers=2)
    program = workload.trace(learning_rate=1e-3, num_steps=4)
    assert str(spanax.plan(program, "h100:8", layout=layout).mesh) == "context=8"
