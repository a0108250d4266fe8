"""Slurm: `spanax launch slurm` writes an sbatch script and submits it.

The script's own process becomes the supervisor (`spanax launch workers`); one `srun` of it starts every rank.
"""

import os
import re
import shlex
import shutil
import signal
import socket
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
from spanax.errors import SpanaxError, WriteError
from spanax.launch.exit_codes import ATTEMPT
from spanax.launch.request import TrainRequest, count
from spanax.launch.supervisor import Limits, as_flags, check
from spanax.printable import printable_lines, to_stdout
from spanax.run.record.run_lock import check_entries


@dataclass(frozen=True)
class SlurmCommand:
    """Write an sbatch script for the command behind `--` into its run folder, and submit it.

    Attributes:
      hosts: nodes; one process runs on each.
      devices_per_host: GPUs of each node, or simulated devices with --device cpu.
      device: gpu, or cpu to simulate devices.
      partition: as sbatch takes it.
      account: as sbatch takes it.
      time: as sbatch takes it, such as 24:00:00; the run saves and is queued again two minutes before it is over.
      cpus_per_host: cores of each node for its process; Slurm gives one where this is left out.
      name: the job's name; by default that of the run folder.
      limits: when to start again within the job, and when to give up.
      python: the interpreter on the nodes; this one by default.
      extra: a line to put into the script as it is, such as '#SBATCH --qos=high' or 'module load cuda'; repeatable.
      dry_run: print the script, and submit nothing.
    """

    hosts: int = 1
    devices_per_host: int = 8
    device: Literal["gpu", "cpu"] = "gpu"
    partition: str | None = None
    account: str | None = None
    time: str | None = None
    cpus_per_host: int | None = None
    name: str | None = None
    limits: Annotated[Limits, tyro.conf.arg(name="")] = field(default_factory=Limits)
    python: str = sys.executable
    extra: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    dry_run: bool = False


def script(command: SlurmCommand, request: TrainRequest) -> str:
    """The sbatch script.

    Raises:
      SpanaxError: a value that Slurm cannot take.
    """
    hosts, devices = count("hosts", command.hosts), count("devices-per-host", command.devices_per_host)
    folder = Path(os.path.abspath(request.folder))
    options = {
        "job-name": command.name or request.name,
        "nodes": hosts,
        "ntasks-per-node": 1,
        "gpus-per-node": devices if command.device == "gpu" else None,
        "cpus-per-task": None if command.cpus_per_host is None else count("cpus-per-host", command.cpus_per_host),
        "partition": command.partition,
        "account": command.account,
        "time": command.time,
        # To the supervisor alone: it tells the ranks, and they save.
        "signal": "B:TERM@120",
        "requeue": True,
        "open-mode": "append",
        "output": str(folder / JOB_LOG).replace("%", "%%"),
    }
    cpus = f" --cpus-per-task={command.cpus_per_host}" if command.cpus_per_host else ""
    log = shlex.quote(str(folder).replace("%", "%%") + f"/{RANK_LOG.of('%t')}")
    spanax = f"{shlex.quote(command.python)} -P -m spanax"
    start = f"srun --kill-on-bad-exit=1{cpus} --open-mode=append --output={log} {spanax}"
    flags = ["--hosts", str(hosts), *as_flags(check(command.limits)), "--start", start]
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
    """Submit the script, or print it; the exit code.

    Raises:
      SpanaxError: there is no Slurm here, or it refuses the job.
      EntryError: something other than a regular file or folder is in the run folder.
      WriteError: the run folder cannot be written.
    """
    request = TrainRequest.of(argv)
    text = script(command, request)
    if command.dry_run:
        to_stdout(text)
        return 0
    sbatch = _tool("sbatch")
    place, file = Folder.of(request.folder), request.folder / JOB_SCRIPT
    try:
        check_entries(place.make())
        # Slurm opens its log by path, before anything of ours runs, and makes no folders.
        place.make(LOGS)
        with place.appending(JOB_LOG):
            pass
        place.replace(JOB_SCRIPT, [text])
    except OSError as error:
        raise WriteError(f"cannot write to the run folder '{request.folder}'.", where=str(error)) from None
    done = subprocess.run([sbatch, "--parsable", str(file)], capture_output=True, text=True)
    if done.returncode:
        raise SpanaxError("sbatch refused the job.", where=_first_line(done.stderr), fix=f"edit and sbatch {file}")
    job = done.stdout.strip().partition(";")[0]
    print(f"submitted job {job}; it writes to {request.folder / LOGS}; scancel {job} ends it")
    return 0


# ---- inside of the job


@dataclass(eq=False)
class Step:
    """An `srun`, which starts every rank of the job and waits for them.

    Attributes:
      process: srun.
      errors: what it writes to standard error.
    """

    process: subprocess.Popen[bytes]
    errors: IO[bytes]

    @cached_property
    def failed(self) -> tuple[int, int]:
        """The rank that failed first and its exit code, once all have ended."""
        code = self.process.wait()
        with self.errors:
            self.errors.seek(0)
            told = self.errors.read().decode(errors="replace")
        print(printable_lines(told), end="", file=sys.stderr, flush=True)
        return first_failed(told, code)

    def send_signal(self, number: int) -> None:
        """Send every rank a signal, through scancel.

        srun takes a SIGTERM for the order to kill its ranks, and killed itself it leaves them running (Slurm 22.05).
        """
        listed = _output("squeue", f"--job={os.environ['SLURM_JOB_ID']}", "--steps", "--noheader", "--format=%i")
        ids = [step for step in listed.split() if step.rpartition(".")[2].isdigit()]
        if ids:
            subprocess.run(["scancel", f"--signal={signal.Signals(number).name[3:]}", *ids], check=False)
        elif self.process.poll() is None:
            self.process.send_signal(number)


@dataclass(frozen=True)
class Rank:
    """One rank of a step, as a supervisor knows it; all end together, and the first one takes the signals for all."""

    step: Step
    number: int

    def poll(self) -> int | None:
        """The exit code of the rank that failed first, 0 of all others; None while they run."""
        return None if self.step.process.poll() is None else self.wait()

    def wait(self) -> int:
        """The same, once they have ended."""
        first, code = self.step.failed
        return code if self.number == first else 0

    def send_signal(self, number: int) -> None:
        """Send every rank a signal, if this is the first one."""
        if self.number == 0:
            self.step.send_signal(number)

    def kill(self) -> None:
        """End every rank, if this is the first one."""
        self.send_signal(signal.SIGKILL)


def first_failed(told: str, code: int) -> tuple[int, int]:
    """The rank that failed first, and its exit code, a signal as a negative number.

    Args:
      told: what srun said.
      code: its own exit code, the highest of all: mostly that of a rank that it ended because of the first.

    Example:
      >>> first_failed("srun: error: n1: task 1: Exited with exit code 65\\nsrun: error: n0: task 0: Terminated", 143)
      (1, 65)
      >>> first_failed("srun: error: n1: tasks 1-3: Killed\\nsrun: error: n0: task 0: Exited with exit code 75", 137)
      (1, -9)
    """
    first = re.search(r"tasks? (\d+)[\d,-]*: (?:Exited with exit code (\d+)|([A-Z][a-z ]+))", told)
    if not code or not first:
        return 0, code
    if first[2]:
        return int(first[1]), int(first[2])
    named = {signal.strsignal(number): number for number in signal.Signals}
    return int(first[1]), -named.get(first[3].strip(), signal.SIGABRT)


def started(command: Sequence[str], hosts: int, environment: Mapping[str, str], folder: Path) -> list[Rank]:
    """Start every rank of the job.

    Slurm tells each rank its number. The coordinator JAX would name by a host name; here it is the address that the
    second node has seen this one under.

    Args:
      command: `srun` and what every rank runs.
      hosts: the nodes of the job.
      environment: more of it for the ranks.
      folder: the run folder.

    Raises:
      SpanaxError: the second node does not answer.
    """
    host = "127.0.0.1"
    if hosts > 1:
        host = _output("srun", "--relative=1", "--nodes=1", "--ntasks=1", "printenv", "SLURM_LAUNCH_NODE_IPADDR")
        if not host:
            raise SpanaxError("the second node of the job does not answer.", where="srun --relative=1")
    place = Folder.of(folder)
    place.make(LOGS)
    for number in range(hosts):
        with place.appending(RANK_LOG.of(number)) as log:
            os.write(log, f"{ATTEMPT} {environment['SPANAX_ATTEMPT']}\n".encode())
    joined = {"SPANAX_COORDINATOR": f"{host}:{_free_port(host)}", "SPANAX_NUM_HOSTS": str(hosts)}
    # The parent of a rank is Slurm's.
    told = {**os.environ, **environment, **(joined if hosts > 1 else {}), "SPANAX_SUPERVISOR": "0"}
    errors = tempfile.TemporaryFile()  # noqa: SIM115
    step = Step(subprocess.Popen(command, env=told, stderr=errors, start_new_session=True), errors)
    return [Rank(step, number) for number in range(hosts)]


def requeue() -> None:
    """Put this job back into the queue, unless it was cancelled; Slurm then ends this process."""
    job = os.environ["SLURM_JOB_ID"]
    if "JobState=RUNNING" in _output("scontrol", "show", "job", job):
        subprocess.run(["scontrol", "requeue", job], check=False)


def _directive(name: str, value: object) -> str:
    if value is True:
        return f"#SBATCH --{name}"
    if not re.fullmatch(r"[^\s'\"\\]+( [^\s'\"\\]+)*", str(value)):
        raise SpanaxError(f"sbatch cannot take --{name} {value!r}.", fix="a value without quotes and line breaks")
    return f"#SBATCH --{name}={value}" if " " not in str(value) else f'#SBATCH --{name}="{value}"'


def _environment(command: SlurmCommand) -> dict[str, str]:
    """JAX gives a process under Slurm one GPU unless told; a simulated device is told of here too."""
    if command.device == "cpu":
        return {"JAX_PLATFORMS": "cpu", "SPANAX_HOST_DEVICES": str(command.devices_per_host)}
    return {"JAX_LOCAL_DEVICE_IDS": ",".join(str(index) for index in range(command.devices_per_host))}


def _tool(name: str) -> str:
    found = shutil.which(name)
    if found is None:
        raise SpanaxError(
            f"there is no {name} on this machine.", fix="run it where Slurm is, or --dry-run to see the script"
        )
    return found


def _output(*command: str) -> str:
    return subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False).stdout.strip()


def _free_port(host: str) -> int:
    with socket.socket() as one:
        one.bind((host, 0))
        return one.getsockname()[1]


def _first_line(text: str) -> str:
    return next(iter(text.strip().splitlines()), "")
