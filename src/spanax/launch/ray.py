"""Starts one process on each host of a Ray cluster for `spanax launch ray`, and supervises them from the driver.

Ray places the processes and delivers signals; the collectives of the run are JAX's.
"""

import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

import tyro

from spanax.entries.folder import Folder
from spanax.entries.names import LOGS, RANK_LOG
from spanax.errors import PREEMPTED, LaunchError, NotInstalledError, SpanaxError
from spanax.launch.exit_codes import ATTEMPT
from spanax.launch.guard import Guard
from spanax.launch.local import free_port
from spanax.launch.request import Request, count, request_of
from spanax.launch.supervisor import POLL_SECONDS, RESUME_AGAIN, Limits, Supervisor, as_flags, check
from spanax.printable import to_stderr, to_stdout
from spanax.units import whole_number

RESOURCES = {"gpu": "GPU", "tpu": "TPU", "cpu": "CPU"}


@dataclass(frozen=True)
class RayCommand:
    """Run the command after `--` on a Ray cluster, or submit it there as a job.

    Attributes:
      address: auto for the cluster of this machine, HOST:PORT of a head node, or the http://HOST:8265 of a dashboard,
        to submit a job.
      hosts: number of processes; each gets devices on one node.
      devices_per_host: chips of each process, or simulated devices with --device cpu.
      device: gpu, tpu, or cpu to simulate devices.
      together: allow several processes on a node; by default each gets a separate one.
      wait_seconds: maximum time to wait for free resources on the cluster.
      logs: folder for the logs, heartbeats and events of a program, on all nodes; by default runs/launched-DATE.
      limits: when to restart, and when to give up.
      python: interpreter on the nodes. Default: the one that runs this command.
      dry_run: print the placement or the job without starting anything.
    """

    address: str = "auto"
    hosts: int = 1
    devices_per_host: int = 8
    device: Literal["gpu", "tpu", "cpu"] = "gpu"
    together: bool = False
    wait_seconds: float = 300.0
    logs: str | None = None
    limits: Annotated[Limits, tyro.conf.arg(name="")] = field(default_factory=Limits)
    python: str = sys.executable
    dry_run: bool = False


def job(command: RayCommand, request: Request) -> list[str]:
    """Returns the command line that submits a driver to a dashboard."""
    options = {"hosts": command.hosts, "devices-per-host": command.devices_per_host, "device": command.device}
    flags = [word for name, value in options.items() for word in (f"--{name}", str(value))]
    flags += ["--wait-seconds", f"{command.wait_seconds:g}", *as_flags(command.limits)]
    flags += ["--together"] * command.together
    flags += request.flags
    driver = [command.python, "-P", "-m", "spanax", "launch", "ray", *flags, "--python", command.python, "--"]
    driver += request.argv(is_again=False)
    return ["ray", "job", "submit", "--address", command.address, "--no-wait", "--", *driver]


def bundle(command: RayCommand) -> dict[str, float]:
    """Returns the resources of one process; simulated devices count for nothing in Ray."""
    devices = count("devices-per-host", command.devices_per_host)
    return {"CPU": 1.0} | ({} if command.device == "cpu" else {RESOURCES[command.device]: float(devices)})


@dataclass(eq=False)
class Worker:
    """The driver's handle on a process of the cluster."""

    host: Any
    returncode: int | None = None

    def poll(self) -> int | None:
        """Returns the exit code; None while it runs. If its node is lost, the process counts as killed."""
        if self.returncode is None:
            self.returncode = self._ask("poll", lost=-signal.SIGKILL)
        return self.returncode

    def wait(self) -> int:
        """Blocks until the process ends, and returns the exit code."""
        while (code := self.poll()) is None:
            time.sleep(POLL_SECONDS)
        return code

    def send_signal(self, number: int) -> None:
        """Sends the process a signal."""
        if self.returncode is None:
            self._ask("send_signal", number)

    def kill(self) -> None:
        """Kills the process and its children."""
        if self.returncode is None:
            self._ask("kill")

    def must(self, method: str, *args: Any) -> Any:
        """Calls a method of the host and returns its result.

        Raises:
          SpanaxError: the call fails there.
        """
        import ray

        try:
            return ray.get(getattr(self.host, method).remote(*args))
        except ray.exceptions.RayError as error:
            reason = str(error).strip().splitlines()[-1:]
            raise LaunchError("cannot start a process on a node of the Ray cluster.", where="".join(reason)) from None

    def _ask(self, method: str, *args: Any, lost: Any = None) -> Any:
        try:
            return self.must(method, *args)
        except SpanaxError:
            return lost  # the caller's value for a lost node


class Host:
    """A Ray actor that owns the process on its node."""

    def __init__(self) -> None:
        self.process: subprocess.Popen[bytes] | None = None
        self.guard = Guard(Limits().stop_seconds)

    def coordinator(self) -> str:
        """Returns an address of this node in the cluster, with a free port."""
        import ray

        address = ray.util.get_node_ip_address()
        return f"{address}:{free_port(address)}"

    def start(self, command: Sequence[str], environment: Mapping[str, str], folder: str, run_folder: str) -> None:
        """Starts the process in a working directory, and appends its output to its log in the run folder."""
        place = Folder.of(run_folder).make()
        place.make(LOGS)
        with place.appending(RANK_LOG.of(environment["SPANAX_HOST"])) as output:
            os.write(output, f"{ATTEMPT} {environment['SPANAX_ATTEMPT']}\n".encode())
            self.process = subprocess.Popen(
                command,
                cwd=folder,
                env={**os.environ, **environment, "SPANAX_SUPERVISOR": str(os.getpid())},
                stdout=output,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )
        self.guard.watch([self.process.pid])  # Ray kills the actor of a driver that has ended

    def poll(self) -> int | None:
        """Returns the exit code of the process; None while it runs."""
        code = None if self.process is None else self.process.poll()
        if code is not None:
            self.guard.watch([])
        return code

    def send_signal(self, number: int) -> None:
        """Sends the process a signal."""
        if self.process is not None:
            self.process.send_signal(number)

    def kill(self) -> None:
        """Kills the process group."""
        if self.process is not None and self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)


@dataclass(eq=False)
class Cluster:
    """The nodes of a run on Ray; every start places the processes again where resources are free."""

    command: RayCommand
    request: Request
    _group: Any = None

    def start(self, attempt: int) -> list[Worker]:
        """Starts one process for each host.

        Raises:
          SpanaxError: the cluster does not have the resources.
        """
        hosts = [Worker(host) for host in self._placed()]
        command = self.command
        words = self.request.command(command.python, is_again=attempt > 0)
        environment = {
            "SPANAX_COORDINATOR": hosts[0].must("coordinator"),
            "SPANAX_NUM_HOSTS": str(len(hosts)),
            "SPANAX_ATTEMPT": str(attempt),
            **self.request.environment,
        }
        if command.device == "cpu":
            environment |= {"JAX_PLATFORMS": "cpu", "SPANAX_HOST_DEVICES": str(command.devices_per_host)}
        folder = os.path.abspath(self.request.folder)
        for rank, host in enumerate(hosts):
            host.must("start", words, environment | {"SPANAX_HOST": str(rank)}, os.getcwd(), folder)
        return hosts

    def close(self) -> None:
        """Releases the nodes."""
        if self._group is not None:
            from ray.util import remove_placement_group

            remove_placement_group(self._group)
            self._group = None

    def _placed(self) -> list[Any]:
        import ray
        from ray.util import placement_group
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        self.close()
        resources, hosts = bundle(self.command), count("hosts", self.command.hosts)
        strategy = "PACK" if self.command.together else "STRICT_SPREAD"
        self._group = placement_group([resources] * hosts, strategy=strategy)
        if not self._group.wait(self.command.wait_seconds):
            self.close()
            free = ", ".join(f"{value:g} {name}" for name, value in _free(ray).items()) or "nothing"
            raise LaunchError(
                f"the Ray cluster has no room for {hosts} x {resources} after {self.command.wait_seconds:g} s.",
                where=f"free on {len(ray.nodes())} nodes: {free}",
                fix="fewer --hosts or --devices-per-host" + ("" if self.command.together else ", or --together"),
            )
        custom = {name: value for name, value in resources.items() if name not in ("CPU", "GPU")}
        actor = ray.remote(num_cpus=1, num_gpus=resources.get("GPU", 0), resources=custom or None, max_restarts=0)(Host)
        return [
            actor.options(
                scheduling_strategy=PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=index)
            ).remote()
            for index in range(hosts)
        ]


def launch(command: RayCommand, argv: Sequence[str]) -> int:
    """Runs on the cluster until the end, submits to it, or prints what it would do; returns the exit code.

    Raises:
      SpanaxError: Ray is not installed, there is no cluster, or it lacks the resources.
    """
    resources, hosts = bundle(command), count("hosts", command.hosts)
    request = request_of(argv, command.logs, is_here=False)
    is_submitted = command.address.startswith(("http://", "https://"))
    if command.dry_run:
        words = request.command(command.python, is_again=False)
        text = shlex.join(job(command, request)) if is_submitted else f"{hosts} x {resources}: {shlex.join(words)}"
        to_stdout(f"{text}\n")
        return 0
    if is_submitted:
        if shutil.which("ray") is None:
            raise NotInstalledError(
                "ray is not installed on this machine.", fix="pip install 'spanax[ray]', or --dry-run"
            )
        return subprocess.run(job(command, request)).returncode
    return _driven(command, request)


def _driven(command: RayCommand, request: Request) -> int:
    try:
        import ray
    except ImportError:
        raise NotInstalledError("Ray is not installed.", fix="pip install 'spanax[ray]'") from None
    host, _, port = command.address.rpartition(":")
    try:
        if (number := whole_number(port)) is not None:
            # Ray itself would retry for minutes.
            socket.create_connection((host, number), timeout=10).close()
        ray.init(address=command.address, log_to_driver=False, logging_level="warning")
    except OSError as error:
        raise LaunchError(
            f"there is no Ray cluster at '{command.address}'.", where=str(error), fix="ray start --head, or --address"
        ) from None
    cluster = Cluster(command, request)
    try:
        code = Supervisor.of(cluster.start, request, check(command.limits)).watch()
    finally:
        cluster.close()
        ray.shutdown()
    if code == PREEMPTED and not request.is_program:
        to_stderr(RESUME_AGAIN)
    return code


def _free(ray: Any) -> dict[str, float]:
    return {name: value for name, value in ray.available_resources().items() if name in RESOURCES.values()}
