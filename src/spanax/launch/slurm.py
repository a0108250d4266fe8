"""Writes an sbatch script for `spanax launch slurm` and submits it.

The process of the script is the supervisor (`spanax launch workers`); it starts every rank with one `srun`.
"""

import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import IO, Annotated, Literal

import tyro

from spanax.entries.folder import Folder
from spanax.entries.names import JOB_LOG, JOB_SCRIPT, LOGS, RANK_LOG
from spanax.errors import FileErrors, FormatError, LaunchError, NotInstalledError, WriteError
from spanax.launch.exit_codes import begin_log
from spanax.launch.local import LOOPBACK, free_port
from spanax.launch.request import Request, request_of
from spanax.launch.supervisor import Limits, as_flags
from spanax.printable import printable_lines, to_stdout
from spanax.train.flags import check_numbers
from spanax.train.record.run_lock import check_entries


@dataclass(frozen=True)
class SlurmCommand:
    """Write an sbatch script for the command after `--` into its folder, and submit it.

    Attributes:
      hosts: number of nodes; each runs one process.
      devices_per_host: GPUs of each node, or simulated devices with --device cpu.
      device: gpu, or cpu to simulate devices.
      partition: Slurm partition.
      account: Slurm account.
      time: time limit, such as 24:00:00; two minutes before it the run saves and is requeued.
      cpus_per_host: cores of each node for its process; Slurm's default is one.
      name: name of the job; by default that of the folder.
      logs: folder for the logs, heartbeats and events of a program, on all nodes; by default runs/launched-DATE.
      limits: when to restart within the job, and when to give up.
      python: interpreter on the nodes. Default: the one that runs this command.
      extra: line to insert into the script, such as '#SBATCH --qos=high' or 'module load cuda'; repeatable.
      dry_run: print the script without submitting it.
    """

    hosts: int = 1
    devices_per_host: int = 8
    device: Literal["gpu", "cpu"] = "gpu"
    partition: str | None = None
    account: str | None = None
    time: str | None = None
    cpus_per_host: int | None = None
    name: str | None = None
    logs: str | None = None
    limits: Annotated[Limits, tyro.conf.arg(name="")] = field(default_factory=Limits)
    python: str = sys.executable
    extra: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    dry_run: bool = False


def script(command: SlurmCommand, request: Request) -> str:
    """Returns the sbatch script.

    Raises:
      SpanaxError: a value is invalid for Slurm.
    """
    check_numbers(command)
    check_numbers(command.limits)
    folder = Path(os.path.abspath(request.folder))
    options = {
        "job-name": command.name or request.name,
        "nodes": command.hosts,
        "ntasks-per-node": 1,
        "gpus-per-node": command.devices_per_host if command.device == "gpu" else None,
        "cpus-per-task": command.cpus_per_host,
        "partition": command.partition,
        "account": command.account,
        "time": command.time,
        # To the supervisor only, which signals the ranks; they save.
        "signal": "B:TERM@120",
        "requeue": True,
        "open-mode": "append",
        "output": str(folder / JOB_LOG).replace("%", "%%"),
    }
    cpus = f" --cpus-per-task={command.cpus_per_host}" if command.cpus_per_host else ""
    log = shlex.quote(str(folder).replace("%", "%%") + f"/{RANK_LOG.of('%t')}")
    spanax = f"{shlex.quote(command.python)} -P -m spanax"
    start = f"srun --kill-on-bad-exit=1{cpus} --open-mode=append --output={log}"
    start = start if request.is_program else f"{start} {spanax}"
    flags = ["--hosts", str(command.hosts), *as_flags(command.limits), *request.flags, "--start", start]
    lines = [
        "#!/bin/bash",
        *(_directive(name, value) for name, value in options.items() if value is not None),
        *command.extra,
        *(f"export {name}={value}" for name, value in _environment(command).items()),
        f"exec {spanax} launch workers {shlex.join(flags)} -- \\",
        f"  {shlex.join(request.argv(is_again=False))}",
    ]
    return "\n".join(lines) + "\n"


def launch(command: SlurmCommand, argv: Sequence[str]) -> int:
    """Submits the script, or prints it; returns the exit code.

    Raises:
      SpanaxError: Slurm is not installed, or rejects the job.
      EntryError: the run folder contains an entry that is neither a regular file nor a folder.
      WriteError: the run folder is not writable.
    """
    request = request_of(argv, command.logs)
    text = script(command, request)
    if command.dry_run:
        to_stdout(text)
        return 0
    sbatch = _tool("sbatch")
    place = Folder.of(request.folder)
    file = request.folder / JOB_SCRIPT
    with FileErrors(WriteError, f"cannot write to the run folder '{request.folder}'."):
        check_entries(place.make())
        # Slurm opens its log by path before Spanax runs, and does not create folders.
        place.make(LOGS)
        with place.appending(JOB_LOG):
            pass
        place.replace(JOB_SCRIPT, [text])
    process = subprocess.run([sbatch, "--parsable", str(file)], capture_output=True, text=True)
    if process.returncode:
        reason = process.stderr.strip().partition("\n")[0]
        raise LaunchError("sbatch refused the job.", where=reason, fix=f"edit and sbatch {file}")
    job = process.stdout.strip().partition(";")[0]
    print(f"submitted job {job}; it writes to {request.folder / LOGS}; scancel {job} cancels it")
    return 0


# ---- inside of the job


@dataclass(eq=False)
class Step:
    """An `srun` process, which starts every rank of the job and waits for them.

    Attributes:
      process: srun.
      errors: its standard error.
    """

    process: subprocess.Popen[bytes]
    errors: IO[bytes]

    @cached_property
    def failed(self) -> tuple[int, int]:
        """The rank that failed first and its exit code; blocks until all have ended."""
        code = self.process.wait()
        with self.errors:
            self.errors.seek(0)
            stderr = self.errors.read().decode(errors="replace")
        print(printable_lines(stderr), end="", file=sys.stderr, flush=True)
        return first_failed(stderr, code)

    def send_signal(self, number: int) -> None:
        """Sends every rank a signal, through scancel.

        On SIGTERM srun kills its ranks, and if srun is killed, they keep running (Slurm 22.05).
        """
        steps = _output("squeue", f"--job={os.environ['SLURM_JOB_ID']}", "--steps", "--noheader", "--format=%i")
        ids = [step for step in steps.split() if step.rpartition(".")[2].isdigit()]
        if ids:
            subprocess.run(["scancel", f"--signal={signal.Signals(number).name[3:]}", *ids], check=False)
        elif self.process.poll() is None:
            self.process.send_signal(number)


@dataclass(frozen=True)
class Rank:
    """The supervisor's handle on a rank of a step; all ranks end together, and rank 0 receives signals for all."""

    step: Step
    number: int

    def poll(self) -> int | None:
        """Returns the exit code of the rank that failed first, 0 for all others; None while they run."""
        return None if self.step.process.poll() is None else self.wait()

    def wait(self) -> int:
        """Blocks until all ranks have ended, and returns the same."""
        first, code = self.step.failed
        return code if self.number == first else 0

    def send_signal(self, number: int) -> None:
        """Sends every rank a signal, if this is rank 0."""
        if self.number == 0:
            self.step.send_signal(number)

    def kill(self) -> None:
        """Kills every rank, if this is rank 0."""
        self.send_signal(signal.SIGKILL)


def first_failed(stderr: str, code: int) -> tuple[int, int]:
    """Returns the rank that failed first and its exit code, negative for a signal.

    Args:
      stderr: standard error of srun.
      code: exit code of srun, the highest of all: usually that of a rank that it terminated because of the first.

    Example:
      >>> first_failed("srun: error: n1: task 1: Exited with exit code 65\\nsrun: error: n0: task 0: Terminated", 143)
      (1, 65)
      >>> first_failed("srun: error: n1: tasks 1-3: Killed\\nsrun: error: n0: task 0: Exited with exit code 75", 137)
      (1, -9)
    """
    first = re.search(r"tasks? (\d+)[\d,-]*: (?:Exited with exit code (\d+)|([A-Z][a-z ]+))", stderr)
    if not code or not first:
        return 0, code
    if first[2]:
        return int(first[1]), int(first[2])
    signals = {signal.strsignal(number): number for number in signal.Signals}
    return int(first[1]), -signals.get(first[3].strip(), signal.SIGABRT)


def started(command: Sequence[str], hosts: int, environment: Mapping[str, str], folder: Path) -> list[Rank]:
    """Starts every rank of the job.

    Slurm sets the number of each rank. As coordinator JAX would use a host name; here it is the address of this node as
    the second node reports it.

    Args:
      command: `srun` and the command of every rank.
      hosts: number of nodes of the job.
      environment: additional environment of the ranks.
      folder: the run folder.

    Raises:
      SpanaxError: the second node does not answer.
    """
    host = LOOPBACK
    if hosts > 1:
        host = _output("srun", "--relative=1", "--nodes=1", "--ntasks=1", "printenv", "SLURM_LAUNCH_NODE_IPADDR")
        if not host:
            raise LaunchError("the second node of the job does not answer.", where="srun --relative=1")
    for number in range(hosts):
        begin_log(folder, number, environment["SPANAX_ATTEMPT"])
    group_variables = {"SPANAX_COORDINATOR": f"{host}:{free_port(host)}", "SPANAX_NUM_HOSTS": str(hosts)}
    # The parent of a rank is a process of Slurm.
    rank_environment = {**os.environ, **environment, **(group_variables if hosts > 1 else {}), "SPANAX_SUPERVISOR": "0"}
    errors = tempfile.TemporaryFile()  # noqa: SIM115
    step = Step(subprocess.Popen(command, env=rank_environment, stderr=errors, start_new_session=True), errors)
    return [Rank(step, number) for number in range(hosts)]


def requeue() -> bool:
    """Requeues this job, unless it was cancelled, and returns whether it did; Slurm then ends this process."""
    job = os.environ["SLURM_JOB_ID"]
    if "JobState=RUNNING" not in _output("scontrol", "show", "job", job):
        return False
    return subprocess.run(["scontrol", "requeue", job], check=False).returncode == 0


def _directive(name: str, value: object) -> str:
    if value is True:
        return f"#SBATCH --{name}"
    if not re.fullmatch(r"[^\s'\"\\]+( [^\s'\"\\]+)*", str(value)):
        raise FormatError(
            f"--{name} {value!r} is invalid for sbatch.", fix="use a value without quotes and line breaks"
        )
    return f"#SBATCH --{name}={value}" if " " not in str(value) else f'#SBATCH --{name}="{value}"'


def _environment(command: SlurmCommand) -> dict[str, str]:
    """Returns the environment of the job: simulated devices, or all GPUs, as JAX uses one for each task by default."""
    if command.device == "cpu":
        return {"JAX_PLATFORMS": "cpu", "SPANAX_HOST_DEVICES": str(command.devices_per_host)}
    return {"JAX_LOCAL_DEVICE_IDS": ",".join(str(index) for index in range(command.devices_per_host))}


def _tool(name: str) -> str:
    path = shutil.which(name)
    if path is None:
        raise NotInstalledError(
            f"{name} is not installed on this machine.",
            fix="run it on a Slurm node, or use --dry-run to print the script",
        )
    return path


def _output(*command: str) -> str:
    return subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False).stdout.strip()
