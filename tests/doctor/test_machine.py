"""Disks, shared memory, clock and limits that the doctor must object to."""

import os
import resource
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from spanax.doctor import machine
from spanax.doctor.machine import Reading


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Path]:
    """A file system of 4 MiB."""
    place = tmp_path / "small"
    place.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", place], capture_output=True)
    if mounted.returncode != 0:
        pytest.skip(f"a file system cannot be mounted here: {mounted.stderr.decode().strip()}")
    try:
        yield place
    finally:
        subprocess.run(["umount", "-l", place], check=True)


def test_a_full_disk(small: Path) -> None:
    for name, fix in (("temporary", "TMPDIR"), ("run folder", "--out"), ("compile cache", "XDG_CACHE_HOME")):
        verdict = machine.disk(name, small / "runs" / "a")
        assert verdict.state == "problem" and "No space left on device" in verdict.what and fix in verdict.fix, verdict
    assert not list(small.iterdir()), "something was left behind"


def test_shared_memory_of_a_container(small: Path) -> None:
    verdict = machine.shared_memory(small)
    assert verdict.state == "warning" and verdict.what.startswith("4 MiB are free") and "--shm-size" in verdict.fix


def test_no_shared_memory(tmp_path: Path) -> None:
    verdict = machine.shared_memory(tmp_path / "nowhere")
    assert verdict.state == "warning" and "No such file" in verdict.what


def test_a_path_that_is_not_a_folder_raises(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    verdict = machine.disk("run folder", tmp_path / "file" / "a")
    assert verdict.state == "problem" and "Not a directory" in verdict.what


def test_a_check_of_the_disk_leaves_no_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "MIN_BYTES_PER_SECOND", 0.0)
    monkeypatch.setitem(machine.MIN_FREE, "run folder", 0)
    verdict = machine.disk("run folder", tmp_path / "runs" / "a")
    assert verdict.state == "ok" and "/s with fsync" in verdict.what and verdict.where == f"'{tmp_path}'"
    assert not list(tmp_path.iterdir())


def test_a_disk_with_little_room_few_files_or_slow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    verdict = machine.disk("run folder", tmp_path)
    real = os.statvfs(tmp_path)
    changed = {"f_bavail": 1 << 18, "f_favail": 9, "f_frsize": 4096, "f_files": 1000}

    def statvfs(place: Path) -> os.statvfs_result:
        return os.statvfs_result([changed.get(name, getattr(real, name)) for name in NAMES])

    monkeypatch.setattr(os, "statvfs", statvfs)
    verdict = machine.disk("run folder", tmp_path)
    assert verdict.state == "warning" and "only 1 GiB are free" in verdict.what and "free disk space" in verdict.fix
    changed["f_bavail"] = 1 << 30
    verdict = machine.disk("run folder", tmp_path)
    assert verdict.state == "warning" and "only 9 more files fit" in verdict.what
    changed["f_favail"] = 1 << 30
    monkeypatch.setattr(machine, "_written", lambda place: 2.0**20)
    verdict = machine.disk("run folder", tmp_path)
    assert verdict.state == "warning" and "writing a checkpoint of 1 GiB takes 1024 s" in verdict.what
    assert machine.disk("temporary", tmp_path).state == "ok"


NAMES = (
    "f_bsize", "f_frsize", "f_blocks", "f_bfree", "f_bavail", "f_files", "f_ffree", "f_favail", "f_flag", "f_namemax",
)  # fmt: skip


def test_a_disk_without_locks_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def flock(file: object, how: int) -> None:
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr(machine.fcntl, "flock", flock)
    verdict = machine.disk("run folder", tmp_path)
    assert verdict.state == "problem" and "Function not implemented" in verdict.what


@pytest.mark.parametrize(
    ("after", "is_synchronized", "state", "what"),
    [
        (Reading(102, 12), True, "ok", "steady, synchronized"),
        (Reading(102, 12), None, "ok", "synchronization unknown"),
        (Reading(102, 12), False, "warning", "the clock is not synchronized"),
        (Reading(3702, 12), True, "warning", "set by +3600.0 s"),
        (Reading(72, 12), True, "warning", "set by -30.0 s"),
    ],
)
def test_clocks(after: Reading, is_synchronized: bool | None, state: str, what: str) -> None:
    verdict = machine.clock(Reading(100, 10), after, is_synchronized)
    assert (verdict.state, bool(verdict.fix)) == (state, state != "ok") and what in verdict.what


def test_the_clock_of_this_machine_passes() -> None:
    before = Reading.now()
    assert machine.clock(before, Reading.now(), True).state == "ok"
    assert machine.is_clock_synchronized() in (True, False, None)


@pytest.mark.parametrize(
    ("which", "what", "fix"),
    [
        (resource.RLIMIT_NOFILE, "256 open files are allowed", "ulimit -n"),
        (resource.RLIMIT_NPROC, "256 processes are allowed", "ulimit -u"),
    ],
)
def test_low_limits(which: int, what: str, fix: str) -> None:
    verdict = machine.limits(lambda asked: (256, 1024) if asked == which else (-1, -1))
    assert [item.state for item in verdict] == ["warning"]
    assert what in verdict[0].what and fix in verdict[0].fix and verdict[0].where == "at most 1024"


def test_unlimited_resources_pass() -> None:
    verdict = machine.limits(lambda asked: (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    assert [item.state for item in verdict] == ["ok"] and verdict[
        0
    ].what == "any number of open files, any number of processes"
