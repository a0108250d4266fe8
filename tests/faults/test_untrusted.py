"""Text of run folders on a terminal: every recorded text, and file names, with what steers one in them."""

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Union, get_args, get_origin, get_type_hints

import pytest

import fuzzed
from spanax import cli
from spanax.check.profile import StepProfile
from spanax.documents import json_line
from spanax.entries.names import PLAN
from spanax.errors import SpanaxError
from spanax.launch.supervisor import Limits, Supervisor
from spanax.schema import Within
from spanax.sealed import sealed
from spanax.show.live.events import line
from spanax.train.config import TrainConfig
from spanax.train.record import folder as run_folder
from spanax.train.record.events import KINDS
from spanax.train.record.heartbeat import Heartbeat
from spanax.train.store import manifest

EVIL = "[bold]:smile:\x1b[2J\x9b31m\r\x07\x7f\u202e\u2066\u2028\u2029\tA\nspanax: done"
"""Escapes of C0 and C1, bidi overrides, separators of lines, a line break with a message of its own, and markup."""

SHOWN = "[bold]:smile:\\x1b[2J\\x9b31m"
"""How it begins where it is shown."""


def evil(hint: Any, name: str = "") -> Any:
    """A value of a type in which every text is EVIL."""
    origin, args = get_origin(hint), get_args(hint)
    if origin is Annotated:
        limits = [limit for limit in args[1:] if isinstance(limit, Within)]
        return max(1, limits[0].low) if limits else evil(args[0], name)
    if origin in (Union, UnionType):
        return evil(next(arg for arg in args if arg is not NoneType), name)
    if is_dataclass(hint):
        return record(hint)
    if origin is tuple:
        return [evil(args[0])] if args[-1] is Ellipsis else [evil(arg) for arg in args]
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return {evil(args[0]): evil(args[1])}
    return {str: EVIL, bool: False, Any: {EVIL: [EVIL]}}.get(hint, 1)


def record(kind: Any, **values: Any) -> dict[str, Any]:
    """The values of a dataclass with EVIL in every text of it, but for those given."""
    hints = get_type_hints(kind, include_extras=True)
    return {field.name: evil(hints[field.name]) for field in fields(kind)} | values


def test_every_text_of_a_record_has_control_characters() -> None:
    texts = [field.name for field in fields(TrainConfig) if "str" in str(field.type)]
    match = record(TrainConfig)
    assert len(texts) > 15 and all(match[name] == EVIL for name in texts)
    assert record(Heartbeat)["seconds"] == {EVIL: 1} and record(KINDS["begin"])["mesh"] == {EVIL: 1}


@pytest.fixture
def folder(devices: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run folder in which every recorded text, key and file name is EVIL."""
    monkeypatch.chdir(tmp_path)
    place = tmp_path / "run"
    for name, content in fuzzed.template().items():
        (place / name).parent.mkdir(parents=True, exist_ok=True)
        (place / name).write_bytes(content)
    config = TrainConfig(**record(TrainConfig)).record()
    run_folder.write_records(place, config, (place / PLAN).read_text().partition("\n")[0] + "\n}\n", [])
    shutil.copy(fuzzed.RECORDED / "plan.json", place / "plan.json")
    environment = record(run_folder.Environment, packages={EVIL: EVIL, "jax": EVIL}, python=EVIL)
    (place / "env.json").write_text(sealed(json.dumps(environment, indent=1)))
    lines = [
        record(
            kind,
            event=name,
            time=1_700_000_000 + number,
            record=0,
            **{EVIL: EVIL, "what": EVIL, "why": EVIL, "words": EVIL},
        )
        for number, (name, kind) in enumerate(KINDS.items())
    ]
    lines += [{"event": EVIL, "time": 1}, {"event": EVIL}]
    lines = [entry | ({"seconds": {EVIL: 1.0, "step": 1.0}} if entry["event"] == "ledger" else {}) for entry in lines]
    (place / "events.jsonl").write_text("".join(json.dumps(entry) + "\n" for entry in lines) + EVIL + "\n")
    metrics = [{"event": kind, "step": 3, EVIL: EVIL, "loss": 1.0, "val_loss": 1.0} for kind in ("step", "eval", EVIL)]
    (place / "metrics.jsonl").write_text("".join(json.dumps(entry) + "\n" for entry in metrics))
    for name, values in {"0": record(Heartbeat, rank=0), "1": {"pid": EVIL}, EVIL: {EVIL: EVIL}}.items():
        (place / "heartbeats" / f"{name}.json").write_text(json.dumps(values))
    (place / "log" / "rank0.log").write_text(f"== attempt 0\n{EVIL}\n{EVIL}\n")
    (place / "profile" / "summary.json").write_text(json.dumps(record(StepProfile)))
    step = place / "checkpoints" / "2"
    (step / "meta.json").write_text(json.dumps(record(manifest.Meta)))
    (step / EVIL).write_text("")
    manifest.write(step)
    (step / EVIL).write_text("changed")
    (place / "checkpoints" / f"3{EVIL}").mkdir()
    (place / "plans").mkdir()
    plan = json.loads((fuzzed.RECORDED / "plan.json").read_text())
    for number, spoiled in enumerate([plan | {key: EVIL} for key in plan] + [plan | {EVIL: EVIL}]):
        (place / "plans" / f"{number}.json").write_text(json.dumps(spoiled))
    return place


def steers(text: str) -> str | None:
    """What in a text a terminal would obey."""
    match = re.search("[\x00-\x09\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]|\nspanax: done", text)
    return None if match is None else repr(text[max(0, match.start() - 200) : match.end() + 20])


VERBS = [
    ["report", "run"], ["report", "run", "--json"], ["report", "run", "-o", "page.html"], ["report", "run/plan.json"],
    ["inspect", "run"], ["inspect", "run", "--json"], ["inspect", "run", "--hlo", "x"], ["inspect", "run/checkpoints"],
    ["checkpoint", "show", "run"], ["checkpoint", "show", "run", "--json"], ["checkpoint", "verify", "run"],
    ["checkpoint", "verify", "run", "--json"], ["train", "--resume", "--output-dir", "run"], ["train",
        "--output-dir", "run"],
    ["train", "--config", "run/config.toml"], ["train", "gpt-nano", "--init", "run", "--devices", "1"],
    ["launch", "slurm", "--dry-run", "--", "train", "--config", "run/config.toml"], ["doctor", "--output-dir", "run"],
    ["check", "gpt-nano", "--on", "cpu:8", "--profiled", "run"], ["export", "run", "--as", "gpt2", "--output-dir",
        "new"],
    ["import", "run", "--as", "gpt2", "--output-dir", "new"],
]  # fmt: skip


@pytest.mark.parametrize("argv", VERBS, ids=" ".join)
def test_no_command_prints_control_characters(
    argv: list[str], folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        cli.main(argv)
    except SystemExit as stop:
        assert stop.code != 70
    output = capsys.readouterr()
    assert output.out or output.err
    for text in output:
        assert steers(text) is None and "Traceback" not in text
        assert "--json" not in argv or not text or json.loads(text)


def test_recorded_text_is_shown_escaped(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """No markup, and no emoji code, is interpreted."""
    for argv in (["report", "run"], ["checkpoint", "show", "run"], ["checkpoint", "verify", "run"]):
        with pytest.raises(SystemExit) if argv[1] == "verify" else pytest.MonkeyPatch.context():
            cli.main(argv)
        assert SHOWN in capsys.readouterr().out, argv


@pytest.mark.parametrize("number", range(len(json.loads((fuzzed.RECORDED / "plan.json").read_text())) + 1))
def test_no_plan_file_prints_control_characters(number: int, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for argv in (["inspect"], ["report"], ["plan", "--diff", "run/plan.json"]):
        with pytest.raises(SystemExit) as stop:
            cli.main([*argv, f"run/plans/{number}.json"])
        output = capsys.readouterr()
        assert stop.value.code == 65 and output.err.startswith("spanax: ") and steers(output.out + output.err) is None


def test_a_supervisor_quotes_no_escapes(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def start(attempt: int) -> list[subprocess.Popen[bytes]]:
        return [subprocess.Popen([sys.executable, "-c", "import sys; sys.exit(65)"])]

    assert Supervisor(start, folder, Limits()).watch() == 65
    output = capsys.readouterr().err
    assert SHOWN in output and steers(output) is None and len(output.splitlines()) < 12


@pytest.mark.parametrize("kind", ["start", "init", "warning", "save_failed", "bad_step", "preempted", "done"])
def test_a_live_run_prints_no_escapes(kind: str) -> None:
    share = {"share": 1.0, "source": EVIL, "num_examples": 1, "epochs": 1.0}
    event = {
        "event": kind, "workload": EVIL, "parameters": 1, "mesh": {EVIL: 1}, "init": EVIL, "layout": EVIL, "why": EVIL,
        "state_bytes_per_device": 1, "out": EVIL, "data": [share], "source": EVIL, "message": EVIL, "reason": EVIL,
        "step": 1, "batch": 1, "steps": 1, "seconds": 1.0, "removed": None,
    }  # fmt: skip
    event |= dict.fromkeys(("loaded", "missing", "mismatched", "unexpected"), [EVIL])
    text = line(event)
    assert steers(text) is None and (SHOWN in text or kind == "init")


def test_no_error_prints_escapes(capsys: pytest.CaptureFixture[str]) -> None:
    error = SpanaxError(f"no '{EVIL}'.", where=EVIL, fix=EVIL)
    assert steers(str(error)) is None and len(str(error).splitlines()) == 3
    assert steers(json_line({EVIL: EVIL})) is None
