"""`spanax report` of runs that finished, are in progress, were killed, or are invalid."""

import json
import os
import re
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from spanax import cli
from spanax.sealed import sealed
from spanax.show.report import duration_text, report_text
from spanax.train.record.events import Events
from spanax.train.record.report import run_report
from spanax.train.store import manifest

BEGAN = 1_700_000_000.0

EVENTS: list[tuple[float, int, str, dict[str, Any]]] = [
    (4, 0, "rank 0", {"event": "begin", "step": 0, "devices": 8, "mesh": {"fsdp": 4, "model": 2}}),
    (30, 0, "rank 0", {"event": "ledger", "step": 9, "seconds": {"start": 4, "compile": 6, "step": 18, "save": 2}}),
    (42, 0, "supervisor", {"event": "died", "what": "it was killed.", "rank": 1, "words": "hm\nouch"}),
    (43, 0, "supervisor", {"event": "restart", "after_seconds": 1.0, "from_step": 6}),
    (55, 1, "rank 0", {"event": "begin", "step": 6, "devices": 4, "mesh": {"fsdp": 4}}),
    (
        70,
        1,
        "rank 0",
        {"event": "ledger", "step": 12, "seconds": {"restart": 8, "recomputed": 6, "step": 11}},
    ),
]
END = (71, 1, "rank 0", {"event": "end", "step": 12})

EXPECTED_REPORT = """\
gpt-nano in FOLDER: 41.4 % goodput, 29.0 s of 1 min 10 s were steps that count
  time in
  step        29.0 s  41.4 %  steps that count
  recomputed  6.0 s   8.6 %   steps computed before and lost
  compile     6.0 s   8.6 %   XLA compilation, including the first step
  save        2.0 s   2.9 %   steps blocked by a checkpoint
  start       4.0 s   5.7 %   imports, tracing, planning
  restart     23.0 s  32.9 %  from a fault or preemption until steps resumed
attempts (UTC)
  began                lasted  ended     steps  devices  mesh
  2023-11-14 22:13:20  30.0 s  died      0-9    8        fsdp 4, model 2
  2023-11-14 22:14:05  25.0 s  finished  6-12   4        fsdp 4
faults and recovery
  after   by          event
  42.0 s  supervisor  died     it was killed. 'ouch' rank 1
  43.0 s  supervisor  restart  after_seconds 1, from_step 6
last checkpoint: step 10, 2026-01-02T03:04:05Z; the 2 steps after it are not saved
to resume for longer, with a learning-rate schedule over 24 steps: \
spanax train --output-dir FOLDER --resume --steps 24"""


def a_run(folder: Path, *reported: tuple[float, int, str, dict[str, Any]]) -> Path:
    folder.mkdir(exist_ok=True)
    for after, attempt, by, event in reported:
        wall = {"wall_seconds": sum(event["seconds"].values())} if "seconds" in event else {}
        Events(folder, by, attempt).append(**({"time": BEGAN + after} | event | wall))
    (folder / "config.toml").write_text(sealed('workload = "gpt-nano"\n'))
    return folder


def a_checkpoint(folder: Path, step: int) -> Path:
    saved = folder / "checkpoints" / str(step)
    (saved / "arrays").mkdir(parents=True)
    (saved / "arrays" / "data").write_bytes(bytes(100))
    (saved / "plan.json").write_text("{}")
    (saved / "meta.json").write_text('{"saved_at": "2026-01-02T03:04:05Z", "leaves": {}, "meta": {}}')
    manifest.write(saved)
    return saved


def report_output(folder: Path) -> str:
    return report_text(run_report(folder))


def test_the_text_of_a_report(tmp_path: Path) -> None:
    folder = a_run(tmp_path / "a", *EVENTS, END)
    a_checkpoint(folder, 10)
    assert report_output(folder).replace(str(folder), "FOLDER") == EXPECTED_REPORT


def test_buckets_that_round_to_zero_are_not_listed(tmp_path: Path) -> None:
    seconds = {"step": 7, "idle": 0.04, "data": 0.05}
    text = report_output(
        a_run(tmp_path / "a", EVENTS[0], (30, 0, "rank 0", {"event": "ledger", "step": 9, "seconds": seconds}))
    )
    assert "none of these" not in text and "waiting for batches" in text


def test_a_damaged_checkpoint_is_not_the_latest(tmp_path: Path) -> None:
    folder = a_run(tmp_path / "a", *EVENTS, END)
    a_checkpoint(folder, 6)
    (a_checkpoint(folder, 10) / "arrays" / "data").write_bytes(b"")
    assert "last checkpoint: step 6," in report_output(folder)


def test_the_resume_command_has_the_flags_of_the_run(tmp_path: Path) -> None:
    folder = a_run(tmp_path / "my run", *EVENTS)
    assert report_output(folder).endswith(f"to resume: spanax train --output-dir '{folder}' --resume")
    (folder / "heartbeats").mkdir()
    beat = {"rank": 0, "pid": os.getpid(), "host": socket.gethostname(), "attempt": 1, "phase": "step", "step": 14}
    beat |= {"step_seconds": 1.0, "time": BEGAN + 74, "seconds": {"restart": 8, "recomputed": 6, "step": 15}}
    (folder / "heartbeats" / "0.json").write_text(json.dumps(beat))
    assert report_output(folder).endswith("last checkpoint: none\nto resume: it is running")
    assert "33.0 s of 1 min 14 s were steps that count" in report_output(folder)


def test_as_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = a_run(tmp_path / "a", *EVENTS, END)
    samples = [{"step": step, "prompt": "a", "text": f"\x1b{step}"} for step in (6, 12)]
    (folder / "samples.jsonl").write_text("".join(json.dumps(sample) + "\n" for sample in samples))
    assert "samples of step 12\n  prompt  text\n  a       \\x1b12\n" in report_output(folder)
    a_checkpoint(folder, 12)
    cli.main(["report", str(folder), "--json"])
    data = json.loads(capsys.readouterr().out)
    assert sum(data["seconds"].values()) == pytest.approx(data["wall_seconds"]) == 70
    assert data["goodput"] == pytest.approx(29 / 70) and data["reached"] == 12
    assert [attempt["outcome"] for attempt in data["attempts"]] == ["died", "finished"]
    assert [event["event"] for event in data["faults"]] == ["died", "restart"]
    assert data["samples"] == samples[1:]
    assert data["checkpoint"]["step"] == 12 and data["workload"] == "gpt-nano"
    assert data["how_to_go_on"] == f"spanax train --output-dir {folder} --resume --steps 24"


def test_text_from_files_is_escaped(tmp_path: Path) -> None:
    """No colors or escapes from an untrusted run folder, and no additional lines."""
    evil = {"event": "died", "why": "[red]why[/red] :smile:\x1b[2J\nfine", "[bold]": float("nan"), "long": "x" * 10_000}
    folder = a_run(tmp_path / "a", *EVENTS, *((72.0 + number, 1, "[b]me", evil) for number in range(50)))
    (folder / "config.toml").write_text("not toml")
    text = report_output(folder)
    assert "\x1b" not in text and "[red]why[/red] :smile:\\x1b[2J\\nfine" in text and "a run in " in text
    assert "faults and recovery, the last 40 of 52" in text and len(text.splitlines()) < 300
    assert text.count("[red]why[/red]") == 40
    assert max(map(len, text.splitlines())) < 160 + len(str(folder)) * 2


def test_unreadable_records_are_counted_and_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = a_run(tmp_path / "a", *EVENTS, END)
    (folder / "config.toml").write_text("not toml")
    (folder / "metrics.jsonl").write_text('{"event": "step", "step": 3, "loss": 2.5}\n{"event": "st\n[]\n')
    with open(folder / "events.jsonl", "a") as file:
        file.write('{"event": "died", "time": null}\n' + '{"event": "[b]new", "time": 1}\n' * 2)
    (folder / "heartbeats").mkdir()
    for rank, pid in enumerate([None, 1 << 40, 0, "7"]):
        beat = {"rank": rank, "pid": pid, "host": "a", "attempt": 0, "phase": "step", "step": 1}
        (folder / "heartbeats" / f"{rank}.json").write_text(json.dumps(beat | {"step_seconds": 1, "time": BEGAN}))
    alien = beat | {"pid": 7, "rank": 9, "step_seconds": 1, "time": BEGAN}
    (folder / "heartbeats" / "4.json").write_text(json.dumps(alien))
    text = report_output(folder)
    for line in (
        "events.jsonl: 1 line damaged", "events.jsonl: 2 lines of the unknown kind '[b]new' left out",
        "metrics.jsonl: 2 lines damaged", "heartbeats/0.json: pid is None, not int",
        "heartbeats/2.json: pid is 0, not within 1 and", "heartbeats/4.json: it is the beat of rank 9",
    ):  # fmt: skip
        assert line in text
    assert "cannot read the configuration" in text and "step  metrics" in text
    cli.main(["report", str(folder), "--json"])
    assert len(json.loads(capsys.readouterr().out)["notes"]) == 9


def test_a_folder_without_a_run_cannot_be_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "empty").mkdir()
    for place, says in (("nowhere", "does not exist"), ("empty", "is not a run folder")):
        with pytest.raises(SystemExit) as stopped:
            cli.main(["report", str(tmp_path / place)])
        error = capsys.readouterr().err
        assert stopped.value.code == 65 and says in error and len(error.splitlines()) <= 4


def test_a_report_starts_no_jax(tmp_path: Path) -> None:
    folder = a_run(tmp_path / "a", *EVENTS)
    code = "import sys; from spanax.cli import main; main(sys.argv[1:]); print('jax' in sys.modules)"
    argv = [sys.executable, "-c", code, "report", str(folder)]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=240)
    assert done.stdout.endswith("False\n"), done.stderr


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0.0 s"), (59.94, "59.9 s"), (59.97, "1 min 00 s"), (3599.7, "1 h 00 min"), (-3, "-3.0 s")],
)
def test_times_are_rounded_once(seconds: float, text: str) -> None:
    assert duration_text(seconds) == text
    assert not re.search(r"60 (s|min)", duration_text(seconds))


def test_an_invalid_time_is_reported(tmp_path: Path) -> None:
    begin = {"event": "begin", "step": 0}
    assert "9e+14 s" in report_output(a_run(tmp_path / "a", (9e14 - BEGAN, 0, "rank 0", begin)))
