"""The measured load of experts equals what NumPy counts, under every layout, at the cost of one small reduction."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import spanax
from byo import corpus
from programs import calm_program
from sampling import sampled
from spanax.check.hlo.collectives import collectives
from spanax.step.expert_load import DEVICE_LOAD, EXPERT_LOAD
from spanax.train.run import Run

DIM, EXPERTS, LAYERS, TOP = 8, 8, 3, 2
X = np.random.default_rng(0).normal(size=(32, DIM)).astype(np.float32) + np.linspace(0, 1, DIM, dtype=np.float32)


class Layers(nnx.Module):
    """Layers of experts that add zeros: each router sees the batch."""

    def __init__(self, form: str, rngs: nnx.Rngs):
        normal = nnx.initializers.normal(1.0)
        self.form = form
        self.routers = nnx.Param(normal(rngs.params(), (LAYERS, DIM, EXPERTS)))
        self.up = nnx.Param(normal(rngs.params(), (LAYERS, EXPERTS, DIM, 16)))
        self.down = nnx.Param(jnp.zeros((LAYERS, EXPERTS, 16, DIM)))

    def __call__(self, x: jax.Array) -> jax.Array:
        @jax.checkpoint
        def layer(x: jax.Array, weights: Any) -> tuple[jax.Array, None]:
            return x + self.experts(x, *weights), None

        return jax.lax.scan(layer, x, (self.routers[...], self.up[...], self.down[...]))[0]

    def experts(self, x: jax.Array, router: jax.Array, up: jax.Array, down: jax.Array) -> jax.Array:
        scores = x @ router
        if self.form == "argmax":
            best = jax.nn.one_hot(jnp.argmax(scores, -1), EXPERTS) * jax.nn.softmax(scores)
            return jnp.einsum("ne,nef->nf", best, jnp.einsum("nd,edf,efg->neg", x, up, down))
        gates, chosen = jax.lax.top_k(jax.nn.softmax(scores), TOP)
        if self.form == "dense":
            return jnp.einsum("nke,nk,nd,edf,efg->ng", jax.nn.one_hot(chosen, EXPERTS), gates, x, up, down)
        order = jnp.argsort(chosen.reshape(-1))
        sizes = jnp.bincount(chosen.reshape(-1), length=EXPERTS).astype(jnp.int32)
        rows = jax.lax.ragged_dot(jax.lax.ragged_dot(x[order // TOP], up, sizes), down, sizes)
        return jnp.zeros_like(x).at[order // TOP].add(rows * gates.reshape(-1)[order][:, None])


@functools.cache
def layers(form: str, microbatches: int) -> spanax.Program:
    return spanax.trace(
        build=lambda rngs: Layers(form, rngs),
        optimizer=optax.sgd(0.1),
        batch=X,
        loss=lambda model, x: jnp.square(model(x)).mean(),
        microbatches=microbatches,
    )


def expected(routers: np.ndarray, top: int, ways: int) -> dict[str, float]:
    counts = np.stack([np.bincount(np.argsort(-(X @ each))[:, :top].ravel(), minlength=EXPERTS) for each in routers])
    of_devices = counts.reshape(LAYERS, ways, -1).sum(2)
    devices = (of_devices.max(1) / of_devices.mean(1)).mean()
    return {EXPERT_LOAD: (counts.max(1) / counts.mean(1)).max(), DEVICE_LOAD: devices}


CASES = [
    (form, mesh, microbatches)
    for form in ("sorted", "dense", "argmax")
    for mesh in ("data=8", "data=2,expert=4", "expert=2,model=2,data=2")
    for microbatches in (1, 2)
]


@pytest.mark.usefixtures("devices")
@pytest.mark.parametrize(("form", "mesh", "microbatches"), sampled(CASES, [("sorted", "data=2,expert=4", 2)]))
def test_the_load_is_that_of_the_choices(form: str, mesh: str, microbatches: int) -> None:
    program = layers(form, microbatches)
    plan = spanax.plan(program, "cpu:8", mesh=mesh)
    run = spanax.start(program, plan, seed=1)
    run.measures_load = True
    known = expected(np.asarray(run.params()["routers"]), 1 if form == "argmax" else TOP, plan.mesh.ways(["expert"]))
    metrics = run.step(X)
    measured = {name: float(metrics[name]) for name in known if name in metrics}
    assert measured == pytest.approx({name: known[name] for name in measured})
    assert (DEVICE_LOAD in measured) == ("expert" in mesh) and known[EXPERT_LOAD] > 1.1


def moved(program: spanax.Program, plan: spanax.Plan, *, measures_load: bool) -> tuple[int, float]:
    run = Run(program, plan, plan.mesh.build(), [], measures_load=measures_load)
    (module,) = run.compile().runtime_executable().hlo_modules()
    found = [*collectives(module.as_serialized_hlo_module_proto(), plan.mesh)]
    return sum(each.runs for each in found), sum(each.runs * each.num_bytes for each in found)


FORMS = ["moe", "mixtral", "indexed-moe", "dropless", "sorted_moe", "sorted_taken"]


@pytest.mark.usefixtures("devices")
@pytest.mark.parametrize("name", sampled(FORMS, []))
def test_measuring_adds_one_reduction_of_the_counts_to_a_step(name: str) -> None:
    """After the loop over layers: nothing is sent in it."""
    program = corpus.program(name) if name.startswith("sorted") else calm_program(name)
    plan = spanax.plan(program, "cpu:8", mesh="data=2,expert=4")
    plain, measuring = (moved(program, plan, measures_load=measures) for measures in (False, True))
    assert len(program.step.chosen_experts) in (1, 2)
    assert measuring[0] - plain[0] <= len(program.step.chosen_experts) and measuring[1] - plain[1] <= 4 * 8 * 3


def test_without_experts_nothing_is_measured() -> None:
    assert not calm_program("llama").step.chosen_experts
