"""`spanax train` when its numbers go wrong: what each policy does, and that none lets a bad step into a checkpoint."""

import functools
import json
import math
import os
import signal
import socket
import subprocess
import sys
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
from programs import Net
from sampling import sampled
from spanax.errors import NumbersError
from spanax.train.config import TrainConfig
from spanax.train.record import events
from spanax.train.store import manifest
from spanax.train.trainer import train

STEPS, BAD = 12, 6
NAN = math.nan


class Layers(nnx.Module):
    """Layers that the stages of a pipeline share."""

    def __init__(self, rngs: nnx.Rngs):
        self.blocks = nnx.split_rngs(splits=4)(nnx.vmap(lambda rngs: nnx.Linear(8, 8, rngs=rngs)))(rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        graph, state = nnx.split(self.blocks)
        return jax.lax.scan(lambda x, layer: (jnp.tanh(nnx.merge(graph, layer)(x)), None), x, state)[0]


def loss(model: nnx.Module, batch: dict[str, jax.Array]) -> jax.Array:
    return jnp.square(model(batch["x"]) - batch["y"]).mean()


def batches(bad: dict[int, float], num: int = 40) -> list[dict[str, np.ndarray]]:
    """Full batches in order; in the bad ones, one number is changed."""
    random = np.random.default_rng(0)
    shape = lambda: random.normal(size=(16, 8)).astype(np.float32)  # noqa: E731
    results = [{"x": shape(), "y": shape()} for _ in range(num)]
    for index, value in bad.items():
        results[index]["y"][0, 0] = value
    return results


def workload(source: Any, build: Any = Net, optimizer: Any = None) -> Callable[..., spanax.Workload]:
    batch = {name: jax.ShapeDtypeStruct((16, 8), "float32") for name in ("x", "y")}
    optimizer = optimizer or optax.adamw(1e-2)
    microbatches = 4 if build is Layers else 1
    built = spanax.Workload(
        build=build, batch=batch, loss=loss, optimizer=optimizer, source=source, microbatches=microbatches
    )
    return lambda **sizes: built


def config(out: Path, policy: str, **settings: Any) -> TrainConfig:
    inputs = {"mesh": "fsdp=8", "steps": STEPS, "save_every": 4, "keep_last": 100} | settings
    return TrainConfig(workload="own", output_dir=str(out), on_bad_step=policy, **inputs)


def trained(
    source: Any, settings: TrainConfig, emit: Callable[[Any], None] = lambda event: None, **built: Any
) -> dict[str, Any]:
    size = spanax.MeshShape.of(settings.mesh or "fsdp=8").size
    return train(workload(source, **built), settings, jax.devices()[:size], emit)


@functools.cache
def on_one_device(**built: Any) -> tuple[spanax.Program, spanax.Plan]:
    program = workload(batches({}), **built)().trace(learning_rate=0, num_steps=0)
    return program, spanax.plan(program, spanax.cluster("cpu:1"), mesh="data=1")


def saved(out: Path, **built: Any) -> dict[int, dict[str, np.ndarray]]:
    """Every array of every checkpoint of a run."""
    program, plan = on_one_device(**built)
    return {step: arrays(spanax.restore(program, plan, out / "checkpoints", step=step)) for step in steps_in(out)}


def steps_in(out: Path) -> list[int]:
    return manifest.steps(out / "checkpoints")


def arrays(run: spanax.Run) -> dict[str, np.ndarray]:
    is_key = lambda array: jax.dtypes.issubdtype(array.dtype, jax.dtypes.prng_key)  # noqa: E731
    return {path: np.asarray(jax.random.key_data(a) if is_key(a) else a) for path, a in run.arrays().items()}


def assert_same(item: dict[str, np.ndarray], other: dict[str, np.ndarray]) -> None:
    assert item.keys() == other.keys()
    for path, array in item.items():
        np.testing.assert_array_equal(array, other[path], err_msg=path)


def happened(out: Path, *names: str) -> list[dict[str, Any]]:
    """The events of these names, without their time."""
    hidden = ("time", "by", "attempt")
    results = [{key: value for key, value in event.items() if key not in hidden} for event in events.read(out).records]
    return [event for event in results if event["event"] in names]


def told_steps(out: Path) -> list[int]:
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [line["step"] for line in lines if line["event"] == "step"]


MADE: dict[str, dict[str, Any]] = {"data=1": {}, "fsdp=8": {}, "pipe=2,fsdp=2": {"build": Layers}}
"""Places; on one device the metrics of a step come when the next one is already under way."""


@functools.cache
def without(mesh: str, folder: Path) -> dict[str, np.ndarray]:
    """The last state of a run over the same data without the bad batch."""
    source = batches({})
    del source[BAD]
    out = folder / f"without-{mesh}"
    trained(source, config(out, "rollback", mesh=mesh), **MADE[mesh])
    return saved(out, **MADE[mesh])[STEPS]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("bad")


def test_halt_names_the_step_and_saves_nothing_of_it(tmp_path: Path) -> None:
    out, source = tmp_path / "run", batches({BAD: NAN})
    with pytest.raises(NumbersError) as caught:
        trained(source, config(out, "halt"))
    assert caught.value.args[0].startswith(f"step {BAD + 1} is bad: loss is nan.\n  where: batch {BAD} of list")
    assert "--on-bad-step rollback" in caught.value.args[0] and caught.value.exit_code == 70
    assert steps_in(out) == [4]
    assert all(np.isfinite(array).all() for array in saved(out)[4].values())
    (event,) = happened(out, "bad_step", "rolled_back", "skipped")
    assert event == {
        "event": "bad_step", "step": BAD + 1, "batch": BAD, "reason": "loss is nan", "policy": "halt",
        "loss": "nan", "grad_norm": "nan",
    }  # fmt: skip


@pytest.mark.parametrize("mesh", sampled(MADE, ["pipe=2,fsdp=2"]))
def test_rollback_continues_as_if_the_batch_were_skipped(mesh: str, folder: Path, tmp_path: Path) -> None:
    out, source = tmp_path / "run", batches({BAD: NAN})
    done = trained(source, config(out, "rollback", mesh=mesh), **MADE[mesh])
    assert done["steps"] == STEPS and math.isfinite(done["train_loss"])
    assert [event["event"] for event in happened(out, "bad_step", "rolled_back")] == ["bad_step", "rolled_back"]
    assert happened(out, "rolled_back")[0] == {"event": "rolled_back", "step": 4, "from_step": BAD + 1, "batch": BAD}
    assert told_steps(out) == list(range(1, STEPS + 1))
    result = saved(out, **MADE[mesh])
    assert list(result) == [4, 8, 12] and all(np.isfinite(of).all() for step in result.values() for of in step.values())
    assert_same(result[STEPS], without(mesh, folder))


@pytest.mark.parametrize("mesh", sampled(MADE, ["data=1"]))
def test_skip_continues_with_the_previous_state(mesh: str, folder: Path, tmp_path: Path) -> None:
    out, source = tmp_path / "run", batches({BAD: NAN})
    trained(source, config(out, "skip", mesh=mesh, steps=STEPS + 1), **MADE[mesh])
    assert happened(out, "skipped", "rolled_back") == [{"event": "skipped", "step": BAD + 1, "batch": BAD}]
    assert told_steps(out) == list(range(1, STEPS + 2))
    result = saved(out, **MADE[mesh])
    assert all(np.isfinite(of).all() for step in result.values() for of in step.values())
    for path, array in without(mesh, folder).items():
        np.testing.assert_allclose(array, result[STEPS + 1][path], rtol=1e-4, atol=1e-6, err_msg=path)


@pytest.mark.slow
def test_ignore_saves_any_state(tmp_path: Path) -> None:
    """What the tests above would see if nothing watched."""
    out, source = tmp_path / "run", batches({BAD: NAN})
    trained(source, config(out, "ignore"))
    assert happened(out, "bad_step") == [] and not np.isfinite(saved(out)[8]["up.kernel"]).all()


@pytest.mark.parametrize("policy", sampled(["rollback", "skip"], ["rollback"]))
def test_a_resumed_run_skips_the_same_batches(policy: str, tmp_path: Path) -> None:
    """Ended right after a skipped batch, and before another."""
    source, uninterrupted, out = batches({BAD: NAN, BAD + 2: NAN}), tmp_path / "uninterrupted", tmp_path / "stopped"
    settings = config(uninterrupted, policy, save_every=2)
    trained(source, settings)
    trained(source, replace(settings, output_dir=str(out), steps=BAD + 1))
    trained(source, replace(settings, output_dir=str(out), resume=True))
    assert_same(saved(out)[STEPS], saved(uninterrupted)[STEPS])


@pytest.mark.parametrize("policy", sampled(["rollback", "skip"], ["rollback"]))
def test_a_bad_step_that_is_due_is_not_saved(policy: str, tmp_path: Path) -> None:
    reported: list[dict[str, Any]] = []
    source = batches({7: NAN})
    trained(source, config(tmp_path / "run", policy, steps=8), reported.append)
    assert [event["step"] for event in reported if event["event"] == "save"] == [4, 8]
    assert all(np.isfinite(array).all() for array in saved(tmp_path / "run")[8].values())


def test_a_run_stopped_after_a_bad_step_does_not_save_it(tmp_path: Path) -> None:
    """On one device, where the metrics of that step have not come yet."""
    out, source = tmp_path / "run", batches({BAD: NAN})

    def stop(event: dict[str, Any]) -> None:
        if event["event"] == "step" and event["step"] == BAD:
            os.kill(os.getpid(), signal.SIGTERM)

    last = trained(source, config(out, "rollback", mesh="data=1"), stop)
    assert (last["event"], last["step"]) == ("preempted", 4) and steps_in(out) == [4]
    trained(source, config(out, "rollback", mesh="data=1", resume=True))
    assert all(np.isfinite(array).all() for array in saved(out)[STEPS].values())


@pytest.mark.slow
def test_a_rollback_before_the_first_checkpoint_restarts_the_run(folder: Path, tmp_path: Path) -> None:
    source = batches({1: NAN})
    trained(source, config(tmp_path / "run", "rollback", steps=2))
    trained([source[0], *source[2:]], config(tmp_path / "without", "rollback", steps=2))
    assert happened(tmp_path / "run", "rolled_back")[0]["step"] == 0
    assert_same(saved(tmp_path / "run")[2], saved(tmp_path / "without")[2])


def test_a_spike_is_detected_from_the_history_before_a_resume(tmp_path: Path) -> None:
    """Of the 16 good steps that it takes, the resumed run has seen but two itself."""
    source = batches({20: 3000.0})
    settings = config(tmp_path / "run", "rollback", spike_factor=20.0, save_every=6, steps=18)
    trained(source, settings)
    trained(source, replace(settings, resume=True, steps=22))
    (event,) = happened(tmp_path / "run", "bad_step")
    assert event["step"] == 21 and event["batch"] == 20 and "over its limit of" in event["reason"]
    assert happened(tmp_path / "run", "rolled_back")[0]["step"] == 18


ENDS = {
    "rollback": "2 rollbacks and no checkpoint since; now batch 8",
    "skip": "3 bad steps in a row, the last one on b",
}


@pytest.mark.parametrize("policy", sampled(ENDS, ["skip"]))
def test_too_many_bad_steps_end_the_run(policy: str, tmp_path: Path) -> None:
    source = batches(dict.fromkeys(range(BAD, 40), NAN))
    with pytest.raises(NumbersError) as caught:
        trained(source, config(tmp_path / "run", policy, max_bad_steps=2))
    assert ENDS[policy] in caught.value.args[0] and "a higher --max-bad-steps" in caught.value.args[0]
    assert len(happened(tmp_path / "run", "bad_step")) == 3 and steps_in(tmp_path / "run")[-1] in (4, 8)
    assert all(np.isfinite(of).all() for step in saved(tmp_path / "run").values() for of in step.values())


@pytest.mark.parametrize("policy", sampled(["halt", "skip", "rollback"], ["halt"]))
def test_a_state_that_became_invalid_unnoticed_is_not_saved(policy: str, tmp_path: Path) -> None:
    """An infinite learning rate makes parameters infinite after a finite loss and gradient."""
    rate = lambda count: jnp.where(count == 3, jnp.inf, 0.1)  # noqa: E731
    with pytest.raises(NumbersError, match="the state after step 4 is not finite, although its metrics are"):
        trained(batches({}), config(tmp_path / "run", policy), optimizer=optax.sgd(rate))
    assert steps_in(tmp_path / "run") == []


# Several processes

PROCESS = """
import hashlib, sys, jax, numpy as np
rank, port, folder, out = sys.argv[1:]
jax.config.update("jax_num_cpu_devices", 4)
jax.distributed.initialize("127.0.0.1:" + port, 2, int(rank), coordinator_bind_address="127.0.0.1:" + port)
sys.path.insert(0, folder)
import spanax
from test_bad_steps import Net, batches, loss, workload

source = batches({4: float("nan"), 20: 3000.0})
program = workload(source)().trace(learning_rate=0, num_steps=0)
plan = spanax.plan(program, spanax.cluster("cpu:8"), mesh="fsdp=8")
said = []
for policy in ("skip", "rollback"):
    guard = spanax.Guard(policy, spike=20.0)
    run, data = spanax.start(program, plan, guard=guard), spanax.batches(source, plan, epochs=None)
    for _ in range(22):
        metrics = run.step(next(data))
        reason = run.judge(run.num_steps, {name: np.asarray(value).tolist() for name, value in metrics.items()})
        if reason:
            said.append((policy, run.num_steps, data.last_index, reason))
        if reason and policy == "rollback":
            left_out = {*data.skipped, data.last_index}
            run.go_back(lambda: spanax.restore(program, plan, out, guard=guard))
            data.restore(run.position)
            data.skip(*left_out)
        elif run.num_steps % 4 == 0 and policy == "rollback":
            assert run.unsound() == []
            run.save(out, data=data).wait()
    said.append((policy, run.num_steps, run.unsound(), sorted(data.skipped)))
print("DECISION", said)
"""


@pytest.mark.slow
def test_two_processes_see_it_in_the_same_step(tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    environment = {**os.environ, "XLA_FLAGS": ""}
    command = [sys.executable, "-c", PROCESS]
    places = [str(Path(__file__).parent), str(tmp_path / "saved")]
    runs = [subprocess.Popen([*command, rank, port, *places], env=environment, stdout=-1, text=True) for rank in "01"]
    output = [run.communicate(timeout=240)[0] for run in runs]
    assert [run.returncode for run in runs] == [0, 0]
    first, second = ([line for line in text.splitlines() if line.startswith("DECISION")] for text in output)
    assert first == second and len(first) == 1
    for reported in ("('skip', 5, 4, 'loss is nan')", "('rollback', 5, 4, 'loss is nan')", "('skip', 22, [], [])"):
        assert reported in first[0], first
    assert first[0].count("over its limit") == 2 and "[], [4, 20])" in first[0], first


@pytest.mark.parametrize("per_call", sampled([1, 3], [3]))
def test_a_run_that_skips_every_step_raises(tmp_path: Path, per_call: int) -> None:
    source = batches(dict.fromkeys(range(4), NAN))
    settings = config(tmp_path / "run", "skip", steps=3, max_bad_steps=3, steps_per_call=per_call)
    with pytest.raises(NumbersError, match="all 3 steps were bad") as caught:
        trained(source, settings)
    assert caught.value.exit_code == 70 and "fix: " in caught.value.args[0]


def test_a_run_that_ends_on_a_skipped_step_reports_the_last_good_loss(tmp_path: Path) -> None:
    reported: list[dict[str, Any]] = []
    trained(batches({2: NAN}), config(tmp_path / "run", "skip", steps=3), reported.append)
    losses = {event["step"]: event["loss"] for event in reported if event["event"] == "step"}
    assert math.isnan(losses[3]) and reported[-1]["train_loss"] == losses[2]
