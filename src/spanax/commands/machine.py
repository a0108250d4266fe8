"""`spanax doctor` and `spanax probe`: diagnose the machine, its network and its software; measure its devices."""

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from spanax.commands.answer import Answer
from spanax.errors import WriteError
from spanax.printable import printable
from spanax.usage import wants_colors

if TYPE_CHECKING:
    from spanax.doctor.machine import Verdict

_COLOURS = {"ok": 32, "warning": 33, "problem": 31}


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


def doctor_answer(command: DoctorCommand) -> Answer:
    """Returns the diagnosis; exit code 1 if there is a problem.

    Raises:
      SpanaxError: an address is invalid.
    """
    verdicts = diagnose(command, os.environ)
    text = verdicts_text(verdicts, in_colours=wants_colors(sys.stdout))
    data = {"is_well": is_well(verdicts), "findings": [asdict(verdict) for verdict in verdicts]}
    return Answer(text, data, exit_code=0 if is_well(verdicts) else 1, is_styled=True)


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


def is_well(verdicts: "Sequence[Verdict]") -> bool:
    """Whether no verdict is a problem."""
    return all(verdict.state != "problem" for verdict in verdicts)


def verdicts_text(verdicts: "Sequence[Verdict]", *, in_colours: bool = False) -> str:
    """Returns one line per verdict; below those that are not ok, where and how to fix them."""
    lines = []
    for verdict in verdicts:
        state = f"{verdict.state:7}"
        if in_colours:
            state = f"\x1b[{_COLOURS[verdict.state]}m{state}\x1b[0m"
        lines.append(f"{state}  {verdict.name:13}  {printable(verdict.what)}")
        hints = {"where": verdict.where, "fix": verdict.fix} if verdict.state != "ok" else {}
        lines += [f"{'':24}{key}: {printable(text)}" for key, text in hints.items() if text]
    problems, warnings = (sum(verdict.state == state for verdict in verdicts) for state in ("problem", "warning"))
    lines.append(f"{_count_text(problems, 'problem')}, {_count_text(warnings, 'warning')} in {len(verdicts)} findings")
    return "\n".join(lines)


def _count_text(count: int, name: str) -> str:
    return f"{count} {name}" if count == 1 else f"{count} {name}s"


@dataclass(frozen=True)
class ProbeCommand:
    """Measure matmuls, memory and collectives of the available devices; writes a cluster file for spanax plan --on.

    Attributes:
      out: the cluster file to write.
      devices: number of devices; simulated on the CPU if there are fewer.
      seconds: approximate duration of the measurement.
    """

    out: Path = Path("cluster.toml")
    devices: int | None = None
    seconds: float = 30.0


def probe_answer(command: ProbeCommand) -> Answer:
    """Writes the cluster file, and returns the command that uses it.

    Raises:
      WriteError: the file cannot be written; raised before the measurement.
    """
    from spanax.hardware.probe import probe
    from spanax.processes.devices import devices

    if not command.out.parent.is_dir() or command.out.is_dir():
        raise WriteError(f"cannot write '{command.out}'.", fix="--out cluster.toml, in a folder that exists")
    command.out.write_text(probe(devices(command.devices), seconds=command.seconds))
    return Answer(f"measured; spanax plan ... --on {command.out}")
