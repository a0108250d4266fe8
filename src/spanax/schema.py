"""Conversion of JSON and TOML values to dataclasses, validated by their type hints.

The type hints of a dataclass are the schema of its records. Files are untrusted: an invalid value raises a SchemaError
with the name of the field.
"""

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass, is_dataclass
from types import NoneType, UnionType
from typing import Annotated, Any, TypeVar, Union, get_args, get_origin, get_type_hints

from spanax.documents import MAX_INT
from spanax.printable import is_printable

Record = TypeVar("Record")


class SchemaError(ValueError):
    """The value of a field is invalid.

    Attributes:
      name: the field.
      value: the invalid value.
      expected: the type that the field declares.
    """

    def __init__(self, name: str, value: Any, expected: Any, why: str = ""):
        self.name = name
        self.value = value
        self.expected = expected
        super().__init__(why or f"{name[:60]} is {short(value)}, not {getattr(expected, '__name__', expected)}")


def short(value: Any) -> str:
    """Returns the first 60 characters of `repr(value)`.

    Example:
      >>> short(["a"]), short(1 << 20_000)
      ("['a']", 'an integer of 20001 bits')
    """
    if isinstance(value, int) and value.bit_length() > 256:  # Python does not format very large integers
        return f"an integer of {value.bit_length()} bits"
    return repr(value)[:60]


@dataclass(frozen=True)
class Within:
    """The inclusive range of a number, as part of its type: `Annotated[int, Within(0, 9)]`."""

    low: float
    high: float


Count = Annotated[int, Within(0, MAX_INT)]
Seconds = Annotated[float, Within(0, 1e15)]
"""A duration, or a time since 1970."""


def parsed(kind: type[Record], data: Any, *, is_open: bool = False, is_strict: bool = True) -> Record:
    """Converts JSON or TOML values to a dataclass; lists become tuples.

    Args:
      kind: the dataclass.
      data: its fields by name.
      is_open: whether to ignore unknown fields, such as those of a record from a newer version.
      is_strict: whether to reject strings that are not printable in one line, and integers of more than 62 bits.

    Raises:
      SchemaError: a field is unknown or missing, has the wrong type, or is out of range.

    Example:
      >>> from spanax.units import Measure
      >>> parsed(Measure, {"units": {"B": 1.0}, "low": "1 B", "high": 8, "example": "2 B"})
      Traceback (most recent call last):
      spanax.schema.SchemaError: high is 8, not str
    """
    if not isinstance(data, Mapping):
        raise SchemaError(kind.__name__, data, kind)
    hints = _hints(kind)  # type: ignore[arg-type]
    unknown = [name for name in data if name not in hints]
    if unknown and not is_open:
        name = str(unknown[0])[:60]
        raise SchemaError(name, data[unknown[0]], None, f"'{name}' is unknown to {kind.__name__}")
    fields = {name: _as(hints[name], value, name, is_open, is_strict) for name, value in data.items() if name in hints}
    try:
        return kind(**fields)
    except TypeError as error:  # a field without a default is missing
        raise SchemaError(kind.__name__, data, kind, str(error)) from None


def _as(hint: Any, value: Any, name: str, is_open: bool, is_strict: bool) -> Any:
    """Converts a value to the type of a type hint."""
    origin, args = _parts(hint)
    parse = functools.partial(_as, name=name, is_open=is_open, is_strict=is_strict)
    if origin is Annotated:
        result = parse(args[0], value)
        limits = [limit for limit in args[1:] if isinstance(limit, Within)]
        if any(not limit.low <= result <= limit.high for limit in limits):
            low = limits[0].low
            high = limits[0].high
            raise SchemaError(name, value, hint, f"{name} is {short(value)}, not within {low:g} and {high:g}")
        return result
    if origin in (Union, UnionType):
        return None if value is None and NoneType in args else parse(next(a for a in args if a is not NoneType), value)
    if origin is tuple and isinstance(value, list | tuple):
        hints = args[:1] * len(value) if args[-1] is Ellipsis else args
        if len(hints) == len(value):
            return tuple(parse(part, item) for part, item in zip(hints, value, strict=True))
    elif is_dataclass(hint):
        return value if type(value) is hint else parsed(hint, value, is_open=is_open, is_strict=is_strict)  # type: ignore[arg-type]
    elif isinstance(origin, type) and issubclass(origin, Mapping) and isinstance(value, Mapping):
        return {parse(args[0], key): parse(args[1], item) for key, item in value.items()}
    elif hint is Any or (type(value) is hint and (_is_plain(value) or not is_strict) and _is_finite(value)):
        return value
    elif hint is float and type(value) is int and -MAX_INT < value < MAX_INT:
        return value
    raise SchemaError(name, value, hint)


def _is_plain(value: Any) -> bool:
    """Returns whether a string is printable in one line, or an integer has at most 62 bits."""
    return is_printable(value) if isinstance(value, str) else not isinstance(value, int) or abs(value) < MAX_INT


def _is_finite(value: Any) -> bool:
    return not isinstance(value, float) or math.isfinite(value)


@functools.cache
def _hints(kind: Any) -> dict[str, Any]:
    return get_type_hints(kind, include_extras=True)


@functools.cache
def _parts(hint: Any) -> tuple[Any, tuple[Any, ...]]:
    return get_origin(hint), get_args(hint)
