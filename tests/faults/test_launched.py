"""Runs of real processes under a supervisor, with faults: the results are bit-equal to uninterrupted ones."""

import json
import os
import random
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from launched import TRAIN, Launched, digest, losses
from sampling import sampled

FORMS = {"one process": (1, 8), "two processes": (2, 4)}
"""Their processes and the devices of each; `make test` has the first, once, killed once."""


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("launched")


@pytest.fixture(scope="module", params=sampled(FORMS, ["one process"]))
def form(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def uninterrupted(place: Path, form: str) -> Launched:
    """An uninterrupted run."""
    hosts, devices = FORMS[form]
    run = Launched.start(place, f"uninterrupted{hosts}", *TRAIN, hosts=hosts, devices=devices)
    assert run.end() == 0, run.output()
    return run


@contextmanager
def running(place: Path, out: str, *train: str, **how: Any) -> Iterator[Launched]:
    run = Launched.start(place, out, *train, **how)
    try:
        yield run
    finally:
        run.kill()


def same(run: Launched, uninterrupted: Launched) -> None:
    assert losses(run.folder) == losses(uninterrupted.folder)
    assert digest(run.folder) == digest(uninterrupted.folder)


def test_kills_at_random_moments_lose_nothing(place: Path, form: str, uninterrupted: Launched) -> None:
    hosts, devices = FORMS[form]
    num_kills, moments = hosts, random.Random(hosts)
    # Three steps an attempt, so that no run ends before its kills.
    asleep = {"ASLEEP": f"0:{24 // hosts * 4}:{num_kills}"}
    with running(place, f"killed{hosts}", hosts=hosts, devices=devices, environ=asleep) as run:
        for kill in range(num_kills):
            run.until(lambda: len(run.events("begin")) > kill)  # noqa: B023
            run.until(lambda: run.step() > run.events("begin")[-1]["step"])
            run.pause(moments.uniform(0, 1))
            run.send(signal.SIGKILL, moments.randrange(hosts))
        assert run.end() == 0, run.output()
        assert len(run.events("died")) == len(run.events("restart")) == num_kills, run.output()
        same(run, uninterrupted)


@pytest.mark.slow
def test_a_process_that_sleeps_in_python_is_restarted(place: Path, uninterrupted: Launched, form: str) -> None:
    """The other process waits for it in a collective forever, and does not react to signals."""
    if form == "one process":
        pytest.skip("there is no other process")
    asleep = {"ASLEEP": f"1:{24 // 2 * 7}:1"}
    with running(place, "asleep", hosts=2, devices=4, flags=("--stuck-seconds", "10"), environ=asleep) as run:
        run.until(lambda: run.events("begin") and run.pid(0) and run.pid(1))
        addresses = [address for rank in range(2) for address in _listening(run.pid(rank))]
        assert run.end() == 0, run.output()
        # 127.0.0.1 as the kernel writes it, or the same in IPv6.
        assert addresses and all(address.split(":")[0].endswith("0100007F") for address in addresses), addresses
        start = json.loads((run.folder / "metrics.jsonl").read_text().splitlines()[0])
        assert start["event"] == "start" and len(start["listens"]) >= 2, start
        assert all(address.startswith("127.0.0.1:") for address in start["listens"]), start
        (stuck,) = run.events("stuck")
        assert 1 in stuck["ranks"] and not run.events("died")
        logs = [(run.folder / "log" / f"rank{rank}.log").read_text() for rank in range(2)]
        assert all("most recent call first" in text for text in logs) and "__getitem__" in logs[1]
        same(run, uninterrupted)


@pytest.mark.slow
def test_a_run_stopped_by_a_signal_saves_and_resumes(place: Path, form: str, uninterrupted: Launched) -> None:
    """SIGTERM to one process: all of them stop after the same step, and no step is lost."""
    hosts, devices = FORMS[form]
    asked = {"ASKED_TO_STOP": f"{hosts - 1}:{24 // hosts * 5}:1"}
    with running(place, f"told{hosts}", hosts=hosts, devices=devices, environ=asked) as run:
        assert run.end() == 75, run.output()
        (end,) = (event for event in run.events("end") if event["by"] == "rank 0")
        assert end["how"] == "preempted" and losses(run.folder)[-1][0] == end["step"]
    with running(place, f"told{hosts}", *TRAIN, "--resume", hosts=hosts, devices=devices) as again:
        assert again.end() == 0, again.output()
        assert again.events("begin")[-1]["step"] == end["step"]
        same(again, uninterrupted)


@pytest.mark.slow
def test_a_refused_request_is_reported_once(place: Path, form: str) -> None:
    """Every process says why; the supervisor says it once, and starts nothing again."""
    hosts, devices = FORMS[form]
    bad = [word if word != "fsdp" else "tensor" for word in TRAIN] + ["--mesh", "model=7,data=3"]
    with running(place, f"refused{hosts}", *bad, hosts=hosts, devices=devices) as run:
        assert run.end() == 2 and not run.events("restart"), run.output()
        assert "21 devices" in run.folder.with_suffix(".txt").read_text()


@pytest.mark.slow
def test_the_example_of_the_readme_works_as_written(place: Path, form: str) -> None:
    if form == "one process":
        pytest.skip("it is one of two processes")
    readme = Path(__file__).parents[2] / "README.md"
    (line,) = (line.strip() for line in readme.read_text().splitlines() if line.startswith("    spanax launch local"))
    argv = [sys.executable, "-m", *shlex.split(line)]
    done = subprocess.run(argv, cwd=place, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0 and "done: 10 steps" in done.stdout, done.stdout + done.stderr
    assert len(losses(place / "runs" / "two")) == 10


def _listening(pid: int | None) -> list[str]:
    """The addresses that a process listens on, as /proc has them."""
    inodes = {os.readlink(link) for link in Path(f"/proc/{pid}/fd").iterdir()}
    tables = "".join(Path(f"/proc/{pid}/net/{table}").read_text() for table in ("tcp", "tcp6"))
    rows = [line.split() for line in tables.splitlines() if line.strip()[0].isdigit()]
    return [row[1] for row in rows if row[3] == "0A" and f"socket:[{row[9]}]" in inodes]
