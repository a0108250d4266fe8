"""Disks that fill up, turn read-only, are slow or lose the run folder under a run; and who holds a run folder."""

import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from flax import nnx

import spanax
from spanax.entries.folder import Folder
from spanax.entries.names import METRICS
from spanax.errors import EntryError, WriteError
from spanax.train.config import TrainConfig
from spanax.train.record import events
from spanax.train.record.folder import AppendLog
from spanax.train.record.run_lock import claimed, supervised
from spanax.train.state import saves
from spanax.train.store import checkpoint, manifest
from spanax.train.trainer import train

Event = dict[str, Any]
WIDTH = 64


def workload(**_: Any) -> spanax.Workload:
    rows = np.random.default_rng(0).normal(size=(16, 8, WIDTH)).astype("float32")
    return spanax.Workload(
        build=lambda rngs: nnx.Linear(WIDTH, WIDTH, rngs=rngs),
        batch=rows[0],
        loss=lambda model, x: ((model(x) - x) ** 2).mean(),
        source=[row for row in rows for _ in range(2)],
        num_steps=8,
    )


def run(out: Path, at: dict[int, Callable[[], object]] | None = None, **settings: Any) -> list[Event]:
    """All events of a training run with a fault after a step is logged."""
    reported: list[Event] = []

    def emit(event: Event) -> None:
        reported.append(event)
        if event["event"] == "step":
            (at or {}).get(event["step"], lambda: None)()

    config = TrainConfig(**{"workload": "w", "output_dir": str(out), "save_every": 2, "layout": "data", **settings})
    train(workload, config, jax.devices()[:2], emit)
    return reported


def between_saves(act: Callable[[], object]) -> Callable[[], object]:
    """A fault after a save that is complete, so that the affected save is known."""
    return lambda: ([thread.join() for thread in threading.enumerate() if "spanax-save" in thread.name], act())


def kinds(events: list[Event], kind: str) -> list[Event]:
    return [event for event in events if event["event"] == kind]


def recorded(out: Path) -> list[int]:
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [line["step"] for line in lines if line["event"] == "step"]


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def fill(disk: Path) -> None:
    """Takes all the room there is, to the last byte."""
    with open(disk / "ballast", "ab", buffering=0) as file:
        for piece in (1 << 16, 1 << 10, 1):
            while True:
                try:
                    file.write(bytes(piece))
                except OSError:
                    break


# ---- full


def test_a_full_disk_does_not_end_the_run_or_leave_files(small_disk: Path) -> None:
    out = small_disk / "run"
    reported = run(out, {3: between_saves(lambda: fill(small_disk)), 5: between_saves((small_disk / "ballast").unlink)})
    failed = kinds(reported, "save_failed")
    assert [event["step"] for event in failed] == [4] and "no space left" in failed[0]["reason"]
    assert failed[0]["removed"] is None, "the only good step stays"
    assert names(out / "checkpoints") == ["2", "6", "8"] and checkpoint.verify(out / "checkpoints") == []
    assert recorded(out) == list(range(1, 9)), "lines are buffered"


def test_older_steps_are_removed_from_a_full_disk(small_disk: Path) -> None:
    out = small_disk / "run"

    def leave_little() -> None:
        """Room for about one checkpoint and a half."""
        step = sum(file.stat().st_blocks * 512 for file in (out / "checkpoints" / "2").rglob("*"))
        free = os.statvfs(small_disk).f_bavail * os.statvfs(small_disk).f_frsize
        (small_disk / "ballast").write_bytes(bytes(free - step * 3 // 2))

    reported = run(out, {3: between_saves(leave_little)}, keep_last=5, steps=12)
    removed = [event["removed"] for event in kinds(reported, "save_failed")]
    assert removed and None not in removed[:1] and reported[-1]["event"] == "done"
    saved = manifest.steps(out / "checkpoints")
    assert saved[-1] == 12 and checkpoint.verify(out / "checkpoints") == []
    assert not manifest.unfinished(out / "checkpoints")


def test_the_last_save_that_fails_ends_with_73(small_disk: Path) -> None:
    out = small_disk / "run"
    with pytest.raises(WriteError, match="step 8 was not saved: no space left") as error:
        run(out, {7: between_saves(lambda: fill(small_disk))}, save_every=6)
    assert error.value.exit_code == 73
    assert names(out / "checkpoints") == ["6"] and checkpoint.verify(out / "checkpoints") == []


@pytest.fixture
def size_limit() -> Iterator[Callable[[int], None]]:
    """Files of this process can grow to so many bytes; -1 for no limit. It needs no root."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    yield lambda size: resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_file_size_limit_does_not_end_the_run(tmp_path: Path, size_limit: Callable[[int], None]) -> None:
    reported = run(
        tmp_path / "run", {3: between_saves(lambda: size_limit(8192)), 5: between_saves(lambda: size_limit(-1))}
    )
    assert [event["step"] for event in kinds(reported, "save_failed")] == [4]
    assert [event["step"] for event in events.read(tmp_path / "run").records if event["event"] == "save_failed"] == [4]
    assert names(tmp_path / "run" / "checkpoints") == ["2", "6", "8"]
    assert checkpoint.verify(tmp_path / "run" / "checkpoints") == []


def test_metrics_are_buffered_on_a_full_disk(
    tmp_path: Path, size_limit: Callable[[int], None], capfd: pytest.CaptureFixture[str]
) -> None:
    lines, path = AppendLog(Folder.of(tmp_path), METRICS), tmp_path / METRICS
    lines.write("first" + "." * 4000)
    size_limit(4010)
    for index in range(3):
        lines.write(f"line {index}")
    assert path.read_text() == "first" + "." * 4000 + "\nline"
    size_limit(-1)
    lines.write("last")
    assert path.read_text() == "first" + "." * 4000 + "\nline 0\nline 1\nline 2\nlast\n"
    assert capfd.readouterr().err.count("cannot write") == 1


def test_the_oldest_of_ten_thousand_buffered_lines_are_dropped(tmp_path: Path) -> None:
    lines = AppendLog(Folder.of(tmp_path / "run"), METRICS)
    for number in range(10_003):
        lines.write(str(number))
    (tmp_path / "run").mkdir()
    lines.write("last")
    result = (tmp_path / "run" / METRICS).read_text().splitlines()
    assert len(result) == 10_000 and (result[0], result[-1]) == ("4", "last")


def test_the_only_intact_step_is_never_removed(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        (tmp_path / str(step)).mkdir()
        (tmp_path / str(step) / "plan.json").write_text("{}")
        (tmp_path / str(step) / "meta.json").write_bytes(manifest.meta_text({}, {}))
        manifest.write(tmp_path / str(step))
    (tmp_path / "3" / "plan.json").write_text("[]")
    assert saves.make_room(tmp_path) is None and names(tmp_path) == ["1", "2", "3"]
    (tmp_path / "3" / "plan.json").write_text("{}")
    assert [saves.make_room(tmp_path) for _ in range(3)] == [1, 2, None] and names(tmp_path) == ["3"]


# ---- read-only, removed, slow


def test_a_disk_that_turns_read_only_ends_no_run(small_disk: Path, capfd: pytest.CaptureFixture[str]) -> None:
    def turn_read_only() -> None:
        # A second mount over the first: no file is open there, so it can be read-only at once.
        subprocess.run(["mount", "--bind", str(small_disk), str(small_disk)], check=True)
        subprocess.run(["mount", "-o", "remount,ro,bind", str(small_disk)], check=True)

    reported = run(
        small_disk / "run",
        {3: between_saves(turn_read_only), 5: lambda: subprocess.run(["umount", str(small_disk)], check=True)},
    )
    assert capfd.readouterr().err.count("training continues, and its lines are buffered") == 1
    assert [event["step"] for event in kinds(reported, "save_failed")] == [4]
    assert "Read-only" in kinds(reported, "save_failed")[0]["reason"]
    assert names(small_disk / "run" / "checkpoints") == ["2", "6", "8"] and recorded(small_disk / "run") == list(
        range(1, 9)
    )


def test_a_removed_run_folder_is_created_again(tmp_path: Path) -> None:
    out = tmp_path / "run"
    reported = run(out, {3: between_saves(lambda: shutil.rmtree(out))})
    assert "was removed, and has been created again" in kinds(reported, "warning")[0]["message"]
    assert names(out / "checkpoints") == ["4", "6", "8"] and checkpoint.verify(out / "checkpoints") == []
    assert {"config.toml", "plan.json", "env.json", "LOCK"} <= set(names(out))
    assert recorded(out)[-5:] == list(range(4, 9))


def test_a_run_folder_replaced_by_another_run_is_not_changed(tmp_path: Path) -> None:
    out = tmp_path / "run"

    def take() -> None:
        shutil.rmtree(out)
        out.mkdir()
        (out / "metrics.jsonl").write_text('{"event": "step", "step": 1}\n')

    with pytest.raises(WriteError, match="already contains a run"):
        run(out, {3: between_saves(take)})
    assert not (out / "checkpoints").exists() and not (out / "plan.json").exists()


def test_a_slow_disk_does_not_block_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write, go_on, at_once = manifest.write, threading.Event(), []

    def slow(folder: Folder) -> None:
        at_once.append(len(manifest.unfinished(folder.outer)))
        assert go_on.wait(240)
        write(folder)

    monkeypatch.setattr(manifest, "write", slow)
    monkeypatch.setattr(saves, "GRACE_SECONDS", 0.0)
    reported = run(tmp_path / "run", {7: go_on.set})
    assert kinds(reported, "step")[6]["step"] == 7, "no step waited for the disk"
    assert at_once == [1] * len(at_once) and not kinds(reported, "save_failed")
    (warning,) = kinds(reported, "warning")
    assert "were skipped: step 4, 6" in warning["message"] and "--save-every " in warning["message"]
    assert names(tmp_path / "run" / "checkpoints") == ["2", "8"]


# ---- who holds a run folder

HOLDER = """
import os, sys, time
from pathlib import Path
from spanax.entries import folder_lock
from spanax.train.record import run_lock
folder_lock.socket.gethostname = lambda: sys.argv[2] or os.uname().nodename
with run_lock.claimed(Path(sys.argv[1]), resume=False):
    if len(sys.argv) > 3 and os.fork():
        os._exit(0)
    print(os.getpid(), flush=True)
    time.sleep(600)
"""


@pytest.mark.parametrize("host", ["", "elsewhere"])
def test_a_lock_is_released_when_its_holder_ends(tmp_path: Path, host: str) -> None:
    holder = subprocess.Popen([sys.executable, "-c", HOLDER, tmp_path / "run", host], stdout=subprocess.PIPE)
    try:
        assert holder.stdout is not None and int(holder.stdout.readline()) == holder.pid
        with pytest.raises(WriteError, match=f"is in use.*\n.*process {holder.pid} on {host}") as error:
            claimed(tmp_path / "run", resume=False).__enter__()
        assert error.value.exit_code == 73 and "has ended" not in str(error.value)
    finally:
        holder.send_signal(signal.SIGKILL)
        holder.communicate()
    assert f"process {holder.pid}" in (tmp_path / "run" / "LOCK").read_text(), "killed, it leaves its lock behind"
    with claimed(tmp_path / "run", resume=False):
        assert f"process {os.getpid()}" in (tmp_path / "run" / "LOCK").read_text()


def test_an_error_names_the_child_that_holds_the_lock(tmp_path: Path) -> None:
    holder = subprocess.Popen([sys.executable, "-c", HOLDER, tmp_path / "run", "", "x"], stdout=subprocess.PIPE)
    assert holder.stdout is not None
    child = int(holder.stdout.readline())
    assert holder.wait(240) == 0
    with pytest.raises(WriteError, match=f"process {holder.pid} on .*, which has ended: a process that it started"):
        claimed(tmp_path / "run", resume=False).__enter__()
    holder.stdout.close()
    os.kill(child, signal.SIGKILL)


@pytest.mark.parametrize(
    "name",
    [
        "LOCK",
        "LOCK.leader",
        "LOCK.rank3",
        "metrics.jsonl",
        "config.toml",
        "checkpoints",
        "heartbeats",
        "events.jsonl",
        "tensorboard",
        "wandb",
        "log",
        "profile",
        "job.sh",
        "model.json",
    ],  # fmt: skip
)
def test_a_run_folder_with_a_link_is_refused_unchanged(tmp_path: Path, name: str) -> None:
    out, outside = tmp_path / "run", tmp_path / "outside"
    out.mkdir()
    outside.write_text("precious")
    (out / name).symlink_to(outside)
    for claim in (claimed(out, resume=True), supervised(out, 0), supervised(out, 1)):
        with pytest.raises(EntryError, match=f"'{name}' is a symbolic link") as error:
            claim.__enter__()
    assert error.value.exit_code == 65 and outside.read_text() == "precious" and names(out) == [name]


def test_a_link_in_place_of_a_temporary_is_not_followed(tmp_path: Path) -> None:
    from spanax.train.record.folder import open_metrics

    (tmp_path / "outside").write_text("precious")
    (tmp_path / "metrics.jsonl.new").symlink_to(tmp_path / "outside")
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n[]\n7\n{"step": "x"}\n{"step": 5}\nhalf')
    open_metrics(tmp_path, 3).write("{}")
    assert (tmp_path / "outside").read_text() == "precious"
    assert (tmp_path / "metrics.jsonl").read_text() == '{"step": 1}\n{}\n'


def test_metrics_of_any_size_are_read(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n')
    os.truncate(tmp_path / "metrics.jsonl", 1 << 40)
    assert next(Folder.of(tmp_path).lines(METRICS)) == {"step": 1}
