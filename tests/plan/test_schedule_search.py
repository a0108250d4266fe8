"""Searches with stages: more chunks per stage and the zero-bubble schedule."""

from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import spanax
from pipelines import ranked_layers
from spanax.models.workloads import load
from spanax.plan.candidate import plan_of
from spanax.plan.candidates.grids import grids_of
from spanax.plan.candidates.request import Request
from spanax.plan.choose import searched
from spanax.plan.cost.calibration import Assumptions
from spanax.plan.cost.memory.state import state_of
from spanax.plan.evaluate import LayoutCosts
from spanax.plan.reason import Code, Reason
from spanax.plan.search import search
from spanax.plan.space import families
from spanax.plan.spmd.sharded_program import ShardedProgram


@pytest.fixture(scope="module")
def result() -> spanax.Search:
    program = load("gpt2", batch_size=32, seq_len=256, num_layers=12).trace(learning_rate=1e-3, num_steps=4)
    return search(program, "h100:2x8", remat=("none", "full"), top=100_000, ring=False)


def test_a_search_prices_zero_bubble_and_every_number_of_chunks_without_padding(result: spanax.Search) -> None:
    chunks: dict[tuple[str, int], set[int]] = {}
    for each in result.candidates:
        chunks.setdefault((each.schedule, each.num_stages), set()).add(each.num_chunks)
    assert chunks["zero-bubble", 2] == chunks["zero-bubble", 4] == {1}
    assert chunks["interleaved", 2] == {2, 3, 6} and chunks["interleaved", 4] == {3}


@pytest.mark.parametrize("remat", ["none", "full"])
def test_a_schedule_costs_the_same_as_alone(result: spanax.Search, remat: str) -> None:
    program = result.programs[remat]
    family = families(program, result.cluster, result.batch_size, Counter())[0]
    grids = grids_of(family, result.batch_size, program.batch_size, None, num_layers=12)
    assert grids is not None and {grid.schedule for grid, _ in grids.others} == {"interleaved", "zero-bubble"}
    sharded = ShardedProgram(family.resolver.of(program), program.step)
    layout = LayoutCosts(sharded, state_of(family.resolver), result.cluster, Assumptions())
    plain = layout.costs(grids.plain)
    for grid, columns in grids.others:
        alone, derived = layout.costs(grid), plain.select(columns).scheduled(grid)
        np.testing.assert_allclose(derived.step_seconds, alone.step_seconds, rtol=1e-12)
        np.testing.assert_allclose(derived.flops, alone.flops, rtol=1e-12)
        for name, seconds in alone.terms.items():
            np.testing.assert_allclose(derived.terms[name], seconds, rtol=1e-9, atol=1e-15)


def test_a_zero_bubble_is_not_priced_with_recomputation(result: spanax.Search) -> None:
    """Its weight gradients wait, and with them what remat recomputes for them."""
    assert {each.remat for each in result.candidates if each.schedule == "zero-bubble"} == {"none"}
    assert result.rejected[Reason(Code.STORES_RECOMPUTED)] > 0


def test_a_partial_remat_policy_is_priced_without_stages(result: spanax.Search) -> None:
    program, cluster = next(iter(result.programs.values())), result.cluster
    priced = search(program, cluster, remat=("full:6",), top=100_000, ring=False)
    assert {each.num_stages for each in priced.candidates} == {1} < {each.num_stages for each in result.candidates}
    by_layout = {(each.layout, each.mesh, each.microbatches, each.remat): each for each in result.candidates}
    linear = [each for each in priced.candidates if each.layout in ("data", "fsdp", "hsdp")]
    for each in linear[:3]:
        none, full = (by_layout[each.layout, each.mesh, each.microbatches, remat] for remat in ("none", "full"))
        assert each.flops == pytest.approx((none.flops + full.flops) / 2)
        assert full.peak_bytes < each.peak_bytes < none.peak_bytes
        assert each.peak_bytes == pytest.approx((none.peak_bytes + full.peak_bytes) / 2, rel=0.1)
        assert plan_of(priced, each).schedule.remat == "full:6"


def test_a_zero_bubble_is_shorter_and_takes_more_memory(result: spanax.Search) -> None:
    key = {
        each.schedule: each
        for each in result.candidates
        if (each.layout, each.num_stages, each.microbatches, each.remat) == ("pipeline+data+zero1", 4, 4, "none")
        and dict(each.mesh.axes) == {"data": 2, "fsdp": 2}
        and each.num_chunks == 1
    }
    plain, zero_bubble = key["1f1b"], key["zero-bubble"]
    assert zero_bubble.seconds["bubble"] < plain.seconds["bubble"]
    assert zero_bubble.memory["activations"] == pytest.approx(plain.memory["activations"] * 7 / 4, rel=0.25)


class Deep(nnx.Module):
    """Sixteen layers, one loop."""

    def __init__(self, rngs: nnx.Rngs):
        self.blocks = nnx.split_rngs(splits=16)(nnx.vmap(lambda rngs: nnx.Linear(1024, 1024, rngs=rngs)))(rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        graph, state = nnx.split(self.blocks)
        layers = jax.lax.scan(lambda x, layer: (jnp.tanh(nnx.merge(graph, layer)(x)), None), x, state)
        return jnp.square(layers[0]).mean()


@pytest.mark.parametrize("is_ranked", [False, True])
def test_interleaved_stages_are_rejected_where_the_update_depends_on_the_order_of_layers(is_ranked: bool) -> None:
    program = spanax.trace(
        build=Deep, batch=jax.ShapeDtypeStruct((64, 1024), "float32"), loss=lambda model, x: model(x),
        optimizer=optax.chain(ranked_layers(None), optax.sgd(0.1)) if is_ranked else optax.sgd(0.1),
    )  # fmt: skip
    result = searched(program, spanax.cluster("h100:4x1"), Request(pipeline=True))
    reasons = {reason.detail: count for reason, count in result.rejected.items() if reason.code is Code.NO_CHUNKS}
    assert result.best is not None and result.best.num_stages == 4
    assert result.best.schedule == ("1f1b" if is_ranked else "interleaved")
    detail = "`iota` outside of the layer loop depends on the order of the layers."
    assert [*reasons] == ([detail] if is_ranked else []) and all(count > 10 for count in reasons.values())
