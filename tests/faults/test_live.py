"""Readers of a run that saves every step and keeps two: no error, and no damage where there is none."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import fuzzed
from spanax import cli
from spanax.check.array_placement import array_placement
from spanax.commands.inspect import show, verify
from spanax.entries import folder_lock
from spanax.entries.folder import Folder
from spanax.entries.names import PLAN
from spanax.errors import DataError
from spanax.plan.plan import Plan
from spanax.show.report import report_text
from spanax.train.record.report import run_report
from spanax.train.store import checkpoint, manifest, view, writer

WORKLOAD = """
import jax, numpy as np, optax, spanax
from flax import nnx

workload = spanax.Workload(
    build=lambda rngs: nnx.Linear(8, 8, rngs=rngs),
    batch=jax.ShapeDtypeStruct((8, 8), "float32"),
    loss=lambda model, x: (model(x) ** 2).mean(),
    optimizer=optax.sgd(0.1),
    source=[np.ones(8, "float32")] * 64,
)
"""
TRAIN = ("--devices", "1", "--steps", "1000000", "--save-every", "1", "--keep-last", "2", "--json")


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The folder of a run that saves as fast as it can."""
    place = tmp_path_factory.mktemp("live")
    (place / "tiny.py").write_text(WORKLOAD)
    argv = [sys.executable, "-m", "spanax", "train", "tiny.py:workload", "--output-dir", "run", *TRAIN]
    with open(place / "said.txt", "w") as output:
        run = subprocess.Popen(argv, cwd=place, env={**os.environ, "XLA_FLAGS": ""}, stdout=output, stderr=output)
    try:
        while len(manifest.steps(place / "run" / "checkpoints")) < 2:
            assert run.poll() is None, (place / "said.txt").read_text()
            time.sleep(0.05)
        yield place / "run"
    finally:
        run.send_signal(signal.SIGTERM)
        assert run.wait() == 75, (place / "said.txt").read_text()


def read(live: Path, count: int) -> None:
    states: set[str] = set()
    reached = []
    for number in range(count):
        if number % 4 == 0:
            reply = show(live)
            text, problems = reply.text, [problem for step in reply.data["steps"] for problem in step["problems"]]
        elif number % 4 == 1:
            reply = verify(live)
            text, problems = reply.to_json(), reply.data["problems"]
        elif number % 4 == 2:
            text, problems = array_placement(live).origin, []
            assert text.startswith("checkpoint ")
        else:
            report = run_report(live)
            text, problems = report_text(report), []
            assert report.checkpoint is not None and report.account.attempts[-1].outcome == "running"
            reached.append(report.checkpoint.step)
        assert not problems, text
        steps = view.describe(live / "checkpoints")
        states |= {step.state for step in steps}
        assert [step.state for step in steps].count("good") in (1, 2, 3), steps
    assert states == {"good", "saving"} and reached[-1] > reached[0] and reached == sorted(reached)


def test_reads_of_a_run_that_saves_every_step(live: Path) -> None:
    read(live, 36)


@pytest.mark.slow
def test_hundreds_of_reads_of_a_saving_run_succeed(live: Path) -> None:
    read(live, 500)


def finished(folder: Path, *names: str) -> None:
    for name in names:
        (folder / name).mkdir()
        (folder / name / "plan.json").write_text("{}")
        (folder / name / "meta.json").write_bytes(manifest.meta_text({}, {}))
        manifest.write(folder / name)


@pytest.mark.parametrize("stays", [[], ["0"]], ids=["no other step", "another step"])
def test_a_step_removed_while_it_is_read_is_skipped(
    stays: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    finished(tmp_path, *stays, "1", "2.new0")
    problems = manifest.problems

    def moving(folder: Path) -> list[str]:
        if folder.name == "1":
            manifest.discard(folder)
        if folder.name == "2.new0":
            manifest.settle(tmp_path)
        return problems(folder)

    monkeypatch.setattr(manifest, "problems", moving)
    assert [(step.folder, step.state) for step in view.describe(tmp_path)] == [
        *((n, "good") for n in stays),
        ("2", "good"),
    ]
    assert view.verify(tmp_path) == []


def test_a_step_replaced_while_it_is_read_is_not_damage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that goes back saves a step of the same number again."""
    finished(tmp_path, "1", "2")
    problems = manifest.problems

    def replacing(folder: Path) -> list[str]:
        if folder.name != "2" or (tmp_path / "gone").exists():
            return problems(folder)
        (tmp_path / "2").rename(tmp_path / "gone")
        result = problems(folder)
        finished(tmp_path, "2")
        return result

    monkeypatch.setattr(manifest, "problems", replacing)
    assert {step.state for step in view.describe(tmp_path)} == {"good"} and (tmp_path / "gone").exists()


def test_a_restore_skips_a_step_that_is_removed_meanwhile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    finished(tmp_path, "1", "2")
    problems, warnings = manifest.problems, []

    def going(folder: Path) -> list[str]:
        if folder.name == "2":
            manifest.discard(folder)
        return problems(folder)

    monkeypatch.setattr(manifest, "problems", going)
    assert checkpoint.choose(Folder.of(tmp_path), None, warnings.append)[0] == 1 and not warnings


@pytest.mark.parametrize("place", [".", "checkpoints"])
def test_inspect_reads_the_newest_step_if_one_is_removed(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before its plan is read, and between its plan and the shardings that it was saved with."""
    for name, content in fuzzed.template().items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(content)
    steps = tmp_path / "checkpoints"
    for name in ("4", "5.new0"):
        shutil.copytree(steps / "2", steps / name)
        manifest.write(steps / name)
    of_run, moments = Plan.of_run, iter((False, True))

    def moving(folder: Folder) -> Plan:
        is_read = next(moments, None)
        plan = of_run(folder) if is_read else None
        if is_read is False:
            manifest.settle(steps)  # 5.new0 becomes 5
        elif is_read:
            manifest.discard(steps / "5")
        return plan or of_run(folder)

    monkeypatch.setattr(Plan, "of_run", moving)
    assert array_placement(tmp_path / place).origin == "checkpoint 4" and next(moments, None) is None


def test_reading_ends_if_every_step_is_removed(tmp_path: Path) -> None:
    finished(tmp_path, *map(str, range(20)))
    with pytest.raises(DataError, match="every step in '.*' was removed while it was being read"):
        view.newest(tmp_path, lambda step, folder: manifest.discard(folder))
    assert len(manifest.steps(tmp_path)) == 20 - view.MAX_ROUNDS


def test_a_save_on_another_machine_is_not_damage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Network file systems show the lock of a step to the machine that holds it alone."""
    finished(tmp_path, "1")
    staging = Folder.of(tmp_path).inner("2.new0")
    writer.claim(staging.outer)
    staging.make_new()
    staging.replace(PLAN, ["{}"])
    assert [step.state for step in view.describe(tmp_path)] == ["good", "saving"]
    monkeypatch.setattr(folder_lock.fcntl, "flock", lambda descriptor, how: None)
    try:
        assert [(step.state, step.problems) for step in view.describe(tmp_path)] == [("good", ()), ("unfinished", ())]
        cli.main(["checkpoint", "show", str(tmp_path)])
        cli.main(["checkpoint", "verify", str(tmp_path)])
        assert "every file matches its checksum; step 2 is unfinished" in capsys.readouterr().out
        cli.main(["checkpoint", "verify", str(tmp_path), "--json"])
        data = json.loads(capsys.readouterr().out)
        assert (data["steps"], data["saving"], data["unfinished"], data["problems"]) == ([1], [], [2], [])
    finally:
        writer.release(staging.outer)
    # A step that has its number was finished once: without its manifest it is damaged.
    (tmp_path / "1" / "manifest.json").unlink()
    with pytest.raises(SystemExit) as stop:
        cli.main(["checkpoint", "verify", str(tmp_path)])
    assert stop.value.code == 65 and "step 1: manifest.json: missing" in capsys.readouterr().out
