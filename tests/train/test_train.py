"""`spanax train` from the outside: its events, and its folder."""

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from spanax.commands.report import page_of
from spanax.plan.plan import Plan
from spanax.show.live.events import line
from spanax.show.page.document import document
from spanax.train.record.report import run_report
from spanax.train.store import manifest

WORKLOAD = """
import spanax
from spanax.models import gpt

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
