"""Experts: model FLOPs of those that tokens use, ragged matmuls by XLA and by a kernel, and the busiest device."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import spanax
from byo import corpus
from programs import array
from sampling import sampled
from spanax.errors import SpanaxError
from spanax.models import moe
from spanax.models.workloads import text_workload
from spanax.plan.cost.calibration import Assumptions
from spanax.plan.cost.roofline import grouped
from spanax.plan.evaluate import Evaluation, evaluate, model_flops
from spanax.trace.program import Program

TINY = moe.MoEConfig(64, 32, num_layers=2, num_heads=4, num_kv_heads=2, embed_dim=16, mlp_dim=24, num_experts=4)
TOKENS = 8 * TINY.seq_len


@functools.cache
def mixtral(config: moe.MoEConfig = TINY) -> Program:
    return text_workload(moe.Mixtral, moe.loss, config, batch_size=8, nano=True).trace(learning_rate=1e-3, num_steps=10)


def of_experts(num_chosen: int) -> float:
    """FLOPs of three passes over three matrices of every chosen expert."""
    return 3 * 3 * 2.0 * TOKENS * num_chosen * TINY.embed_dim * TINY.mlp_dim


class Experts(nnx.Module):
    """The same experts in four forms: every expert for every token, slots, sorted tokens, a Python loop."""

    def __init__(self, form: str, dim: int, rngs: nnx.Rngs):
        init, shape = nnx.initializers.normal(0.1), (4, dim, dim + dim // 2)
        self.form, self.router = form, nnx.Linear(dim, 4, use_bias=False, rngs=rngs)
        self.up = nnx.Param(init(rngs.params(), shape))
        self.down = nnx.Param(init(rngs.params(), (4, shape[2], dim)))

    def __call__(self, x_ND: jax.Array) -> jax.Array:
        gates, chosen = jax.lax.top_k(jax.nn.softmax(self.router(x_ND)), 2)
        gates_NE = (jax.nn.one_hot(chosen, 4) * gates[..., None]).sum(1)
        if self.form == "dense":
            h = jax.nn.silu(jnp.einsum("nd,edf->nef", x_ND, self.up[...])) * gates_NE[..., None]
            return jnp.einsum("nef,efd->nd", h, self.down[...])
        if self.form == "loop":
            parts = [jax.nn.silu(x_ND @ self.up[e]) @ self.down[e] * gates_NE[:, e, None] for e in range(4)]
            return sum(parts[1:], parts[0])
        if self.form == "slots":
            place = jnp.where(gates_NE > 0, jnp.cumsum(gates_NE > 0, axis=0) - 1, -1)
            slots_NEC = jax.nn.one_hot(place, 48)
            x_ECD = jnp.einsum("nec,nd->ecd", slots_NEC, x_ND)
            y_ECD = jnp.einsum("ecf,efd->ecd", jax.nn.silu(jnp.einsum("ecd,edf->ecf", x_ECD, self.up[...])), self.down)
            return jnp.einsum("nec,ecd->nd", slots_NEC * gates_NE[..., None], y_ECD)
        order = jnp.argsort(chosen.reshape(-1))
        sizes = jnp.bincount(chosen.reshape(-1), length=4).astype(jnp.int32)
        h = jax.nn.silu(jax.lax.ragged_dot(x_ND[order // 2], self.up[...], sizes))
        y = jax.lax.ragged_dot(h, self.down[...], sizes) * gates.reshape(-1)[order][:, None]
        return jnp.zeros_like(x_ND).at[order // 2].add(y)


@functools.cache
def formed(form: str, dim: int = 16, num_tokens: int = 64) -> Program:
    return spanax.trace(
        build=lambda rngs: Experts(form, dim, rngs),
        optimizer=corpus.CALM,
        batch=array(num_tokens, dim),
        loss=lambda model, x: jnp.square(model(x)).mean(),
    )


@pytest.mark.parametrize("form", ["dense", "slots", "sorted"])
def test_model_flops_are_those_of_the_experts_that_tokens_use(form: str) -> None:
    program = formed(form)
    assert model_flops(program) == 3 * 2 * 64 * (16 * 4 + 2 * 2 * 16 * 24)
    assert program.step.active.is_exact


def test_if_no_weight_has_experts_all_products_count_with_a_note() -> None:
    program = formed("loop")
    assert model_flops(program) == 3 * 2 * 64 * (16 * 4 + 4 * 2 * 16 * 24)
    searches = {form: spanax.search(formed(form), spanax.cluster("a100:8")) for form in ("loop", "dense")}
    assert [search.counts_all_experts for search in searches.values()] == [True, False]


@pytest.mark.parametrize("factor", sampled([None, 1.0, 1.25, 2.0], [None, 1.25]))
def test_model_flops_do_not_depend_on_the_capacity(factor: float | None) -> None:
    config = dataclasses.replace(TINY, capacity_factor=factor)
    double, single = (mixtral(dataclasses.replace(config, experts_per_token=count)) for count in (2, 1))
    assert model_flops(double) - model_flops(single) == TINY.num_layers * of_experts(1)


def test_dropped_tokens_do_not_count() -> None:
    half = mixtral(dataclasses.replace(TINY, capacity_factor=0.5))
    assert model_flops(mixtral()) - model_flops(half) == TINY.num_layers * of_experts(1)


# Ragged matmuls


@functools.cache
def ragged(preset: str, mesh: str, on: str = "v5e:2x4") -> Evaluation:
    program, cluster = corpus.program("sorted_moe"), spanax.cluster(on)
    return evaluate(program, spanax.plan(program, cluster, layout=preset, mesh=mesh), cluster)


@pytest.mark.parametrize(
    ("preset", "mesh", "compiled"),
    [
        ("data", "data=8", 6_135_808),
        ("fsdp", "fsdp=8", 6_135_808),
        ("expert", "data=2,expert=4", 3_735_552),
        ("fsdp+tensor", "fsdp=4,model=2", 6_176_768),
    ],
)
def test_ragged_matmuls_are_executed_as_libtpu_compiles_them(preset: str, mesh: str, compiled: int) -> None:
    """Compiled: `spanax check --level 3` of this model, batch of 16, for v5e:2x4, libtpu 0.0.52."""
    assert ragged(preset, mesh).matmul_flops == pytest.approx(compiled, rel=0.02)


@pytest.mark.parametrize(
    ("preset", "mesh", "compiled"),
    [
        ("data", "data=8", 6_135_808),
        ("fsdp", "fsdp=8", 6_135_808),
        ("expert", "data=2,expert=4", 3_776_512),
        ("tensor", "model=8", 13_303_808),
    ],
)
def test_for_cpus_each_device_computes_its_shard_of_the_gradients_of_experts(
    preset: str, mesh: str, compiled: int
) -> None:
    """Compiled: `spanax check --level 2` of this model, batch of 16, for cpu:8, JAX 0.10.2."""
    assert ragged(preset, mesh, "cpu:8").matmul_flops == pytest.approx(compiled, rel=0.01)


@pytest.mark.parametrize(
    ("on", "kind", "compiled"),
    [("h100:8", "all-to-all", 33_792), ("h100:8", "all-gather", 3_136), ("cpu:8", "all-gather", 35_840)],
)
def test_rows_are_sent_where_the_compiler_can_and_tokens_are_gathered_elsewhere(
    on: str, kind: str, compiled: int
) -> None:
    """Compiled: `spanax check` of this model, batch of 16, JAX 0.10.2."""
    assert ragged("expert", "data=2,expert=4", on).collectives["expert"][kind] == pytest.approx(compiled, rel=0.04)


def test_a_kernel_multiplies_each_row_by_the_matrix_of_its_group() -> None:
    terms = ragged("data", "data=8").terms
    before, after = terms.matmuls, grouped(terms).matmuls
    rows = before.groups > 1
    assert rows.sum() == 6 and set(before.groups[rows]) == {4.0}
    np.testing.assert_array_equal(after.flops[rows] * 4, before.flops[rows])
    np.testing.assert_array_equal(after.sizes.prod(1)[rows] * 2, after.flops[rows])
    np.testing.assert_array_equal(after.sizes[~rows], before.sizes[~rows])


@functools.cache
def planned(program: Program, cluster: str, layout: str, mesh: str) -> spanax.Plan:
    return spanax.plan(program, cluster, layout=layout, mesh=mesh)


def seconds(program: Program, cluster: str, layout: str, mesh: str, **constants: Any) -> dict[str, float]:
    plan = planned(program, cluster, layout, mesh)
    return evaluate(program, plan, spanax.cluster(cluster), Assumptions(**constants)).candidate.seconds


@functools.cache
def large(num_chosen: int, factor: float | None = 1.0) -> Program:
    config = moe.MoEConfig(
        256, 512, 2, 8, 8, embed_dim=1024, mlp_dim=2048, experts_per_token=num_chosen, capacity_factor=factor
    )
    workload = text_workload(moe.Mixtral, moe.loss, config, batch_size=64, nano=True)
    return workload.trace(learning_rate=1e-3, num_steps=10)


def test_the_busiest_device_determines_the_step_only_where_experts_are_sharded() -> None:
    def costs(layout: str, mesh: str) -> list[dict[str, float]]:
        return [seconds(large(2), "h100:8", layout, mesh, imbalance=load) for load in (1.0, 1.5, 3.0)]

    sharded, replicated = costs("expert", "data=2,expert=4"), costs("data", "data=8")
    for term in ("matmuls", "activations between devices"):
        values = [each[term] for each in sharded]
        assert values == sorted(values) and len(set(values)) == 3
    assert replicated[0] == replicated[1] == replicated[2]


def test_ragged_matmuls_of_the_busiest_device_take_longer() -> None:
    """Where they are narrow, too: more rows of one product are not many products, as vector units would compute."""
    narrow, wide = (
        [seconds(program, "h100:8", "expert", "data=2,expert=4", imbalance=load)["matmuls"] for load in (1.0, 1.5, 3.0)]
        for program in (corpus.program("sorted_moe"), formed("sorted", 1024, 16384))
    )
    assert narrow == sorted(narrow)
    assert wide[0] < wide[1] < wide[2]


def test_less_than_the_mean_is_refused() -> None:
    with pytest.raises(SpanaxError, match=r"imbalance is 0\.9"):
        Assumptions(imbalance=0.9)
