"""Golden scripts for Slurm, and errors for bad input."""

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

import golden_messages
from followed import followed
from spanax import cli
from spanax.commands import launch as launching
from spanax.errors import SpanaxError
from spanax.launch.request import request_of
from spanax.launch.slurm import SlurmCommand, first_failed, script
from spanax.printable import printable_lines

GOLDEN = Path(__file__).parent.parent / "golden"

TRAIN = "-- train gpt2 --data 'my texts' --output-dir /runs/first"

RENDERED = {
    "launch_slurm.sh": "slurm --hosts 4 --python python --partition long --account lab --time 24:00:00 "
    f"--cpus-per-host 16 --extra '#SBATCH --qos=high' --extra 'module load cuda' {TRAIN}",
    "launch_slurm_cpu.sh": f"slurm --hosts 2 --python python --device cpu --devices-per-host 4 --restarts 5 {TRAIN}",
    "launch_slurm_program.sh": "slurm --hosts 4 --python python --logs /runs/first -- sh train.sh --name 'my run'",
}


def launch(argv: Sequence[str]) -> int:
    """The exit code of a launch."""
    return launching.answer(launching.parse(argv)).exit_code


@pytest.mark.parametrize("name", RENDERED)
def test_the_rendered_text_equals_the_golden_file(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    where, *rest = shlex.split(RENDERED[name])
    assert launch([where, "--dry-run", *rest]) == 0
    result = capsys.readouterr().out
    if os.environ.get("SPANAX_GOLDEN") == "update":
        (GOLDEN / name).write_text(result)
    assert result == (GOLDEN / name).read_text(), "a rendered text changed: `make golden`, then read the diff"


STEERING = "\x1b[2J\x9b31m\u202e"


@pytest.mark.parametrize("name", [name for name in RENDERED if "cpu" not in name])
def test_a_terminal_shows_escapes_and_a_file_the_exact_text(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    where, *rest = shlex.split(RENDERED[name])
    command = [where, "--dry-run", *rest, "--data", f"my{STEERING}texts"]
    assert launch(command) == 0
    written = capsys.readouterr().out
    assert f"my{STEERING}texts" in shlex.split(written, comments=True)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    assert launch(command) == 0
    shown = capsys.readouterr().out
    assert shown == printable_lines(written) and not re.search("[\x1b\x9b\u202e]", shown) and "[2J" in shown


@pytest.mark.parametrize("name", RENDERED)
def test_the_script_is_one_that_bash_reads(name: str) -> None:
    text = (GOLDEN / name).read_text()
    assert subprocess.run(["bash", "-n"], input=text, text=True).returncode == 0
    lines = text.splitlines()
    directives = [index for index, line in enumerate(lines) if line.startswith("#SBATCH")]
    first = next(index for index, line in enumerate(lines) if not line.startswith("#"))
    assert max(directives) < first, "sbatch reads no directive behind a command"


def test_arguments_of_the_command_are_quoted_in_the_script() -> None:
    request = request_of(["train", "--data", "a'b $HOME", "--output-dir", "runs/x"], None)
    text = script(SlurmCommand(device="cpu"), request)
    words = shlex.split(text.partition("exec ")[2].replace("\\\n", ""))
    assert words[words.index("--") + 1 :] == request.argv(is_again=False)
    start = shlex.split(words[words.index("--start") + 1])
    assert start[0] == "srun" and start[-3:] == ["-P", "-m", "spanax"]


BAD = {
    "nowhere": "",
    "an unknown place": f"slrum {TRAIN}",
    "kubernetes": f"kubernetes --image a --claim b {TRAIN}",
    "ray": f"ray --hosts 4 {TRAIN}",
    "nothing behind it": "slurm --hosts 2",
    "nothing behind the dashes": "slurm --hosts 2 --",
    "an unknown command": "slurm -- trian gpt2",
    "a command for one machine": "slurm -- plan gpt2",
    "a bad setting": "slurm -- train --steps 0",
    "slurm: no hosts": f"slurm --hosts 0 {TRAIN}",
    "slurm: no devices": f"slurm --devices-per-host 0 {TRAIN}",
    "slurm: no cores": f"slurm --cpus-per-host 0 {TRAIN}",
    "slurm: a partition of two lines": f"slurm --partition 'a\nb' {TRAIN}",
    "slurm: a limit that is none": f"slurm --stuck-seconds -1 {TRAIN}",
    "slurm: no sbatch": f"slurm {TRAIN}",
    "logs of a run": "local --logs runs/a -- train gpt2",
    "logs without a name": "local --logs ' ' -- sh",
    "a script without its interpreter": "local -- train.py --lr 3e-4",
    "spanax itself": "local -- spanax train gpt2",
    "workers: no hosts": f"workers --hosts 0 {TRAIN}",
}


def error_message(arguments: str) -> str:
    with pytest.raises(SpanaxError) as caught:
        launch(shlex.split(arguments))
    assert caught.value.exit_code == 2
    return str(caught.value)


def test_bad_input_raises_with_a_message(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    result = "".join(f"[{name}] spanax launch {text}\n{error_message(text)}\n\n" for name, text in BAD.items())
    assert not list(tmp_path.iterdir()), "something was left behind"
    golden = GOLDEN / "launch_errors.txt"
    if os.environ.get("SPANAX_GOLDEN") == "update":
        golden.write_text(result)
    assert result == golden.read_text(), "a message changed: `make golden`, then read the diff"
    assert all(len(answer.splitlines()) <= 5 for answer in re.split(r"\n\n(?=\[)", result))


PROSE = {
    "nowhere", "an unknown command", "a command for one machine", "slurm: a partition of two lines", "slurm: no sbatch",
    "logs of a run", "spanax itself", "kubernetes", "ray",
}  # fmt: skip
"""Errors whose fix is not a flag or a command."""


def test_a_fix_works_or_is_prose(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("train.py").touch()
    errors = golden_messages.sections(GOLDEN / "launch_errors.txt")
    fixed = {name: followed(shlex.split(text), errors[name]) for name, text in BAD.items()}
    assert {name for name in fixed if not fixed[name]} == PROSE
    for where, *rest in (args for lines in fixed.values() for args in lines if args[0] != "workers"):
        is_dry = where == "local" or "--dry-run" in rest
        assert launch([where, *rest] if is_dry else [where, "--dry-run", *rest]) == 0


def test_a_misspelled_flag_of_the_run_raises_before_submission(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        cli.main(["launch", "slurm", "--", "train", "--stpes", "3"])
    assert stop.value.code == 2 and "--steps" in capsys.readouterr().err


# ---- what submits


def tool(folder: Path, name: str, code: str) -> None:
    (folder / name).write_text(f"#!/bin/sh\n{code}\n")
    (folder / name).chmod(0o755)


def test_the_script_is_written_to_the_run_folder_and_submitted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tool(tmp_path, "sbatch", 'echo "$@" > "$(dirname "$0")/said"; echo "7;here"')
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert launch(["slurm", "--", "train", "--output-dir", str(tmp_path / "run")]) == 0
    assert "submitted job 7" in capsys.readouterr().out
    assert (tmp_path / "said").read_text() == f"--parsable {tmp_path}/run/job.sh\n"
    assert (tmp_path / "run" / "job.sh").read_text().startswith("#!/bin/bash\n") and (tmp_path / "run/log").is_dir()


def test_the_first_failed_rank_is_read_from_the_output_of_srun() -> None:
    ended = "srun: error: n0: task 0: Terminated\nsrun: Force Terminated StepId=5.1\n"
    cases = {
        "Exited with exit code 65": (1, 65),
        "Killed": (1, -9),
        "Aborted (core dumped)": (1, -6),
        "Segmentation fault": (1, -11),
        "Out Of Memory": (1, -6),
    }
    for words, expected in cases.items():
        assert first_failed(f"srun: error: n1: task 1: {words}\n{ended}", 143) == expected
    assert first_failed("srun: error: Unable to create step\n", 1) == (0, 1)
    assert first_failed("", 0) == (0, 0)
