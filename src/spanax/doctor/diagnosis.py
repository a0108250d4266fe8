"""Examine: everything that is looked at, in order; without JAX in this process."""

import os
import tempfile
from collections.abc import Mapping
from pathlib import Path

from spanax.doctor import jax_probe, machine, network, software
from spanax.doctor.verdict import Verdict


def diagnose(
    *, out: Path, hosts: str = "", timeout: float = 60.0, environ: Mapping[str, str] = os.environ
) -> list[Verdict]:
    """What would stop or hinder a run on this machine; takes about as long as JAX takes to start twice.

    Args:
      out: where runs are to be written to.
      hosts: `host:port` of other hosts, with commas.
      timeout: seconds that JAX may take to start, and that the hosts of a group wait for each other.
      environ: the environment that a run would have.

    Raises:
      SpanaxError: an address is none.
    """
    addresses = [address for address in hosts.split(",") if address.strip()]
    for address in addresses:
        network.parse_address(address, "--hosts")
    before, installed = machine.Reading.now(), software.Installed()
    is_group = bool(addresses) or network.place(environ)[1] > 1
    found = [
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
    met = network.group(environ, timeout)
    found += [met] if met is not None else []
    return [*found, machine.clock(before, machine.Reading.now(), machine.synchronised())]


def _folders(out: Path, environ: Mapping[str, str]) -> dict[str, Path]:
    """The folders that a run writes to."""
    home = environ.get("JAX_COMPILATION_CACHE_DIR") or environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    folders = {"run folder": out, "temporary": Path(tempfile.gettempdir())}
    # It may be a bucket, which JAX reaches and we do not.
    return folders if "://" in home else folders | {"compile cache": Path(home)}
