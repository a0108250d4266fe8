"""Provides devices for a process that has not started JAX's backend yet: accelerators, or simulated CPU devices."""

import os
from typing import Any

from spanax.compat import has_backend
from spanax.errors import DeviceCountError, RangeError
from spanax.printable import to_stderr
from spanax.processes.gpu_memory import missing_setting, setting_text
from spanax.processes.processes import Hosts, is_first, prepare_devices

DEFAULT_SIMULATED = 8
MAX_SIMULATED = 4096


def simulate(num_devices: int) -> list[Any]:
    """Simulates devices on the CPU; call it before creating an array or querying JAX's devices.

    Raises:
      SpanaxError: JAX has already started, on an accelerator or with fewer devices.

    Example:
      >>> len(simulate(8))
      8
    """
    import jax

    if num_devices < 1:
        raise RangeError(f"simulate({num_devices}) requires at least 1 device.", fix="simulate(8)")
    jax.config.update("jax_platforms", "cpu")
    started = _started(num_devices)
    if started[0].platform != "cpu" or len(started) < num_devices:
        raise DeviceCountError(
            f"simulate({num_devices}) must be called before JAX starts; it has already started with {len(started)} "
            f"{started[0].platform} devices.",
            fix=f"call spanax.simulate({num_devices}) at the start of the program, before any array or jax.devices(); "
            "in a notebook, restart the kernel",
        )
    return started[:num_devices]


def devices(num_devices: int | None) -> list[Any]:
    """Returns the devices to run on: accelerators if there are any, else simulated ones.

    A process that has not started JAX gives it most of the memory of its GPUs, and says so.

    Raises:
      SpanaxError: there are fewer devices than requested.
    """
    if num_devices is not None and num_devices < 1:
        raise RangeError(f"--devices is {num_devices}; expected an integer >= 1.", fix="--devices 8")
    missing = {} if has_backend() else missing_setting()
    os.environ.update(missing)
    available = _started(num_devices)
    if missing and available[0].platform == "gpu" and is_first():
        to_stderr(setting_text(missing, is_set=True))
    if num_devices is not None and len(available) < num_devices:
        platform = available[0].platform
        raise DeviceCountError(
            f"{num_devices} devices requested, but only {len(available)} available ({platform}).",
            fix=f"--devices {len(available)}"
            + ("" if platform == "cpu" else ", or JAX_PLATFORMS=cpu to simulate them"),
        )
    return available[:num_devices]


def _started(num_devices: int | None) -> list[Any]:
    """Returns the devices of JAX, and starts its backend if needed."""
    hosts = Hosts.of()
    share = hosts.devices_per_host or _share(num_devices or DEFAULT_SIMULATED, hosts.num_hosts)
    if share > MAX_SIMULATED:
        raise RangeError(
            f"--devices is {num_devices}; a process simulates at most {MAX_SIMULATED}.",
            fix=f"--devices {MAX_SIMULATED}",
        )
    prepare_devices(share)
    hosts.join()
    import jax

    started = jax.devices()
    if started[0].platform == "cpu" and jax.process_count() > 1:
        # On CPUs only rank 0 hits JAX's compilation cache, and its collectives wait 30 s for ranks that compile.
        jax.config.update("jax_enable_compilation_cache", False)
    return started


def _share(num_devices: int, num_hosts: int) -> int:
    """Returns the number of devices that each process simulates."""
    if num_devices % num_hosts:
        raise DeviceCountError(
            f"{num_devices} devices do not divide by {num_hosts} processes.",
            fix=f"--devices {-(-num_devices // num_hosts) * num_hosts}",
        )
    return num_devices // num_hosts
