"""First step: a run warns where it does not learn, once, and a run of `spanax train` as an event."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import spanax
from spanax.train.config import TrainConfig
from spanax.train.trainer import train

ROWS = np.random.default_rng(0).normal(size=(16, 8)).astype("float32")


def mean_square(model: Any, x: Any) -> Any:
    return jnp.square(model(x)).mean()


def same_mask(model: Any, x: Any) -> Any:
    return mean_square(nnx.Sequential(model, nnx.Dropout(0.5, rngs=nnx.Rngs(0))), x)


def dead(model: Any, x: Any) -> Any:
    return nnx.relu(model(x) - 1e6).mean()


LOSSES = {
    "a constant": (lambda model, x: jnp.float32(1.0), ["nothing is trained", "not depend on the batch"]),
    "the same mask": (same_mask, ["the same random numbers"]),
    "dead units": (dead, ["the gradient norm of step 1 is 0"]),
    "an ordinary loss": (mean_square, []),
}


def begun(loss: Any) -> spanax.Run:
    program = spanax.trace(
        build=lambda rngs: nnx.Linear(8, 8, rngs=rngs), optimizer=optax.sgd(0.1), batch=ROWS, loss=loss
    )
    plan = spanax.plan(program, spanax.cluster("cpu:2"), layout="data")
    return spanax.start(program, plan, devices=jax.devices()[:2])


@pytest.mark.parametrize("several", [False, True])
@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.filterwarnings("default")
def test_a_run_that_does_not_learn_warns_once(name: str, several: bool, recwarn: pytest.WarningsRecorder) -> None:
    loss, expected = LOSSES[name]
    run = begun(loss)
    assert not recwarn
    for _ in range(3):
        jax.block_until_ready(run.steps([ROWS, ROWS]) if several else run.step(ROWS))
    lines = [str(warning.message) for warning in recwarn]
    assert len(lines) == len(expected) and all(text in line for text, line in zip(expected, lines, strict=True)), lines
    assert all(warning.filename == __file__ for warning in recwarn)


@pytest.mark.parametrize("name", LOSSES)
def test_the_trainer_records_training_warnings(name: str, tmp_path: Path) -> None:
    loss, expected = LOSSES[name]
    workload = spanax.Workload(
        build=lambda rngs: nnx.Linear(8, 8, rngs=rngs), batch={"x": jax.ShapeDtypeStruct((16, 8), "float32")},
        loss=lambda model, batch: loss(model, batch["x"]), optimizer=optax.sgd(0.1),
        source=[{"x": row} for row in ROWS],
    )  # fmt: skip
    reported: list[dict[str, Any]] = []
    config = TrainConfig(workload="mine", layout="data", steps=3, output_dir=str(tmp_path / "run"))
    train(lambda **_: workload, config, jax.devices()[:2], reported.append)
    lines = [event["message"] for event in reported if event["event"] == "warning"]
    assert len(lines) == len(expected) and all(text in line for text, line in zip(expected, lines, strict=True)), lines
