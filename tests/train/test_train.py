"""`spanax train` from the outside: its events, its folder, and what survives a kill -9."""

import json
import os
import shutil
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from boards import shown
from launched import arrays
from spanax.commands.report import page_of
from spanax.plan.plan import Plan
from spanax.show.live.events import line
from spanax.show.page.document import document
from spanax.train.record.events import read
from spanax.train.record.report import run_report
from spanax.train.record.time_account import TimeAccount, account
from spanax.train.store import manifest

WORKLOAD = """
import os, re, signal, sys
import spanax
from spanax.models import gpt

def stop(event, args):
    # So that a test kills this process at a moment of its choice.
    if event in ("open", "os.mkdir") and re.fullmatch(os.environ["STOP_AT"], str(args[0])):
        if len(stops) == int(os.environ["STOP_AFTER"]):
            os.kill(os.getpid(), signal.SIGSTOP)
        stops.append(event)

stops = []
if "STOP_AT" in os.environ:
    sys.addaudithook(stop)

def tiny(batch_size=8, seq_len=16, vocab_size=256):
    config = gpt.GPTConfig(vocab_size, seq_len, num_layers=2, num_heads=4, embed_dim=16, dropout=0.1)
    return spanax.Workload(build=lambda rngs: gpt.GPT(config, rngs), batch=gpt.example_batch(batch_size, seq_len),
                           loss=gpt.loss, source="python", vocab_size=vocab_size, num_steps=4)
"""

TRACK = ["--track", "tensorboard"] if find_spec("tensorboardX") else []
SETTINGS = ["--steps", "8", "--save-every", "2", "--seed", "5", "--eval-batches", "2", "--json", *TRACK]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("train")
    (folder / "tiny.py").write_text(WORKLOAD)
    return folder


def command(place: Path, *args: str) -> tuple[list[str], dict[str, str]]:
    return [sys.executable, "-m", "spanax", *args], {**os.environ, "PYTHONWARNINGS": ""}


def spanax_cli(place: Path, *args: str) -> subprocess.CompletedProcess[str]:
    argv, env = command(place, *args)
    return subprocess.run(argv, cwd=place, env=env, capture_output=True, text=True, timeout=300)


def train(place: Path, out: str, *args: str) -> list[dict[str, Any]]:
    done = spanax_cli(place, "train", "tiny.py:tiny", "--output-dir", out, *SETTINGS, *args)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.slow
def test_the_printed_resume_command_runs(tmp_path: Path) -> None:
    place = tmp_path / "my 'first' \"runs\" $HOME"
    place.mkdir()
    (place / "tiny.py").write_text(WORKLOAD)
    (place / "spanax").write_text(f'#!/bin/sh\nexec {sys.executable} -m spanax "$@"\n')
    (place / "spanax").chmod(0o755)
    (place / "out's").mkdir()
    args = ("--output-dir", "out's/a; b", "--steps", "2", "--devices", "1", "--eval-batches", "1")
    done = spanax_cli(place, "train", "tiny.py:tiny", *args)
    _, command = done.stdout.rstrip().rsplit("\nto resume for longer, with a learning-rate schedule over 4 steps: ", 1)
    assert json.loads(spanax_cli(place, "report", "out's/a; b", "--json").stdout)["how_to_go_on"] == command
    environ = {**os.environ, "PYTHONWARNINGS": "", "PATH": f".:{os.environ['PATH']}"}
    again = subprocess.run(["sh", "-c", command], cwd=place, env=environ, capture_output=True, text=True, timeout=300)
    assert again.returncode == 0 and "done: 4 steps" in again.stdout, again.stdout + again.stderr
    assert line({"event": "preempted", "step": 3, "out": "a; b"}).endswith("spanax train --output-dir 'a; b' --resume")


@pytest.fixture(scope="module")
def uninterrupted(place: Path) -> list[dict[str, Any]]:
    """An uninterrupted run."""
    return train(place, "uninterrupted", "--mesh", "fsdp=4,model=2")


def test_the_events_are_the_contract(uninterrupted: list[dict[str, Any]]) -> None:
    steps = [event for event in uninterrupted if event["event"] == "step"]
    assert [event["step"] for event in steps] == list(range(1, 9))
    assert all(event["loss"] > 0 and event["step_seconds"] > 0 for event in steps)
    done = uninterrupted[-1]
    assert done["event"] == "done" and done["steps"] == 8 and done["train_loss"] == steps[-1]["loss"]
    keys = {"val_loss", "bigram_loss", "tokens_per_second", "step_seconds_median", "data_wait_fraction"}
    assert all(isinstance(done[key], float) for key in keys), done


def test_the_run_folder_records_the_run(place: Path, uninterrupted: list[dict[str, Any]]) -> None:
    folder = place / "uninterrupted"
    names = {path.name for path in folder.iterdir()}
    assert {"config.toml", "plan.json", "env.json", "metrics.jsonl", "checkpoints"} <= names
    recorded = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [e["loss"] for e in recorded if e["event"] == "step"] == [
        e["loss"] for e in uninterrupted if e["event"] == "step"
    ]
    assert 'mesh = "fsdp=4,model=2"' in (folder / "config.toml").read_text()
    assert manifest.steps(folder / "checkpoints") == [4, 6, 8]


def test_a_run_folder_has_a_prediction_and_a_page(place: Path, uninterrupted: list[dict[str, Any]]) -> None:
    price = Plan.load(place / "uninterrupted" / "plan.json").price
    assert price is not None and price.cluster == "cpu:8" and price.moved_of
    kinds = ("parameters", "optimizer", "other state")
    assert sum(price.memory[kind] for kind in kinds) == uninterrupted[0]["state_bytes_per_device"]
    text, loss = document(page_of(run_report(place / "uninterrupted"))), f"{uninterrupted[-1]['train_loss']:.4g}"
    assert "Predicted and measured" in text and loss in text and "could not be" not in text


def start_and_kill(place: Path, out: str, stop_at: str, *, after: int = 0) -> None:
    """Train until an entry whose name matches is opened or made once more than `after`, and kill the process there."""
    argv, env = command(place, "train", "tiny.py:tiny", "--output-dir", out, *SETTINGS, "--mesh", "fsdp=4,model=2")
    env |= {"STOP_AT": stop_at, "STOP_AFTER": str(after)}
    with open(place / f"{out}.err", "w") as errors:
        process = subprocess.Popen(argv, cwd=place, env=env, stdout=errors, stderr=errors)
    try:
        status = os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)
        assert status and status.si_code == os.CLD_STOPPED, (place / f"{out}.err").read_text()
    finally:
        process.kill()
        process.wait()


@pytest.mark.slow
def test_killed_in_training_then_resumed_is_bit_equal(place: Path, uninterrupted: list[dict[str, Any]]) -> None:
    before = time.time()
    start_and_kill(place, "killed", r"\.6\.new\w*\.[0-9a-f]{32}")
    saved = manifest.steps(place / "killed" / "checkpoints")
    events = train(place, "killed", "--resume")
    assert saved == [2, 4] and events[0]["step"] == 4
    assert events[-1]["steps"] == 8 and events[-1]["train_loss"] == uninterrupted[-1]["train_loss"]
    recorded = [json.loads(line) for line in (place / "killed" / "metrics.jsonl").read_text().splitlines()]
    assert [e["step"] for e in recorded if e["event"] == "step"] == list(range(1, 9))
    if TRACK:
        assert shown(place / "killed", "loss") == shown(place / "uninterrupted", "loss")
        assert [step for step, _ in shown(place / "killed", "loss")] == list(range(1, 9))
    same_bits(place / "killed", place / "uninterrupted")
    begin = next(event for event in read(place / "killed").records if event["event"] == "begin")
    adds_up(account(place / "killed"), before, begin["time"])


def adds_up(times: TimeAccount, before: float, begin: float) -> None:
    """The account covers the time since the first process was started, and counts steps taken twice apart."""
    first, second = times.attempts
    assert (first.outcome, second.outcome) == ("killed", "finished") and times.reached == 8
    assert before - 0.1 < first.began < begin, "the kernel and time.time() differ by ticks"
    assert times.wall_seconds == pytest.approx(second.ended - first.began)
    assert all(seconds >= 0 for seconds in times.seconds.values())
    assert all(times.seconds[name] > 0 for name in ("step", "compile", "save", "start", "restart", "restore"))
    # The first step of an attempt counts as compiling.
    assert (times.seconds["recomputed"] > 0) == (first.last_step > second.first_step + 1)


@pytest.mark.slow
def test_killed_in_a_save_then_resumed_is_bit_equal(place: Path, uninterrupted: list[dict[str, Any]]) -> None:
    folder = place / "cut" / "checkpoints"
    start_and_kill(place, "cut", r"\.manifest\.json\.\w+\.new", after=1)
    assert manifest.steps(folder) == [2] and [path.name[:5] for path in manifest.unfinished(folder)] == ["4.new"]
    train(place, "cut", "--resume")
    assert not manifest.unfinished(folder)
    same_bits(place / "cut", place / "uninterrupted")


def same_bits(item: Path, other: Path) -> None:
    mine, theirs = arrays(item), arrays(other)
    assert mine.keys() == theirs.keys()
    for path, array in mine.items():
        np.testing.assert_array_equal(array, theirs[path], err_msg=path)


@pytest.mark.slow
def test_another_mesh_continues_with_the_same_data(place: Path, uninterrupted: list[dict[str, Any]]) -> None:
    """More steps of the undisturbed run, on one device."""
    events = train(place, "uninterrupted", "--resume", "--steps", "9", "--devices", "1", "--mesh", "data=1")
    assert events[0]["step"] == 8 and events[-1]["steps"] == 9
    assert np.isfinite(events[-1]["train_loss"])


@pytest.mark.slow
def test_a_mixture_of_tables_continues_with_the_same_rows_on_another_mesh(place: Path) -> None:
    for name, field in (("a.jsonl", "content"), ("b.jsonl", "text")):
        rows = (json.dumps({field: f"{name} {number} to be or not to be"}) for number in range(400))
        (place / name).write_text("\n".join(rows))
    data = ["--data", "a.jsonl=0.75,b.jsonl=0.25", "--field", "content,text", "--tokenizer", "bpe:300"]
    uninterrupted = train(place, "mixed", *data, "--mesh", "data=1", "--devices", "1")
    assert [part["share"] for part in uninterrupted[0]["data"]] == [0.75, 0.25]
    shutil.copytree(place / "mixed", place / "moved")
    for step in ("6", "8"):
        shutil.rmtree(place / "moved" / "checkpoints" / step)
    events = train(place, "moved", "--resume", "--mesh", "fsdp=4", "--devices", "4")
    losses = [[e["loss"] for e in result if e["event"] == "step"][-4:] for result in (uninterrupted, events)]
    np.testing.assert_allclose(losses[0], losses[1], rtol=1e-5)
