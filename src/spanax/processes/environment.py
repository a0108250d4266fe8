"""Reads the variables that launchers set to describe a group of processes."""

from collections.abc import Mapping

from spanax.errors import GroupError
from spanax.units import whole_number

WHERE = "the environment of this process"


def number(environ: Mapping[str, str], name: str, default: int | None) -> int:
    """Returns the value of a variable as a non-negative integer.

    Raises:
      SpanaxError: it is not one, or is not set and has no default.
    """
    text = environ.get(name)
    if text is None and default is not None:
        return default
    value = None if text is None else whole_number(text)
    if value is None:
        shown = None if text is None else text[:80]
        raise GroupError(f"{name} is {shown!r}; expected an integer.", where=WHERE)
    return value
