"""Hijax Variables: a model that is written with `nnx.var_defaults(hijax=True)` trains as one without."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import spanax
from spanax.trace.variables import wants_hijax

BATCH = np.random.default_rng(0).normal(size=(16, 16)).astype("float32")


class Count(nnx.Variable[Any]):
    """How often the model was called."""


class Net(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.count, self.dropout = Count(jnp.array(0)), nnx.Dropout(0.5, rngs=rngs)
        self.up, self.down = nnx.Linear(16, 32, rngs=rngs), nnx.Linear(32, 16, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        self.count[...] += 1
        return self.down(self.dropout(nnx.relu(self.up(x))))


with nnx.var_defaults(hijax=True):
    wants = wants_hijax()


def loss(model: Any, x: jax.Array) -> jax.Array:
    return ((model(x) - x) ** 2).mean()


@jax.jit
def writing_step(model: Any, optimizer: Any, x: jax.Array) -> jax.Array:
    """A step in the style of hijax: `jax.jit` over Variables, some of which are written inside `jax.grad`."""
    graphdef, params, rest = nnx.split(model, nnx.Param, ...)
    value = lambda params: loss(nnx.merge(graphdef, params, rest), x)  # noqa: E731
    result, grads = jax.value_and_grad(value)(nnx.with_vars(params, hijax=False))
    optimizer.update(model, grads)
    return result


def copying_step(model: Any, optimizer: Any, x: jax.Array) -> jax.Array:
    """The same, where Flax writes to hijax Variables outside of transformations only."""
    graphdef, params, rest = nnx.split(model, nnx.Param, ...)

    def value(params: Any) -> tuple[jax.Array, Any]:
        called = nnx.merge(graphdef, params, rest, copy=True)
        return loss(called, x), nnx.state(called, nnx.Not(nnx.Param))

    (result, after), grads = jax.value_and_grad(value, has_aux=True)(params)
    nnx.update(model, after)
    optimizer.update(model, grads)
    return result


def losses(**step: Any) -> list[float]:
    program = spanax.trace(build=Net, optimizer=optax.adam(1e-2, eps=0.1), batch=BATCH, **step)
    run = spanax.start(program, spanax.plan(program, spanax.cluster("cpu:8"), layout="fsdp"))
    values = [float(run.step(BATCH)["loss"]) for _ in range(3)]
    assert int(run.arrays()["count"]) == 3 and run.model() is not None
    return values


STEPS: list[dict[str, Any]] = [{"loss": loss}, {"train_step": writing_step if wants else copying_step}]


@pytest.mark.parametrize("step", STEPS, ids=lambda step: next(iter(step)))
def test_hijax_variables_train_as_plain_ones(step: dict[str, Any]) -> None:
    expected = losses(loss=loss)
    with nnx.var_defaults(hijax=True):
        assert losses(**step) == pytest.approx(expected, rel=1e-6)
