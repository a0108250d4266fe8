"""A run that was stopped on request: the launcher prints how to continue it, and its processes do not."""

import io
import shlex
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from spanax.errors import PREEMPTED
from spanax.launch import local, slurm, workers
from spanax.show.live.events import reporter

TRAIN = ["train", "gpt-nano", "--steps", "40", "--output-dir", "runs/two"]
LAST = {"event": "preempted", "step": 3, "out": "runs/two"}
ANY = "to resume: the same `spanax launch` command, with --resume at its end"


@pytest.mark.parametrize(
    ("argv", "processes", "code", "is_printed"),
    [
        (TRAIN, 2, PREEMPTED, True),
        (TRAIN, 1, PREEMPTED, True),
        (TRAIN, 2, 0, False),
        (["python", "train.py"], 2, PREEMPTED, False),
    ],
)
def test_a_stopped_group_prints_how_to_resume_it(
    argv: list[str],
    processes: int,
    code: int,
    is_printed: bool,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(local.Supervisor, "of", lambda *args, **options: SimpleNamespace(watch=lambda: code))
    assert local.launch(local.LocalCommand(processes, devices_per_process=4), argv) == code
    line = f"spanax launch local --processes {processes} --devices-per-process 4 -- {shlex.join([*TRAIN, '--resume'])}"
    assert (f"to resume: {line}\n" in capsys.readouterr().err) == is_printed


@pytest.mark.parametrize(
    ("start", "code", "state", "environ", "is_printed"),
    [
        ("srun", PREEMPTED, "JobState=COMPLETING", {}, True),
        ("srun", PREEMPTED, "JobState=RUNNING", {}, False),  # requeued
        ("", PREEMPTED, "", {"SPANAX_HOST": "0"}, True),
        ("", PREEMPTED, "", {"SPANAX_HOST": "1"}, False),  # each host has a supervisor
        ("", 0, "", {}, False),
    ],
)
def test_a_stopped_job_prints_how_to_resume_it(
    start: str,
    code: int,
    state: str,
    environ: dict[str, str],
    is_printed: bool,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(workers.Supervisor, "of", lambda *args, **options: SimpleNamespace(watch=lambda: code))
    monkeypatch.setattr(slurm, "_output", lambda *words: state)
    monkeypatch.setattr(slurm.subprocess, "run", lambda *args, **options: SimpleNamespace(returncode=0))
    for name, value in {"SLURM_JOB_ID": "7", **environ}.items():
        monkeypatch.setenv(name, value)
    assert workers.launch(workers.WorkersCommand(start=start), TRAIN) == code
    assert (ANY in capsys.readouterr().err) == is_printed


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, "\nto resume: spanax train --output-dir runs/two --resume\n"),
        ({"SPANAX_SUPERVISOR": "0"}, "\n"),
        (
            {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1", "RANK": "0", "WORLD_SIZE": "2"},
            "\nto resume in 2 processes: spanax train --output-dir runs/two --resume\n",
        ),
    ],
)
def test_a_process_of_a_launcher_prints_no_resume_command(
    environ: dict[str, str], expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from spanax.commands import train
    from spanax.processes import devices
    from spanax.show.live import terminal
    from spanax.train import trainer
    from spanax.train.config import TrainConfig

    def stopped(load: Any, config: Any, devices: Any, emit: Any, generate: Any) -> dict[str, Any]:
        emit(LAST)
        return LAST

    stream = io.StringIO()
    monkeypatch.setattr(sys, "stdout", stream)
    monkeypatch.setattr(terminal, "reserve_stdout", lambda: stream)
    monkeypatch.setattr(trainer, "train", stopped)
    monkeypatch.setattr(devices, "devices", lambda number: [])
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    assert train.answer(TrainConfig()).exit_code == PREEMPTED
    assert stream.getvalue() == f"stopped after step 3, all saved{expected}"


def test_a_finished_run_prints_more_steps() -> None:
    stream = io.StringIO()
    with reporter(as_json=False, stream=stream) as emit:
        emit({"event": "done", "steps": 4, "seconds": 1.0, "out": "runs/two"})
    assert stream.getvalue().endswith(
        "to resume for longer, with a learning-rate schedule over 8 steps: "
        "spanax train --output-dir runs/two --resume --steps 8\n"
    )
