"""Trackers: the values that they receive, failures that do not end a run, and files of real trackers."""

import json
import math
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from boards import events, shown
from spanax.errors import SpanaxError, WriteError
from spanax.hardware.mesh import MeshShape
from spanax.plan.plan import Schedule
from spanax.train.config import TrainConfig, check
from spanax.train.record.tensorboard import TensorBoard
from spanax.train.record.trackers import RunInfo, Trackers, check_trackers
from spanax.train.record.wandb import WeightsAndBiases
from spanax.train.tracking import create_trackers, track

STEPS = [{"event": "step", "step": step, "loss": 1.0 / step, "counts": [1, 2]} for step in range(1, 7)]


class Told:
    """A tracker that records its calls, and fails on request."""

    def __init__(self, fails: str = ""):
        self.said: list[Any] = []
        self.fails = fails

    def _say(self, name: str, *output: Any) -> None:
        if name == self.fails:
            raise OSError(28, "No space left on device")
        self.said.append((name, *output))

    def begin(self, about: RunInfo) -> None:
        self._say("begin", about.step, about.reached)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._say("log", step, dict(values))

    def back(self, step: int) -> None:
        self._say("back", step)

    def end(self) -> None:
        self._say("end")


def about(folder: Path, **values: Any) -> RunInfo:
    return RunInfo(folder, {"lr": 0.1, "seed": 3, "mesh": None}, {"layout": "fsdp", "mesh": {"fsdp": 8}}, **values)


def run_of(num_steps: int = 0) -> Any:
    plan = SimpleNamespace(
        layout=SimpleNamespace(name="fsdp"),
        mesh=MeshShape.of("fsdp=8"),
        why="it fits",
        state_bytes=lambda: 80,
        schedule=Schedule(),
    )
    return SimpleNamespace(plan=plan, num_steps=num_steps, program=SimpleNamespace(num_params=20, frozen=frozenset()))


# ---- values that trackers receive


def test_a_tracker_receives_steps_and_evaluations() -> None:
    reported, warnings = Told(), list[str]()
    trackers = Trackers({"told": reported}, about(Path("runs/a"), step=4, reached=6), warnings.append)
    for event in [
        {"event": "start", "step": 4},
        {"event": "step", "step": 5, "loss": 2.5, "ok": True, "counts": [1, 2], "name": "x", "tokens": 7},
        {"event": "save", "step": 5, "blocked_seconds": 0.1},
        {"event": "eval", "step": 5, "val_loss": 2.0},
        {"event": "rolled_back", "step": 4, "from_step": 5, "batch": 5},
        {"event": "warning", "message": "none"},
    ]:
        trackers.take(event)
    trackers.end()
    assert reported.said == [
        ("begin", 4, 6),
        ("log", 5, {"loss": 2.5, "tokens": 7.0}),
        ("log", 5, {"val_loss": 2.0}),
        ("back", 4),
        ("end",),
    ]
    assert not warnings


@pytest.mark.parametrize("fails", ["begin", "log", "back", "end"])
def test_a_failing_tracker_warns_once_and_is_disabled(fails: str) -> None:
    bad, good, warnings = Told(fails), Told(), list[str]()
    trackers = Trackers({"bad": bad, "good": good}, about(Path("runs/a")), warnings.append)
    for event in [{"event": "start"}, *STEPS[:2], {"event": "rolled_back", "step": 1}, *STEPS[1:3]]:
        trackers.take(event)
    trackers.end()
    assert warnings == ["tracker 'bad' failed and is disabled: [Errno 28] No space left on device"]
    assert [line[0] for line in good.said] == ["begin", "log", "log", "back", "log", "log", "end"]
    assert len(bad.said) == {"begin": 0, "log": 1, "back": 3, "end": 6}[fails]


# ---- a loop of one's own


def read(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_a_custom_loop_writes_metrics_and_calls_trackers(tmp_path: Path) -> None:
    reported = Told()
    with track([reported], tmp_path / "a", run_of(), settings={"lr": 0.1}) as tracking:
        for step in (1, 2, 3):
            assert len(read(tmp_path / "a")) == max(0, step - 2)  # fetched only when the next step is under way
            tracking.log(step, {"loss": np.float32(step), "counts": np.arange(2)})
    assert read(tmp_path / "a") == [
        {"event": "step", "step": step, "loss": float(step), "counts": [0, 1]} for step in (1, 2, 3)
    ]
    assert reported.said == [("begin", 0, 0), *(("log", step, {"loss": float(step)}) for step in (1, 2, 3)), ("end",)]


def test_values_that_are_not_finite_are_valid_json(tmp_path: Path) -> None:
    reported = Told()
    with track([reported], tmp_path, run_of()) as tracking:
        tracking.log(1, {"loss": np.float32("nan")})
    assert read(tmp_path) == [{"event": "step", "step": 1, "loss": "nan"}] and math.isnan(reported.said[1][2]["loss"])


def test_a_continued_loop_logs_each_step_once(tmp_path: Path) -> None:
    reported = Told()
    with track("", tmp_path, run_of()) as tracking:
        for step in range(1, 6):
            tracking.log(step, {"loss": 0})
    with track([reported], tmp_path, run_of(3)) as tracking:
        tracking.log(4, {"loss": 1})
        tracking.back(3)
        tracking.log(4, {"loss": 2})
    assert [(line["step"], line["loss"]) for line in read(tmp_path)] == [(1, 0), (2, 0), (3, 0), (4, 1), (4, 2)]
    assert reported.said[0] == ("begin", 3, 5) and ("back", 3) in reported.said


def test_a_loop_without_a_run_logs_any_metrics(tmp_path: Path) -> None:
    import jax.numpy as jnp
    from flax import nnx

    reported, metrics = Told(), nnx.MultiMetric(loss=nnx.metrics.Average("loss"), accuracy=nnx.metrics.Accuracy())
    metrics.update(loss=jnp.float32(2.5), logits=jnp.eye(4), labels=jnp.arange(4))
    with track([reported], tmp_path) as tracking:
        tracking.log(1, metrics.compute())
        tracking.log(2, {"loss": jnp.bfloat16(0.5), "by": {"head": 1, "rows": [1.0, 2.0]}, "step": 9, "event": "odd"})
        tracking.evaluated(2, metrics.compute())
    assert read(tmp_path) == [
        {"event": "step", "step": 1, "accuracy": 1.0, "loss": 2.5},
        {"event": "step", "step": 2, "by.head": 1, "by.rows.0": 1.0, "by.rows.1": 2.0, "loss": 0.5},
        {"event": "eval", "step": 2, "val_accuracy": 1.0, "val_loss": 2.5},
    ]
    assert reported.said[2] == ("log", 2, {"by.head": 1.0, "by.rows.0": 1.0, "by.rows.1": 2.0, "loss": 0.5})
    assert reported.said[3] == ("log", 2, {"val_accuracy": 1.0, "val_loss": 2.5})


def test_a_loop_without_a_run_continues_after_its_step(tmp_path: Path) -> None:
    for step in (None, 0):  # the first one ended before it saved a step
        with track("", tmp_path, step=step) as tracking:
            for number in range(1, 6):
                tracking.log(number, {"loss": 0})
    assert [line["step"] for line in read(tmp_path)] == [1, 2, 3, 4, 5]
    (tmp_path / "checkpoints" / "3").mkdir(parents=True)
    (tmp_path / "checkpoints" / "3" / "manifest.json").touch()
    reported = Told()
    with track([reported], tmp_path, step=3) as tracking:
        tracking.log(4, {"loss": 1})
    assert [(line["step"], line["loss"]) for line in read(tmp_path)] == [(1, 0), (2, 0), (3, 0), (4, 1)]
    assert reported.said[0] == ("begin", 3, 5)
    for step in (None, 0):
        with pytest.raises(WriteError, match="already contains a run"), track("", tmp_path, step=step):
            pass
    with pytest.raises(SpanaxError, match="`step` is that of the run"), track("", tmp_path, run_of(3), step=3):
        pass


def test_the_last_step_is_logged_when_the_loop_fails(tmp_path: Path) -> None:
    reported = Told()
    with pytest.raises(ZeroDivisionError), track([reported], tmp_path, run_of()) as tracking:
        tracking.log(1, {"loss": 0})
        1 / 0  # noqa: B018
    assert reported.said[1:] == [("log", 1, {"loss": 0.0}), ("end",)]


# ---- names


def test_names_are_checked_before_anything_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SpanaxError, match="unknown tracker 'tensorbord'") as error:
        check(TrainConfig(track="tensorbord"))
    assert "did you mean 'tensorboard'?" in error.value.args[0]
    monkeypatch.setattr("spanax.train.record.trackers.find_spec", lambda name: None)
    with pytest.raises(SpanaxError) as error:
        create_trackers(["wandb"])
    assert error.value.args[0] == "tracker 'wandb' requires wandb.\n  fix: pip install \"spanax[wandb]\""
    assert check_trackers("") == [] and check(TrainConfig()).track is None


def test_only_requested_trackers_are_imported() -> None:
    code = "import sys, spanax.train.tracking; print(sorted({'tensorboardX', 'wandb'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=240)
    assert done.stdout.strip() == "[]", done.stderr


# ---- TensorBoard


@pytest.fixture
def board(tmp_path: Path) -> Path:
    pytest.importorskip("tensorboardX", reason='pip install "spanax[tensorboard]"')
    return tmp_path


def test_event_files_contain_the_logged_values(board: Path) -> None:
    tracker = TensorBoard()
    tracker.begin(about(board))
    tracker.log(1, {"loss": 2.5, "val_loss": math.nan})
    tracker.end()
    first, settings, plan, step = events(board)
    assert first.file_version == "brain.Event:2"
    assert settings.summary.value[0].tag == "settings/text_summary"
    assert settings.summary.value[0].tensor.string_val == [b"    lr: 0.1\n    seed: 3"]
    assert b'mesh: {"fsdp": 8}' in plan.summary.value[0].tensor.string_val[0]
    assert step.step == 1 and [(v.tag, str(v.simple_value)) for v in step.summary.value] == [
        ("loss", "2.5"),
        ("val_loss", "nan"),
    ]


def test_no_step_is_shown_twice(board: Path) -> None:
    first = Trackers({"board": TensorBoard()}, about(board), print)
    for event in [{"event": "start"}, *STEPS[:5]]:
        first.take(event)  # killed: nothing is ended
    second = Trackers({"board": TensorBoard()}, about(board, step=3, reached=5), print)
    for event in [{"event": "start"}, *STEPS[3:6], {"event": "rolled_back", "step": 4}, *STEPS[4:]]:
        second.take(event)
    assert [step for step, _ in shown(board, "loss")] == [1, 2, 3, 4, 5, 6]
    assert shown(board, "loss")[3] == (4, 0.25)


def test_a_full_disk_disables_the_tracker_but_not_the_run(board: Path, small_disk: Path) -> None:
    warnings: list[str] = []
    trackers = Trackers({"board": TensorBoard()}, about(small_disk), warnings.append)
    trackers.begin()
    (small_disk / "full").write_bytes(bytes(1 << 19))
    with pytest.raises(OSError):
        (small_disk / "fuller").write_bytes(bytes(1 << 20))
    for event in STEPS * 200:
        trackers.take(event)
    assert len(warnings) == 1
    assert "No space left on device" in warnings[0] or "accepted only a part of an event" in warnings[0]


# ---- Weights & Biases


class FakeRun(list):  # type: ignore[type-arg]
    """The rows of a W&B run; `finish` ends it."""

    def log(self, values: Mapping[str, float], step: int) -> None:
        self.append((step, values["loss"]))

    def finish(self) -> None:
        self.append("finished")


def test_a_resumed_run_is_one_run_without_steps_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs: dict[str, FakeRun] = {}
    fake = SimpleNamespace(
        Settings=lambda **settings: settings,
        init=lambda id, resume, **options: runs.setdefault(id, FakeRun()),
    )
    monkeypatch.setitem(sys.modules, "wandb", fake)
    for first, reached, last in ((0, 0, 4), (2, 4, 6)):
        trackers = Trackers({"wandb": WeightsAndBiases()}, about(tmp_path, step=first, reached=reached), pytest.fail)
        for event in [{"event": "start"}, *STEPS[first:last]]:
            trackers.take(event)
        trackers.end()
    ((name, rows),) = runs.items()
    assert (tmp_path / "wandb" / "id").read_text() == name and re.fullmatch(r"[0-9a-f]{16}", name)
    assert rows == [*((step, 1 / step) for step in range(1, 5)), "finished", (5, 1 / 5), (6, 1 / 6), "finished"]


def test_no_network_ends_the_tracker_and_not_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def init(**_: Any) -> None:
        raise OSError("no network")

    warnings: list[str] = []
    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(Settings=lambda **settings: settings, init=init))
    trackers = Trackers({"wandb": WeightsAndBiases()}, about(tmp_path), warnings.append)
    for event in [{"event": "start"}, *STEPS[:3]]:
        trackers.take(event)
    trackers.end()
    assert warnings == ["tracker 'wandb' failed and is disabled: no network"]
