"""Files made to harm whoever reads them: refused in a line, in little memory, and nothing else happens."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import hostile

MAX_BYTES_MB, MAX_MORE_MB = 300, 100
"""Of a process that needs no JAX, and of one that does over what it had before."""

ALL = {**hostile.LIGHT, **hostile.HEAVY}


@pytest.fixture(scope="module")
def read(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """What came of each file: those that need JAX and those that do not are read by two children at once."""
    if not os.access("/proc/self/clear_refs", os.W_OK):
        pytest.skip("this system does not tell how much memory was needed at most")
    root = tmp_path_factory.mktemp("hostile")
    program = str(Path(hostile.__file__))
    children = [
        subprocess.Popen(
            [sys.executable, program, str(root / which), which], stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        for which in ("light", "heavy")
    ]
    result = {}
    for child in children:
        out, err = child.communicate(timeout=900)
        assert child.returncode == 0, err.decode()[-2000:]
        result |= {line["name"]: line for line in map(json.loads, out.splitlines())}
    return result


def test_there_are_files_of_every_kind() -> None:
    kinds = {name.split()[0] for name in ALL}
    assert len(ALL) >= 100
    assert {"manifest", "meta", "configuration", "plan", "cluster", "summary", "tokenizer", "sidecar", "run"} <= kinds


@pytest.mark.parametrize("name", ALL)
def test_a_hostile_file_is_refused(name: str, read: dict[str, dict[str, Any]]) -> None:
    reported = read[name]
    assert reported["code"] in reported["wanted"], reported["said"]
    # Of a load that failed, Orbax's event loop may print that it is closed, at any later moment.
    assert "Traceback" not in reported["said"] or "uvloop" in reported["said"]
    assert reported["is_clean"] and reported["untouched"]
    if name in hostile.LIGHT:
        assert not reported["jax"] and reported["peak_mb"] <= MAX_BYTES_MB
    assert reported["more_mb"] <= MAX_MORE_MB
    if reported["said"].startswith("spanax: "):
        assert len(reported["said"].splitlines()) <= 4


def test_a_reader_that_is_harmed_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
