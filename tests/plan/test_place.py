"""Place: the placements of a plan, and the program and the resolver that it was made for."""

import math
from dataclasses import replace

import pytest

from programs import small_gpt
from spanax.errors import SpanaxError
from spanax.hardware.mesh import MeshShape
from spanax.plan.place import as_planned, check_made_for, placed, resolver_of
from spanax.plan.plan import Plan, Schedule
from spanax.plan.presets import layout_named


def planned(layout: str, mesh: str, **options: object) -> Plan:
    shape = MeshShape.of(mesh)
    arguments: dict[str, object] = {"pins": {}, "why": "a test"} | options
    return placed(small_gpt(), layout_named(layout, shape), shape, **arguments)  # type: ignore[arg-type]


def test_every_leaf_has_a_shard_of_its_shape() -> None:
    program, plan = small_gpt(), planned("fsdp+tensor", "fsdp=2,model=2")
    assert [place.path for place in plan.leaves] == [leaf.path for leaf in program.leaves]
    for place in (*plan.leaves, *plan.batch):
        num_shards = [plan.mesh.ways(axes) for axes in place.spec]
        assert place.local_shape == tuple(size // n for size, n in zip(place.shape, num_shards, strict=True)), place
        assert place.local_bytes == place.item_bytes * math.prod(place.local_shape)
    assert plan.state_bytes() < sum(leaf.num_bytes for leaf in program.leaves)


def test_a_plan_resolves_to_its_placements() -> None:
    program, plan = small_gpt(), planned("fsdp+tensor", "fsdp=2,model=2", pins={"vocab": None})
    resolver = resolver_of(program, plan)
    for place, leaf, value in zip(plan.leaves, program.leaves, program.step.graph.body.inputs, strict=False):
        assert resolver.placed(leaf, program.step.axes.classes[value])[0] == place.spec
    assert plan.pins == (("vocab", ()),)


def test_a_program_is_traced_as_planned() -> None:
    plan = planned("data", "data=4", schedule=Schedule(remat="full", microbatches=2))
    program = as_planned(small_gpt(), plan)
    assert (program.remat, program.microbatches) == ("full", 2) and as_planned(program, plan) is program


def test_a_plan_of_another_program_raises() -> None:
    plan = planned("data", "data=4")
    check_made_for(small_gpt(), plan)
    with pytest.raises(SpanaxError, match="the plan was made for another program"):
        check_made_for(small_gpt(num_layers=6), plan)
    with pytest.raises(SpanaxError, match="made for another program"):
        resolver_of(small_gpt(), replace(plan, fingerprint="other"))


def test_a_layout_that_stores_nothing_sharded_raises() -> None:
    with pytest.raises(SpanaxError, match="the optimizer has no arrays: zero1 would shard nothing in storage"):
        planned("zero1", "fsdp=4")


def test_uneven_stages_are_a_note_in_the_plan() -> None:
    shape = MeshShape.of("pipe=2")
    plan = placed(small_gpt(num_layers=3), layout_named("pipeline", shape), shape, pins={}, why="a test",
                  schedule=Schedule(microbatches=4))  # fmt: skip
    assert plan.why == "a test; 3 layers in 2 parts of 2, the last 1 with one fewer"
