"""Files made to harm whoever reads them: refused in a line, in little memory, and nothing else happens."""

import functools
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import hostile
from sampling import sampled

MAX_BYTES_MB, MAX_MORE_MB = 300, 100
"""Of a process that needs no JAX, and of one that does over what it had before."""

ALL = {**hostile.LIGHT, **hostile.HEAVY}


@pytest.fixture(scope="module")
def read(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], dict[str, Any]]:
    """Returns what came of a file; all that need JAX are read by one child, and all that do not by another."""
    if not os.access("/proc/self/clear_refs", os.W_OK):
        pytest.skip("this system does not tell how much memory was needed at most")
    program, root = str(Path(hostile.__file__)), tmp_path_factory.mktemp("hostile")

    @functools.cache
    def results(which: str) -> dict[str, dict[str, Any]]:
        command = [sys.executable, program, str(root / which), which]
        child = subprocess.run(command, capture_output=True, timeout=900)
        assert child.returncode == 0, child.stderr.decode()[-2000:]
        return {line["name"]: line for line in map(json.loads, child.stdout.splitlines())}

    return lambda name: results("light" if name in hostile.LIGHT else "heavy")[name]


def test_old_files_of_every_kind_exist() -> None:
    kinds = {name.split()[0] for name in ALL}
    assert len(ALL) >= 100
    assert {"manifest", "meta", "configuration", "plan", "cluster", "summary", "tokenizer", "sidecar", "run"} <= kinds


@pytest.mark.parametrize("name", sampled(ALL, hostile.LIGHT))
def test_a_hostile_file_is_refused(name: str, read: Callable[[str], dict[str, Any]]) -> None:
    reported = read(name)
    assert reported["code"] in reported["wanted"], reported["said"]
    # Of a load that failed, Orbax's event loop may print that it is closed, at any later moment.
    assert "Traceback" not in reported["said"] or "uvloop" in reported["said"]
    assert reported["is_clean"] and reported["untouched"]
    if name in hostile.LIGHT:
        assert not reported["jax"] and reported["peak_mb"] <= MAX_BYTES_MB
    assert reported["more_mb"] <= MAX_MORE_MB
    if reported["said"].startswith("spanax: "):
        assert len(reported["said"].splitlines()) <= 4


def test_a_vulnerable_reader_is_detected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A command that runs what it reads, takes memory, and writes elsewhere."""
    monkeypatch.chdir(tmp_path)

    def harmed(command: list[str]) -> None:
        import pickle

        pickle.loads(hostile.PICKLED)
        assert len(b"x" * (150 << 20)) and (tmp_path / "outside").write_text("changed")
        print("\x1b]0;owned\x07")
        raise RecursionError("deep")

    monkeypatch.setattr(hostile.cli, "main", harmed)
    before = hostile.snapshot(tmp_path)
    reported = hostile.watched(["train"])
    assert reported["code"] == -1 and "Traceback" in reported["said"] and not reported["is_clean"]
    assert reported["more_mb"] > MAX_MORE_MB and (tmp_path / "executed").exists()
    assert hostile.snapshot(tmp_path) != before
