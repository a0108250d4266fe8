"""A module that holds a Flax `TrainState`: its optimizer state is not a parameter, though Optax keeps it in Params."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.training import train_state

import spanax
from spanax.trace.program import Program


class TrainState(train_state.TrainState):
    graphdef: nnx.GraphDef[Any]


class Trainer(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        graphdef, params = nnx.split(nnx.Linear(16, 32, rngs=rngs), nnx.Param)
        state = TrainState.create(apply_fn=None, params=params, tx=optax.adam(1e-2), graphdef=graphdef)
        self.state = nnx.data(jax.tree.map(jnp.asarray, state))


def train_step(trainer: Trainer, _: Any, batch: jax.Array) -> dict[str, jax.Array]:
    def loss(params: nnx.State) -> jax.Array:
        return jnp.mean((nnx.merge(trainer.state.graphdef, params)(batch) - 1) ** 2)

    value, grads = jax.value_and_grad(loss)(trainer.state.params)
    trainer.state = trainer.state.apply_gradients(grads=grads)
    return {"loss": value}


@pytest.fixture(scope="module")
def program() -> Program:
    batch = jax.ShapeDtypeStruct((8, 16), "float32")
    return spanax.trace(build=Trainer, optimizer=lambda trainer: (), batch=batch, train_step=train_step)


def test_optimizer_state_is_counted_and_stored_as_such(program: Program) -> None:
    assert program.num_params == 16 * 32 + 32
    plan = spanax.plan(program, "cpu:8", layout="zero1")
    specs = {leaf.path: leaf.spec for leaf in plan.leaves}
    assert specs["state.params.kernel"] == ((), ()) and ("fsdp",) in specs["state.opt_state.0.mu.kernel"]


@pytest.mark.parametrize("layout", ["zero1", "fsdp"])
def test_losses_equal_one_device(program: Program, layout: str) -> None:
    rows = np.random.default_rng(0).normal(size=(3, 8, 16)).astype("float32")
    runs = [spanax.start(program, spanax.plan(program, "cpu:8", layout=layout))]
    runs.append(spanax.start(program, spanax.plan(program, "cpu:1", layout="data")))
    losses = [[float(run.step(batch)["loss"]) for batch in rows] for run in runs]
    np.testing.assert_allclose(*losses, rtol=1e-5)
    assert sorted(runs[0].params()) == ["state.params.bias", "state.params.kernel"]
