"""Several steps in one call: values, saves and bad steps as with one step per call, and every step logged."""

import json
import math
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
from spanax.errors import DataError, NumbersError, SpanaxError
from spanax.train.config import TrainConfig
from spanax.train.run import Run
from spanax.train.trainer import train

SHAPE = jax.ShapeDtypeStruct((16, 8), "float32")
BAD = 5


class Layers(nnx.Module):
    """Layers that the stages of a pipeline share; three of them leave a row of padding."""

    def __init__(self, rngs: nnx.Rngs):
        self.blocks = nnx.split_rngs(splits=3)(nnx.vmap(lambda rngs: nnx.Linear(8, 8, rngs=rngs)))(rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        graph, state = nnx.split(self.blocks)
        return jax.lax.scan(lambda x, layer: (jnp.tanh(nnx.merge(graph, layer)(x)), None), x, state)[0]


def loss(model: nnx.Module, batch: dict[str, jax.Array]) -> jax.Array:
    return jnp.square(model(batch["x"]) - batch["y"]).mean()


def batches(*bad: int, num: int = 12) -> list[dict[str, np.ndarray]]:
    random = np.random.default_rng(0)
    results = [{name: random.normal(size=(16, 8)).astype(np.float32) for name in "xy"} for _ in range(num)]
    for index in bad:
        results[index]["y"][0, 0] = math.nan
    return results


def begun(mesh: str, build: Any = Net, guard: spanax.Guard | None = None) -> Run:
    batch = {"x": SHAPE, "y": SHAPE}
    microbatches = 4 if build is Layers else 1
    program = spanax.trace(build=build, optimizer=optax.adamw(1e-2), batch=batch, loss=loss, microbatches=microbatches)
    size = spanax.MeshShape.of(mesh).size
    plan = spanax.plan(program, spanax.cluster(f"cpu:{size}"), mesh=mesh)
    return spanax.start(program, plan, devices=jax.devices()[:size], guard=guard)


def numbers(run: Run) -> list[np.ndarray]:
    is_key = lambda array: jax.dtypes.issubdtype(array.dtype, jax.dtypes.prng_key)  # noqa: E731
    return [np.asarray(jax.random.key_data(array) if is_key(array) else array) for array in run.state]


def assert_same(run: Run, other: Run) -> None:
    assert run.num_steps == other.num_steps
    for leaf, first, second in zip(run.program.leaves, numbers(run), numbers(other), strict=True):
        np.testing.assert_array_equal(first, second, err_msg=leaf.path)
    places = [array.sharding for array in run.state]
    assert all(
        place.is_equivalent_to(array.sharding, array.ndim) for place, array in zip(places, other.state, strict=True)
    )


MESHES = [("data=1", Net), ("fsdp=2,model=2", Net), ("pipe=2,data=2", Layers)]


@pytest.mark.parametrize("mesh, build", sampled(MESHES, MESHES[2:]))
def test_several_steps_per_call_equal_single_steps(mesh: str, build: Any, devices: Any) -> None:
    singly, together, inputs = begun(mesh, build), begun(mesh, build), batches(num=7)
    losses = [float(singly.step(batch)["loss"]) for batch in inputs]
    result = [float(together.step(inputs[0])["loss"])]
    for at in (1, 4):
        result += np.asarray(together.steps(inputs[at : at + 3])["loss"]).tolist()
    assert result == losses
    assert_same(singly, together)


def test_a_bad_step_inside_of_a_call_changes_nothing(devices: Any) -> None:
    guard = spanax.Guard("skip")
    singly, together, inputs = begun("fsdp=2", guard=guard), begun("fsdp=2", guard=guard), batches(1, num=6)
    for batch in inputs:
        singly.step(batch)
    first, second = together.steps(inputs[:3]), together.steps(inputs[3:])
    assert first["step_ok"].tolist() == [True, False, True] and second["step_ok"].tolist() == [True] * 3
    assert_same(singly, together)
    values = {name: np.asarray(array)[1].tolist() for name, array in first.items()}
    assert together.judge(2, values) == "loss is nan"
    assert together.judge(6, {"loss": 1.0, "step_ok": True}) is None
    assert [step for step, _ in together.history.good] == [1, 3, 4, 5]


def test_limits_that_follow_from_the_step_before_are_refused(devices: Any) -> None:
    run = begun("data=1", guard=spanax.Guard("skip", spike=3))
    with pytest.raises(SpanaxError, match="2 steps per call cannot skip spikes"):
        run.steps(batches(num=2))
    with pytest.raises(SpanaxError, match="at least one batch"):
        run.steps([])


def trained(
    out: Path, source: Any, monkeypatch: pytest.MonkeyPatch, **settings: Any
) -> tuple[list[int], list[dict[str, Any]]]:
    """The length of every call of a run, and its events."""
    lengths, reported = [], []
    step, steps = Run.step, Run.steps
    monkeypatch.setattr(Run, "step", lambda run, batch: (lengths.append(1), step(run, batch))[1])
    monkeypatch.setattr(Run, "steps", lambda run, batches: (lengths.append(len(batches)), steps(run, batches))[1])
    batch = {"x": SHAPE, "y": SHAPE}
    workload = spanax.Workload(build=Net, batch=batch, loss=loss, optimizer=optax.adamw(1e-2), source=source)
    inputs = {"steps": 12, "save_every": 5, "keep_last": 100} | settings
    config = TrainConfig(workload="own", output_dir=str(out), mesh="data=1", **inputs)
    try:
        train(lambda **sizes: workload, config, jax.devices()[:1], reported.append)
    finally:
        monkeypatch.undo()
    return lengths, reported


def losses(reported: list[dict[str, Any]]) -> dict[int, float]:
    return {event["step"]: event["loss"] for event in reported if event["event"] == "step"}


def test_a_call_ends_at_a_save_or_evaluation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, devices: Any) -> None:
    _, item = trained(tmp_path / "one", batches(), monkeypatch)
    lengths, reported = trained(tmp_path / "four", batches(), monkeypatch, steps_per_call=4)
    assert lengths == [4, 1, 4, 1, 1, 1]
    assert losses(reported) == losses(item) and list(losses(reported)) == list(range(1, 13))
    assert [event["step"] for event in reported if event["event"] == "save"] == [5, 10, 12]
    lines = [json.loads(line) for line in (tmp_path / "four" / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if line["event"] == "step"] == list(range(1, 13))
    seconds = [event["step_seconds"] for event in reported if event["event"] == "step"]
    assert len(set(seconds[:4])) == 1 and all(second > 0 for second in seconds)


def test_traced_steps_go_one_by_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, devices: Any) -> None:
    settings = {"save_every": 0, "steps_per_call": 3, "profile": "5:6"}
    lengths, _ = trained(tmp_path / "run", batches(), monkeypatch, **settings)
    assert lengths == [3, 1, 1, 1, 3, 3]


def test_halt_names_the_step_inside_of_the_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, devices: Any) -> None:
    with pytest.raises(NumbersError, match=f"step {BAD + 1} is bad: loss is nan"):
        trained(tmp_path / "run", batches(BAD), monkeypatch, steps_per_call=4, save_every=0)


def test_the_last_batches_run_one_by_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, devices: Any) -> None:
    with pytest.raises(DataError, match="the data ended before step 7"):
        trained(tmp_path / "run", iter(batches(num=6)), monkeypatch, steps_per_call=4, save_every=0)
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    reported = [line["step"] for line in lines if line["event"] == "step"]
    assert reported == [1, 2, 3, 4, 5]  # the last one's metrics wait for a step that never comes
