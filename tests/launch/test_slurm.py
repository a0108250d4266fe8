"""Slurm for real: jobs on a cluster of this machine alone (Debian's slurm-wlm and munge)."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from launch.ranks import attempts, interpreter
from launch.slurm_cluster import Slurm, is_installed, slurm_cluster, wait_for
from spanax.train.record import events, heartbeat
from spanax.train.store import manifest

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not is_installed(), reason="Slurm is not installed: apt-get install slurm-wlm munge"),
]


@pytest.fixture(scope="module")
def slurm() -> Iterator[Slurm]:
    with slurm_cluster(2) as cluster:
        yield cluster


def launch(slurm: Slurm, folder: Path, *flags: str, args: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    """Submits a run with a folder to Slurm; the finished command."""
    words = [sys.executable, "-m", "spanax", "launch", "slurm", *flags, "--", "train", *args]
    words += ["--output-dir", str(folder)]
    return subprocess.run(words, env=slurm.environment, capture_output=True, text=True)


def submitted(slurm: Slurm, folder: Path, *flags: str, args: tuple[str, ...] = ()) -> str:
    """Submits a job of two ranks; its number."""
    done = launch(slurm, folder, "--hosts", "2", "--device", "cpu", "--devices-per-host", "2", *flags, args=args)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()[2].rstrip(";")


def log(folder: Path) -> str:
    return "\n".join(f"--- {file}\n{file.read_text()}" for file in sorted((folder / "log").iterdir()))


def test_jax_finds_its_group_and_listens_on_one_address(slurm: Slurm, tmp_path: Path) -> None:
    folder = tmp_path / "a run"
    job = slurm.ended(submitted(slurm, folder, "--python", interpreter(tmp_path, "group")), 240)
    assert job["ExitCode"] == "0:0", log(folder)
    first, second = (json.loads((folder / f"{rank}.json").read_text()) for rank in (0, 1))
    for result in (first, second):
        assert (result["processes"], result["devices"], result["local_devices"]) == (2, 4, 2)
    assert (first["process"], second["process"]) == (0, 1)
    everywhere = [actual for actual in first["listening"] if not actual.partition(":")[0].endswith("0100007F")]
    assert first["listening"] and not everywhere
    assert attempts(folder) == ["0 0 False", "0 1 False"]


def test_a_cancelled_job_stays_cancelled(slurm: Slurm, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    number = submitted(slurm, folder, "--python", interpreter(tmp_path, "cancelled"))
    wait_for(lambda: len(attempts(folder)) == 2, 240)
    slurm.run("scancel", number)
    job = slurm.ended(number, 240)
    time.sleep(3)
    assert slurm.job(number)["JobState"] == job["JobState"] == "CANCELLED" and job["Restarts"] == "0", log(folder)
    assert attempts(folder) == ["0 0 False", "0 1 False"]


def test_stuck_ranks_log_their_stacks_and_all_restart(slurm: Slurm, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    flags = ("--stuck-seconds", "2", "--python", interpreter(tmp_path, "stuck"))
    job = slurm.ended(submitted(slurm, folder, *flags), 240)
    assert job["ExitCode"] == "0:0", log(folder)
    assert attempts(folder) == ["0 0 False", "0 1 False", "1 0 True", "1 1 True"]
    assert "stuck" in [event["event"] for event in events.read(folder).records]
    for rank in (0, 1):
        stacks = (folder / "log" / f"rank{rank}.log").read_text()
        assert "most recent call first" in stacks and "rank.py" in stacks


def test_a_job_ends_with_an_exit_code_that_a_restart_would_repeat(slurm: Slurm, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    job = slurm.ended(submitted(slurm, folder, "--python", interpreter(tmp_path, "bad")), 240)
    assert job["ExitCode"] == "65:0" and attempts(folder) == ["0 0 False", "0 1 False"], log(folder)


def test_an_error_of_sbatch_is_reported(slurm: Slurm, tmp_path: Path) -> None:
    done = launch(slurm, tmp_path / "run", "--device", "cpu", "--partition", "nowhere")
    assert done.returncode == 2 and "sbatch refused the job" in done.stderr and "partition" in done.stderr


def test_a_run_with_a_killed_rank_ends_bit_equal(slurm: Slurm, tmp_path: Path) -> None:
    uninterrupted, killed = tmp_path / "uninterrupted", tmp_path / "killed"
    train = ("gpt-nano", "--steps", "8", "--save-every", "2", "--eval-batches", "2")
    flags = ("--python", sys.executable)
    assert slurm.ended(submitted(slurm, uninterrupted, *flags, args=train), 240)["ExitCode"] == "0:0", log(
        uninterrupted
    )
    number = submitted(slurm, killed, *flags, args=train)
    wait_for(lambda: manifest.steps(killed / "checkpoints"), 240)
    os.kill(heartbeat.read(killed)[1].pid, signal.SIGKILL)
    job = slurm.ended(number, 240)
    assert job["ExitCode"] == "0:0" and job["Restarts"] == "0", log(killed)
    reported = events.read(killed).records
    (died,) = [event for event in reported if event["event"] == "died"]
    begun = [event for event in reported if event["event"] == "begin"]
    assert died["rank"] == 1 and len(begun) == 2 and begun[1]["step"] >= 2
    print(f"died to begun again: {begun[1]['time'] - died['time']:.1f} s")
    assert losses(killed) == losses(uninterrupted) and len(losses(uninterrupted)) == 8
    assert metrics(uninterrupted)[0]["devices"] == 4


def test_a_preempted_run_loses_no_step(slurm: Slurm, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    train = ("gpt-nano", "--steps", "60", "--save-every", "0", "--eval-batches", "1")
    number = submitted(slurm, folder, "--python", sys.executable, args=train)
    wait_for(lambda: (folder / "metrics.jsonl").exists() and len(losses(folder)) > 2, 240)
    slurm.run("scancel", "--signal=TERM", "--global-batch-size", number)
    wait_for(lambda: slurm.job(number)["JobState"] == "PENDING", 240)
    (reached,) = manifest.steps(folder / "checkpoints")
    time.sleep(2)
    slurm.run("scontrol", "update", f"job={number}", "StartTime=now")
    assert slurm.ended(number, 240)["ExitCode"] == "0:0", log(folder)
    begun = [event for event in events.read(folder).records if event["event"] == "begin"]
    assert 2 < reached < 60 and [(item["step"], item["attempt"]) for item in begun] == [(0, 0), (reached, 1)]
    assert len(losses(folder)) == 60


def metrics(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def losses(folder: Path) -> list[float]:
    return [event["loss"] for event in metrics(folder) if event["event"] == "step"]
