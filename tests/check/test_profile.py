"""Profile: every nanosecond of the traced steps is accounted for once, and what waits is seen to wait."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import spanax
from spanax import cli
from spanax.check.measure.run_record import profile_event
from spanax.check.profile import DEVICE_PLANE, Timeline, _operation, _summary, _Trace, step_profile
from spanax.errors import DataError, SpanaxError
from spanax.train.config import TrainConfig, profiled_steps
from spanax.train.profile import INPUT, PROGRAM, STEP, WINDOW

MINE = """
import itertools, threading, time
import jax, numpy as np, spanax
from flax import nnx

requests, take = [], spanax.Batches.__next__

def counted(batches):
    requests.append(batches)
    return take(batches)

spanax.Batches.__next__ = counted

def is_awaited(index):
    # Whether the main thread waits for this batch, or runs this itself.
    return len(requests) > index or threading.current_thread() is threading.main_thread()

def rows():
    for index in itertools.count():
        while {wait} and index < 6 and not is_awaited(index):
            time.sleep(0.01)
        time.sleep({wait})
        yield {{"x": np.ones((16, 64), "float32")}}

mine = spanax.Workload(
    build=lambda rngs: nnx.Linear(64, 256, rngs=rngs),
    batch={{"x": jax.ShapeDtypeStruct((16, 64), "float32")}},
    loss=lambda model, batch: (model(batch["x"]) ** 2).mean(),
    source=rows(),
)
"""


@pytest.fixture(autouse=True)
def batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Restores `Batches.__next__`, which the workload replaces."""
    monkeypatch.setattr(spanax.Batches, "__next__", spanax.Batches.__next__)


def train(folder: Path, wait: float = 0.0, steps: str = "3:5") -> Path:
    (folder / "mine.py").write_text(MINE.format(wait=wait))
    args = f"--layout fsdp --steps 6 --profile {steps} --output-dir {folder}/run --save-every 0"
    cli.main(["train", f"{folder}/mine.py:mine", *args.split()])
    return folder / "run"


def read(run: Path) -> dict[str, Any]:
    return json.loads((run / "profile" / "summary.json").read_text())


def test_a_run_is_traced_and_summarised(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = train(tmp_path)
    out, data = capsys.readouterr().out, read(run)
    assert "profile of 3 steps on 8 devices" in out and "communication" in out
    assert (data["steps"], data["devices"]) == (3, 8)
    assert sum(data["seconds"].values()) == pytest.approx(data["step_seconds"])
    assert all(seconds >= 0 for seconds in data["seconds"].values()) and data["seconds"]["communication"] > 0
    assert data["communication"].keys() == {"fsdp"}
    events = [json.loads(line)["event"] for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert events.count("step") == 6
    assert "profile" not in (run / "config.toml").read_text()


def test_axes_are_read_from_the_compiled_program(tmp_path: Path) -> None:
    run = train(tmp_path)
    event = profile_event(run)
    assert event["event"] == "profile" and "fsdp" in event["communication"]
    assert "all-reduce" not in event["communication"]
    (run / PROGRAM).unlink()
    assert "fsdp" not in profile_event(run)["communication"]


def test_waiting_for_data_is_recorded(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = train(tmp_path, wait=0.3)
    assert read(run)["seconds"]["input wait"] > 0.25
    assert "SPX019" in [finding["code"] for finding in profile_event(run)["findings"]]
    assert "SPX019 warning" in capsys.readouterr().out
    with (tmp_path / "mine.py").open("a") as file:
        file.write("# spanax: allow SPX019\n")
    assert "SPX019" not in [finding["code"] for finding in profile_event(run)["findings"]]


def op(name: str, start: float, end: float) -> tuple[str, float, float]:
    return name, start * 1e9, end * 1e9


def trace(**marks: list[tuple[float, float]]) -> _Trace:
    spans = {WINDOW: [(0.0, 10.0)], STEP: [(0.0, 1.0), (5.0, 6.0)], INPUT: [(8.5, 9.5)]} | marks
    first = [op("while.2", 0, 8), op("dot.1", 1, 3), op("all-gather.7", 2, 5), op("fusion.4", 6, 7)]
    second = [op("dot.1", 1, 2), op("all-reduce-start.3", 2, 4), op("all-reduce-done.3", 4, 4.5)]
    return _Trace({0: first, 1: second}, {name: [(a * 1e9, b * 1e9) for a, b in of] for name, of in spans.items()})


def test_every_second_is_accounted_for_once() -> None:
    result = _summary(trace(), {"all-gather.7": "fsdp"})
    # Two devices and two steps: a mean of 10 seconds of either device is 5 a step.
    assert result.step_seconds == 5 and result.steps == result.devices == 2
    assert result.seconds == {
        "compute": (3 + 1) / 4,  # 1-3 and 6-7 on the first, 1-2 on the second
        "communication": (2 + 2.5) / 4,  # 3-5, during which nothing is computed; 2-4.5
        "idle": (0 + 0.5 + 1) / 4,  # the second while the first ends its gather, 4.5-5, and computes, 6-7
        "host": (1 + 1 + 2) / 2,  # 0-1, 5-6, 7-8.5 and 9.5-10
        "input wait": 1 / 2,  # 8.5-9.5
    }
    assert sum(result.seconds.values()) == pytest.approx(result.step_seconds)
    assert result.communication == {"fsdp": 3 / 4, "all-reduce": 2.5 / 4}
    assert "while.2" not in result.operations and result.operations["dot.1"] == 3 / 4


def event(name: str, **stats: Any) -> Any:
    return SimpleNamespace(name=name, stats=list(stats.items()))


def test_operations_are_recognized_on_every_platform() -> None:
    cpu = event("all-reduce.3", hlo_op="all-reduce.3", hlo_module="jit_step", device_ordinal=5)
    gpu = event("ncclDevKernel_AllReduce", hlo_op="all-reduce-start.1", hlo_module="jit_step")
    tpu = event("%fusion.2 = f32[8] fusion(...)")
    plane = DEVICE_PLANE.match("/device:GPU:3")
    assert _operation(cpu, "tf_XLAEigen/1", None) == (5, "all-reduce.3")
    assert _operation(gpu, "Stream #14", plane) == (3, "all-reduce-start.1")
    assert _operation(tpu, "XLA Ops", DEVICE_PLANE.match("/device:TPU:0")) == (0, "fusion.2")
    other = event("all-reduce.3", hlo_op="all-reduce.3", hlo_module="jit_other")
    assert _operation(other, "", None) is None
    assert _operation(event("end: all-reduce.3", hlo_op="all-reduce.3"), "", None) is None
    assert _operation(event("Rendezvous"), "tf_XLAEigen/1", None) is None
    assert _operation(event("MemcpyH2D"), "Stream #15", plane) is None


def test_masks_of_a_timeline_select_times() -> None:
    rng = np.random.default_rng(0)
    for _ in range(20):
        spans = [[(int(a), int(b)) for a, b in np.sort(rng.integers(0, 60, (12, 2)), axis=1)] for _ in range(2)]
        times = [{time for start, end in each for time in range(start, end)} for each in spans]
        timeline = Timeline.of(spans[0] + spans[1])
        first, second = map(timeline.mask, spans)
        assert timeline.duration(first) == len(times[0])
        assert timeline.duration(first & ~second) == len(times[0] - times[1])
        assert timeline.duration(first & second) == len(times[0] & times[1])
    assert timeline.duration(timeline.mask([])) == 0


def test_a_missing_trace_raises(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="there is no trace"):
        step_profile(tmp_path)


@pytest.mark.parametrize("text", ["10", "10:", "0:3", "9:3", "a:b", "1:2:3"])
def test_invalid_profile_steps_raise(text: str) -> None:
    with pytest.raises(SpanaxError, match="must be the first and the last step"):
        profiled_steps(TrainConfig(profile=text))


def test_steps_of_the_run() -> None:
    assert profiled_steps(TrainConfig(profile="10:20", steps=20)) == (10, 20)
    assert profiled_steps(TrainConfig()) is None
    with pytest.raises(SpanaxError, match="beyond the last step, 15"):
        profiled_steps(TrainConfig(profile="10:20", steps=15))
