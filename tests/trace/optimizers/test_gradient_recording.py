"""Gradients as they reach the optimizer: of any model, and of a train step of the user's own."""

import jax
import numpy as np
import optax
import pytest
from flax import nnx

import spanax
import zoo
from programs import zoo_program
from spanax.errors import SpanaxError
from spanax.trace.optimizers.wrapped import PREFIX
from spanax.trace.program import Program


def own_step(model: nnx.Module, optimizer: nnx.Optimizer, batch: dict) -> dict:
    loss, grads = nnx.value_and_grad(zoo.squared_error)(model, batch)
    optimizer.update(model, grads)
    return {"loss": loss}


def by_own_step() -> Program:
    case = zoo.ZOO["mlp"]
    return spanax.trace(build=case.build, optimizer=case.optimizer, batch=case.batch(16), train_step=own_step)


@pytest.mark.parametrize("name", ["mlp", "gpt", "cnn", "tied"])
def test_every_parameter_has_its_gradient(name: str) -> None:
    program = zoo_program(name)
    recorded = program.variant(records_gradients=True)
    retained = {leaf.path.removeprefix(PREFIX): leaf for leaf in recorded.leaves if leaf.path.startswith(PREFIX)}
    assert retained.keys() == {leaf.path for leaf in program.leaves if leaf.kind == "param"}
    axes = {leaf.path: leaf.axes for leaf in program.leaves}
    assert all(leaf.axes == axes[path] and leaf.kind == "optimizer" for path, leaf in retained.items())


@pytest.mark.parametrize("built", [lambda: zoo_program("mlp"), by_own_step], ids=["loss", "train_step"])
def test_recorded_gradients_equal_the_gradients(built, devices: list[jax.Device]) -> None:
    recorded = built().variant(records_gradients=True)
    run = spanax.start(recorded, spanax.plan(recorded, spanax.cluster("cpu:1"), layout="data"))
    model, batch = run.model(), zoo.ZOO["mlp"].batch(16)
    run.step(batch)
    result = run.arrays("optimizer")
    _, expected = nnx.value_and_grad(zoo.squared_error)(model, batch)
    for path, leaf in jax.tree_util.tree_flatten_with_path(nnx.to_pure_dict(nnx.state(expected)))[0]:
        name = jax.tree_util.keystr(path, simple=True, separator=".")
        np.testing.assert_allclose(result[PREFIX + name], leaf, rtol=1e-5, atol=1e-7)


def test_policy_parts_and_names_are_preserved() -> None:
    case = zoo.ZOO["gpt"]
    program = spanax.trace(
        build=case.build, optimizer=case.optimizer, batch=case.batch(16), loss=case.loss, remat="full", microbatches=2
    ).rename({"vocab": "words"})
    recorded = program.variant(records_gradients=True)
    assert (recorded.remat, recorded.microbatches) == ("full", 2)
    assert next(leaf for leaf in recorded.leaves if leaf.path == PREFIX + "embed").axes == ("words", "embed")


def test_an_optimizer_of_another_kind_raises() -> None:
    class Mine(nnx.Optimizer):
        pass

    case = zoo.ZOO["mlp"]
    program = spanax.trace(
        build=case.build,
        optimizer=lambda model: Mine(model, optax.sgd(0.1), wrt=nnx.Param),
        batch=case.batch(16),
        loss=case.loss,
    )
    with pytest.raises(SpanaxError, match="gradients that a Mine receives"):
        program.variant(records_gradients=True)
