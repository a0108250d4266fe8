"""`spanax probe`: measures the devices present, and writes a cluster file."""

from dataclasses import dataclass
from pathlib import Path

from spanax.commands.answer import Answer
from spanax.errors import WriteError


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


def answer(command: ProbeCommand) -> Answer:
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
