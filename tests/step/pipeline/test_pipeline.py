"""Pipelines: the same numbers as one device, under every schedule; only permutations go from stage to stage."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import spanax
from pipelines import (
    SIZE,
    assert_same,
    numbers,
    planned,
    program,
    ranked_layers,
    reference,
    tokens,
    trained,
)
from sampling import sampled
from spanax.errors import SpanaxError
from spanax.plan.evaluate import evaluate
from spanax.plan.pipeline.stages import AXIS
from spanax.plan.pipeline.ticks import ticks
from spanax.plan.plan import Plan, Schedule
from spanax.plan.presets import PRESETS
from spanax.step.pipeline import pipeline
from spanax.step.sharded_init import init_sharded_state
from spanax.trace.program import Program

SCHEDULES = ("gpipe", "1f1b", "interleaved", "zero-bubble")

QUICK = [("gpt", "zero-bubble", "pipe=2,data=2,model=2", 4)]
"""Every axis at once; `1f1b` is tried with layers that do not divide (test_uneven.py), and `interleaved` below."""


def cases() -> list[tuple[str, str, str, int]]:
    result = []
    for name in ("gpt", "vit"):
        for schedule in SCHEDULES:
            for mesh in ("pipe=2", "pipe=4", "pipe=2,data=2", "pipe=4,data=2", "pipe=2,model=2", "pipe=4,model=2",
                         "pipe=2,data=2,model=2", "pipe=2,fsdp=2,model=2", "pipe=2,fsdp=4"):  # fmt: skip
                if schedule == "interleaved" and "pipe=4" in mesh:
                    continue  # four layers are too few for two chunks on each of four stages
                for count in (4, 8) if "fsdp=4" not in mesh else (4,):
                    result.append((name, schedule, mesh, count))
    return result


@pytest.mark.parametrize(("name", "schedule", "mesh", "count"), sampled(cases(), QUICK))
def test_a_pipeline_gives_the_numbers_of_one_device(name: str, schedule: str, mesh: str, count: int) -> None:
    built = program(name, count)
    run = spanax.start(built, planned(built, mesh, schedule), seed=3)
    assert_same(reference(name, count), trained(run, name))


def test_every_preset_with_stages_is_tried() -> None:
    tried = {frozenset(spanax.MeshShape.of(mesh).names) for _, _, mesh, _ in cases()}
    assert {frozenset(axes) for axes in PRESETS.values() if AXIS in axes} <= tried


@pytest.mark.slow
def test_outputs_of_layers_for_the_head_are_sent_with_activations() -> None:
    """The experts' balance is a result of every layer, and part of the loss."""
    built = program("mixtral", 4)
    run = spanax.start(built, planned(built, "pipe=2,expert=2", "1f1b"), seed=3)
    assert_same(reference("mixtral", 4), trained(run, "mixtral"))


def test_every_stage_runs_only_its_tasks_on_accelerators(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on accelerators; simulated devices that also split a stage otherwise take the others' tasks along."""
    pipelined_loop = pipeline.pipelined_loop
    run_alone = lambda *args, lockstep: pipelined_loop(*args, lockstep=False)  # noqa: E731
    monkeypatch.setattr(pipeline, "pipelined_loop", run_alone)
    built = program("gpt", 4)
    run = spanax.start(built, planned(built, "pipe=2,data=2", "1f1b"), seed=3)
    assert_same(reference("gpt", 4), trained(run, "gpt"))


@pytest.mark.parametrize(
    ("mesh", "schedule", "within"),
    [("pipe=2,data=2,model=2", "1f1b", 0.0), pytest.param("pipe=4,fsdp=2", "gpipe", 0.05, marks=pytest.mark.slow)],
)
def test_bytes_and_flops_of_a_step_equal_the_plan(mesh: str, schedule: str, within: float) -> None:
    built = program("gpt", 4)
    report = spanax.check(built, planned(built, mesh, schedule), spanax.cluster("cpu:8"), level=2)
    reported, result = report.predicted, report.compiled
    assert reported.collectives and result is not None and result.collectives
    assert result.flops == pytest.approx(reported.flops)
    assert result.state_bytes == reported.state_bytes
    assert reported.collectives[AXIS] == {"collective-permute": result.collectives[AXIS]["collective-permute"]}
    for axes, kinds in reported.collectives.items():
        for kind, size in kinds.items():
            assert result.collectives[axes][kind] == pytest.approx(size, rel=within, abs=64), (axes, kind)
    # Only permutations go from stage to stage; the rest are scalars, such as the norm of all gradients.
    across = {axes: kinds for axes, kinds in result.collectives.items() if AXIS in axes.split("+")}
    rest = {(axes, kind): size for axes, kinds in across.items() for kind, size in kinds.items()}
    assert rest.pop((AXIS, "collective-permute")) > 0
    assert all(kind == "all-reduce" and size <= 64 for (_, kind), size in rest.items()), rest


class Deep(nnx.Module):
    """Layers that leave far more than they are given."""

    def __init__(self, rngs: nnx.Rngs):
        self.front = nnx.Linear(1, 16, rngs=rngs)
        self.blocks = nnx.split_rngs(splits=4)(nnx.vmap(lambda rngs: nnx.Linear(16, 16, rngs=rngs)))(rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        graph, state = nnx.split(self.blocks)
        x, _ = jax.lax.scan(lambda x, layer: (jnp.tanh(nnx.merge(graph, layer)(x)), None), self.front(x), state)
        return jnp.square(x).mean()


def deep(rows: int, count: int) -> Program:
    return spanax.trace(
        build=Deep, optimizer=optax.sgd(0.1), batch=jax.ShapeDtypeStruct((rows, 1), "float32"),
        loss=lambda model, x: model(x), microbatches=count,
    )  # fmt: skip


def temporary_bytes(program: Program, plan: Plan) -> int:
    return int(spanax.start(program, plan).compile().memory_analysis().temp_size_in_bytes)


def test_a_stage_stores_the_microbatches_of_its_schedule() -> None:
    """Memory of the compiled step: what a microbatch leaves times the slots of the table, and not more with each."""
    temporaries = {}
    for schedule in ("gpipe", "1f1b"):
        for count in (4, 16):
            program = deep(256 * count, count)
            temporaries[schedule, count] = temporary_bytes(program, planned(program, "pipe=4", schedule))
    assert ticks("gpipe", 4, 16).num_in_flight == 16 and ticks("1f1b", 4, 16).num_in_flight == 4
    assert temporaries["1f1b", 16] < 1.2 * temporaries["1f1b", 4]
    assert temporaries["gpipe", 16] > 2 * temporaries["gpipe", 4]


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved"])
def test_predicted_activations_are_most_of_the_compiled_temporaries(schedule: str) -> None:
    program = deep(1024 * 8, 8)
    plan = planned(program, "pipe=2", schedule)
    predicted = float(evaluate(program, plan, spanax.cluster("cpu:2")).memory.groups["activations"][0])
    assert 0.6 < predicted / temporary_bytes(program, plan) < 1


def test_a_state_is_initialized_in_stages() -> None:
    built = program("gpt", 4)
    plan = planned(built, "pipe=4,model=2", "1f1b")
    place = plan["blocks.up.kernel"]
    assert place.spec == ((AXIS,), (), ("model",)) and place.local_shape == (1, 16, 32)
    mesh = plan.mesh.build()
    for leaf, array in zip(plan.leaves, init_sharded_state(built, plan.leaves, mesh, 0), strict=True):
        assert array.sharding.shard_shape(array.shape) == leaf.local_shape


def test_stages_with_several_chunks_store_layers_from_several_places() -> None:
    """State that is stored by stage is returned and evaluated in the order of the layers."""
    built = program("gpt", 4)
    first, second = (
        spanax.start(built, plan, seed=3)
        for plan in (
            planned(built, "pipe=2", "interleaved"),
            spanax.plan(built, spanax.cluster("cpu:1"), layout="data"),
        )
    )
    index = [leaf.path for leaf in built.leaves].index("blocks.up.kernel")
    retained, shown = np.asarray(first.state[index]), np.asarray(first.params()["blocks.up.kernel"])
    np.testing.assert_array_equal(retained, shown[[0, 2, 1, 3]])
    np.testing.assert_array_equal(shown, np.asarray(second.params()["blocks.up.kernel"]))
    rows = {key: of[:SIZE] for key, of in tokens().items()}
    assert float(first.evaluate(rows)["loss"]) == pytest.approx(float(second.evaluate(rows)["loss"]), rel=1e-6)
    np.testing.assert_array_equal(np.asarray(first.model().blocks.up.kernel[...]), shown)


def test_an_update_by_layer_index_raises() -> None:
    program = spanax.trace(
        build=Watched, optimizer=optax.chain(ranked_layers(None), optax.sgd(0.1)), microbatches=4, accumulate="mean",
        batch=jax.ShapeDtypeStruct((8, 8), "float32"), loss=lambda model, x: model(x),
    )  # fmt: skip
    run = spanax.start(program, planned(program, "pipe=2", "interleaved"))
    with pytest.raises(SpanaxError, match="depends on the order of the layers"):
        run.compile()


@pytest.mark.slow
def test_a_pipeline_can_be_resumed_on_another_mesh(tmp_path: Any) -> None:
    built = program("gpt", 4)
    run = spanax.start(built, planned(built, "pipe=2,data=2", "interleaved"), seed=3)
    rows = {key: of[:SIZE] for key, of in tokens().items()}
    run.step(rows)
    run.save(tmp_path).wait()
    for plan in (
        planned(built, "pipe=2,model=2", "interleaved"),
        planned(built, "pipe=4,model=2", "gpipe"),
        spanax.plan(built, spanax.cluster("cpu:4"), layout="fsdp"),
    ):
        again = spanax.restore(built, plan, tmp_path)
        for path, array in run.arrays().items():
            np.testing.assert_array_equal(numbers(array), numbers(again.arrays()[path]), path)


class Watched(nnx.Module):
    """A penalty on all layers' weights at once, and what every layer made of its input, outside of their loop."""

    def __init__(self, rngs: nnx.Rngs):
        self.blocks = nnx.split_rngs(splits=4)(nnx.vmap(lambda rngs: nnx.Linear(8, 8, rngs=rngs)))(rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        graph, state = nnx.split(self.blocks)

        def layer(x: jax.Array, layer: Any) -> tuple[jax.Array, jax.Array]:
            x = jnp.tanh(nnx.merge(graph, layer)(x))
            return x, jnp.square(x).mean()

        x, sizes = jax.lax.scan(layer, x, state)
        return jnp.square(x).mean() + 0.1 * sizes.max() + 0.01 * jnp.square(self.blocks.kernel[...]).sum()


@pytest.mark.parametrize(("stages", "schedule"), [(2, "gpipe"), (4, "zero-bubble"), (2, "interleaved")])
def test_functions_of_all_layers_equal_one_device(stages: int, schedule: str) -> None:
    rows = np.random.default_rng(0).normal(size=(8, 8)).astype(np.float32)
    built = spanax.trace(
        build=Watched,
        optimizer=optax.sgd(0.1),
        batch=rows,
        loss=lambda model, x: model(x),
        microbatches=4,
        accumulate="mean",
    ).variant(records_gradients=True)
    result = []
    for plan in (
        planned(built, f"pipe={stages}", schedule),
        spanax.plan(built, spanax.cluster("cpu:1"), layout="data"),
    ):
        run = spanax.start(built, plan)
        losses = np.array([float(run.step(rows)["loss"]) for _ in range(2)])
        result.append({"loss": losses} | {path: numbers(array) for path, array in run.arrays().items()})
    assert_same(result[1], result[0])


class Chained(nnx.Module):
    """The head counts what the front then reads: no pipeline can overlap two microbatches."""

    def __init__(self, rngs: nnx.Rngs):
        self.blocks = nnx.split_rngs(splits=4)(nnx.vmap(lambda rngs: nnx.Linear(8, 8, rngs=rngs)))(rngs)
        self.mean = nnx.BatchStat(jnp.zeros(8))

    def __call__(self, x: jax.Array) -> jax.Array:
        graph, state = nnx.split(self.blocks)
        x, _ = jax.lax.scan(lambda x, layer: (nnx.merge(graph, layer)(x), None), x - self.mean[...], state)
        self.mean[...] = x.mean(0)
        return x


REFUSED: dict[str, tuple[Any, str, Schedule, str]] = {
    "stages over layers": (
        lambda: program("gpt", 4), "pipe=8", Schedule(microbatches=4), "layers (4) is not divisible by 8",
    ),
    "one microbatch": (lambda: program("gpt", 1), "pipe=2,data=4", Schedule(microbatches=1), "needs microbatches"),
    "no such microbatches": (lambda: program("gpt", 1), "pipe=2,data=4", Schedule(microbatches=3), "are 1, 2, 4"),
    "too few": (
        lambda: program("gpt", 1), "pipe=4,data=2", Schedule(microbatches=2, pipeline="interleaved", num_chunks=2),
        "not a multiple of 4 stages",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_an_unsupported_pipeline_raises(name: str) -> None:
    built, mesh, schedule, reported = REFUSED[name]
    with pytest.raises(SpanaxError, match=reported.replace("(", r"\(").replace(")", r"\)")):
        spanax.plan(built(), spanax.cluster("cpu:8"), mesh=mesh, schedule=schedule)


def traced_chain() -> Program:
    return spanax.trace(
        build=Chained, optimizer=optax.sgd(0.1), batch=jax.ShapeDtypeStruct((8, 8), "float32"),
        loss=lambda model, x: (model(x) ** 2).mean(), microbatches=4, accumulate="mean",
    )  # fmt: skip


def test_state_from_the_head_to_the_next_microbatch_raises() -> None:
    built = traced_chain()
    run = spanax.start(built, planned(built, "pipe=2", "1f1b"))
    with pytest.raises(SpanaxError, match="from the head of one microbatch to the front of the next"):
        run.compile()
