"""Devices for a process that has not started JAX's backend yet: real ones, or simulated on the CPU."""

import os
import re
from typing import Any

from spanax.errors import SpanaxError
from spanax.run.hosts import Hosts

DEFAULT_SIMULATED, MOST_SIMULATED = 8, 4096

THREADS_PER_DEVICE = 2
"""XLA's CPU collectives wait for each other on one thread pool. With a thread a device, which it has by itself, a step
that is dispatched while another runs waits for ever; with two none did. More make each step slower.

Source: docs/speed-log.md, 2, 4 and 8 devices on one core and two.
"""


def simulate(num_devices: int) -> list[Any]:
    """Split the CPU into so many devices; call it before anything asks JAX for devices.

    Raises:
      SpanaxError: JAX has started already, with another number.

    Example:
      >>> len(simulate(8))
      8
    """
    import jax

    jax.config.update("jax_platforms", "cpu")
    return devices(num_devices)


def devices(wanted: int | None) -> list[Any]:
    """The devices to run on, as many as wanted: accelerators where there are any, else simulated ones.

    Raises:
      SpanaxError: there are fewer than wanted.
    """
    if wanted is not None and wanted < 1:
        raise SpanaxError(f"--devices is {wanted}; it takes a number from 1.", fix="--devices 1")
    hosts = Hosts.of()
    share = hosts.devices_per_host or _share(wanted or DEFAULT_SIMULATED, hosts.num_hosts)
    if share > MOST_SIMULATED:
        raise SpanaxError(
            f"--devices is {wanted}; one process has up to {MOST_SIMULATED}.", fix=f"--devices {MOST_SIMULATED}"
        )
    _prepare(share)
    hosts.join()
    import jax

    found = jax.devices()
    if wanted is not None and len(found) < wanted:
        kind = found[0].platform
        raise SpanaxError(
            f"{wanted} devices are wanted, and there are {len(found)} ({kind}).",
            fix=f"--devices {len(found)}" + ("" if kind == "cpu" else ", or JAX_PLATFORMS=cpu to simulate them"),
        )
    return found[:wanted]


def _share(wanted: int, num_hosts: int) -> int:
    """The devices that each process of a run simulates."""
    if wanted % num_hosts:
        raise SpanaxError(
            f"{wanted} devices cannot be divided among {num_hosts} processes.",
            fix=f"--devices {-(-wanted // num_hosts) * num_hosts}",
        )
    return wanted // num_hosts


def _prepare(num_simulated: int) -> None:
    threads = THREADS_PER_DEVICE * num_simulated
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    if threads > (cores or 1):  # as many as there are cores it has by itself
        os.environ.setdefault("NPROC", str(threads))
    flags = os.environ.get("XLA_FLAGS", "")
    # JAX refuses its own setting beside the older flag.
    os.environ["XLA_FLAGS"] = re.sub(r"--xla_force_host_platform_device_count=\d+", "", flags).strip()
    import jax

    try:
        jax.config.update("jax_num_cpu_devices", num_simulated)
    except RuntimeError:
        pass  # JAX has started: it has the devices that it has, and the caller counts them
