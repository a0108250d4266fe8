"""Programs of the user under the supervisor: real processes, most of them without JAX."""

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from spanax.commands import launch as launching
from spanax.entries.names import LOGS
from spanax.errors import SpanaxError
from spanax.launch.log_copy import LogCopy
from spanax.train.record import events
from written import blocks

(SCRIPT,) = (
    block.text
    for block in blocks((Path(__file__).parents[2] / "docs" / "hosts.md").read_text())
    if block.kind == "python" and "spanax.distributed()" in block.text
)

KILLED = """
import builtins, os, signal
def print(step, loss):
    builtins.print(step, loss, flush=True)
    # Every process has trained this step, and the first one has not saved it.
    if os.environ.get("SPANAX_ATTEMPT") == "0" and step == 3:
        os.kill(os.getpid(), signal.SIGKILL)
"""


def launched(folder: Path, command: str, *flags: str) -> int:
    """The exit code of `spanax launch local` in this process, with its logs in a folder."""
    argv = ["local", "--logs", str(folder / "logs"), "--backoff-seconds", "0.01", *flags, "--", *shlex.split(command)]
    return launching.answer(launching.parse(argv)).exit_code


def names(folder: Path) -> list[str]:
    return [event["event"] for event in events.read(folder / "logs").records]


def losses(output: str) -> list[list[float]]:
    """The steps and the losses that a script prints; lines of Gloo may interleave with each other."""
    pairs = re.findall(r"^(\d+) (\d+\.\d+(?:e-?\d+)?)$", output, re.MULTILINE)
    return [[float(step), float(loss)] for step, loss in pairs]


def test_the_script_of_the_page_trains_as_in_one_process_and_continues_after_a_kill(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    argv = [sys.executable, "-m", "spanax", "launch", "local", "--processes", "2", "--devices-per-process", "2"]
    argv += ["--backoff-seconds", "0.01", "--", sys.executable, "train.py"]
    (tmp_path / "train.py").write_text(KILLED + SCRIPT)
    done = subprocess.run(argv, cwd=tmp_path, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stdout + done.stderr
    printed = losses(done.stdout)
    expected: list[tuple[int, float]] = []
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    exec(SCRIPT, {"print": lambda step, loss: expected.append((step, loss))})
    assert [step for step, _ in expected] == [1, 2, 3, 4, 5]
    np.testing.assert_allclose(printed, [*expected[:3], *expected[2:]], rtol=1e-6)
    (logs,) = (tmp_path / "runs").glob("launched-*")
    died, restart, _ = events.read(logs).records
    assert died["what"] == "rank 0 was killed by SIGKILL." and 2 <= restart["step"] <= 3
    assert sorted(path.name for path in (logs / LOGS).iterdir()) == ["rank0.log", "rank1.log"]


@pytest.mark.parametrize(
    ("command", "code", "restarts"),
    [
        ("sh -c 'exit 0'", 0, 0),
        ("sh -c 'exit 75'", 75, 0),
        ("sh -c 'exit 1'", 1, 3),
        ("sh -c 'exit 17'", 17, 3),
        ("sh -c 'kill -9 $$'", 137, 3),
        *((f"sh -c 'exit {code}'", code, 0) for code in (2, 65, 73, 78)),
        ("sh -c 'exit $((SPANAX_ATTEMPT ? 0 : 3))'", 0, 1),
    ],
)
def test_the_exit_code_of_a_program_is_passed_on(tmp_path: Path, command: str, code: int, restarts: int) -> None:
    assert launched(tmp_path, command) == code
    assert names(tmp_path).count("restart") == restarts


def test_the_first_process_writes_to_the_terminal_and_all_of_them_to_logs(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    command = 'sh -c \'echo "out $SPANAX_HOST of $SPANAX_NUM_HOSTS"; echo "err $SPANAX_HOST" >&2\''
    assert launched(tmp_path, command, "--processes", "2") == 0
    shown = capfd.readouterr()
    assert shown.out == "out 0 of 2\n"
    assert shown.err == f"spanax: the logs of all processes are in {tmp_path}/logs/log\nerr 0\n"
    logs = [(tmp_path / "logs" / LOGS / f"rank{rank}.log").read_text() for rank in range(2)]
    assert logs == ["== attempt 0\nerr 0\n", "== attempt 0\nout 1 of 2\nerr 1\n"]


HANGS = """
import os, time
import spanax
attempt, rank = int(os.environ["SPANAX_ATTEMPT"]), int(os.environ["SPANAX_HOST"])
def in_a_loader(): time.sleep(600)
for step in range(1, 4):
    spanax.heartbeat(step)
    time.sleep(0.15)
if attempt == 0 and rank == 1: in_a_loader()
"""


def test_a_hang_is_detected_after_a_heartbeat(tmp_path: Path) -> None:
    """The other process has ended: its silence is none."""
    (tmp_path / "hangs.py").write_text(HANGS)
    command = f"{sys.executable} {tmp_path}/hangs.py"
    assert launched(tmp_path, command, "--processes", "2", "--stuck-seconds", "2") == 0
    assert names(tmp_path) == ["stuck", "restart", "end"]
    stuck = events.read(tmp_path / "logs").records[0]
    assert (stuck["ranks"], stuck["phase"], stuck["step"]) == ([1], "step", 3)
    assert "in_a_loader" in (tmp_path / "logs" / LOGS / "rank1.log").read_text()


def test_without_heartbeats_no_hang_is_detected(tmp_path: Path) -> None:
    assert launched(tmp_path, "sleep 1", "--stuck-seconds", "0.1", "--quiet-seconds", "0.2") == 0
    assert names(tmp_path) == ["end"]


def test_a_signal_reaches_every_process_and_75_is_passed_on(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    script = tmp_path / "waits.sh"
    script.write_text(
        "trap 'touch saved$SPANAX_HOST; exit 75' TERM\ntouch up$SPANAX_HOST\nwhile :; do sleep 0.05; done"
    )

    def ask() -> None:
        while len([*tmp_path.glob("up*")]) < 2:
            time.sleep(0.02)
        os.kill(os.getpid(), signal.SIGTERM)

    asking = threading.Thread(target=ask)
    asking.start()
    try:
        assert launched(tmp_path, f"sh -c 'cd {tmp_path}; exec sh waits.sh'", "--processes", "2") == 75
    finally:
        asking.join()
    assert {path.name for path in tmp_path.glob("saved*")} == {"saved0", "saved1"} and names(tmp_path) == ["end"]
    assert "stopping within 120 s" in capfd.readouterr().err


STARTS = "for command in 'sleep 600' 'setsid sleep 601'; do $command & echo $! >> {0}/children; done\n"
"""A shell that dies does not end what it started, in its session or in another one."""


def _wait_for_the_end_of_children(folder: Path) -> None:
    pids = [int(pid) for pid in (folder / "children").read_text().split()]
    deadline = time.monotonic() + 240
    while any(map(_is_running, pids)):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_a_stopped_shell_leaves_no_child(tmp_path: Path) -> None:
    (tmp_path / "shell.sh").write_text(STARTS.format(tmp_path) + "kill -9 $$")
    assert launched(tmp_path, f"sh {tmp_path}/shell.sh", "--restarts", "0") == 137
    _wait_for_the_end_of_children(tmp_path)


def test_children_that_outlive_a_program_are_named(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert launched(tmp_path, "sh -c 'setsid sleep 2 & exit 0'") == 0
    assert re.search(
        r"all ranks have ended, and processes that they started still run: \w+ \(\d+\)", capfd.readouterr().err
    )


@pytest.mark.skipif(sys.platform != "linux", reason="other systems do not list the children of a process")
def test_a_killed_supervisor_leaves_no_process(tmp_path: Path) -> None:
    """One that handles SIGTERM may save; what ignores it, or is in another session, is killed."""
    (tmp_path / "deaf.py").write_text(
        "import signal, time\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\nopen('up', 'w').close()\ntime.sleep(600)"
    )
    (tmp_path / "shell.sh").write_text(
        f"{STARTS.format(tmp_path)}echo $$ >> children\n{sys.executable} deaf.py & echo $! >> children\n"
        "trap 'touch saved; exit 75' TERM\nwhile :; do sleep 0.1; done"
    )
    argv = ["launch", "local", "--logs", str(tmp_path / "logs"), "--stop-seconds", "1", "--", "sh", "shell.sh"]
    supervisor = subprocess.Popen([sys.executable, "-m", "spanax", *argv], cwd=tmp_path)
    try:
        while not (tmp_path / "up").exists():
            assert supervisor.poll() is None
            time.sleep(0.05)
    finally:
        supervisor.kill()
        supervisor.wait()
    _wait_for_the_end_of_children(tmp_path)
    assert (tmp_path / "saved").exists()


def test_an_endless_log_delays_nothing(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    writer = f"import os\nwhile True:\n  os.write(2, b'x' * 79 + b'\\n')\n  open('{tmp_path}/up', 'w').close()"
    (tmp_path / "writer.py").write_text(writer)

    def ask() -> None:
        while not (tmp_path / "up").exists():
            time.sleep(0.02)
        os.kill(os.getpid(), signal.SIGTERM)

    asking = threading.Thread(target=ask)
    asking.start()
    try:
        assert launched(tmp_path, f"{sys.executable} {tmp_path}/writer.py") == 143
    finally:
        asking.join()
    assert "rank 0 was killed by SIGTERM." in capfd.readouterr().err


def test_a_log_is_shown_escaped(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    copy, path = LogCopy(tmp_path, 0), tmp_path / LOGS / "rank0.log"
    path.parent.mkdir()
    path.write_bytes(b"of an earlier attempt\n")
    copy.start()
    with path.open("ab") as file:
        file.write(b"== attempt 1\n\x1b[31mred \xc3\xa9\t50%\r100%\n\xff\x07\n")
    copy.finish()
    assert capfd.readouterr().err == "\\x1b[31mred \u00e9      50%\n100%\n\ufffd\\x07\n"


def _is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


SRUN = """
import os, subprocess, sys
words = [word for word in sys.argv[1:] if not word.startswith("--")]
(log,) = [word.partition("=")[2] for word in sys.argv if word.startswith("--output=")]
with open(log.replace("%t", "0"), "a") as file:
    sys.exit(subprocess.run(words, stdout=file, stderr=file, env=os.environ | {"SLURM_PROCID": "0"}).returncode)
"""


def test_the_supervisor_of_a_slurm_job_starts_a_program_with_srun(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The script that `launch slurm` writes, with an srun that starts one process here."""
    (tmp_path / "srun").write_text(f"#!{sys.executable}\n{SRUN}")
    (tmp_path / "sbatch").write_text("#!/bin/sh\nexec sh $2")
    for name in ("srun", "sbatch"):
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    word = "a 'quoted' $HOME"
    code = "import os, sys, spanax; spanax.heartbeat(4); print(sys.argv[1:], os.environ['SPANAX_HEARTBEATS'])"
    argv = ["slurm", "--logs", str(tmp_path / "logs"), "--device", "cpu", "--devices-per-host", "2", "--python"]
    assert (
        launching.answer(launching.parse([*argv, sys.executable, "--", sys.executable, "-c", code, word])) is not None
    )
    log = (tmp_path / "logs" / LOGS / "rank0.log").read_text()
    assert log == f"== attempt 0\n{[word]} {tmp_path}/logs\n"
    beat = json.loads((tmp_path / "logs" / "heartbeats" / "0.json").read_text())
    assert (beat["phase"], beat["step"]) == ("end", 4) and names(tmp_path) == ["end"]


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("", "there is no command to launch"),
        ("no_such_program --steps 3", "there is no program 'no_such_program'"),
        ("./train.py", "fix: -- python ./train.py"),
        ("spanax train gpt-nano", "would not be resumed"),
        ("python3 -m spanax train", "would not be resumed"),
        ("train gpt-nano", "--logs .* is for programs"),
    ],
)
def test_invalid_launch_requests_raise(tmp_path: Path, command: str, message: str) -> None:
    with pytest.raises(SpanaxError, match=message) as caught:
        launched(tmp_path, command)
    assert caught.value.exit_code == 2 and not (tmp_path / "logs").exists()
