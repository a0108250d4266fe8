"""Joins the processes of one run, and provides collectives on the host: barriers, agreement and broadcasts.

The environment describes the group of a process; launchers set it:

    SPANAX_COORDINATOR   host:port of rank 0
    SPANAX_NUM_HOSTS     the number of processes
    SPANAX_HOST          the rank of this process, >= 0; by default SLURM_PROCID under Slurm
    SPANAX_HOST_DEVICES  the number of devices that each process simulates without an accelerator
    SPANAX_ATTEMPT       the number of earlier attempts of the run
    SPANAX_SUPERVISOR    the pid of the supervisor; 0 for one on another machine
    SPANAX_HEARTBEATS    the folder to which `spanax.heartbeat` writes
    SPANAX_INTERFACE     the network interface of its data sockets; by default the one that reaches the coordinator

Without SPANAX_COORDINATOR the variables of torchrun apply (`TORCHRUN`), and without those JAX's own cluster detection
(TPU pods on GCE and GKE, Slurm, Open MPI, Kubernetes). `SPANAX_NUM_HOSTS=1` alone disables both, for processes of a
cluster that each train a separate model. Everything is based on `jax.distributed`. Whatever starts JAX's backend, in
programs and commands, joins the group first.
"""

import functools
import os
import re
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from spanax.compat import cluster_kinds, coordination, has_backend, register_cpu_collectives
from spanax.errors import GroupError, HostsError, SpanaxError, first_line, nearest
from spanax.processes.absent_tpu import has_only_cpus
from spanax.processes.environment import WHERE, number
from spanax.processes.lockstep import SHUTDOWN_SECONDS, operation, watch
from spanax.processes.supervision import attach_supervisor, exit_on_error

JOIN_SECONDS = 300
"""How long the processes wait for the last of them to join."""

DEATH_SECONDS = 15
"""After this long without a heartbeat a process counts as dead, and the others abort. JAX's default is 100."""

THREADS_PER_DEVICE = 2
"""XLA's CPU collectives wait for each other on one thread pool. With its default of one thread per device, a step that
is dispatched while another runs can deadlock; with two none did. More threads make each step slower.

Source: notes/speed.md, 2, 4 and 8 devices on one core and two.
"""

TORCHRUN = ("MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE")
"""The variables of torchrun that define a group. Source: torch.distributed, Environment variable initialization."""

CLUSTER_RANKS = ("SLURM_PROCID", "OMPI_COMM_WORLD_RANK")
"""Set where JAX detects the group by itself; scripts often export MASTER_ADDR and MASTER_PORT there for PyTorch."""

ALONE = "SPANAX_NUM_HOSTS=1 if each process trains a separate model"

MAX_TEXT_BYTES = 4096
"""Maximum size of a text that the first process broadcasts, in bytes."""


@dataclass(frozen=True)
class Hosts:
    """The place of a process in its group.

    Attributes:
      num_hosts: the number of processes.
      rank: the rank of this process; rank 0 alone writes records and prints.
      attempt: the number of earlier attempts of the run.
      coordinator: host:port of rank 0; empty if JAX detects it.
      devices_per_host: the number of devices to simulate in each process; None for the requested number.
      detects_cluster: whether JAX's cluster detection applies, because no group is set.
      local_device: the accelerator of this process, if several processes share a machine; None for all of them.
      detects_devices: whether JAX's cluster detection chooses the accelerators; it gives a task of Slurm one.
    """

    num_hosts: int = 1
    rank: int = 0
    attempt: int = 0
    coordinator: str = ""
    devices_per_host: int | None = None
    detects_cluster: bool = True
    local_device: int | None = None
    detects_devices: bool = False

    @staticmethod
    def of(environ: Mapping[str, str] = os.environ) -> "Hosts":
        """Reads the group from the environment.

        Raises:
          SpanaxError: a value is not a number, or the variables contradict each other.

        Example:
          >>> Hosts.of({"SPANAX_COORDINATOR": "127.0.0.1:9911", "SPANAX_NUM_HOSTS": "2", "SPANAX_HOST": "1"}).rank
          1
        """
        attempt = number(environ, "SPANAX_ATTEMPT", 0)
        devices_per_host = number(environ, "SPANAX_HOST_DEVICES", 0) or None
        is_ours = "SPANAX_COORDINATOR" in environ or "SPANAX_NUM_HOSTS" in environ
        if not is_ours and (group := _torch_group(environ)) is not None:
            return replace(group, attempt=attempt, devices_per_host=devices_per_host)
        if "SPANAX_COORDINATOR" not in environ:
            num_hosts = number(environ, "SPANAX_NUM_HOSTS", 0)
            if num_hosts > 1:
                raise GroupError(
                    f"SPANAX_NUM_HOSTS is {num_hosts}, but SPANAX_COORDINATOR is not set.",
                    where=WHERE,
                    fix=f"SPANAX_COORDINATOR=HOST:PORT of the first process, or {ALONE}",
                )
            return Hosts(attempt=attempt, devices_per_host=devices_per_host, detects_cluster=num_hosts == 0)
        num_hosts = number(environ, "SPANAX_NUM_HOSTS", None)
        names = ("SPANAX_HOST", "SLURM_PROCID")
        rank = number(environ, next((name for name in names if name in environ), names[0]), None)
        if not 0 <= rank < num_hosts:
            raise GroupError(
                f"host {rank} is out of range for {num_hosts} hosts, counted from 0.",
                where=f"SPANAX_HOST={rank}, SPANAX_NUM_HOSTS={num_hosts}",
            )
        return Hosts(
            num_hosts,
            rank,
            attempt,
            environ["SPANAX_COORDINATOR"],
            devices_per_host,
            detects_devices="SPANAX_HOST" not in environ,
        )

    def join(self) -> None:
        """Joins the group before JAX starts its backend; a no-op without a group, or if it has been joined.

        Raises:
          HostsError: the backend has started already, not all processes joined, or the coordinator's port is in use.
          SpanaxError: the coordinator's address is invalid.
        """
        import jax

        if jax.distributed.is_initialized():
            bind_data_sockets()
            watch()
            return
        num_hosts = 1
        if self.coordinator:
            num_hosts = self.num_hosts
        elif self.detects_cluster:
            num_hosts = detected_processes()
        if not self.coordinator and num_hosts == 1:
            return
        if has_backend():
            raise HostsError(
                f"JAX started before this process joined its group of {num_hosts}.",
                where=f"rank {self.rank}, coordinator {self.coordinator}" if self.coordinator else "detected by JAX",
                fix="call spanax.distributed() before any array or jax.devices()"
                + ("" if self.coordinator else f"; or {ALONE}"),
            )
        options: dict[str, Any] = {}
        if self.coordinator:
            if self.rank == 0:
                _check_free(_bound_to(self.coordinator))
            options = {
                "coordinator_address": self.coordinator,
                "num_processes": self.num_hosts,
                "process_id": self.rank,
                "coordinator_bind_address": _bound_to(self.coordinator),
            }
            if not self.detects_devices:
                # Cluster detection would still choose the local devices: one GPU for a Slurm task.
                options["cluster_detection_method"] = "deactivate"
            if self.local_device is not None:
                options["local_device_ids"] = [self.local_device]
        try:
            jax.distributed.initialize(
                **options,
                initialization_timeout=JOIN_SECONDS,
                heartbeat_timeout_seconds=DEATH_SECONDS,
                shutdown_timeout_seconds=SHUTDOWN_SECONDS,
            )
        except (RuntimeError, ValueError) as error:
            raise HostsError(
                f"the {num_hosts} processes of this run could not connect: {first_line(error)}",
                where=f"rank {self.rank}, coordinator {self.coordinator or 'detected by JAX'}",
                fix="run spanax doctor --hosts HOST:PORT on each of them",
            ) from None
        exit_on_error()
        watch()
        bind_data_sockets()


def _torch_group(environ: Mapping[str, str]) -> Hosts | None:
    """Returns the group that the variables of torchrun and its relatives describe; None if there are none.

    Raises:
      SpanaxError: a variable is missing or not a number, or two of them contradict each other.
    """
    present = [name for name in TORCHRUN if name in environ]
    has_address_only = not {"RANK", "WORLD_SIZE"} & {*present}
    if not present or has_address_only and any(name in environ for name in CLUSTER_RANKS):
        return None
    if len(present) < len(TORCHRUN):
        missing = ", ".join(name for name in TORCHRUN if name not in environ)
        raise GroupError(
            f"{', '.join(present)} {'is' if len(present) == 1 else 'are'} set, but {missing} not.",
            where=WHERE,
            fix="set all four for a group of processes; or SPANAX_NUM_HOSTS=1 if this process trains by itself",
        )
    num_processes = number(environ, "WORLD_SIZE", None)
    rank = _rank(environ, "RANK", None, "WORLD_SIZE", num_processes)
    port = number(environ, "MASTER_PORT", None)
    # torchrun itself listens on MASTER_PORT, for the store that its processes share.
    port += environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    num_local = number(environ, "LOCAL_WORLD_SIZE", num_processes)
    local_rank = _rank(environ, "LOCAL_RANK", 0, "LOCAL_WORLD_SIZE", num_local)
    shares_machine = "LOCAL_RANK" in environ and num_local > 1
    return Hosts(
        num_processes,
        rank,
        coordinator=f"{environ['MASTER_ADDR']}:{port}" if num_processes > 1 else "",
        detects_cluster=False,
        local_device=local_rank if shares_machine else None,
    )


def _rank(environ: Mapping[str, str], name: str, default: int | None, size_name: str, size: int) -> int:
    rank = number(environ, name, default)
    if rank >= size:
        raise GroupError(
            f"process {rank} is out of range for {size} processes, counted from 0.",
            where=f"{name}={rank}, {size_name}={size}",
        )
    return rank


def bind_data_sockets(environ: Mapping[str, str] = os.environ) -> None:
    """Makes the CPU collectives of this process (Gloo) listen on one interface, before JAX starts its backend.

    By default JAX binds to the address of the machine's host name: often one that other machines can reach, sometimes
    none of this machine. Here it is the interface in `SPANAX_INTERFACE`, or the one that reaches the coordinator, which
    is loopback if all processes share a machine.

    Raises:
      HostsError: this process cannot listen there.
      SpanaxError: there is no interface of that name.
    """
    import jax

    state = coordination()
    is_gloo = jax.config.jax_cpu_collectives_implementation == "gloo"
    if state.client is None or state.coordinator_address is None or not is_gloo or has_backend():
        return
    interface = environ.get("SPANAX_INTERFACE")
    if interface is None:
        address = {"hostname": _address_towards(state.coordinator_address)}
    else:
        names = [name for _, name in socket.if_nameindex()]
        if interface not in names:
            message = f"unknown network interface '{interface}'."
            raise GroupError(message, where="SPANAX_INTERFACE", fix=nearest(interface, names))
        address = {"interface": interface}
    register_cpu_collectives(state.client, address)


def join_group() -> None:
    """Joins the group that the environment sets, for programs that do not run a command of Spanax.

    Raises:
      HostsError: the group cannot be joined.
      SpanaxError: the environment is inconsistent.
    """
    import jax

    hosts = Hosts.of()
    if hosts.devices_per_host and not jax.distributed.is_initialized() and not has_backend():
        prepare_devices(hosts.devices_per_host)
    hosts.join()


@dataclass(frozen=True)
class Group:
    """The rank of a process in its group, in JAX's terms.

    Attributes:
      process_index: the index of this process, as `jax.process_index()`; 0 prints and writes files.
      process_count: the number of processes, as `jax.process_count()`; 1 without a group.
      attempt: how often a supervisor has restarted the group.

    Example:
      >>> Group(process_index=0, process_count=2, attempt=0).process_index == 0
      True
    """

    process_index: int
    process_count: int
    attempt: int


def distributed() -> Group:
    """Joins the group of this process, and returns its rank in it; call it before any other JAX function.

    The environment describes the group: the variables of `spanax launch` (SPANAX_COORDINATOR, SPANAX_NUM_HOSTS,
    SPANAX_HOST), or those of torchrun (MASTER_ADDR, MASTER_PORT, RANK, WORLD_SIZE, LOCAL_RANK), or what JAX detects:
    Slurm, Open MPI, Kubernetes and TPU pods. Without any of them, the process is a group by itself. A second call does
    not change anything, and neither does a call after `jax.distributed.initialize()`.

    In a group, an uncaught exception ends its process immediately, without `atexit` handlers, which would wait for the
    other processes while these wait for this one.

    Raises:
      HostsError: the group cannot be joined: JAX has already started, or not all processes connected.
      SpanaxError: the variables are incomplete or contradict each other.

    Example:
      >>> group = distributed()
      >>> group.process_index, group.process_count
      (0, 1)
    """
    attach_supervisor()
    join_group()
    state = coordination()  # jax.process_index() would start the backend
    return Group(state.process_id, state.num_processes, Hosts.of().attempt)


@functools.cache
def detected_processes() -> int:
    """Returns the number of processes of the cluster that JAX detects; 1 if it detects none.

    Raises:
      HostsError: JAX detects a cluster and cannot tell its size, or a launcher started processes it does not detect.
    """
    import jax

    skipped: list[str] = []
    if "JOB_COMPLETION_INDEX" not in os.environ:
        skipped.append("K8sCluster")  # JAX joins only pods of Indexed Jobs
    if os.environ.get("SLURM_STEP_NUM_TASKS") == "1":
        skipped.append("SlurmCluster")  # a shell in an allocation: JAX would wait for all tasks of the job
    platforms = jax.config.jax_platforms
    if platforms and "tpu" not in platforms.split(","):
        skipped += ["GceTpuCluster", "GkeTpuCluster"]  # a worker that simulates devices does not need the others
    try:
        for name, kind in cluster_kinds().items():
            if name not in skipped and kind.is_env_present():
                return int(kind.get_process_count())
    except (RuntimeError, ValueError, LookupError, OSError) as error:
        raise HostsError(
            f"JAX detects a cluster and cannot read its size: {first_line(error)}",
            where=name,
            fix=f"SPANAX_COORDINATOR, SPANAX_NUM_HOSTS and SPANAX_HOST; or {ALONE}",
        ) from None
    num_started = os.environ.get("OMPI_COMM_WORLD_SIZE", "1")
    if num_started != "1":
        raise HostsError(
            f"mpirun started {num_started} processes, but JAX {jax.__version__} does not detect them as a cluster.",
            where="OMPI_COMM_WORLD_SIZE; Open MPI 5 requires JAX 0.12 and mpi4py",
            fix=f"SPANAX_COORDINATOR, SPANAX_NUM_HOSTS and SPANAX_HOST; or {ALONE}",
        )
    return 1


def prepare_devices(num_simulated: int) -> None:
    """Sets how many CPU devices JAX simulates when its backend starts; a no-op afterwards.

    It also chooses the CPU if there is nothing else: libtpu would otherwise look for TPUs, and print warnings.
    """
    import jax

    if has_backend():
        return  # the number is fixed, and the caller checks it
    jax.config.update("jax_num_cpu_devices", num_simulated)
    if not jax.config.jax_platforms and has_only_cpus():
        jax.config.update("jax_platforms", "cpu")
    threads = THREADS_PER_DEVICE * num_simulated
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    if threads > (cores or 1):  # XLA starts one thread per core by default
        os.environ.setdefault("NPROC", str(threads))
    flags = os.environ.get("XLA_FLAGS", "")
    # JAX rejects its setting together with the older flag.
    os.environ["XLA_FLAGS"] = re.sub(r"--xla_force_host_platform_device_count=\d+", "", flags).strip()


def is_first() -> bool:
    """Returns whether this process has rank 0."""
    import jax

    return jax.process_index() == 0


def all_processes(value: bool) -> bool:
    """Returns whether the value is true on every process; a barrier with several processes."""
    import jax

    if jax.process_count() == 1:
        return value
    import numpy as np
    from jax.experimental import multihost_utils

    with operation("an agreement"):
        return bool(np.all(multihost_utils.process_allgather(np.int32(value))))


def on_every_host(array: Any) -> Any:
    """Returns an array as a NumPy array; every process of a group gets all of it, and calls this together."""
    import jax
    import numpy as np

    if jax.process_count() > 1 and isinstance(array, jax.Array) and not array.is_fully_addressable:
        from jax.experimental import multihost_utils

        with operation("a copy of a result"):
            array = multihost_utils.process_allgather(array, tiled=True)
    return np.asarray(array)


def from_first(decide: Callable[[], str], kind: type[SpanaxError]) -> str:
    """Returns the result of `decide` on the first process, on every process.

    Raises:
      SpanaxError: `decide` failed: its error on the first process, and an error of type `kind` on the others.
    """
    import jax

    if jax.process_count() == 1:
        return decide()
    import numpy as np
    from jax.experimental import multihost_utils

    error_of_first = None
    text = ""
    if is_first():
        try:
            text = decide()
        except Exception as error:
            error_of_first = error
    if len(text.encode()) > MAX_TEXT_BYTES:
        error_of_first, text = kind(f"the first process returned {len(text)} characters, over {MAX_TEXT_BYTES}."), ""
    encoded = np.frombuffer(text.encode().ljust(MAX_TEXT_BYTES, b"\0"), np.uint8)
    with operation("a decision of the first process"):
        text = bytes(np.asarray(multihost_utils.broadcast_one_to_all(encoded))).rstrip(b"\0").decode()
    if error_of_first is not None or not text:
        raise error_of_first or kind("the first process failed; see its error.")
    return text


def _bound_to(coordinator: str) -> str:
    """Returns the only address that the coordinator listens on: JAX's default is all, without authentication."""
    host, _, port = coordinator.rpartition(":")
    try:
        if not host:
            raise ValueError("an empty host name stands for every interface")
        return f"{socket.gethostbyname(host)}:{int(port)}"
    except (OSError, ValueError):
        raise GroupError(
            f"the coordinator's address '{coordinator}' is invalid.",
            where="SPANAX_COORDINATOR, or MASTER_ADDR and MASTER_PORT",
            fix="host:port, such as 10.0.0.7:9911",
        ) from None


def _address_towards(coordinator: str) -> str:
    """Returns the address of this machine on the route to the coordinator."""
    host, _, port = coordinator.rpartition(":")
    try:
        info = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_DGRAM)[0]
        with socket.socket(*info[:3]) as route:
            route.connect(info[4])  # a datagram socket: nothing is sent
            address = str(route.getsockname()[0])
        with socket.socket(info[0]) as trial:
            trial.bind((address, 0))
    except (OSError, ValueError) as error:
        raise HostsError(
            f"this process cannot listen on its address towards the coordinator: {error}.",
            where=f"coordinator {coordinator}",
            fix="SPANAX_INTERFACE=NAME of the network interface between the hosts",
        ) from None
    return address


def _check_free(address: str) -> None:
    """Raises if the coordinator cannot listen there: JAX itself would crash without an error (0.10.2 and 0.12.0)."""
    host, _, port = address.rpartition(":")
    with socket.socket() as trial:
        trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            trial.bind((host, int(port)))
        except (OSError, OverflowError) as error:
            raise HostsError(
                f"the coordinator cannot listen on {address}: {error}.",
                where="SPANAX_COORDINATOR, or MASTER_PORT",
                fix="another port",
            ) from None
