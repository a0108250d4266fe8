"""Checks of flags that several commands share."""

from spanax.errors import MissingError, RangeError


def flag(name: str) -> str:
    """Returns the flag of a field.

    Example:
      >>> flag("target_mfu")
      '--target-mfu'
    """
    return f"--{name.replace('_', '-')}"


def require(command: str, workload: str, on: str, devices: str) -> None:
    """Raises SpanaxError if the workload or the devices are missing; `devices` are those of the suggested command."""
    if not workload:
        raise MissingError(f"spanax {command} needs a workload.", fix=f"spanax {command} gpt2 --on {devices}")
    if not on:
        raise MissingError(f"spanax {command} needs the devices.", fix=f"spanax {command} {workload} --on {devices}")


def check_positive(command: object, **usual: str) -> None:
    """Raises RangeError if a number of a command is not positive; `usual` has a usual value of each number."""
    for name, text in usual.items():
        value = getattr(command, name)
        if value is not None and not value > 0:
            raise RangeError(f"{flag(name)} is {value}; expected a number > 0.", fix=f"{flag(name)} {text}")
