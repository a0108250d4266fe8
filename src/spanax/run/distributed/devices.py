"""Devices for a process that has not started JAX's backend yet: real ones, or simulated on the CPU."""

from typing import Any

from spanax.errors import SpanaxError
from spanax.run.distributed.processes import Hosts, prepare_devices

DEFAULT_SIMULATED, MOST_SIMULATED = 8, 4096


def simulate(num_devices: int) -> list[Any]:
    """Simulate devices on the CPU; call it before anything makes an array or asks JAX for devices.

    Raises:
      SpanaxError: JAX has already started, on an accelerator or with fewer devices.

    Example:
      >>> len(simulate(8))
      8
    """
    import jax

    if num_devices < 1:
        raise SpanaxError(f"simulate({num_devices}); it takes a number from 1.", fix="simulate(8)")
    jax.config.update("jax_platforms", "cpu")
    started = _started(num_devices)
    if started[0].platform != "cpu" or len(started) < num_devices:
        raise SpanaxError(
            f"simulate({num_devices}) came too late: JAX has already started, with {len(started)} "
            f"{started[0].platform} devices.",
            fix=f"call spanax.simulate({num_devices}) at the start of the program, before any array or jax.devices(); "
            "in a notebook, restart the kernel",
        )
    return started[:num_devices]


def devices(wanted: int | None) -> list[Any]:
    """The devices to run on, as many as wanted: accelerators where there are any, else simulated ones.

    Raises:
      SpanaxError: there are fewer than wanted.
    """
    if wanted is not None and wanted < 1:
        raise SpanaxError(f"--devices is {wanted}; it takes a number from 1.", fix="--devices 1")
    found = _started(wanted)
    if wanted is not None and len(found) < wanted:
        kind = found[0].platform
        raise SpanaxError(
            f"{wanted} devices are wanted, and there are {len(found)} ({kind}).",
            fix=f"--devices {len(found)}" + ("" if kind == "cpu" else ", or JAX_PLATFORMS=cpu to simulate them"),
        )
    return found[:wanted]


def _started(wanted: int | None) -> list[Any]:
    """The devices of JAX, which starts here unless it has started before."""
    hosts = Hosts.of()
    share = hosts.devices_per_host or _share(wanted or DEFAULT_SIMULATED, hosts.num_hosts)
    if share > MOST_SIMULATED:
        raise SpanaxError(
            f"--devices is {wanted}; one process has up to {MOST_SIMULATED}.", fix=f"--devices {MOST_SIMULATED}"
        )
    prepare_devices(share)
    hosts.join()
    import jax

    here = jax.devices()
    if here[0].platform == "cpu" and jax.process_count() > 1:
        # On CPUs only rank 0 finds programs that JAX kept, and its collectives wait 30 s for ranks that compile.
        jax.config.update("jax_enable_compilation_cache", False)
    return here


def _share(wanted: int, num_hosts: int) -> int:
    """The devices that each process of a run simulates."""
    if wanted % num_hosts:
        raise SpanaxError(
            f"{wanted} devices cannot be divided among {num_hosts} processes.",
            fix=f"--devices {-(-wanted // num_hosts) * num_hosts}",
        )
    return wanted // num_hosts
