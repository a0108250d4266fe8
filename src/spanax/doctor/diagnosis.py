"""Runs all checks of a machine, in order, without JAX in this process."""

import os
import tempfile
from collections.abc import Mapping
from pathlib import Path

from spanax.doctor import jax_probe, machine, network, software
from spanax.doctor.verdict import Verdict


def diagnose(
    *, out: Path, hosts: str = "", timeout: float = 60.0, environ: Mapping[str, str] = os.environ
) -> list[Verdict]:
    """Returns what would stop or slow down a run on this machine; takes about two starts of JAX.

    Args:
      out: the folder for runs.
      hosts: `host:port` of other hosts, separated by commas.
      timeout: seconds for JAX to start, and for the hosts of a group to connect.
      environ: the environment of a run.

    Raises:
      SpanaxError: an address is invalid.
    """
    addresses = [address for address in hosts.split(",") if address.strip()]
    for address in addresses:
        network.parse_address(address, "--hosts")
    reading, installed = machine.Reading.now(), software.installed_packages()
    is_group = bool(addresses) or network.place(environ)[1] > 1
    verdicts = [
        software.python(installed),
        software.packages(installed),
        software.plugins(installed),
        *software.settings(environ, is_group=is_group),
        jax_probe.devices(environ, timeout),
        jax_probe.simulated(environ, timeout),
        *(machine.disk(name, folder) for name, folder in _folders(out, environ).items()),
        machine.shared_memory(),
        *machine.limits(),
        network.loopback(),
        network.coordinator(environ),
        *map(network.reach, addresses),
    ]
    group_verdict = network.group(environ, timeout)
    verdicts += [group_verdict] if group_verdict is not None else []
    return [*verdicts, machine.clock(reading, machine.Reading.now(), machine.is_clock_synchronized())]


def _folders(out: Path, environ: Mapping[str, str]) -> dict[str, Path]:
    """Returns the folders that a run writes to."""
    home = environ.get("JAX_COMPILATION_CACHE_DIR") or environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    folders = {"run folder": out, "temporary": Path(tempfile.gettempdir())}
    # It may be a bucket, which only JAX can access.
    return folders if "://" in home else folders | {"compile cache": Path(home)}
