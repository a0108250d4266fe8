"""The supervisor, with scripted processes that write heartbeats, die, hang and stop."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path

import pytest

from spanax.entries.names import LOGS
from spanax.errors import SpanaxError, WriteError
from spanax.launch.exit_codes import ATTEMPT, ending_of
from spanax.launch.request import request_of
from spanax.launch.supervisor import Limits, Supervisor
from spanax.train.flags import check_numbers
from spanax.train.record import events
from spanax.train.record.heartbeat import Pulse
from spanax.train.record.run_lock import claimed
from spanax.train.record.run_lock import supervised as taken

BEFORE = """
import os, signal, sys, time
from pathlib import Path
from spanax.train.record.heartbeat import Pulse
rank, attempt, folder = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
pulse = Pulse(folder, rank, attempt)
def beat(phase, step): pulse._last_beat = -9; pulse.beat(phase, step)
"""

QUICK = Limits(stuck_seconds=240, quiet_seconds=240, stop_seconds=240, restarts=4, backoff_seconds=0.01)


def supervised(folder: Path, code: str, num_hosts: int = 1, limits: Limits = QUICK) -> tuple[Supervisor, list[str]]:
    output: list[str] = []
    script = folder / "worker.py"
    script.write_text(BEFORE + code)
    (folder / LOGS).mkdir()

    def start(attempt: int) -> list[subprocess.Popen[bytes]]:
        result = []
        for rank in range(num_hosts):
            with open(folder / LOGS / f"rank{rank}.log", "ab") as log:
                log.write(f"{ATTEMPT} {attempt}\n".encode())
                log.flush()
                argv = [sys.executable, str(script), str(rank), str(attempt), str(folder)]
                result.append(subprocess.Popen(argv, stderr=log, stdout=log, start_new_session=True))
        return result

    return Supervisor(start, folder, limits, output.append), output


def log_lines(folder: Path) -> list[str]:
    return [event["event"] for event in events.read(folder).records]


def test_a_run_that_succeeds_is_not_restarted(tmp_path: Path) -> None:
    watched, output = supervised(tmp_path, "beat('step', 3); beat('end', 3)", num_hosts=2)
    assert watched.watch() == 0 and not output and log_lines(tmp_path) == ["end"]


@pytest.mark.parametrize("holder", [lambda folder: claimed(folder, resume=True), lambda folder: taken(folder, 0)])
def test_a_second_supervisor_touches_nothing_of_a_live_run(
    holder: Callable[[Path], AbstractContextManager[object]], tmp_path: Path
) -> None:
    watched, _ = supervised(tmp_path, "beat('end', 3)")
    Pulse(tmp_path, 0, 0).beat("step", 7, seconds={"step": 3.0})
    events.Events(tmp_path).append("begin", step=0, time=1.0)
    (tmp_path / LOGS / "rank0.log").write_text("== attempt 0\n")
    with holder(tmp_path):
        before = {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in tmp_path.rglob("*") if path.is_file()}
        with pytest.raises(WriteError, match="is in use"):
            watched.watch()
        after = {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in tmp_path.rglob("*") if path.is_file()}
        assert after == before
    assert watched.watch() == 0 and log_lines(tmp_path) == ["begin", "ledger", "end"]


def test_a_killed_process_restarts_all_processes(tmp_path: Path) -> None:
    code = """
beat("step", 4 + attempt)
if attempt == 0 and rank == 1:
    os.kill(os.getpid(), signal.SIGKILL)
if attempt == 0:
    (folder / "alive").write_text(str(os.getpid()))
    time.sleep(600)
    (folder / "left alone").touch()
"""
    watched, output = supervised(tmp_path, code, num_hosts=2)
    assert watched.watch() == 0 and not (tmp_path / "left alone").exists()
    assert log_lines(tmp_path) == ["died", "restart", "end"]
    assert output == ["rank 1 was killed by SIGKILL. Restarting in 0.01 s (1 of 4)."]
    left = tmp_path / "alive"
    assert not left.exists() or not Path(f"/proc/{left.read_text()}").exists()


def test_a_failure_that_would_repeat_is_not_restarted(tmp_path: Path) -> None:
    watched, output = supervised(
        tmp_path, "beat('start', 0); print('spanax: the reason.', file=sys.stderr); sys.exit(65)"
    )
    assert watched.watch() == 65 and log_lines(tmp_path) == ["died", "stopped"]
    assert output[-1] == "rank 0: spanax: the reason."
    assert events.read(tmp_path).records[0]["words"] == "spanax: the reason."


KILLS_ITSELF = "beat('step', 7); attempt < {} and os.kill(os.getpid(), signal.SIGKILL)"

RESTARTS: dict[str, tuple[str, int, int, str]] = {
    "code 3": ("beat('step', 1 + attempt); sys.exit(0 if attempt else 3)", 0, 1, ""),
    "other errors at one step": ("beat('step', 7); sys.exit(f'bad {attempt}')", 70, 2, "it ended 3 times at step 7"),
    "one error at one step": ("beat('step', 7); sys.exit('a bug')", 70, 1, "it ended 2 times with the same error"),
    "one error at other steps": ("beat('step', 7 + attempt); sys.exit('a bug' if attempt < 4 else 0)", 0, 4, ""),
    "a few kills at one step": (KILLS_ITSELF.format(4), 0, 4, ""),
    "ten kills at one step": (KILLS_ITSELF.format(99), 70, 9, "it ended 10 times at step 7"),
    "progress": ("beat('step', attempt); sys.exit(1)", 70, 20, "it was restarted 20 times"),
}
"""What a process does, the last exit code, the number of restarts, and why there are no more."""


@pytest.mark.parametrize("name", RESTARTS)
def test_failures_that_may_not_repeat_are_restarted(name: str, tmp_path: Path) -> None:
    script, code, num_restarts, reason = RESTARTS[name]
    watched, output = supervised(tmp_path, script, limits=replace(QUICK, restarts=20, backoff_seconds=1e-4))
    assert watched.watch() == code
    assert log_lines(tmp_path) == ["died", "restart"] * num_restarts + (["died", "stopped"] if reason else ["end"])
    assert not reason or any(line.endswith(f"Not restarting: {reason}.") for line in output[-2:])


def test_a_process_that_ends_while_others_run_is_warned_about(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("spanax.launch.supervisor.ENDED_SECONDS", 0.3)
    watched, output = supervised(tmp_path, "beat('end', 7); rank and time.sleep(2)", num_hosts=2)
    assert watched.watch() == 0 and output == ["rank 0 exited with code 0, while rank 1 still runs."]


def test_the_wait_before_a_restart_doubles_while_nothing_is_gained(tmp_path: Path) -> None:
    limits = Limits(restarts=6, backoff_seconds=0.01)
    watched, _ = supervised(
        tmp_path, "beat('step', [0, 0, 1, 1, 2][attempt] if attempt < 5 else 9); sys.exit(attempt < 5)"
    )
    watched.limits = limits
    assert watched.watch() == 0
    waits = [event["wait_seconds"] for event in events.read(tmp_path).records if event["event"] == "restart"]
    assert waits == [0.01, 0.02, 0.01, 0.02, 0.01]


HANGS = """
import faulthandler
faulthandler.register(signal.SIGUSR1, 2)
def in_a_loader(): time.sleep(600)
(folder / f"up{{attempt}}{{rank}}").touch()
while not (folder / f"up{{attempt}}{{1 - rank}}").exists():
    time.sleep(0.01)
beat("end" if attempt else "step", 5 + rank + attempt)
{what}
"""


@pytest.mark.parametrize("what", ["sleeps", "is stopped"])
def test_a_hanging_process_is_detected_and_every_stack_is_logged(tmp_path: Path, what: str) -> None:
    hang = "if attempt == 0: in_a_loader()"
    if what == "is stopped":
        hang = "if attempt == 0: rank or os.kill(os.getpid(), signal.SIGSTOP); in_a_loader()"
    limits = Limits(stuck_seconds=2, backoff_seconds=0.01)
    watched, output = supervised(tmp_path, HANGS.format(what=hang), num_hosts=2, limits=limits)
    assert watched.watch() == 0
    assert log_lines(tmp_path) == ["stuck", "restart", "end"]
    stuck = events.read(tmp_path).records[0]
    assert stuck["rank"] == 0 and stuck["step"] == 5 and stuck["stopped"] == ([0] if what == "is stopped" else [])
    assert "sent no heartbeat" in output[0] and ("stopped by a signal" in output[0]) == (what == "is stopped")
    for rank in range(2):
        text = (tmp_path / LOGS / f"rank{rank}.log").read_text()
        assert "most recent call first" in text and ("in_a_loader" in text or (rank == 0 and what == "is stopped"))


def test_a_save_counts_as_hung_after_quiet_seconds(tmp_path: Path) -> None:
    watched, _ = supervised(tmp_path, "beat('save', 5); time.sleep(1.5)")
    watched.limits = Limits(stuck_seconds=0.2, quiet_seconds=240, restarts=0)
    assert watched.watch() == 0
    watched.limits = Limits(stuck_seconds=0.2, quiet_seconds=0.4, restarts=0)
    assert watched.watch() == 70


def test_long_steps_may_take_ten_times_their_median(tmp_path: Path) -> None:
    watched, _ = supervised(tmp_path, "pulse.beat('step', 5, step_seconds=24); time.sleep(1.5)")
    watched.limits = Limits(stuck_seconds=0.2, restarts=0)
    assert watched.watch() == 0
    watched, _ = supervised(_below(tmp_path), "pulse.beat('step', 5, step_seconds=0.01); time.sleep(600)")
    watched.limits = Limits(stuck_seconds=0.4, restarts=0)
    assert watched.watch() == 70


def test_a_clock_that_is_wrong_changes_nothing(tmp_path: Path) -> None:
    """A clock a day ahead or a day late, in the content and the time stamp of heartbeats."""
    code = """
import spanax.train.record.heartbeat
spanax.train.record.heartbeat.time = type("", (), {"monotonic": time.monotonic, "time": lambda: time.time() + skew})
skew = [-86400, 86400][rank]
for step in range(8):
    beat("step", step)
    stamp = time.time() + skew + step
    os.utime(folder / "heartbeats" / f"{rank}.json", (stamp, stamp))
    time.sleep(0.15)
sys.exit(attempt == 0)
"""
    watched, _ = supervised(tmp_path, code, num_hosts=2)
    assert watched.watch() == 0 and log_lines(tmp_path) == ["died", "restart", "end"]
    assert events.read(tmp_path).records[1]["step"] == 7


def asked(watched: Supervisor, when: Callable[[], bool]) -> int:
    """The exit code of a watch that is stopped as soon as a condition holds."""

    def ask() -> None:
        while not when():
            time.sleep(0.02)
        os.kill(os.getpid(), signal.SIGTERM)

    asking = threading.Thread(target=ask)
    asking.start()
    try:
        return watched.watch()
    finally:
        asking.join()


def test_processes_that_do_not_stop_in_time_are_killed(tmp_path: Path) -> None:
    waits = "signal.signal(signal.SIGTERM, signal.SIG_IGN); (folder / 'up').touch(); time.sleep(600)"
    watched, output = supervised(tmp_path, waits)
    watched.limits = Limits(stop_seconds=0.5)
    assert asked(watched, (tmp_path / "up").exists) == 70
    what = "the processes did not stop within 0.5 s."
    assert output == [f"stopped on request: {what} Earlier checkpoints are intact."]


def test_a_signal_between_attempts_starts_no_attempt(tmp_path: Path) -> None:
    watched, _ = supervised(tmp_path, "beat('step', 1); sys.exit(1)")
    watched.limits = Limits(backoff_seconds=240)
    assert asked(watched, lambda: "restart" in log_lines(tmp_path)) == 75
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


def test_a_process_does_not_begin_without_its_supervisor() -> None:
    """It may die before its guard knows the process."""
    code = "from spanax.processes.supervision import attach_supervisor; attach_supervisor(); print('began')"
    with subprocess.Popen(["true"]) as ended:
        pass
    environ = os.environ | {"SPANAX_SUPERVISOR": str(ended.pid)}
    done = subprocess.run([sys.executable, "-c", code], env=environ, capture_output=True, text=True)
    assert done.returncode == 1 and done.stdout == "" and "the supervisor has exited" in done.stderr


def test_one_signal_to_one_process_is_a_preemption_too(tmp_path: Path) -> None:
    watched, _ = supervised(tmp_path, "beat('step', 3); sys.exit(75)", num_hosts=2)
    assert watched.watch() == 75 and log_lines(tmp_path) == ["end"]


def test_the_first_failure_of_several_is_reported() -> None:
    assert ending_of([-6, 1]).rank == 1 and ending_of([-6, -9]).rank == 1 and ending_of([1, 65]).code == 65
    assert ending_of([-6, 3]).code == 3 and ending_of([-6, 1]).code == 70
    assert ending_of([1, -9], is_program=True).code == 137 and ending_of([17, -6], is_program=True).code == 17
    assert ending_of([-9, 65, 1], is_program=True).code == 65 and ending_of([75, 0], is_program=True).code == 75
    assert ending_of([-6, None]).what == "rank 0 was killed by SIGABRT." and ending_of([75, None, 0]).code == 75


def test_invalid_limits_raise() -> None:
    for wrong in (Limits(stuck_seconds=0), Limits(restarts=-1), Limits(backoff_seconds=float("nan"))):
        with pytest.raises(SpanaxError, match="--"):
            check_numbers(wrong)


def test_the_command_after_the_dashes_is_parsed() -> None:
    assert request_of(["train", "--output-dir=runs/b", "--resume"], None).argv(is_again=True).count("--resume") == 1
    assert request_of(["train"], None).folder.parent == request_of(["sh"], None).folder.parent == Path("runs")
    for wrong in ([], ["plan"], ["train", "--output-dir"], ["train", "--stpes", "3"]):
        with pytest.raises((SpanaxError, SystemExit)):
            request_of(wrong, None)


def _below(folder: Path) -> Path:
    below = folder / "below"
    below.mkdir()
    return below
