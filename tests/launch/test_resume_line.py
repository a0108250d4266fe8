"""A run of several processes that was stopped on request: the launcher prints how to continue it in as many."""

from types import SimpleNamespace

import pytest

from spanax.errors import PREEMPTED
from spanax.launch import local

TRAIN = ["train", "gpt-nano", "--steps", "40", "--output-dir", "runs/two"]


@pytest.mark.parametrize(
    ("argv", "processes", "code", "is_printed"),
    [
        (TRAIN, 2, PREEMPTED, True),
        (TRAIN, 2, 0, False),
        (TRAIN, 1, PREEMPTED, False),
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
    line = "spanax launch local --processes 2 --devices-per-process 4 -- " + " ".join([*TRAIN, "--resume"])
    assert (f"to resume in 2 processes: {line}\n" in capsys.readouterr().err) == is_printed
