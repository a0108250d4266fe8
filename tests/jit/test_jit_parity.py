"""Parity: a train step under `spanax.jit` on eight devices gives the numbers of `nnx.jit` on one, objects included."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest
from flax import nnx

import spanax
import zoo
from train.test_parity import LOOSER, MATRIX, NOUGHT, numbers

STEPS, SIZE = 20, 16
TOLERANCE, OF_STATE = 2e-5, 5e-4
"""Largest difference over the largest value, for the losses and for each array of the objects after 20 steps."""

QUICK = {"mlp": "data", "dropout": "fsdp+tensor", "cnn": "fsdp"}
"""What is run in every test; `slow` is all of it."""


def cases() -> list[Any]:
    result = []
    for name, layouts in MATRIX.items():
        quick = {QUICK[name]} if name in QUICK else set()
        for layout, mesh in layouts:
            marks = () if layout in quick else pytest.mark.slow
            quick.discard(layout)
            result.append(pytest.param(name, layout, mesh, marks=marks, id=f"{name}-{layout}-{mesh}"))
    return result


def train_step(name: str, value_and_grad: Callable[..., Any] = nnx.value_and_grad) -> Callable[..., Any]:
    """The train step that a user of `nnx.jit` writes around the loss of a model, which closes over the batch."""
    case = zoo.ZOO[name]

    def train_step(model: Any, optimizer: Any, batch: Any) -> Any:
        def loss(model: Any) -> Any:
            returned = case.loss(model, batch)
            return returned if isinstance(returned, tuple) else (returned, {})

        (value, extra), grads = value_and_grad(loss, argnums=nnx.DiffState(0, case.wrt), has_aux=True)(model)
        optimizer.update(model, grads)
        return value

    return train_step


def trained(name: str, step: Callable[..., Any]) -> dict[str, np.ndarray]:
    """The losses, and every array of the model and the optimizer after the last step."""
    case = zoo.ZOO[name]
    model = case.build(nnx.Rngs(3))
    optimizer = nnx.Optimizer(model, case.optimizer, wrt=case.wrt)
    rows = case.batch(STEPS * SIZE)
    losses = []
    for index in range(STEPS):
        batch = {key: array[index * SIZE : (index + 1) * SIZE] for key, array in rows.items()}
        losses.append(float(step(model, optimizer, batch)))
        nnx.pop(model, nnx.Intermediate)
    state = nnx.to_flat_state(nnx.state((model, optimizer)))
    arrays = {jax.tree_util.keystr((path,)): leaf for path, leaf in state}
    return {"loss": np.array(losses)} | {path: numbers(leaf[...]) for path, leaf in arrays.items()}


@functools.cache
def reference(name: str) -> dict[str, np.ndarray]:
    return trained(name, nnx.jit(train_step(name)))


def differences(name: str, layout: str, mesh: str) -> dict[str, float]:
    expected = reference(name)
    step = train_step(name, spanax.value_and_grad if layout == "ring" else nnx.value_and_grad)
    result = trained(name, spanax.jit(step, layout=layout, mesh=mesh))
    assert expected.keys() == result.keys()
    scale = {path: max(np.abs(value).max(initial=0), NOUGHT) for path, value in expected.items()}
    return {path: float(np.abs(value - result[path]).max(initial=0) / scale[path]) for path, value in expected.items()}


@pytest.mark.parametrize("name, layout, mesh", cases())
def test_objects_after_twenty_steps_are_those_of_one_device(name: str, layout: str, mesh: str) -> None:
    worst = differences(name, layout, mesh)
    assert worst.pop("loss") < LOOSER.get(name, TOLERANCE)
    assert max(worst.values()) < LOOSER.get(name, OF_STATE), max(worst, key=worst.__getitem__)


def test_collectives_and_memory_are_those_of_a_run() -> None:
    case, step = zoo.ZOO["mlp"], train_step("mlp")
    program = spanax.trace(
        build=case.build, optimizer=lambda model: nnx.Optimizer(model, case.optimizer, wrt=case.wrt),
        batch=case.batch(SIZE), train_step=lambda *args: {"loss": step(*args)},
    )  # fmt: skip
    function = spanax.jit(step, layout="fsdp+tensor", mesh="fsdp=4,model=2")
    trained("mlp", function)
    plan = spanax.plan(program, spanax.cluster("cpu:8"), layout="fsdp+tensor", mesh="fsdp=4,model=2")
    assert function.plan == plan
    expected, result = spanax.check(program, plan, "cpu:8", level=2), function.check(level=2)
    assert result.compiled.collectives == expected.compiled.collectives
    assert result.compiled.flops == expected.compiled.flops
