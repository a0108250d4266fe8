"""Searches with a sharded sequence: rings are tried, and no attention kernel is repeated."""

import spanax
from spanax.models.workloads import load
from spanax.plan.choose import Request, searched
from spanax.plan.reason import Code, Reason


def test_a_search_tries_rings_and_repeats_no_kernel() -> None:
    workload = load("llama3-8b", batch_size=1, seq_len=65536, num_layers=2)
    program = workload.trace(learning_rate=1e-3, num_steps=4)
    result = searched(program, spanax.cluster("h100:2x8"), Request(), top=1000)
    assert {each.context for each in result.candidates} >= {"ring"}
    assert result.rejected[Reason(Code.KERNEL_REPEATED)] > 0
    names = [(each.storing, each.sequence, each.mesh, each.num_stages, each.context) for each in result.candidates]
    assert len(set(names)) == len(names)
