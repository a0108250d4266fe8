"""Run: it obeys its plan on the real arrays, compiles once, donates, and gives the model back."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import spanax
import zoo
from sampling import sampled
from spanax.step.placement import assert_placed
from spanax.trace.program import Program
from spanax.train.run import Run

LAYOUTS = [
    ("mlp", "data", "data=8"),
    ("mlp", "zero1", "fsdp=8"),
    ("mlp", "zero2", "fsdp=8"),
    ("mlp", "hsdp", "data=2,fsdp=4"),
    ("dropout", "fsdp+tensor", "fsdp=4,model=2"),
    ("cnn", "fsdp", "fsdp=8"),
]


@functools.cache
def program(name: str) -> Program:
    case = zoo.ZOO[name]
    return spanax.trace(build=case.build, optimizer=case.optimizer, batch=case.batch(16), loss=case.loss)


def plan(program: Program, layout: str, mesh: str) -> spanax.Plan:
    return spanax.plan(program, spanax.cluster("cpu", spanax.MeshShape.of(mesh).size), layout=layout, mesh=mesh)


def start(name: str = "mlp", layout: str = "fsdp", mesh: str = "fsdp=8", **options: Any) -> Run:
    return spanax.start(program(name), plan(program(name), layout, mesh), **options)


def batch(name: str = "mlp") -> dict[str, np.ndarray]:
    return zoo.ZOO[name].batch(16)


def refused(match: str, call: Any) -> str:
    with pytest.raises(spanax.SpanaxError, match=match) as caught:
        call()
    return str(caught.value)


# Where the arrays lie


def misplaced(run: Run) -> list[str]:
    """The leaves whose shardings or shards differ from the plan."""
    return [
        place.path
        for place, array in zip(run.plan.leaves, run.state, strict=True)
        if not array.sharding.is_equivalent_to(place.sharding(run.mesh), array.ndim)
        or {shard.data.shape for shard in array.addressable_shards} != {place.local_shape}
        or len(array.addressable_shards) != run.mesh.size
    ]


@pytest.mark.parametrize(("name", "layout", "mesh"), sampled(LAYOUTS, LAYOUTS[::2]))
def test_the_state_is_sharded_as_planned_before_and_after_steps(name: str, layout: str, mesh: str) -> None:
    run = start(name, layout, mesh)
    assert misplaced(run) == []
    for _ in range(3):
        run.step(batch(name))
    assert misplaced(run) == []
    assert_placed(run.plan, run.state, run.mesh)


def test_arrays_with_other_shardings_are_detected() -> None:
    run = start()
    at = next(i for i, leaf in enumerate(run.plan.leaves) if leaf.path == "up.kernel")
    run.state[at] = jax.device_put(np.asarray(run.state[at]), run.plan.leaves[0].sharding(run.mesh))
    assert misplaced(run) == ["up.kernel"]
    text = refused("`up.kernel` is not sharded as planned", lambda: assert_placed(run.plan, run.state, run.mesh))
    assert "planned P" in text and "(None, 'fsdp')" in text


@pytest.mark.parametrize(("layout", "mesh"), [("zero1", "fsdp=8"), ("fsdp+tensor", "fsdp=4,model=2")])
def test_inputs_and_outputs_of_the_compiled_step_are_as_planned(layout: str, mesh: str) -> None:
    run = start("mlp", layout, mesh)
    compiled = run.lower().compile()
    taken, inputs = compiled.input_shardings[0], compiled.output_shardings
    for place, before, after in zip(run.plan.leaves, taken[0], inputs[0], strict=True):
        for result in (before, after):
            assert result.is_equivalent_to(place.sharding(run.mesh), len(place.shape)), place
    held = compiled.memory_analysis().argument_size_in_bytes
    assert held == run.plan.state_bytes() + sum(leaf.local_bytes for leaf in run.plan.batch)


# One compilation, donated


@pytest.mark.parametrize(("name", "layout", "mesh"), sampled(LAYOUTS[1:], LAYOUTS[2::2]))
def test_steps_compile_once(name: str, layout: str, mesh: str, compilations: list[str]) -> None:
    run, rows = start(name, layout, mesh), batch(name)
    compilations.clear()
    run.step(rows)
    assert len(compilations) == 1
    for _ in range(2):
        run.step(rows)
    assert len(compilations) == 1


def test_the_old_state_is_donated() -> None:
    run = start()
    before = list(run.state)
    run.step(batch())
    assert all(array.is_deleted() for array in before)
    assert not any(array.is_deleted() for array in run.state)


# What comes back


def test_a_restored_model_evaluates_to_the_same_loss() -> None:
    run = start("dropout")
    run.step(batch())
    model = run.model()
    model.eval()
    expected = float(zoo.squared_error(model, batch()))
    assert float(run.evaluate(batch())["loss"]) == pytest.approx(expected, rel=1e-5)
    for path, array in run.params().items():
        result = functools.reduce(getattr, path.split("."), model)[...]
        np.testing.assert_array_equal(result, array)


def test_the_returned_model_is_independent_of_the_run() -> None:
    run = start("dropout")
    model = run.model()
    before = np.asarray(model.up.bias[...])
    model.up.bias.set_value(jnp.full_like(model.up.bias[...], 7))
    run.step(batch())
    run.step(batch())
    np.testing.assert_array_equal(run.model().mid.kernel.shape, model.mid.kernel.shape)
    assert not np.any(np.asarray(run.params()["up.bias"]) == 7) and not np.any(before == 7)
    assert np.isfinite(np.asarray(model(batch()["x"]))).all()


def test_an_evaluation_changes_nothing() -> None:
    run = start("cnn")
    before = {path: np.asarray(array) for path, array in run.arrays().items()}
    first, second = (float(run.evaluate(batch("cnn"))["loss"]) for _ in range(2))
    assert first == second and run.num_steps == 0
    for path, array in run.arrays().items():
        np.testing.assert_array_equal(array, before[path])


def test_an_evaluation_before_the_first_step_is_compiled_before_a_barrier(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gloo connects the devices at the first collective, which may be that of an evaluation."""
    compiled: list[int] = []

    def record(function: Any, arguments: Any, *_: Any) -> Any:
        compiled.append(len(jax.tree.leaves(function.lower(*arguments).out_info)))
        return function

    monkeypatch.setattr("spanax.train.run.compiled_with_barrier", record)
    run = start()
    metrics = run.evaluate(batch())
    assert compiled == [len(jax.tree.leaves(metrics))]


def test_an_evaluation_is_in_evaluation_mode() -> None:
    """Running statistics, and no dropout: not the loss of the step."""
    run = start("cnn")
    model = run.model()
    model.eval()
    evaluated = float(run.evaluate(batch("cnn"))["loss"])
    assert evaluated == pytest.approx(float(zoo.cross_entropy(model, batch("cnn"))), rel=1e-5)
    assert evaluated != pytest.approx(float(run.step(batch("cnn"))["loss"]), rel=1e-3)


def test_metrics_are_the_dict_of_the_step() -> None:
    run = start()
    metrics = run.step(batch())
    assert set(metrics) == {"loss", "grad_norm"}
    assert all(value.shape == () and value.sharding.is_fully_replicated for value in metrics.values())


# The step that Spanax writes, in numbers


def linear(**options: Any) -> Run:
    program = spanax.trace(
        build=zoo.MLP,
        optimizer=optax.chain(optax.trace(decay=0.0), optax.scale(-0.1)),
        batch=batch(),
        loss=zoo.squared_error,
        **options,
    )
    return spanax.start(program, plan(program, "fsdp", "fsdp=2"))


def gradients(run: Run) -> dict[str, np.ndarray]:
    """What the optimizer was given: `optax.trace` without decay keeps it."""
    result = {path: np.asarray(array) for path, array in run.arrays("optimizer").items() if ".trace." in path}
    assert result
    return result


@functools.cache
def plain() -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    run = linear()
    metrics = run.step(batch())
    return metrics, gradients(run)


def test_clipping() -> None:
    norm = float(plain()[0]["grad_norm"])
    run = linear(clip_norm=norm / 4)
    assert float(run.step(batch())["grad_norm"]) == pytest.approx(norm, rel=1e-5)  # before clipping
    for path, gradient in gradients(run).items():
        np.testing.assert_allclose(gradient, plain()[1][path] / 4, rtol=1e-4, atol=1e-7)


def test_half_precision_compute_is_close_and_not_equal() -> None:
    run = linear(compute_dtype=jnp.bfloat16)
    loss = float(run.step(batch())["loss"])
    assert loss == pytest.approx(float(plain()[0]["loss"]), rel=2e-2) and loss != float(plain()[0]["loss"])
    assert {str(array.dtype) for array in run.params().values()} == {"float32"}


def test_statistics_are_updated_by_every_microbatch() -> None:
    program = spanax.trace(
        build=zoo.CNN,
        optimizer=optax.sgd(0.0),
        batch=batch("cnn"),
        loss=zoo.cross_entropy,
        microbatches=2,
        accumulate="mean",
    )
    run = spanax.start(program, plan(program, "data", "data=2"))
    run.step(batch("cnn"))
    model = spanax.start(program, run.plan).model()  # the rate is zero: the parameters are those of the start
    forward = nnx.jit(lambda model, x: model(x))
    for part in (slice(0, None, 2), slice(1, None, 2)):
        forward(model, batch("cnn")["x"][part])
    np.testing.assert_allclose(run.arrays()["stem_norm.mean"], model.stem_norm.mean[...], rtol=1e-4, atol=1e-6)


# What is refused


def test_a_plan_of_another_program() -> None:
    text = refused(
        "the plan was made for another program",
        lambda: spanax.start(program("mlp"), plan(program("cnn"), "data", "data=8")),
    )
    assert "make a plan for this model and batch" in text


def test_too_few_devices() -> None:
    refused("the mesh needs 8 devices, and there are 2", lambda: start(devices=jax.devices()[:2]))


def test_batches_that_were_not_traced() -> None:
    run = start()
    short = {name: rows[:8] for name, rows in batch().items()}
    assert "drop the incomplete batch" in refused("batch leaf 'x' has shape", lambda: run.step(short))
    refused("structure of the batch differs", lambda: run.step({"x": batch()["x"]}))
    integers = {name: rows.astype(np.int32) for name, rows in batch().items()}
    refused("batch leaf 'x' is int32, but was traced as float32", lambda: run.step(integers))
    assert run.num_steps == 0 and not any(array.is_deleted() for array in run.state)


def test_an_evaluation_of_a_custom_step() -> None:
    def step(model: Any, optimizer: Any, rows: Any) -> Any:
        loss, grads = nnx.value_and_grad(zoo.squared_error)(model, rows)
        optimizer.update(model, grads)
        return {"loss": loss}

    program = spanax.trace(build=zoo.MLP, optimizer=optax.sgd(0.1), batch=batch(), train_step=step)
    run = spanax.start(program, plan(program, "fsdp", "fsdp=2"))
    assert np.isfinite(float(run.step(batch())["loss"]))
    assert "loss=..." in refused("this program has no evaluation", lambda: run.evaluate(batch()))


def test_devices_may_be_passed() -> None:
    run = start("mlp", "fsdp", "fsdp=2", devices=jax.devices()[4:6])
    assert {shard.device.id for shard in run.state[1].addressable_shards} == {
        device.id for device in jax.devices()[4:6]
    }
