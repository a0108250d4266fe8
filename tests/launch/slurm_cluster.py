"""A Slurm cluster of this machine alone: Debian's munged, slurmctld and one slurmd a node, on loopback."""

import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

DAEMONS = ("munged", "slurmctld", "slurmd", "sbatch", "srun")

CONF = """
ClusterName=test
SlurmctldHost=localhost(127.0.0.1)
SlurmctldPort={controller}
SlurmUser={user}
SlurmdUser={user}
AuthInfo=socket={folder}/munge.socket
# Without these both daemons listen on every interface.
CommunicationParameters=NoCtldInAddrAny,NoInAddrAny
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool.%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
MpiDefault=none
ReturnToService=2
KillWait=10
SchedulerParameters=sched_interval=1,bf_interval=1
"""


def is_installed() -> bool:
    """Whether Slurm's daemons are on this machine."""
    return all(_found(name) for name in DAEMONS)


@dataclass(frozen=True)
class Slurm:
    """A running cluster.

    Attributes:
      folder: its configuration, state and logs.
      environment: what its commands need.
    """

    folder: Path
    environment: dict[str, str]

    def run(self, *command: str) -> str:
        """What one of its commands prints."""
        return subprocess.run(command, env=self.environment, check=True, capture_output=True, text=True).stdout

    def job(self, number: str) -> dict[str, str]:
        """What the controller knows of a job."""
        words = self.run("scontrol", "show", "job", number).split()
        return dict(word.split("=", 1) for word in words if "=" in word)

    def ended(self, number: str, timeout_seconds: float) -> dict[str, str]:
        """A job once it is over."""
        over = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL")
        return wait_for(lambda: (job := self.job(number))["JobState"] in over and job, timeout_seconds)


@contextmanager
def slurm_cluster(num_nodes: int) -> Iterator[Slurm]:
    """A cluster of so many nodes of two cores each; every daemon is gone afterwards."""
    folder = Path(tempfile.mkdtemp(prefix="slurm-"))
    (folder / "state").mkdir()
    (folder / "munge.key").write_bytes(os.urandom(1024))
    (folder / "munge.key").chmod(0o400)
    ports = _free_ports(1 + num_nodes)
    conf = CONF.format(controller=ports[0], user=os.environ.get("USER", "root"), folder=folder)
    for index, port in enumerate(ports[1:]):
        conf += f"NodeName=n{index} NodeHostname=localhost NodeAddr=127.0.0.1 Port={port} CPUs=2 State=UNKNOWN\n"
    conf += "PartitionName=test Nodes=ALL Default=YES State=UP\n"
    (folder / "slurm.conf").write_text(conf)
    environment = {**os.environ, "SLURM_CONF": str(folder / "slurm.conf")}
    files = {name: f"--{name}-file={folder}/munge.{name}" for name in ("key", "pid", "log", "seed")}
    munge = ["--foreground", "--force", "--num-threads=2", f"--socket={folder}/munge.socket", *files.values()]
    commands = [["munged", *munge], ["slurmctld", "-D"], *(["slurmd", "-D", "-N", f"n{i}"] for i in range(num_nodes))]
    slurm = Slurm(folder, environment)
    daemons: list[subprocess.Popen[bytes]] = []
    try:
        for name, *args in commands:
            with open(folder / f"{name}.out", "ab") as output:
                program = [_found(name) or name, *args]
                daemons.append(subprocess.Popen(program, env=environment, stdout=output, stderr=output))
            if name == "munged":
                wait_for((folder / "munge.socket").exists, 20)
        wait_for(lambda: slurm.run("sinfo", "--noheader", "--format=%D %t").split() == [str(num_nodes), "idle"], 60)
        yield slurm
        for number in slurm.run("squeue", "--noheader", "--format=%i").split():
            slurm.run("scancel", number)
        wait_for(lambda: not slurm.run("squeue", "--noheader"), 60)
    finally:
        for daemon in reversed(daemons):
            daemon.send_signal(signal.SIGTERM)
        for daemon in reversed(daemons):
            daemon.wait(240)
        shutil.rmtree(folder, ignore_errors=True)


def wait_for(result: Callable[[], Any], timeout_seconds: float) -> Any:
    """What is found, once it is something."""
    until = time.monotonic() + timeout_seconds
    while not (something := _tried(result)):
        assert time.monotonic() < until, f"nothing in {timeout_seconds} s"
        time.sleep(0.2)
    return something


def _tried(result: Callable[[], Any]) -> Any:
    try:
        return result()
    except subprocess.CalledProcessError:
        return None  # the controller is not there yet


def _found(name: str) -> str | None:
    return shutil.which(name) or shutil.which(name, path="/usr/sbin:/sbin")


def _free_ports(how_many: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(how_many)]
    ports = [item.getsockname()[1] for item in sockets]
    for socket_info in sockets:
        socket_info.close()
    return ports
