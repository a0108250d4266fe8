"""Hosts: the processes that make one run together, how one of them joins, and what they settle among themselves.

A process is told by its environment that it is one of several, by whoever started it:

    SPANAX_COORDINATOR   host:port of rank 0
    SPANAX_NUM_HOSTS     how many processes there are
    SPANAX_HOST          which of them this one is, from 0; under Slurm left out, SLURM_PROCID says it
    SPANAX_HOST_DEVICES  devices to simulate in each, where there is no accelerator
    SPANAX_ATTEMPT       how often the run was started again before
    SPANAX_SUPERVISOR    the process that watches it, its parent; without that one it stops as if asked to; 0 for one
                         on another machine

Without them JAX's own detection is asked where there is a sign of a group (an MPI or Slurm step, a TPU slice).
`jax.distributed` is the engine.
"""

import ctypes
import faulthandler
import os
import signal
import socket
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from spanax.errors import HostsError, SpanaxError, first_line

JOIN_SECONDS = 300
"""How long the processes wait for the last of them to come."""

DEATH_SECONDS = 15
"""A process that JAX has not heard of for so long is dead to the others, and they abort. JAX's own default is 100."""

STDERR = 2

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
      coordinator: host:port of rank 0; empty where JAX is to find it.
      devices_per_host: devices to simulate in each; None for as many as are asked for.
    """

    num_hosts: int = 1
    rank: int = 0
    attempt: int = 0
    coordinator: str = ""
    devices_per_host: int | None = None

    @staticmethod
    def of(environ: Mapping[str, str] = os.environ) -> "Hosts":
        """The place that the environment gives.

        Raises:
          SpanaxError: its values are no numbers, or do not go together.

        Example:
          >>> Hosts.of({"SPANAX_COORDINATOR": "127.0.0.1:9911", "SPANAX_NUM_HOSTS": "2", "SPANAX_HOST": "1"}).rank
          1
        """
        attempt = _number(environ, "SPANAX_ATTEMPT", 0)
        here = _number(environ, "SPANAX_HOST_DEVICES", 0) or None
        if "SPANAX_COORDINATOR" not in environ:
            return Hosts(attempt=attempt, devices_per_host=here)
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
        """Meet the other processes, before JAX is asked for devices; returns at once where there are none.

        Raises:
          HostsError: they did not all come, or the coordinator's port is taken.
          SpanaxError: the coordinator's address is none.
        """
        import jax

        if jax.distributed.is_initialized() or not (self.coordinator or _is_in_group(os.environ)):
            return
        known: dict[str, Any] = {}
        if self.coordinator:
            if self.rank == 0:
                _check_free(_bound_to(self.coordinator))
            known = {
                "coordinator_address": self.coordinator, "num_processes": self.num_hosts, "process_id": self.rank,
                "coordinator_bind_address": _bound_to(self.coordinator),
            }  # fmt: skip
        try:
            jax.distributed.initialize(
                **known,
                initialization_timeout=JOIN_SECONDS,
                heartbeat_timeout_seconds=DEATH_SECONDS,
                shutdown_timeout_seconds=DEATH_SECONDS,
            )
        except (RuntimeError, ValueError) as error:
            raise HostsError(
                f"the {self.num_hosts or ''} processes of this run did not come together: {first_line(error)}",
                where=f"rank {self.rank}, coordinator {self.coordinator or 'as JAX finds it'}",
                fix="spanax doctor --hosts HOST:PORT on each of them",
            ) from None


def obey_supervisor(environ: Mapping[str, str] = os.environ) -> bool:
    """Under a supervisor: SIGUSR1 and every crash write all stacks to standard error, and its death asks to stop.

    Returns whether there is one.
    """
    if "SPANAX_SUPERVISOR" not in environ:
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
    letters = np.frombuffer(text.encode()[:LONGEST_TEXT].ljust(LONGEST_TEXT), np.uint8)
    text = bytes(np.asarray(multihost_utils.broadcast_one_to_all(letters))).decode().strip()
    if failed is not None or not text:
        raise failed or kind("the first process cannot go on, and says why.")
    return text


def _is_in_group(environ: Mapping[str, str]) -> bool:
    """Whether there is a sign of several processes that JAX can find by itself."""
    counts = [environ.get(name, "1") for name in ("SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE")]
    several = any(count.isdigit() and int(count) > 1 for count in counts)
    return several or "," in environ.get("TPU_WORKER_HOSTNAMES", "")


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
