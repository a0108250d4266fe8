"""`spanax doctor`: diagnoses the machine, its network and its software."""

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from spanax.commands.answer import Answer
from spanax.usage.examples import wants_colors

if TYPE_CHECKING:
    from spanax.doctor.machine import Verdict


@dataclass(frozen=True)
class DoctorCommand:
    """Check this machine for problems that would stop a run; each finding has a fix. Exits with 1 if there is a
    problem.

    Attributes:
      output_dir: the folder for runs.
      hosts: addresses to reach, host:port, separated by commas.
      timeout: seconds that JAX may take to start.
      json: print one JSON object.
    """

    output_dir: Path = Path("runs")
    hosts: str = ""
    timeout: float = 60.0
    json: bool = False


def answer(command: DoctorCommand) -> Answer:
    """Returns the diagnosis; exit code 1 if there is a problem.

    Raises:
      SpanaxError: an address is invalid.
    """
    from spanax.show.doctor import is_well, verdicts_json, verdicts_text

    verdicts = diagnose(command, os.environ)
    text = verdicts_text(verdicts, in_colours=wants_colors(sys.stdout))
    return Answer(text, verdicts_json(verdicts), exit_code=0 if is_well(verdicts) else 1, is_styled=True)


def diagnose(command: DoctorCommand, environ: Mapping[str, str]) -> "list[Verdict]":
    """Returns what would stop or slow down a run in an environment, without JAX in this process.

    Raises:
      SpanaxError: an address is invalid, or the variables of a group contradict each other.
    """
    from spanax.doctor import jax_probe, machine, network
    from spanax.processes.processes import Hosts

    addresses = [address for address in command.hosts.split(",") if address.strip()]
    for address in addresses:
        network.parse_address(address, "--hosts")
    hosts = Hosts.of(environ)
    installed = machine.installed_packages()
    return [
        machine.packages(installed),
        machine.plugins(installed),
        *machine.settings(environ, is_group=bool(addresses) or hosts.num_hosts > 1),
        jax_probe.devices(environ, command.timeout),
        *machine.disks(command.output_dir, environ),
        machine.shared_memory(),
        *map(network.reach, addresses),
        network.group(hosts, command.timeout),
    ]
