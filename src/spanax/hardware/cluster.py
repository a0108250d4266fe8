"""Cluster: how many devices of which kind there are, and what one of them holds."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from spanax.errors import SpanaxError, nearest

CHIPS = ("cpu",)


@dataclass(frozen=True)
class Cluster:
    """Devices of one kind. `memory_bytes` is what one device may hold; None: not known.

    Example:
      >>> print(Cluster("cpu", 8, memory_bytes=2**30))
      cpu:8
    """

    chip: str
    num_devices: int
    memory_bytes: int | None = None

    def __str__(self) -> str:
        return f"{self.chip}:{self.num_devices}"


def cluster(name: str, num_devices: int | None = None) -> Cluster:
    """A cluster by name, such as `cpu:8`; no device is touched.

    Raises:
      SpanaxError: no such chip, or not a whole number of devices.

    Example:
      >>> cluster("cpu:8").num_devices
      8
    """
    chip, _, count = name.partition(":")
    if chip not in CHIPS:
        raise SpanaxError(f"unknown chip '{chip}'.", where=f"cluster '{name}'", fix=nearest(chip, CHIPS))
    number = num_devices if num_devices is not None else int(count) if count.isdigit() else 0
    if number < 1:
        raise SpanaxError(f"cluster '{name}' has no number of devices.", fix=f"{chip}:8")
    host = _host_bytes()
    return Cluster(chip, number, None if host is None else host // number)


def local(devices: Sequence[Any] | None = None) -> Cluster:
    """The devices of this machine, or those given; simulated CPU devices share the host's memory.

    Example:
      >>> local().chip
      'cpu'
    """
    import jax

    devices = jax.devices() if devices is None else devices
    kind = devices[0].platform
    if kind == "cpu":
        return cluster("cpu", len(devices))
    stats = devices[0].memory_stats() or {}
    return Cluster(devices[0].device_kind, len(devices), stats.get("bytes_limit"))


def _host_bytes() -> int | None:
    import os

    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError, AttributeError):
        return None
