"""Supervises the processes of a job; the scripts of the cluster launchers call it."""

import os
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated

import tyro

from spanax.errors import PREEMPTED
from spanax.launch import local, slurm
from spanax.launch.request import request_of
from spanax.launch.supervisor import RESUME_AGAIN, Limits, Process, Supervisor
from spanax.printable import to_stderr
from spanax.processes.environment import number
from spanax.train.flags import check_numbers


@dataclass(frozen=True)
class WorkersCommand:
    """Start the processes of a run that belong to this machine or job, and supervise them.

    Attributes:
      start: command prefix in place of the interpreter; an `srun ...` starts every rank of the job.
      hosts: number of processes that srun starts.
      logs: folder for the logs, heartbeats and events of a program; by default runs/launched-DATE.
      limits: when to restart, and when to give up.
    """

    start: str = ""
    hosts: int = 1
    logs: str | None = None
    limits: Annotated[Limits, tyro.conf.arg(name="")] = field(default_factory=Limits)


def launch(command: WorkersCommand, argv: Sequence[str]) -> int:
    """Supervises the processes until the run ends; returns the exit code.

    Raises:
      SpanaxError: the request is invalid.
    """
    check_numbers(command)
    check_numbers(command.limits)
    words = shlex.split(command.start)
    request = request_of(argv, command.logs)
    is_slurm = words[:1] == ["srun"]
    rank = 0 if is_slurm else number(os.environ, "SPANAX_HOST", 0)

    def start(attempt: int) -> Sequence[Process]:
        environment = {"SPANAX_ATTEMPT": str(attempt)} | request.environment
        is_again = attempt > 0
        prefixed = [*words, *request.argv(is_again=is_again)]
        argv_of_attempt = prefixed if words else request.command(sys.executable, is_again=is_again)
        if is_slurm:
            return slurm.started(argv_of_attempt, command.hosts, environment, request.folder)
        # This machine has one process; the environment says whether the run has others.
        return [local.started(argv_of_attempt, environment, request.folder, rank)]

    # Earlier starts of the job itself, as reported by a JobSet or by Slurm.
    counter = "SPANAX_ATTEMPT" if os.environ.get("SPANAX_ATTEMPT") else "SLURM_RESTART_COUNT"
    begun = number(os.environ, counter, 0)
    code = Supervisor.of(start, request, command.limits, begun=begun, rank=rank, shows_first=not is_slurm).watch()
    is_requeued = code == PREEMPTED and is_slurm and slurm.requeue()
    if code == PREEMPTED and rank == 0 and not is_requeued and not request.is_program:
        to_stderr(RESUME_AGAIN)
    return code
