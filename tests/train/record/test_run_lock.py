"""Claims: who may hold a run folder together, and that whoever is refused has touched nothing."""

import os
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from typing import Any

import pytest

from spanax.entries import folder_lock
from spanax.entries.names import LOCK
from spanax.errors import WriteError
from spanax.train.record.events import Events
from spanax.train.record.heartbeat import Pulse
from spanax.train.record.run_lock import claimed, supervised

CLAIMS: dict[str, Callable[[Path], AbstractContextManager[Any]]] = {
    "a train of its own": lambda folder: claimed(folder, resume=True),
    "a supervisor": lambda folder: supervised(folder, 0),
    "the leader of a supervisor": lambda folder: claimed(folder, resume=True, is_supervised=True),
    "a supervisor of rank 1": lambda folder: supervised(folder, 1),
}
TOGETHER = {
    ("a supervisor", "the leader of a supervisor"), ("a supervisor", "a supervisor of rank 1"),
    ("a supervisor of rank 1", "a supervisor"), ("a supervisor of rank 1", "the leader of a supervisor"),
    ("the leader of a supervisor", "a supervisor of rank 1"), ("a supervisor of rank 1", "a train of its own"),
    ("a train of its own", "a supervisor of rank 1"), ("a train of its own", "the leader of a supervisor"),
}  # fmt: skip
"""Which may follow which; a leader is started by a supervisor alone, which was refused or holds the folder."""


def run_folder(folder: Path) -> Path:
    """A run with a heartbeat and events."""
    folder.mkdir()
    Events(folder).append("begin", step=0)
    Pulse(folder, 0, 0).beat("step", 7, seconds={"step": 3.0})
    (folder / "log").mkdir()
    (folder / "log" / "rank0.log").write_text("== attempt 0\n")
    return folder


def snapshot(folder: Path) -> dict[str, tuple[bytes, int]]:
    files = (path for path in folder.rglob("*") if path.is_file())
    return {str(path): (path.read_bytes(), path.stat().st_mtime_ns) for path in files}


@pytest.mark.parametrize("second", CLAIMS)
@pytest.mark.parametrize("first", CLAIMS)
def test_shared_locks_of_a_run_folder(first: str, second: str, tmp_path: Path) -> None:
    folder = run_folder(tmp_path / "run")
    with CLAIMS[first](folder), ExitStack() as stack:
        before = snapshot(folder)
        if (first, second) in TOGETHER:
            stack.enter_context(CLAIMS[second](folder))
        else:
            with pytest.raises(WriteError, match=f"is in use.*\n.*process {os.getpid()} on"):
                stack.enter_context(CLAIMS[second](folder))
            after = snapshot(folder)
            # A train that finds a leader has taken the other lock for a moment.
            assert {**after, str(folder / LOCK): ()} == {**before, str(folder / LOCK): ()}
    with CLAIMS[second](folder):
        pass


def test_a_recreated_lock_is_not_held_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between opening and acquiring a lock, its holder may remove it, and another process may recreate it."""
    folder, flock, raced = run_folder(tmp_path / "run"), folder_lock.fcntl.flock, iter([True])

    def slow(descriptor: int, how: int) -> None:
        flock(descriptor, how)
        if next(raced, False):
            (folder / LOCK).unlink()

    monkeypatch.setattr(folder_lock.fcntl, "flock", slow)
    with claimed(folder, resume=True):
        assert (folder / LOCK).read_text().startswith(f"process {os.getpid()} ")
        with pytest.raises(WriteError, match="is in use"):
            claimed(folder, resume=True).__enter__()


def test_files_of_a_killed_save_are_removed(tmp_path: Path) -> None:
    folder = run_folder(tmp_path / "run")
    (folder / f".config.toml.{'a' * 16}.new").touch()
    with claimed(folder, resume=True):
        assert sorted(os.listdir(folder)) == ["LOCK", "events.jsonl", "heartbeats", "log"]


def test_a_refused_request_leaves_only_files_of_others(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    with claimed(folder, resume=False):
        Pulse(folder, 0, 0).beat("start", 0)
    assert not folder.exists()
    with claimed(folder, resume=False):
        (folder / "heartbeats").mkdir()
        (folder / "heartbeats" / "mine").touch()
    assert os.listdir(folder / "heartbeats") == ["mine"]
