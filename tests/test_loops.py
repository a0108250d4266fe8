"""The loop of docs/training.md, verbatim: killed, it continues bit for bit, and it goes back before a bad step."""

import contextlib
import io
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from spanax.train.data.batches import Batches
from spanax.train.state.named_objects import NamedObjects, is_nnx
from written import blocks

PAGE = Path(__file__).resolve().parents[1] / "docs" / "training.md"


def block_with(text: str) -> str:
    """The first block of Python of the page with this text."""
    return next(block.text for block in blocks(PAGE.read_text()) if block.kind == "python" and text in block.text)


MODEL, LOOP, WEIGHTS = block_with("class Classifier"), block_with("spanax.track("), block_with("trained = ")

KILLED = """
import os, signal, time
import spanax.train.tracking

def log(self, step, metrics, log=spanax.train.tracking.Tracking.log):
    log(self, step, metrics)
    while step == 37:
        if os.path.exists("runs/mine/checkpoints/20/manifest.json"):
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(0.01)

spanax.train.tracking.Tracking.log = log
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, devices: list[jax.Device]) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run(names: dict[str, Any] | None = None, between: str = "") -> dict[str, Any]:
    """Executes the page, and returns its names."""
    names = {"__name__": "__main__"} if names is None else names
    with contextlib.redirect_stdout(io.StringIO()):
        for text in (MODEL, between, LOOP):
            exec(text, names)
    return names


def bits(objects: dict[str, Any]) -> dict[str, Any]:
    """The bytes of every array of the objects of a loop, and the states of the others."""
    arrays = NamedObjects.of({name: value for name, value in objects.items() if is_nnx(value)}).arrays
    is_key = lambda array: jax.dtypes.issubdtype(array.dtype, jax.dtypes.prng_key)  # noqa: E731
    data = {path: jax.random.key_data(array) if is_key(array) else array for path, array in arrays.items()}
    states = {name: value.state() for name, value in objects.items() if not is_nnx(value)}
    return {path: np.asarray(array).tobytes() for path, array in data.items()} | states


def events(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "runs/mine/metrics.jsonl").read_text().splitlines()]


def test_a_killed_loop_continues_bit_for_bit(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "killed").mkdir()
    (folder / "killed" / "loop.py").write_text("\n".join([KILLED, MODEL, LOOP]))
    done = subprocess.run([sys.executable, "loop.py"], cwd=folder / "killed", capture_output=True, timeout=300)
    assert done.returncode == -signal.SIGKILL, done.stderr
    expected = run()
    assert len(expected["data"]) == expected["step"] == 60 and len(events(folder)) == 63
    monkeypatch.chdir(folder / "killed")
    assert sorted(os.listdir("runs/mine/checkpoints")) == ["0", "20", "LOCK.steps"]
    resumed = run()
    assert bits(resumed["objects"]) == bits(expected["objects"])
    assert events(folder / "killed") == events(folder)
    assert events(folder)[-1]["val_accuracy"] > 0.6
    again = run(between=WEIGHTS.replace("checkpoints", "spanax.Checkpoints('runs/mine/checkpoints')"))
    assert bits(again["objects"]) == bits(expected["objects"])  # a loop that has ended takes no step
    assert bits({"model": again["trained"]}) == bits({"model": expected["model"]})


def test_the_loop_rolls_back_before_a_bad_step(folder: Path) -> None:
    bad = "clean = examples\ndef examples(count, seed):\n    rows = clean(count, seed)\n"
    bad += "    for row in (rows[100], rows[300]) if count == 640 else ():\n"
    bad += "        row['features'] = row['features'] * np.nan\n    return rows\n"
    names = run(between=bad)
    skipped = names["data"].state()["skipped"]
    assert [index // 20 for index in skipped] == [0, 0, 1, 1, 2, 2]  # twice an epoch, which a checkpoint precedes
    assert names["step"] == 54 and len([event for event in events(folder) if event.get("loss") == "nan"]) == 6
    assert np.isfinite(names["model"].up.kernel[...]).all()
    os.rename("runs", "before")
    skipping = "batches = spanax.batches\ndef skipping(*args, **options):\n    data = batches(*args, **options)\n"
    skipping += (
        f"    data.skip(*({skipped} if 'epochs' in options else []))\n    return data\nspanax.batches = skipping\n"
    )
    try:
        expected = run(between=bad + skipping)
    finally:
        exec("spanax.batches = batches", expected)
    assert bits(names["objects"]) == bits(expected["objects"])
    assert isinstance(expected["data"], Batches)
