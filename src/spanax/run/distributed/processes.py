"""Hosts: the processes that make one run together, how one of them joins, and what they settle among themselves.

A process is told by its environment that it is one of several, by whoever started it:

    SPANAX_COORDINATOR   host:port of rank 0
    SPANAX_NUM_HOSTS     how many processes there are
    SPANAX_HOST          which of them this one is, from 0; under Slurm left out, SLURM_PROCID says it
    SPANAX_HOST_DEVICES  devices to simulate in each, where there is no accelerator
    SPANAX_ATTEMPT       how often the run was started again before
    SPANAX_SUPERVISOR    the process that watches it, its parent; without that one it stops as if asked to; 0 for one
                         on another machine
    SPANAX_INTERFACE     the network interface that its data sockets listen on; by default the one that leads to the
                         coordinator

If none of them is set, JAX's own cluster detection decides (TPU pods on GCE and GKE, Slurm, Open MPI, Kubernetes);
`SPANAX_NUM_HOSTS=1` alone turns it off, for processes of a cluster that train a model each. `jax.distributed` is the
engine. Programs and commands follow the same rule: whatever asks JAX for devices joins the group first.
"""

import ctypes
import faulthandler
import functools
import os
import re
import signal
import socket
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from spanax.errors import HostsError, SpanaxError, first_line, nearest

JOIN_SECONDS = 300
"""How long the processes wait for the last of them to come."""

DEATH_SECONDS = 15
"""A process that JAX has not heard of for so long is dead to the others, and they abort. JAX's own default is 100."""

STDERR = 2

THREADS_PER_DEVICE = 2
"""XLA's CPU collectives wait for each other on one thread pool. With a thread a device, which it has by itself, a step
that is dispatched while another runs waits for ever; with two none did. More make each step slower.

Source: docs/speed-log.md, 2, 4 and 8 devices on one core and two.
"""

ALONE = "SPANAX_NUM_HOSTS=1 where each process trains a model of its own"

PR_SET_PDEATHSIG = 1
"""Of prctl(2): the signal that a process gets when its parent dies. Source: linux/prctl.h."""

LONGEST_TEXT = 4096
"""Letters in a decision that one process hands to the others."""


@dataclass(frozen=True)
class Hosts:
    """A process's place among those of its run.

    Attributes:
      num_hosts: how many processes there are.
      rank: which one this is; rank 0 leads: it alone writes records and talks.
      attempt: how often the run was started again before.
      coordinator: host:port of rank 0; empty where JAX detects it.
      devices_per_host: devices to simulate in each; None for as many as are asked for.
      detects_cluster: whether JAX's cluster detection decides, as no group is set.
    """

    num_hosts: int = 1
    rank: int = 0
    attempt: int = 0
    coordinator: str = ""
    devices_per_host: int | None = None
    detects_cluster: bool = True

    @staticmethod
    def of(environ: Mapping[str, str] = os.environ) -> "Hosts":
        """The place that the environment gives.

        Raises:
          SpanaxError: a value is not a number, or the variables contradict each other.

        Example:
          >>> Hosts.of({"SPANAX_COORDINATOR": "127.0.0.1:9911", "SPANAX_NUM_HOSTS": "2", "SPANAX_HOST": "1"}).rank
          1
        """
        attempt = _number(environ, "SPANAX_ATTEMPT", 0)
        here = _number(environ, "SPANAX_HOST_DEVICES", 0) or None
        if "SPANAX_COORDINATOR" not in environ:
            num_hosts = _number(environ, "SPANAX_NUM_HOSTS", 0)
            if num_hosts > 1:
                raise SpanaxError(
                    f"SPANAX_NUM_HOSTS is {num_hosts}, and SPANAX_COORDINATOR is not set.",
                    where="the environment of this process",
                    fix=f"SPANAX_COORDINATOR=HOST:PORT of the first process, or {ALONE}",
                )
            return Hosts(attempt=attempt, devices_per_host=here, detects_cluster=num_hosts == 0)
        num_hosts = _number(environ, "SPANAX_NUM_HOSTS", None)
        names = ("SPANAX_HOST", "SLURM_PROCID")
        rank = _number(environ, next((name for name in names if name in environ), names[0]), None)
        if not 0 <= rank < num_hosts:
            raise SpanaxError(
                f"this process is host {rank}, and there are {num_hosts}, counted from 0.",
                where=f"SPANAX_HOST={rank}, SPANAX_NUM_HOSTS={num_hosts}",
            )
        return Hosts(num_hosts, rank, attempt, environ["SPANAX_COORDINATOR"], here)

    def join(self) -> None:
        """Join the group before JAX starts its backend; returns at once without a group, or if it has been joined.

        Raises:
          HostsError: the backend has started already, the processes did not all come, or the coordinator's port is
            taken.
          SpanaxError: the coordinator's address is not one.
        """
        import jax

        if jax.distributed.is_initialized():
            bind_data_sockets()
            return
        num_hosts = self.num_hosts if self.coordinator else detected_processes() if self.detects_cluster else 1
        if not self.coordinator and num_hosts == 1:
            return
        if _has_backend():
            raise HostsError(
                f"JAX started before this process joined its group of {num_hosts}.",
                where=f"rank {self.rank}, coordinator {self.coordinator}" if self.coordinator else "detected by JAX",
                fix="call spanax.local() before any array or jax.devices()"
                + ("" if self.coordinator else f"; or {ALONE}"),
            )
        known: dict[str, Any] = {}
        if self.coordinator:
            if self.rank == 0:
                _check_free(_bound_to(self.coordinator))
            known = {
                "coordinator_address": self.coordinator, "num_processes": self.num_hosts, "process_id": self.rank,
                "coordinator_bind_address": _bound_to(self.coordinator),
            }  # fmt: skip
            if "SPANAX_HOST" in os.environ:
                # Detection would still choose the local devices: one GPU in a Slurm task.
                known["cluster_detection_method"] = "deactivate"
        try:
            jax.distributed.initialize(
                **known,
                initialization_timeout=JOIN_SECONDS,
                heartbeat_timeout_seconds=DEATH_SECONDS,
                shutdown_timeout_seconds=DEATH_SECONDS,
            )
        except (RuntimeError, ValueError) as error:
            raise HostsError(
                f"the {num_hosts} processes of this run did not come together: {first_line(error)}",
                where=f"rank {self.rank}, coordinator {self.coordinator or 'as JAX finds it'}",
                fix="spanax doctor --hosts HOST:PORT on each of them",
            ) from None
        bind_data_sockets()


def bind_data_sockets(environ: Mapping[str, str] = os.environ) -> None:
    """Has the CPU collectives of this process (Gloo) listen on one interface, before JAX starts its backend.

    JAX's own default is the address that the machine's host name resolves to: often one that others reach, sometimes
    none of this machine. The interface is that of `SPANAX_INTERFACE`, or the one that leads to the coordinator:
    loopback where all processes share a machine.

    Raises:
      HostsError: this process cannot listen there.
      SpanaxError: there is no interface of that name.
    """
    import jax
    from jax._src import distributed, xla_bridge  # nothing public hands collectives to the CPU backend
    from jaxlib import _jax

    client, coordinator = distributed.global_state.client, distributed.global_state.coordinator_address
    is_gloo = jax.config.jax_cpu_collectives_implementation == "gloo"
    if client is None or coordinator is None or not is_gloo or _has_backend():
        return
    interface = environ.get("SPANAX_INTERFACE")
    if interface is None:
        place = {"hostname": _address_towards(coordinator)}
    else:
        names = [name for _, name in socket.if_nameindex()]
        if interface not in names:
            what = f"there is no network interface '{interface}'."
            raise SpanaxError(what, where="SPANAX_INTERFACE", fix=nearest(interface, names))
        place = {"interface": interface}

    def client_of_cpus() -> Any:
        collectives = _jax.make_gloo_tcp_collectives(distributed_client=client, **place)
        return xla_bridge.make_cpu_client(collectives=collectives)

    xla_bridge.register_backend_factory("cpu", client_of_cpus, priority=0, fail_quietly=False)


def join_group() -> None:
    """Join the group that the environment sets, for programs that start no command of Spanax.

    Raises:
      HostsError: the group cannot be joined.
      SpanaxError: the environment contradicts itself.
    """
    import jax

    hosts = Hosts.of()
    if hosts.devices_per_host and not jax.distributed.is_initialized() and not _has_backend():
        prepare_devices(hosts.devices_per_host)
    hosts.join()


@functools.cache
def detected_processes() -> int:
    """Returns the number of processes of the cluster that JAX detects; 1 if it detects none.

    Raises:
      HostsError: JAX detects a cluster and cannot tell its size, or a launcher started processes it does not detect.
    """
    import jax

    # Nothing public answers this: jax.distributed.initialize() raises where there is not a cluster, and starts a
    # coordinator where there is one process.
    from jax._src.clusters import ClusterEnv, GceTpuCluster, GkeTpuCluster, K8sCluster, SlurmCluster

    skipped: list[type[ClusterEnv]] = []
    if "JOB_COMPLETION_INDEX" not in os.environ:
        skipped.append(K8sCluster)  # JAX joins the pods of Indexed Jobs only; a pod of another kind is not a cluster
    if os.environ.get("SLURM_STEP_NUM_TASKS") == "1":
        skipped.append(SlurmCluster)  # a shell in an allocation: JAX would wait for all tasks of the job
    platforms = jax.config.jax_platforms
    if platforms and "tpu" not in platforms.split(","):
        skipped += [GceTpuCluster, GkeTpuCluster]  # devices are simulated on a worker, which has no need of the others
    try:
        for kind in ClusterEnv._cluster_types:
            if not kind.opt_in_only_method and kind not in skipped and kind.is_env_present():
                return kind.get_process_count()
    except (RuntimeError, ValueError, LookupError, OSError) as error:
        raise HostsError(
            f"JAX detects a cluster and cannot read its size: {first_line(error)}",
            where=kind.__name__,
            fix=f"SPANAX_COORDINATOR, SPANAX_NUM_HOSTS and SPANAX_HOST; or {ALONE}",
        ) from None
    num_started = os.environ.get("OMPI_COMM_WORLD_SIZE", "1")
    if num_started != "1":
        raise HostsError(
            f"mpirun started {num_started} processes, and JAX {jax.__version__} does not detect them as a cluster.",
            where="OMPI_COMM_WORLD_SIZE; Open MPI 5 takes JAX 0.12 and mpi4py",
            fix=f"SPANAX_COORDINATOR, SPANAX_NUM_HOSTS and SPANAX_HOST; or {ALONE}",
        )
    return 1


def prepare_devices(num_simulated: int) -> None:
    """Set how many CPU devices JAX simulates when its backend starts; without effect afterwards."""
    import jax

    if _has_backend():
        return  # it has the devices that it has, and the caller counts them
    jax.config.update("jax_num_cpu_devices", num_simulated)
    threads = THREADS_PER_DEVICE * num_simulated
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    if threads > (cores or 1):  # XLA has a thread per core by default
        os.environ.setdefault("NPROC", str(threads))
    flags = os.environ.get("XLA_FLAGS", "")
    # JAX refuses its own setting next to the older flag.
    os.environ["XLA_FLAGS"] = re.sub(r"--xla_force_host_platform_device_count=\d+", "", flags).strip()


def is_supervised(environ: Mapping[str, str] = os.environ) -> bool:
    """Returns whether a supervisor started this process."""
    return "SPANAX_SUPERVISOR" in environ


def obey_supervisor(environ: Mapping[str, str] = os.environ) -> bool:
    """Under a supervisor: SIGUSR1 and every crash write all stacks to standard error, and its death asks to stop.

    Returns whether there is one.
    """
    if not is_supervised(environ):
        return False
    faulthandler.enable(STDERR)
    faulthandler.register(signal.SIGUSR1, STDERR)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    if _number(environ, "SPANAX_SUPERVISOR", None) not in (0, os.getppid()):
        sys.exit("spanax: the supervisor is gone")
    return True


def is_first() -> bool:
    """Whether this process leads."""
    import jax

    return jax.process_index() == 0


def everywhere(here: bool) -> bool:
    """Whether it is true on every process; a barrier where there are several."""
    import jax

    if jax.process_count() == 1:
        return here
    import numpy as np
    from jax.experimental import multihost_utils

    return bool(np.all(multihost_utils.process_allgather(np.int32(here))))


def from_first(decide: Callable[[], str], kind: type[SpanaxError]) -> str:
    """What the first process decides, on every process; its error there, and a short one of that kind elsewhere."""
    import jax

    if jax.process_count() == 1:
        return decide()
    import numpy as np
    from jax.experimental import multihost_utils

    failed, text = None, ""
    if is_first():
        try:
            text = decide()
        except Exception as error:
            failed = error
    if len(text.encode()) > LONGEST_TEXT:
        failed, text = kind(f"the first process decided on {len(text)} letters, over {LONGEST_TEXT}."), ""
    letters = np.frombuffer(text.encode().ljust(LONGEST_TEXT, b"\0"), np.uint8)
    text = bytes(np.asarray(multihost_utils.broadcast_one_to_all(letters))).rstrip(b"\0").decode()
    if failed is not None or not text:
        raise failed or kind("the first process cannot go on, and says why.")
    return text


def _has_backend() -> bool:
    """Returns whether JAX has started its backend: the last moment to join a group is before."""
    from jax._src import xla_bridge  # what jax.distributed.initialize() asks; nothing public answers it

    return bool(xla_bridge.backends_are_initialized())


def _bound_to(coordinator: str) -> str:
    """The one interface that the coordinator listens on: JAX's own default is all of them, without a password."""
    host, _, port = coordinator.rpartition(":")
    try:
        if not host:
            raise ValueError("to the system no name is every interface")
        return f"{socket.gethostbyname(host)}:{int(port)}"
    except (OSError, ValueError):
        raise SpanaxError(
            f"the coordinator's address '{coordinator}' is not one.",
            where="SPANAX_COORDINATOR",
            fix="host:port, such as 10.0.0.7:9911",
        ) from None


def _address_towards(coordinator: str) -> str:
    """The address of this machine on the way to the coordinator."""
    host, _, port = coordinator.rpartition(":")
    try:
        kind = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_DGRAM)[0]
        with socket.socket(*kind[:3]) as way:
            way.connect(kind[4])  # of datagrams: nothing is sent
            address = str(way.getsockname()[0])
        with socket.socket(kind[0]) as trial:
            trial.bind((address, 0))
    except (OSError, ValueError) as error:
        raise HostsError(
            f"this process cannot listen where the coordinator reaches it: {error}.",
            where=f"coordinator {coordinator}",
            fix="SPANAX_INTERFACE=NAME of the network interface between the hosts",
        ) from None
    return address


def _check_free(address: str) -> None:
    """Whether the coordinator can listen there: JAX itself would crash without a word (0.10.2 and 0.12.0)."""
    host, _, port = address.rpartition(":")
    with socket.socket() as trial:
        trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            trial.bind((host, int(port)))
        except (OSError, OverflowError) as error:
            raise HostsError(
                f"the coordinator cannot listen on {address}: {error}.", where="SPANAX_COORDINATOR", fix="another port"
            ) from None


def _number(environ: Mapping[str, str], name: str, default: int | None) -> int:
    text = environ.get(name)
    if text is None and default is not None:
        return default
    if text is None or not text.isdigit():
        raise SpanaxError(f"{name} is {text!r}; it takes a whole number.", where="the environment of this process")
    return int(text)
