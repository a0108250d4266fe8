"""Ends the processes of a supervisor that was killed, with everything that they have started.

The supervisor starts this file as a process of its own, which must not import Spanax. Each line that it writes to its
standard input lists the processes that run now, each the leader of a process group; the end of the input is the end of
the supervisor.
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path


class Guard:
    """The process that guards a supervisor.

    Args:
      stop_seconds: the time for the processes to save and exit, before they are killed.
    """

    def __init__(self, stop_seconds: float):
        argv = [sys.executable, "-I", "-S", __file__, str(os.getpid()), str(stop_seconds)]
        null = subprocess.DEVNULL
        self._process = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=null, stderr=null, start_new_session=True)

    def watch(self, pids: Sequence[int]) -> None:
        """Ends these processes, and no others any more, if the supervisor is killed."""
        assert self._process.stdin is not None
        with suppress(OSError):  # somebody has killed it
            self._process.stdin.write(" ".join(map(str, pids)).encode() + b"\n")
            self._process.stdin.flush()

    def close(self) -> None:
        """Ends the guard."""
        self._process.kill()
        self._process.wait()
        assert self._process.stdin is not None
        self._process.stdin.close()


def started_by(leaders: Sequence[int], supervisor: int) -> dict[int, str]:
    """Returns the names of the processes that a supervisor has started, by pid; empty without /proc.

    They are in a session of these leaders, or have inherited the supervisor's variable of their environment.

    Example:
      >>> os.getpid() in started_by([os.getsid(0)], 0) or sys.platform != "linux"
      True
    """
    named = {}
    variable = f"SPANAX_SUPERVISOR={supervisor}".encode()
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has ended, or belongs to another user
            name, _, values = (folder / "stat").read_text(errors="replace").rpartition(")")
            state, _, _, session = values.split()[:4]  # proc_pid_stat(5)
            is_started = int(session) in leaders or variable in (folder / "environ").read_bytes().split(b"\0")
            if is_started and state != "Z":
                named[int(folder.name)] = name.partition("(")[2]
    return named


def kill_all(leaders: Sequence[int], supervisor: int) -> None:
    """Kills processes and everything that they have started."""
    for pid in started_by(leaders, supervisor):
        with suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGKILL)
    for pid in leaders:
        with suppress(ProcessLookupError, PermissionError):  # all of them have ended
            os.killpg(pid, signal.SIGKILL)


def state_of(pid: int) -> str:
    """Returns the state of a process, such as `T` if it was stopped and `Z` if it has ended; empty if unknown."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return ""


def _runs(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return state_of(pid) != "Z"


def _main(supervisor: int, stop_seconds: float) -> None:
    leaders: list[int] = []
    for line in sys.stdin:
        leaders = [int(word) for word in line.split()]
    deadline = time.monotonic() + stop_seconds
    for pid in leaders:
        with suppress(OSError):
            if os.getsid(pid) == pid:  # not another process with the number of one that has ended
                os.kill(pid, signal.SIGTERM)
    while any(map(_runs, leaders)) and time.monotonic() < deadline:
        time.sleep(0.1)
    if leaders:
        kill_all(leaders, supervisor)


if __name__ == "__main__":
    _main(int(sys.argv[1]), float(sys.argv[2]))
