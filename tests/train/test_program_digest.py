"""A run that is resumed with another model than it was started with."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import spanax
from spanax.errors import ConfigError, DataError
from spanax.train.config import TrainConfig
from spanax.train.store import manifest
from spanax.train.trainer import train

Event = dict[str, Any]


def tiny(activation: Any = jnp.tanh, width: int = 16, *, owns_step: bool = False) -> Callable[..., spanax.Workload]:
    def build(rngs: nnx.Rngs) -> nnx.Module:
        return nnx.Sequential(nnx.Linear(8, width, rngs=rngs), activation, nnx.Linear(width, 8, rngs=rngs))

    def loss(model: Any, batch: Any) -> jax.Array:
        return jnp.square(model(batch["x"]) - batch["y"]).mean()

    def train_step(model: Any, optimizer: Any, batch: Any) -> Any:
        value, grads = nnx.value_and_grad(loss)(model, batch)
        optimizer.update(model, grads)
        return {"loss": value}

    batch = {name: jax.ShapeDtypeStruct((16, 8), "float32") for name in ("x", "y")}
    step: dict[str, Any] = {"train_step": train_step} if owns_step else {"loss": loss}
    workload = spanax.Workload(
        build=build,
        batch=batch,
        optimizer=lambda rate, steps: optax.adam(optax.cosine_decay_schedule(rate, steps)),
        source=[{name: np.full((16, 8), 0.1 * index, "float32") for name in ("x", "y")} for index in range(20)],
        **step,
    )
    return lambda **sizes: workload


def run(out: Path, load: Callable[..., spanax.Workload], **settings: Any) -> list[Event]:
    inputs = {"steps": 2, "mesh": "fsdp=2", "eval_every": 0} | settings
    events: list[Event] = []
    train(load, TrainConfig(workload="own", output_dir=str(out), **inputs), jax.devices()[:2], events.append)
    return events


def warnings(events: list[Event]) -> list[str]:
    return [event["message"] for event in events if event["event"] == "warning"]


@pytest.fixture
def started(tmp_path: Path) -> Path:
    run(tmp_path / "run", tiny())
    return tmp_path / "run"


def test_a_checkpoint_resumes_under_another_layout(started: Path) -> None:
    events = run(started, tiny(), resume=True, steps=4, learning_rate=0.5, mesh="data=2", dtype="bfloat16")
    assert events[-1]["steps"] == 4 and warnings(events) == []


def test_a_resumed_run_with_no_step_left_says_so_and_keeps_its_records(started: Path) -> None:
    before = [(started / name).read_bytes() for name in ("config.toml", "plan.json")]
    events = run(started, tiny(), resume=True, mesh="data=2")
    (warning,) = warnings(events)
    assert warning.startswith("the run has all its 2 steps: it trains nothing") and events[-1]["steps"] == 2
    assert [(started / name).read_bytes() for name in ("config.toml", "plan.json")] == before


def test_another_model_is_refused_unless_accepted(started: Path) -> None:
    before = sorted(path.name for path in (started / "checkpoints").iterdir())
    with pytest.raises(
        ConfigError, match="differs from the one that saved step 2: the loss; the gradients; operations: "
    ) as item:
        run(started, tiny(jnp.sin), resume=True, steps=4)
    assert "tanh 1, now 0" in str(item.value) and "--accept-changed-model" in str(item.value)
    assert item.value.exit_code == 78
    assert sorted(path.name for path in (started / "checkpoints").iterdir()) == before
    events = run(started, tiny(jnp.sin), resume=True, steps=4, accept_changed_model=True)
    assert events[-1]["steps"] == 4
    (warning,) = warnings(events)
    assert "step 2 was saved by another program: the loss" in warning
    # It saved a checkpoint of the new model, which can now be resumed.
    assert warnings(run(started, tiny(jnp.sin), resume=True, steps=5)) == []
    with pytest.raises(ConfigError, match="saved step 5"):
        run(started, tiny(), resume=True, steps=6)


def test_other_parameters_are_listed_and_never_loaded(started: Path) -> None:
    with pytest.raises(ConfigError, match=r"layers.0.bias float32\[16\], now float32\[12\]; .* more arrays; the loss"):
        run(started, tiny(width=12), resume=True, steps=4)
    with pytest.raises(DataError, match="is of another model"):
        run(started, tiny(width=12), resume=True, steps=4, accept_changed_model=True)


@pytest.mark.slow
def test_with_other_versions_only_arrays_are_compared(started: Path) -> None:
    step = started / "checkpoints" / "2"
    saved = json.loads((step / "meta.json").read_text())
    saved["meta"]["computation"]["versions"]["jax"] = "0.9.9"
    (step / "meta.json").write_text(json.dumps(saved))
    manifest.write(step)
    events = run(started, tiny(jnp.sin), resume=True, steps=3)
    assert (
        f"not the model code, are compared with those of step 2: jax 0.9.9, now {jax.__version__}"
        in warnings(events)[0]
    )
    del saved["meta"]["computation"]
    (started / "checkpoints" / "3" / "meta.json").write_text(json.dumps(saved))
    manifest.write(started / "checkpoints" / "3")
    assert "has no record of what its program computes" in warnings(run(started, tiny(), resume=True, steps=4))[0]


def test_restoring_by_hand_lists_what_differs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def program(load: Callable[..., spanax.Workload]) -> spanax.Program:
        return replace(load(), optimizer=optax.sgd(0.1)).trace(learning_rate=0.1, num_steps=1)

    first = program(tiny())
    plan = spanax.plan(first, spanax.cluster("cpu:2"), layout="data")
    spanax.start(first, plan, devices=jax.devices()[:2]).save(tmp_path).wait()
    lines: list[str] = []
    for load in (tiny(), tiny(jnp.sin)):
        changed = program(load)
        spanax.restore(changed, plan, tmp_path, devices=jax.devices()[:2], warn=lines.append)
    (line,) = lines
    assert line.startswith("WARNING: step 0 was saved by another program: the loss; the gradients")
    spanax.restore(program(tiny(jnp.sin)), plan, tmp_path, devices=jax.devices()[:2])
    assert line in capsys.readouterr().err
