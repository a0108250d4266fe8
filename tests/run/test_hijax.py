"""Hijax Variables: a model that is written with `nnx.var_defaults(hijax=True)` trains as one without."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import spanax

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


class Pure(Net):
    """The same with nothing that a call writes: what is outside of a `jax.grad` cannot be written in it."""

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.down(nnx.relu(self.up(x)))


def loss(model: Any, x: jax.Array) -> jax.Array:
    return ((model(x) - x) ** 2).mean()


def train_step(model: Any, optimizer: Any, x: jax.Array) -> jax.Array:
    """A step in the style of hijax: split, differentiate plain Variables, update in place."""
    graphdef, params, rest = nnx.split(model, nnx.Param, ...)
    value = lambda params: loss(nnx.merge(graphdef, params, rest), x)  # noqa: E731
    result, grads = jax.value_and_grad(value)(nnx.with_vars(params, hijax=False))
    optimizer.update(model, grads)
    model.count[...] += 1
    return result


def losses(build: Any, **step: Any) -> list[float]:
    program = spanax.trace(build=build, optimizer=optax.adam(1e-2, eps=0.1), batch=BATCH, **step)
    run = spanax.start(program, spanax.plan(program, spanax.cluster("cpu:8"), layout="fsdp"))
    values = [float(run.step(BATCH)["loss"]) for _ in range(3)]
    assert int(run.arrays()["count"]) == 3 * (build is Net or "train_step" in step) and run.model() is not None
    return values


@pytest.mark.parametrize(("build", "step"), [(Net, {"loss": loss}), (Pure, {"train_step": train_step})])
def test_hijax_variables_train_as_plain_ones(build: Any, step: dict[str, Any]) -> None:
    expected = losses(build, loss=loss)
    with nnx.var_defaults(hijax=True):
        assert losses(build, **step) == pytest.approx(expected, rel=1e-6)
