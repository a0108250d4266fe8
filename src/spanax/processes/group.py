"""Joins the process group of a script, and describes the place of this process in it."""

from dataclasses import dataclass

from spanax.processes.processes import Hosts, join_group
from spanax.processes.supervision import attach_supervisor


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
    from jax._src import distributed as jax_distributed  # jax.process_index() would start the backend

    state = jax_distributed.global_state
    return Group(state.process_id, state.num_processes, Hosts.of().attempt)
