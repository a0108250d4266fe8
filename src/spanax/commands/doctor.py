"""`spanax doctor`: diagnoses the machine, its network and its software."""

import sys
from dataclasses import dataclass
from pathlib import Path

from spanax.commands.answer import Answer
from spanax.usage.examples import wants_colors


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
    from spanax.doctor.diagnosis import diagnose
    from spanax.show.doctor import is_well, verdicts_json, verdicts_text

    verdicts = diagnose(out=command.output_dir, hosts=command.hosts, timeout=command.timeout)
    text = verdicts_text(verdicts, in_colours=wants_colors(sys.stdout))
    return Answer(text, verdicts_json(verdicts), exit_code=0 if is_well(verdicts) else 1, is_styled=True)
