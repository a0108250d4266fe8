"""Decisions by the sizes of a mesh: meshes with equal ones have equal shardings, and others do not."""

from collections import Counter

import numpy as np
import pytest

import spanax
from programs import workload, zoo_program
from spanax.models.workloads import load
from spanax.plan.candidates.attention_kernel import with_attention
from spanax.plan.sharding.resolve import resolve
from spanax.plan.sharding.size_decisions import size_decisions
from spanax.plan.space import AXES, families, layout_on
from spanax.plan.spmd.sharded_program import ShardedProgram, ShardingCache
from spanax.trace.program import Program

PLACES = ["gpt-nano", "moe-nano", "tied", "cnn", "flash"]


def program_of(name: str) -> Program:
    if name == "flash":
        traced = load("llama3-8b", batch_size=16, seq_len=1024, num_layers=2).trace(
            learning_rate=1e-3, num_steps=4, compute_dtype="bfloat16"
        )
        return with_attention(traced, spanax.cluster("h100:8"), "flash")
    return workload(name) if name.endswith("-nano") else zoo_program(name)


CASES = [("gpt-nano", "cpu:64"), *((name, "a100:2x8") for name in PLACES)]


@pytest.mark.parametrize(("name", "cluster"), CASES)
def test_the_meshes_of_a_family_have_one_sharding(name: str, cluster: str) -> None:
    program, cache = program_of(name), ShardingCache()
    result = families(program, spanax.cluster(cluster), program.batch_size, Counter())
    signatures = Counter[object]()
    for family in result:
        shared = ShardedProgram(family.resolver, program.step, cache).signature
        signatures[family.storing, family.sequence, shared] += 1
        for sizes in np.unique(family.sizes, axis=1).T.tolist():
            mesh = spanax.MeshShape(tuple(zip(AXES, sizes, strict=True)))
            alone = resolve(program, layout_on(family.storing, family.sequence, mesh), mesh, {})
            assert ShardedProgram(alone, program.step, cache).signature == shared, mesh
    assert len(result) > 4
    # Few families differ in decisions that change no sharding.
    assert len(signatures) >= 0.5 * len(result)


def test_a_lookup_moves_the_table_or_its_rows_depending_on_the_sizes() -> None:
    program = workload("gpt-nano")
    mesh = spanax.MeshShape(tuple(zip(AXES[:5], (2, 2, 1, 1, 2), strict=True)))
    resolver = resolve(program, layout_on("fsdp", False, mesh), mesh, {})
    sizes = np.asarray([[2, 2, 1, 1, 2], [2, 2, 1, 1, 2], [2, 16, 1, 1, 2], [2, 2, 1, 1, 16]]).T
    decisions = size_decisions(resolver, sizes)
    assert (decisions[:, 0] == decisions[:, 1]).all()
    assert (decisions[:, 0] != decisions[:, 2]).any() and (decisions[:, 0] != decisions[:, 3]).any()
