"""Reads the variables that launchers set to describe a group of processes."""

from collections.abc import Mapping
from dataclasses import dataclass

from spanax.errors import GroupError
from spanax.units import whole_number

WHERE = "the environment of this process"

REQUIRED = ("MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE")
"""The variables of torchrun that define a group. Source: torch.distributed, Environment variable initialization."""

CLUSTER_RANKS = ("SLURM_PROCID", "OMPI_COMM_WORLD_RANK")
"""Set where JAX detects the group by itself; scripts often export MASTER_ADDR and MASTER_PORT there for PyTorch."""


@dataclass(frozen=True)
class TorchGroup:
    """A group of processes as torchrun and its relatives describe it.

    Attributes:
      num_processes: WORLD_SIZE.
      rank: RANK.
      coordinator: host:port of rank 0.
      local_device: the only device of this process, if several processes share a machine; None for all devices.
    """

    num_processes: int
    rank: int
    coordinator: str
    local_device: int | None = None

    @staticmethod
    def of(environ: Mapping[str, str]) -> "TorchGroup | None":
        """Reads the group; None if no variable describes one.

        Raises:
          SpanaxError: a variable is missing or not a number, or two of them contradict each other.

        Example:
          >>> group = TorchGroup.of({"MASTER_ADDR": "n0", "MASTER_PORT": "1234", "RANK": "1", "WORLD_SIZE": "2"})
          >>> group.coordinator, group.rank, group.local_device
          ('n0:1234', 1, None)
        """
        present = [name for name in REQUIRED if name in environ]
        has_address_only = not {"RANK", "WORLD_SIZE"} & {*present}
        if not present or has_address_only and any(name in environ for name in CLUSTER_RANKS):
            return None
        if len(present) < len(REQUIRED):
            missing = ", ".join(name for name in REQUIRED if name not in environ)
            raise GroupError(
                f"{', '.join(present)} {'is' if len(present) == 1 else 'are'} set, but {missing} not.",
                where=WHERE,
                fix="set all four for a group of processes; or SPANAX_NUM_HOSTS=1 if this process trains by itself",
            )
        rank = number(environ, "RANK", None)
        num_processes = number(environ, "WORLD_SIZE", None)
        _check_rank("RANK", rank, "WORLD_SIZE", num_processes)
        port = number(environ, "MASTER_PORT", None)
        # torchrun itself listens on MASTER_PORT, for the store that its processes share.
        port += environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        num_local = number(environ, "LOCAL_WORLD_SIZE", num_processes)
        local_rank = number(environ, "LOCAL_RANK", 0)
        _check_rank("LOCAL_RANK", local_rank, "LOCAL_WORLD_SIZE", num_local)
        has_share = "LOCAL_RANK" in environ and num_local > 1
        return TorchGroup(num_processes, rank, f"{environ['MASTER_ADDR']}:{port}", local_rank if has_share else None)


def number(environ: Mapping[str, str], name: str, default: int | None) -> int:
    """Returns the value of a variable as a non-negative integer.

    Raises:
      SpanaxError: it is not one, or is not set and has no default.
    """
    text = environ.get(name)
    if text is None and default is not None:
        return default
    value = None if text is None else whole_number(text)
    if value is None:
        shown = None if text is None else text[:80]
        raise GroupError(f"{name} is {shown!r}; expected an integer.", where=WHERE)
    return value


def _check_rank(rank_name: str, rank: int, size_name: str, size: int) -> None:
    if rank >= size:
        raise GroupError(
            f"process {rank} is out of range for {size} processes, counted from 0.",
            where=f"{rank_name}={rank}, {size_name}={size}",
        )
