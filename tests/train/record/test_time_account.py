"""The account of a run over its attempts: exact on a run written by hand, and true of processes that were killed."""

import json
import os
import signal
import socket
import struct
import subprocess
import sys
import time
from pathlib import Path

import pytest

from spanax.errors import DataError
from spanax.train.record.events import Events, read
from spanax.train.record.heartbeat import Pulse
from spanax.train.record.time_account import TimeAccount, account, reached, record_last_heartbeat
from spanax.train.record.time_ledger import BUCKETS

FAULTY = [
    # when, attempt, by, event
    (1004.0, 0, "rank 0", {"event": "begin", "step": 0, "devices": 8, "mesh": {"fsdp": 8}}),
    (1020.0, 0, "rank 0", {"event": "ledger", "step": 4, "seconds": {"start": 4, "compile": 6, "step": 10}}),
    (1030.0, 0, "rank 0", {"event": "ledger", "step": 9, "seconds": {"start": 4, "compile": 6, "step": 18, "save": 2}}),
    (1042.0, 0, "supervisor", {"event": "died", "rank": 1, "signal": "SIGKILL"}),
    (1043.0, 0, "supervisor", {"event": "restart", "after_seconds": 1.0}),
    (1055.0, 1, "rank 0", {"event": "begin", "step": 6, "devices": 4, "mesh": {"fsdp": 4}}),
    (1070.0, 1, "rank 0", {"event": "ledger", "step": 12, "seconds": {"restart": 8, "recomputed": 6, "step": 11}}),
    (1071.0, 1, "rank 0", {"event": "end", "step": 12}),
]


def write(folder: Path, reported: list[tuple[float, int, str, dict]]) -> Path:  # type: ignore[type-arg]
    for when, attempt, by, event in reported:
        values = {"time": when} | event
        if "seconds" in event:
            values["wall_seconds"] = sum(event["seconds"].values())
        if "silent" in event:
            values["seconds"] = event["silent"]
        Events(folder, by, attempt).append(**values)
    return folder


def spent(times: TimeAccount) -> dict[str, float]:
    return {name: seconds for name, seconds in times.seconds.items() if seconds}


def test_two_attempts_make_one_account(tmp_path: Path) -> None:
    times = account(write(tmp_path, FAULTY))
    assert spent(times) == {
        "start": 4, "compile": 6, "save": 2, "step": 29, "recomputed": 6, "restart": 8 + (1045 - 1030)
    }  # fmt: skip
    assert times.wall_seconds == 1070 - 1000 and times.goodput == 29 / 70
    first, second = times.attempts
    assert (first.began, first.ended, first.outcome, first.first_step, first.last_step) == (1000, 1030, "died", 0, 9)
    assert (second.outcome, second.first_step, second.last_step) == ("finished", 6, 12)
    assert first.place == {"devices": 8, "mesh": {"fsdp": 8}}
    assert [event["event"] for event in times.faults] == ["died", "restart"]
    assert json.loads(json.dumps(times.to_json()))["reached"] == times.reached == 12


def test_records_of_other_attempts_are_not_counted(tmp_path: Path) -> None:
    """The second attempt gets stuck before it can say that it begins."""
    around = [
        (999.0, 0, "supervisor", {"event": "begin"}),
        *FAULTY[:5],
        (1050.0, 1, "supervisor", {"event": "stuck", "rank": 0}),
        *((when, 2, by, event) for when, _, by, event in FAULTY[5:]),
    ]
    times = account(write(tmp_path, around))
    assert [attempt.outcome for attempt in times.attempts] == ["died", "finished"] and times.wall_seconds == 1070 - 1000
    assert [event["event"] for event in times.faults] == ["died", "restart", "stuck"]


def test_time_after_a_finished_run_is_not_downtime(tmp_path: Path) -> None:
    later = [
        (9000.0, 0, "rank 0", {"event": "begin", "step": 12}),
        (9010.0, 0, "rank 0", {"event": "ledger", "step": 15, "seconds": {"start": 3, "step": 7}}),
    ]
    times = account(write(tmp_path, FAULTY + later))
    assert times.paused_seconds == 9000 - 1070 and times.wall_seconds == 70 + 10
    assert times.seconds["start"] == 4 + 3


@pytest.mark.parametrize(
    ("phase", "last", "lost"), [("step", 1030.0, 0), ("step", 1043.0, 10), ("save", 1043.0, 10), ("step", 1035.0, 3)]
)
def test_the_time_of_a_hang_is_not_step_time(phase: str, last: float, lost: float, tmp_path: Path) -> None:
    """Silent from 1032 to 1042, and then woken to write its stacks down; usually it is never heard of again."""
    seconds = {"start": 4, "compile": 6, "step": 18, "save": 2}
    seconds[phase] += last - 1030
    reported = [
        *FAULTY[:2],
        (last, 0, "rank 0", {"event": "ledger", "step": 9, "seconds": seconds}),
        (1042.0, 0, "supervisor", {"event": "stuck", "rank": 0, "phase": phase, "silent": 10}),
        *FAULTY[4:],
    ]
    times = account(write(tmp_path, reported))
    assert times.attempts[0].seconds[phase] == seconds[phase] - lost and times.attempts[0].outcome == "stuck"
    assert times.attempts[0].seconds.get("restart", 0) == lost
    assert times.wall_seconds == 1070 - 1000


def test_an_attempt_that_failed_before_training_counts(tmp_path: Path) -> None:
    """Two died while JAX started: one before the first beginning, one after it."""
    reported = [
        (990.0, 0, "rank 0", {"event": "ledger", "step": 0, "seconds": {"start": 10}}),
        (991.0, 0, "supervisor", {"event": "restart"}),
        *((when, attempt + 1, by, event) for when, attempt, by, event in FAULTY[:5]),
        (1044.0, 2, "rank 0", {"event": "ledger", "step": 0, "seconds": {"restart": 5}}),
        *((when, 3, by, event) for when, _, by, event in FAULTY[5:]),
    ]
    times = account(write(tmp_path, reported))
    assert [attempt.outcome for attempt in times.attempts] == ["killed", "died", "killed", "finished"]
    assert times.wall_seconds == 1070 - 980 and times.seconds["step"] == 29 and times.reached == 12
    assert times.seconds["start"] == 10 and times.seconds["restart"] == (1000 - 990) + 4 + (1045 - 1030) + 8


def test_a_clock_set_back_between_attempts_makes_no_time_negative(tmp_path: Path) -> None:
    early = [(when - 500 * attempt, attempt, by, event) for when, attempt, by, event in FAULTY]
    times = account(write(tmp_path, early))
    assert times.seconds["restart"] == 8 and times.wall_seconds == 30 + 25


@pytest.mark.parametrize("attempt", [0, 1])
def test_the_time_after_a_preemption_counts_as_restart(attempt: int, tmp_path: Path) -> None:
    """The supervisor ends with the run, both record it, and a later one starts by hand, or as the next attempt."""
    reported = [
        *FAULTY[:3],
        (1031.0, 0, "rank 0", {"event": "end", "how": "preempted", "step": 9}),
        (1032.0, 0, "supervisor", {"event": "end", "how": "asked to stop", "code": 75}),
        (1090.0, attempt, "rank 0", {"event": "begin", "step": 9}),
        (1095.0, attempt, "rank 0", {"event": "ledger", "step": 12, "seconds": {"start": 5, "step": 10}}),
        (1096.0, attempt, "rank 0", {"event": "end", "how": "done", "step": 12}),
    ]
    times = account(write(tmp_path, reported))
    assert [each.outcome for each in times.attempts] == ["preempted", "finished"]
    away = 1080 - 1030
    restart, start, paused = (away + 5, 4, 0) if attempt else (0, 4 + 5, away)
    assert (times.seconds["restart"], times.seconds["start"], times.paused_seconds) == (restart, start, paused)


def test_a_manual_restart_after_a_kill_counts_as_a_restart(tmp_path: Path) -> None:
    """Attempts are not counted then: both have number 0, and both record a beginning."""
    again = [
        (1090.0, 0, "rank 0", {"event": "begin", "step": 6}),
        (1095.0, 0, "rank 0", {"event": "ledger", "step": 9, "seconds": {"start": 5, "recomputed": 10}}),
    ]
    times = account(write(tmp_path, FAULTY[:3] + again))
    assert [attempt.outcome for attempt in times.attempts] == ["killed", "killed"]
    assert times.seconds["restart"] == (1080 - 1030) + 5 and times.seconds["start"] == 4
    assert times.wall_seconds == 1095 - 1000


def test_the_last_heartbeat_counts_where_events_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, FAULTY[:2])
    monkeypatch.setattr(time, "time", lambda: 1032.5)
    Pulse(tmp_path, rank=0, attempt=0).beat("step", 10, seconds={"start": 4, "compile": 6, "step": 22.5})
    assert spent(account(tmp_path)) == {"start": 4, "compile": 6, "step": 22.5} and reached(tmp_path) == 10
    assert account(tmp_path).attempts[0].outcome == "running"
    # A worker that beats later is not the leader.
    Pulse(tmp_path, rank=1, attempt=0).beat("step", 11, seconds={"start": 40})
    assert reached(tmp_path) == 10


def test_a_heartbeat_is_recorded_before_the_next_attempt_overwrites_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, FAULTY[:2])
    monkeypatch.setattr(time, "time", lambda: 1032.5)
    Pulse(tmp_path, rank=0, attempt=0).beat("step", 10, seconds={"start": 4, "compile": 6, "step": 22.5})
    for _ in range(2):
        record_last_heartbeat(Events(tmp_path, "supervisor", attempt=1))
    retained = [event for event in read(tmp_path).records if event["event"] == "ledger"]
    assert len(retained) == 2 and retained[1]["attempt"] == 0 and retained[1]["wall_seconds"] == 32.5
    write(tmp_path, FAULTY[5:])
    Pulse(tmp_path, rank=0, attempt=1).beat("start", 6)
    times = account(tmp_path)
    assert times.attempts[0].last_step == 10 and times.seconds["step"] == 22.5 + 11
    assert times.wall_seconds == 1070 - 1000


def test_a_missing_leader_counts_as_killed(tmp_path: Path) -> None:
    write(tmp_path, FAULTY[:3])
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    beat = {"rank": 0, "pid": gone.pid, "host": socket.gethostname(), "attempt": 0, "phase": "step", "step": 9}
    (tmp_path / "heartbeats").mkdir()
    path = tmp_path / "heartbeats" / "0.json"
    for changes, outcome in (
        ({}, "killed"),
        ({"pid": os.getpid()}, "running"),
        ({"pid": os.getpid(), "host": "elsewhere"}, "killed"),
        ({"host": "elsewhere", "time": time.time()}, "running"),
        ({"seconds": "many", "time": []}, "killed"),
    ):
        path.write_text(json.dumps(beat | {"step_seconds": 1, "time": 1030.5, "seconds": {}} | changes))
        assert account(tmp_path).attempts[-1].outcome == outcome, changes


def test_a_folder_without_a_run_is_refused(tmp_path: Path) -> None:
    Events(tmp_path, "supervisor").append("died", rank=0)
    with pytest.raises(DataError, match="is not a run folder") as caught:
        account(tmp_path)
    assert caught.value.exit_code == 65 and len(str(caught.value).splitlines()) <= 4
    assert reached(tmp_path) == 0 == reached(tmp_path / "nowhere")


CHILD = """
import json, os, signal, struct, sys, time
from pathlib import Path

folder, attempt, fatal, last = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), 24
clock = os.open(folder / "clock", os.O_RDWR)  # outlives this process; moves in sleep() alone
sleeps = 0

def now_ns():
    return struct.unpack("q", os.pread(clock, 8, 0))[0]

def sleep(seconds):
    global sleeps
    sleeps += 1
    if sleeps == fatal:
        os.kill(os.getpid(), signal.SIGKILL)
    os.pwrite(clock, struct.pack("q", now_ns() + round(seconds * 1e9)), 0)

time.time = time.monotonic = lambda: now_ns() / 1e9
time.monotonic_ns = now_ns

from spanax.train.record.time_account import record_last_heartbeat, reached
from spanax.train.record.events import Events
from spanax.train.record.heartbeat import Pulse
from spanax.train.record.time_ledger import Ledger

sleep(1)
events, pulse = Events(folder, attempt=attempt), Pulse(folder, 0, attempt)
record_last_heartbeat(events)
ledger = Ledger(attempt, reached(folder), age_seconds=1)
saved = folder / "saved"
first = int(saved.read_text()) if saved.exists() else 0
events.append("begin", step=first)
log = open(folder / "steps.jsonl", "a", buffering=1)
for step in range(first + 1, last + 1):
    ledger.enter("data")
    sleep(0.01)
    is_again = step <= ledger.reached
    ledger.take(step)
    spent = 0.06 + 0.002 * step
    sleep(spent)
    if step % 4 == 0:
        with ledger.within("save"):
            sleep(0.02)
            saved.write_text(str(step))
        events.append("ledger", **ledger.record(step))
    ledger.enter("idle")
    log.write(json.dumps([attempt, step, is_again, spent]) + "\\n")
    pulse._last_beat = 0
    pulse.beat("step", step, seconds=ledger.seconds())
events.append("ledger", **ledger.record(last))
events.append("end", step=last)
"""


def test_the_account_of_killed_processes_is_exact(tmp_path: Path) -> None:
    """Three kill -9: the buckets add up to the wall time, and `recomputed` are the steps that were taken again."""
    clock, began, gap = tmp_path / "clock", 1000, 5
    clock.write_bytes(struct.pack("q", began * 10**9))
    for attempt, fatal in enumerate((15, 19, 16, 0)):  # waiting for data, in a save, in a step
        argv = [sys.executable, "-c", CHILD, str(tmp_path), str(attempt), str(fatal)]
        assert subprocess.run(argv).returncode == (-signal.SIGKILL if fatal else 0)
        (ended,) = struct.unpack("q", clock.read_bytes())
        clock.write_bytes(struct.pack("q", ended + gap * 10**9))
    steps = [json.loads(line) for line in (tmp_path / "steps.jsonl").read_text().splitlines()]
    again = [spent for _, _, is_again, spent in steps if is_again]
    assert len(again) == 7
    times = account(tmp_path)
    assert times.wall_seconds == pytest.approx(ended / 1e9 - began, abs=1e-6)
    assert sum(times.seconds.values()) == times.wall_seconds and set(times.seconds) == set(BUCKETS)
    assert times.seconds["recomputed"] == pytest.approx(sum(again), abs=1e-6)
    assert times.seconds["step"] == pytest.approx(sum(0.06 + 0.002 * step for step in range(1, 25)), abs=1e-6)
    assert [attempt.outcome for attempt in times.attempts] == ["killed", "killed", "killed", "finished"]
    assert times.reached == 24
