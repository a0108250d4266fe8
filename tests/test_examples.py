"""Every example runs and is short enough to be read; the first in a process of its own, as a user runs it."""

import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = sorted((Path(__file__).resolve().parent.parent / "examples").glob("*.py"))


def test_there_are_examples() -> None:
    assert EXAMPLES


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_is_under_60_lines(example: Path) -> None:
    assert len(example.read_text().splitlines()) < 60


def test_an_example_runs_in_a_process_of_its_own(tmp_path: Path) -> None:
    argv = [sys.executable, str(EXAMPLES[0])]
    run = subprocess.run(argv, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stderr[-4000:]
    assert run.stdout.strip(), "it printed nothing"


# The first examples train one model on few meshes, so that later ones find in the cache what those compiled.
@pytest.mark.parametrize("example", EXAMPLES[1:], ids=lambda path: path.stem)
def test_an_example_runs_and_says_how_it_ended(
    example: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [str(example)])
    monkeypatch.setenv("XLA_FLAGS", os.environ["XLA_FLAGS"])  # examples ask for devices, which sets it
    runpy.run_path(str(example), run_name="__main__")
    assert capsys.readouterr().out.strip(), "it printed nothing"
