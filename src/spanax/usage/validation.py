"""Checks of flags that several commands share."""

from spanax.errors import SpanaxError


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
        raise SpanaxError(f"spanax {command} needs a workload.", fix=f"spanax {command} gpt2 --on {devices}")
    if not on:
        raise SpanaxError(f"spanax {command} needs the devices.", fix=f"spanax {command} {workload} --on {devices}")


def check_positive(command: object, *names: str) -> None:
    """Raises SpanaxError if a number of a command is not positive."""
    for name in names:
        value = getattr(command, name)
        if value is not None and not value > 0:
            raise SpanaxError(f"{flag(name)} is {value}; expects a number > 0.", fix=f"{flag(name)} 1")
