"""Documents: JSON and TOML from files that anybody may have written, read in bounded time and memory.

Nothing read here can name code. What is too large, too deep, said twice or no number is refused with a ValueError that
says so; whoever reads a file tells the user which one it was.
"""

import functools
import json
import math
import os
import re
import stat
import tomllib
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import is_dataclass
from types import NoneType, UnionType
from typing import IO, Any, TypeVar, Union, get_args, get_origin, get_type_hints

MAX_BYTES = 1 << 24
"""Of a JSON file. The plan of a model of 10,000 arrays takes 5 MB."""

MAX_TOML_BYTES, MAX_DOTS = 1 << 16, 64
"""Of a TOML file, and of one of its keys: Python's reader takes time that grows with the square of a key's length."""

MAX_VALUES, MAX_DEPTH, MAX_INT = 1 << 20, 64, 1 << 62
"""How many values, one inside the other how often, and how large a whole number may be."""

_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")

Made = TypeVar("Made")


def read_bytes(path: str | os.PathLike[str], *, max_bytes: int = MAX_BYTES) -> bytes:
    """What a plain file holds; a pipe or device, which may never end, is refused.

    Raises:
      OSError: it cannot be read.
      ValueError: it is no plain file, or holds more.

    Example:
      >>> read_bytes(os.devnull)
      Traceback (most recent call last):
      ValueError: it is no plain file
    """
    with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK), "rb") as file:
        found = os.fstat(file.fileno())
        if not stat.S_ISREG(found.st_mode):
            raise ValueError("it is no plain file")
        content = file.read(max_bytes + 1) if found.st_size <= max_bytes else None
    if content is None or len(content) > max_bytes:
        raise ValueError(f"it has {found.st_size:,} bytes, and at most {max_bytes:,} are read")
    return content


def read_json(path: str | os.PathLike[str]) -> Any:
    """The value in a JSON file; see `read_bytes` and `parse_json`."""
    return parse_json(read_bytes(path))


def read_toml(path: str | os.PathLike[str]) -> dict[str, Any]:
    """The table in a TOML file.

    Raises:
      OSError: it cannot be read.
      ValueError: it is no TOML, or one that nobody would write.
    """
    return parse_toml(read_bytes(path, max_bytes=MAX_TOML_BYTES))


def parse_toml(raw: bytes) -> dict[str, Any]:
    """The table of a TOML text.

    Raises:
      ValueError: it is no TOML, or one that nobody would write.

    Example:
      >>> parse_toml(b"steps = 4")
      {'steps': 4}
    """
    text = raw.decode("utf-8")
    if any(line.count(".") >= MAX_DOTS for line in text.splitlines()):
        raise ValueError(f"a line has {MAX_DOTS} dots")
    try:
        return _not_too_deep(tomllib.loads(text))
    except RecursionError:
        raise ValueError("it is nested too deep") from None


def parse_json(text: str | bytes) -> Any:
    """The value of a JSON text.

    Raises:
      ValueError: it is no JSON, has a name twice, a number that is none, too many values, or is nested too deep.

    Example:
      >>> parse_json('{"steps": [1, 2]}')
      {'steps': [1, 2]}
      >>> parse_json('{"steps": 1, "steps": 2}')
      Traceback (most recent call last):
      ValueError: 'steps' is there twice
    """
    text = text.decode("utf-8") if isinstance(text, bytes) else text
    if sum(text.count(sign) for sign in "[{,") > MAX_VALUES:
        raise ValueError(f"it holds more than {MAX_VALUES:,} values")
    try:
        return _not_too_deep(json.loads(text, object_pairs_hook=_once, parse_float=_finite, parse_constant=_finite))
    except RecursionError:
        raise ValueError("it is nested too deep") from None


def json_line(record: Mapping[str, Any]) -> str:
    """A record as one line of JSON that every reader takes; a number that is not finite is its name.

    Example:
      >>> json_line({"step": 4, "loss": float("nan"), "norms": [1.5, float("inf")]})
      '{"step": 4, "loss": "nan", "norms": [1.5, "inf"]}'
    """
    try:
        return json.dumps(record, allow_nan=False)
    except ValueError:
        return json.dumps(_named(record), allow_nan=False)


def _named(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _named(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_named(one) for one in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def json_lines(file: IO[bytes], max_bytes: int = 1 << 20) -> Iterator[Mapping[str, Any]]:
    """The objects in a file of JSON lines, one at a time; a line that is none, half of one, or longer is left out.

    Example:
      >>> import io
      >>> list(json_lines(io.BytesIO(b'{"step": 1}\\n{"step": '), 1 << 10))
      [{'step': 1}]
    """
    is_inside = False
    while line := file.readline(max_bytes):
        is_rest, is_inside = is_inside, len(line) == max_bytes and not line.endswith(b"\n")
        if is_rest or is_inside:
            continue
        try:
            found = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(found, dict):
            yield found


def made(kind: type[Made], data: Any) -> Made:
    """A dataclass from JSON values: every field there is, and of the type that it declares; lists become tuples.

    Raises:
      ValueError: a field is unknown, missing, or of another type.

    Example:
      >>> from spanax.units import Measure
      >>> made(Measure, {"units": {"B": 1.0}, "low": "1 B", "high": 8, "example": "2 B"})
      Traceback (most recent call last):
      ValueError: high = 8 is no str
    """
    if not isinstance(data, Mapping):
        raise ValueError(f"{repr(data)[:60]} is no {kind.__name__}")
    hints = _hints(kind)  # type: ignore[arg-type]
    for name in data:
        if name not in hints:
            raise ValueError(f"a {kind.__name__} has no '{name[:60]}'")
    try:
        return kind(**{name: _as(hints[name], value, name) for name, value in data.items()})
    except TypeError as error:  # a field without a default is missing
        raise ValueError(str(error)) from None


def _as(hint: Any, value: Any, name: str) -> Any:
    """A value as a type hint wants it."""
    origin, args = _parts(hint)
    if origin in (Union, UnionType):
        hint = NoneType if value is None and NoneType in args else next(arg for arg in args if arg is not NoneType)
        origin, args = _parts(hint)
    if origin is tuple and isinstance(value, list | tuple):
        wanted = args[:1] * len(value) if args[-1] is Ellipsis else args
        if len(wanted) == len(value):
            return tuple(_as(one, item, name) for one, item in zip(wanted, value, strict=True))
    elif is_dataclass(hint):
        return value if type(value) is hint else made(hint, value)  # type: ignore[arg-type]
    elif isinstance(origin, type) and issubclass(origin, Mapping) and isinstance(value, Mapping):
        return {_as(args[0], key, name): _as(args[1], item, name) for key, item in value.items()}
    elif hint is Any or (hint is float and type(value) is int):
        return value
    elif type(value) is hint and _is_plain(value):
        return value
    raise ValueError(f"{name} = {repr(value)[:60]} is no {getattr(hint, '__name__', hint)}")


def _is_plain(value: Any) -> bool:
    """Whether a text has no letters that steer a terminal, and a whole number is one that a computer counts to."""
    return not _CONTROL.search(value) if isinstance(value, str) else not isinstance(value, int) or abs(value) < MAX_INT


@functools.cache
def _hints(kind: Any) -> dict[str, Any]:
    return get_type_hints(kind)


@functools.cache
def _parts(hint: Any) -> tuple[Any, tuple[Any, ...]]:
    return get_origin(hint), get_args(hint)


def _not_too_deep(value: Any) -> Any:
    level = [value]
    for _ in range(MAX_DEPTH):
        level = [
            inner
            for one in level
            for inner in (one.values() if isinstance(one, dict) else one if isinstance(one, list) else ())
        ]
        if not level:
            return value
    raise ValueError("it is nested too deep")


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        (twice, _), *_ = Counter(name for name, _ in pairs).most_common(1)
        raise ValueError(f"{twice[:60]!r} is there twice")
    return found


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{text[:60]} is no number")
    return number
