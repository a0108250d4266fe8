"""Every event of a run goes through one sink: which kinds reach which file, the trackers and the caller."""

import json
from pathlib import Path
from typing import Any

import pytest

from spanax.train.record.telemetry import Telemetry, open_telemetry
from spanax.train.record.trackers import RunInfo


class Tracker:
    """Records the names of its calls."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def __getattr__(self, name: str) -> Any:
        return lambda *args: self.calls.append(name)


def lines(folder: Path, name: str) -> list[str]:
    path = folder / name
    return [json.loads(line)["event"] for line in path.read_text().splitlines()] if path.exists() else []


def report(telemetry: Telemetry, *kinds: str) -> None:
    for kind in kinds:
        telemetry.report({"event": kind, "step": 1, "reason": "a test", "how": "done", "loss": 2.5})


def test_each_kind_of_event_reaches_its_files(tmp_path: Path) -> None:
    events: list[Any] = []
    tracker = Tracker()
    with open_telemetry(tmp_path, rank=0, attempt=0, emit=events.append) as telemetry:
        report(telemetry, "warning")
        telemetry.begin(RunInfo(tmp_path, {}, {}), {"tracker": tracker})
        report(telemetry, "begin", "start", "step", "sample", "bad_step", "save_failed", "rolled_back", "sample")
        telemetry.finish({"event": "done"}, step=1)
    emitted = ["start", "step", "bad_step", "save_failed", "rolled_back", "done"]
    assert [event["event"] for event in events if event["event"] != "sample"] == ["warning", *emitted]
    assert lines(tmp_path, "metrics.jsonl") == emitted
    assert lines(tmp_path, "samples.jsonl") == ["sample", "sample"]
    assert lines(tmp_path, "events.jsonl") == ["begin", "bad_step", "save_failed", "rolled_back", "end", "ledger"]
    assert tracker.calls == ["begin", "log", "back", "end"]
    assert json.loads((tmp_path / "heartbeats" / "0.json").read_text())["phase"] == "end"


def test_other_processes_only_write_heartbeats(tmp_path: Path) -> None:
    with open_telemetry(tmp_path, rank=1, attempt=0, emit=None) as telemetry:
        report(telemetry, "begin", "start", "step", "bad_step")
        telemetry.finish({"event": "done"}, step=1)
    assert sorted(path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*.json*")) == ["heartbeats/1.json"]


@pytest.mark.parametrize("error", [OSError("no space left"), BrokenPipeError()])
def test_a_callback_on_a_full_disk_does_not_end_the_run(error: OSError, tmp_path: Path) -> None:
    def emit(event: Any) -> None:
        raise error

    with open_telemetry(tmp_path, rank=0, attempt=0, emit=emit) as telemetry:
        telemetry.begin(RunInfo(tmp_path, {}, {}), {})
        if isinstance(error, BrokenPipeError):
            with pytest.raises(BrokenPipeError):
                report(telemetry, "step")
        else:
            report(telemetry, "step")
    assert lines(tmp_path, "metrics.jsonl") == ["step"]
