"""Rates: the learning rate of each step is a metric, where the optimizer says what it is."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import spanax
from sampling import sampled
from spanax.trace.optimizers.named import adamw
from spanax.train.config import TrainConfig
from spanax.train.trainer import train

pytestmark = pytest.mark.usefixtures("devices")  # they compare values

ROWS = np.random.default_rng(0).normal(size=(16, 8)).astype("float32")
SCHEDULE = optax.linear_schedule(0.5, 0.1, 10)


def mean_square(model: Any, x: Any) -> Any:
    return jnp.square(model(x)).mean()


def own_step(model: Any, optimizer: Any, batch: Any) -> dict[str, Any]:
    value, gradients = nnx.value_and_grad(mean_square)(model, batch)
    optimizer.update(model, gradients)
    return {"loss": value}


def build(rngs: nnx.Rngs) -> nnx.Module:
    return spanax.Stack(lambda rngs: nnx.Linear(8, 8, rngs=rngs), 4, rngs=rngs)


def run_of(mesh: str, optimizer: Any, **options: Any) -> spanax.Run:
    options = options if "train_step" in options else {"loss": mean_square, **options}
    program = spanax.trace(build=build, optimizer=optimizer, batch=ROWS, **options)
    size = spanax.MeshShape.of(mesh).size
    return spanax.start(program, spanax.plan(program, spanax.cluster(f"cpu:{size}"), mesh=mesh))


OPTIMIZERS = {
    "a logged schedule": optax.adamw(spanax.logged(SCHEDULE)),
    "one behind a chain": optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(spanax.logged(SCHEDULE), momentum=0.9)),
    "injected hyperparameters": optax.inject_hyperparams(optax.adam)(SCHEDULE),
}
STEPS: dict[str, dict[str, Any]] = {
    "one batch": {}, "microbatches": {"microbatches": 2}, "own": {"train_step": own_step},
    "own, compiled": {"train_step": nnx.jit(own_step)},
}  # fmt: skip


@pytest.mark.parametrize("step", sampled(STEPS, [*STEPS][::2]))
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_step_returns_its_learning_rate(name: str, step: str) -> None:
    run = run_of("data=2", OPTIMIZERS[name], **STEPS[step])
    rates = [float(run.step(ROWS)["learning_rate"]) for _ in range(3)]
    np.testing.assert_allclose(rates, [SCHEDULE(count) for count in range(3)], rtol=1e-6)


@pytest.mark.parametrize("mesh", sampled(["pipe=2,data=2", "fsdp=4"], ["pipe=2,data=2"]))
def test_on_any_mesh(mesh: str) -> None:
    microbatches = 2 if "pipe" in mesh else 1
    run = run_of(mesh, OPTIMIZERS["a logged schedule"], microbatches=microbatches)
    rates = [float(run.step(ROWS)["learning_rate"]) for _ in range(2)]
    np.testing.assert_allclose(rates, [SCHEDULE(count) for count in range(2)], rtol=1e-6)


def test_two_schedules_are_logged_by_name() -> None:
    other = optax.linear_schedule(2.0, 0.0, 10)
    labels = lambda params: jax.tree.map(lambda leaf: "few" if leaf.ndim < 3 else "many", params)  # noqa: E731
    both = optax.partition(
        {"few": optax.sgd(spanax.logged(SCHEDULE, "few_rate")), "many": optax.sgd(spanax.logged(other, "many_rate"))},
        labels,
    )
    metrics = run_of("data=2", both).step(ROWS)
    assert (float(metrics["few_rate"]), float(metrics["many_rate"])) == (0.5, 2.0)
    assert "learning_rate" not in run_of("data=2", optax.adam(0.1)).step(ROWS)


def test_a_learning_rate_returned_by_the_step_is_unchanged() -> None:
    def step(model: Any, optimizer: Any, batch: Any) -> dict[str, Any]:
        return {**own_step(model, optimizer, batch), "learning_rate": jnp.float32(7.0)}

    assert float(run_of("data=2", OPTIMIZERS["a logged schedule"], train_step=step).step(ROWS)["learning_rate"]) == 7


def test_a_skipped_step_does_not_advance_the_schedule(tmp_path: Path) -> None:
    batches = [{"x": ROWS} for _ in range(4)]
    batches[1] = {"x": np.full_like(ROWS, np.nan)}
    workload = spanax.Workload(
        build=build, batch={"x": jax.ShapeDtypeStruct((16, 8), "float32")},
        loss=lambda model, batch: mean_square(model, batch["x"]), optimizer=adamw, source=batches,
    )  # fmt: skip
    reported: list[dict[str, Any]] = []
    config = TrainConfig(
        workload="mine",
        layout="data",
        steps=4,
        learning_rate=1e-2,
        on_bad_step="skip",
        output_dir=str(tmp_path / "run"),
    )
    train(lambda **_: workload, config, jax.devices()[:2], reported.append)
    rates = [event["learning_rate"] for event in reported if event["event"] == "step"]
    schedule = optax.warmup_cosine_decay_schedule(0.0, 1e-2, 1, 4, end_value=1e-3)
    np.testing.assert_allclose(rates, [schedule(count) for count in (0, 1, 1, 2)], rtol=1e-6)
