"""Starts the processes of a run on this machine, connected over the loopback interface, under a supervisor."""

import os
import shlex
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Annotated

import tyro

from spanax.entries.folder import Folder
from spanax.entries.names import RANK_LOG
from spanax.errors import PREEMPTED
from spanax.launch.exit_codes import begin_log
from spanax.launch.request import Request, request_of
from spanax.launch.supervisor import Limits, Supervisor
from spanax.printable import to_stderr
from spanax.train.flags import check_numbers

LOOPBACK = "127.0.0.1"


@dataclass(frozen=True)
class LocalCommand:
    """Run `train ...` or a program in one or several processes on this machine, and restart all of them if one fails.

    Attributes:
      processes: number of processes.
      devices_per_process: devices of each process: its share of the GPUs,
          or simulated CPU devices (by default 8 in all).
      logs: folder for the logs, heartbeats and events of a program; by default runs/launched-DATE.
      limits: when to restart, and when to give up.
    """

    processes: int = 1
    devices_per_process: int | None = None
    logs: str | None = None
    limits: Annotated[Limits, tyro.conf.arg(name="")] = field(default_factory=Limits)


def launch(command: LocalCommand, argv: Sequence[str]) -> int:
    """Runs the command in the requested number of processes until it ends; returns the exit code.

    Raises:
      SpanaxError: the request is invalid.
    """
    check_numbers(command)
    check_numbers(command.limits)
    request = request_of(argv, command.logs)
    code = Supervisor.of(partial(start, command, request), request, command.limits, shows_first=True).watch()
    if code == PREEMPTED and not request.is_program:
        to_stderr(f"to resume: {resume_line(command, request)}")
    return code


def resume_line(command: LocalCommand, request: Request) -> str:
    """Returns the command line that continues a run in the same number of processes.

    Example:
      >>> request = request_of(["train", "gpt-nano", "--output-dir", "runs/a"], None)
      >>> resume_line(LocalCommand(processes=2), request)
      'spanax launch local --processes 2 -- train gpt-nano --output-dir runs/a --resume'
    """
    flags = ["--processes", str(command.processes)]
    if command.devices_per_process is not None:
        flags += ["--devices-per-process", str(command.devices_per_process)]
    return shlex.join(["spanax", "launch", "local", *flags, "--", *request.argv(is_again=True)])


def start(command: LocalCommand, request: Request, attempt: int) -> list[subprocess.Popen[bytes]]:
    """Starts all processes of an attempt; the first one writes to this process's output, the others to their logs."""
    shared: dict[str, str] = {"SPANAX_ATTEMPT": str(attempt)}
    if command.processes > 1:  # a single process may belong to a cluster that JAX detects
        shared |= {
            "SPANAX_COORDINATOR": f"{LOOPBACK}:{free_port(LOOPBACK)}",
            "SPANAX_NUM_HOSTS": str(command.processes),
        }
    if command.devices_per_process is not None:
        shared["SPANAX_HOST_DEVICES"] = str(command.devices_per_process)
    argv, shared = request.command(sys.executable, is_again=attempt > 0), shared | request.environment
    return [
        started(argv, shared | {"SPANAX_HOST": str(rank)} | _gpus(command, rank), request.folder, rank, talks=rank == 0)
        for rank in range(command.processes)
    ]


def started(
    argv: Sequence[str], environment: Mapping[str, str], folder: Path, rank: int, *, talks: bool = True
) -> subprocess.Popen[bytes]:
    """Starts a supervised child process of a run; without `talks`, its standard output goes to its log as well."""
    begin_log(folder, rank, environment["SPANAX_ATTEMPT"])
    with Folder.of(folder).appending(RANK_LOG.of(rank)) as log:
        return subprocess.Popen(
            argv,
            env={**os.environ, **environment, "SPANAX_SUPERVISOR": str(os.getpid())},
            stdin=subprocess.DEVNULL,
            stdout=None if talks else log,
            stderr=log,
            # Ctrl-C on a terminal reaches only the supervisor, which stops all processes.
            start_new_session=True,
        )


def _gpus(command: LocalCommand, rank: int) -> dict[str, str]:
    """Returns the environment that assigns a process its share of the GPUs, if several processes use them."""
    if command.processes == 1 or command.devices_per_process is None or not Path("/dev/nvidiactl").exists():
        return {}
    first = rank * command.devices_per_process
    return {"CUDA_VISIBLE_DEVICES": ",".join(map(str, range(first, first + command.devices_per_process)))}


def free_port(host: str) -> int:
    """Returns a free port; if another process takes it first, the attempt fails and the next one chooses another."""
    with socket.socket() as server:
        server.bind((host, 0))
        return int(server.getsockname()[1])
