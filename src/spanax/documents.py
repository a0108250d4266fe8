"""Parsers of JSON and TOML from untrusted files, in bounded time and memory.

Parsing never executes code. Content that is too large, too deeply nested, has duplicate keys or invalid numbers raises
a ValueError with the reason, to which callers add the name of the file.
"""

import json
import math
import os
import re
import stat
import tomllib
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from typing import IO, Any

from spanax.sealed import opened

MAX_BYTES = 1 << 24
"""The maximum size of a JSON file. The plan of a model with 10,000 arrays has 5 MB."""

MAX_TOML_BYTES = 1 << 16
MAX_DOTS = 64
"""The maximum size of a TOML file, and number of dots in a line: `tomllib` is quadratic in the length of a key."""

MAX_VALUES = 1 << 20
MAX_DEPTH = 64
MAX_INT = 1 << 62
"""The maximum number of values, depth of nesting, and magnitude of integers."""

_QUOTED = re.compile(r""""(?:[^"\\\n]|\\.)*"|'[^'\n]*'""")
_LONG_QUOTES = re.compile("\"{3}|'{3}")


def read_bytes(path: str | os.PathLike[str], *, max_bytes: int = MAX_BYTES) -> bytes:
    """Reads a regular file; pipes and devices, which may be endless, are rejected.

    Raises:
      OSError: the file cannot be read.
      ValueError: it is not a regular file, or is larger than `max_bytes`.

    Example:
      >>> read_bytes(os.devnull)
      Traceback (most recent call last):
      ValueError: it is not a regular file
    """
    with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK), "rb") as file:
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode):
            raise ValueError("it is not a regular file")
        content = file.read(max_bytes + 1) if status.st_size <= max_bytes else None
    if content is None or len(content) > max_bytes:
        raise ValueError(f"it has {status.st_size:,} bytes; at most {max_bytes:,} are allowed")
    return content


def read_json(path: str | os.PathLike[str]) -> Any:
    """Reads the value of a JSON file; see `read_bytes` and `parse_json`."""
    return parse_json(read_bytes(path))


def read_toml(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Reads the table of a TOML file; see `read_bytes` and `parse_toml`."""
    return parse_toml(read_bytes(path, max_bytes=MAX_TOML_BYTES).decode("utf-8"))


def read_opened(path: str | os.PathLike[str]) -> str:
    """Reads the text of a file with an optional seal.

    Raises:
      OSError: the file cannot be read.
      ValueError: it is not a regular file, or not UTF-8; a DamagedError if the text does not match its seal.
    """
    return opened(read_bytes(path).decode("utf-8"))


def parse_toml(text: str) -> dict[str, Any]:
    """Parses TOML into a table.

    Raises:
      ValueError: the text is not TOML, too large, or too deeply nested.

    Example:
      >>> parse_toml('data = "a.b"')
      {'data': 'a.b'}
    """
    if len(text) > MAX_TOML_BYTES:
        raise ValueError(f"it has more than {MAX_TOML_BYTES:,} bytes")
    # Dots in quotes are not part of a key. With multiline strings, quotes cannot be matched by line, so all dots count.
    bare = text if _LONG_QUOTES.search(text) else _QUOTED.sub("", text)
    if any(line.count(".") >= MAX_DOTS for line in bare.split("\n")):
        raise ValueError(f"a line has {MAX_DOTS} dots")
    try:
        return _not_too_deep(tomllib.loads(text))
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def parse_json(text: str | bytes) -> Any:
    """Parses JSON into a value.

    Raises:
      ValueError: the text is not JSON, has duplicate keys, numbers that are not finite, too many values, or is too
        deeply nested.

    Example:
      >>> parse_json('{"steps": [1, 2]}')
      {'steps': [1, 2]}
      >>> parse_json('{"steps": 1, "steps": 2}')
      Traceback (most recent call last):
      ValueError: duplicate key 'steps'
    """
    text = text.decode("utf-8") if isinstance(text, bytes) else text
    if sum(text.count(sign) for sign in "[{,") > MAX_VALUES:
        raise ValueError(f"it has more than {MAX_VALUES:,} values")
    try:
        return _not_too_deep(json.loads(text, object_pairs_hook=_once, parse_float=_finite, parse_constant=_finite))
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def json_line(record: Mapping[str, Any]) -> str:
    """Formats a record as a line of standard JSON; numbers that are not finite become strings.

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
        return {key: _named(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_named(item) for item in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def json_lines(file: IO[bytes], max_bytes: int = 1 << 20) -> Iterator[Mapping[str, Any] | None]:
    """Yields the objects of a JSON lines file; None for lines that are invalid or longer than `max_bytes`.

    An incomplete last line is ignored, since it may still be in the process of being written.

    Example:
      >>> import io
      >>> list(json_lines(io.BytesIO(b'{"step": 1}\\n{"step"\\n{"step": '), 1 << 10))
      [{'step': 1}, None]
    """
    while line := file.readline(max_bytes):
        if line.endswith(b"\n"):
            if line.strip():
                yield _object(line)
            continue
        if len(line) < max_bytes:
            return
        while (line := file.readline(max_bytes)) and not line.endswith(b"\n"):
            pass
        yield None


def _object(line: bytes) -> Mapping[str, Any] | None:
    try:
        value = json.loads(line)
        if line.count(b"[") + line.count(b"{") > MAX_DEPTH:
            _not_too_deep(value)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def _inner_values(value: Any) -> Collection[Any]:
    if isinstance(value, dict):
        return value.values()
    return value if isinstance(value, list) else ()


def _not_too_deep(value: Any) -> Any:
    level = [value]
    for _ in range(MAX_DEPTH):
        level = [inner for parent in level for inner in _inner_values(parent)]
        if not level:
            return value
    raise ValueError("it is nested too deeply")


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) < len(pairs):
        (duplicate, _), *_ = Counter(name for name, _ in pairs).most_common(1)
        raise ValueError(f"duplicate key {duplicate[:60]!r}")
    return fields


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{text[:60]} is not a finite number")
    return number


def message_classes(text: str, *names: str) -> dict[str, Any]:
    """Returns the classes of some protocol buffer messages, with the fields that are declared of each.

    Args:
      text: for each message a line, `Message: field=number type, ...`, which may continue after a comma; `*` marks
        repeated fields.
      names: the messages.

    Example:
      >>> pair = message_classes("Pair: first=1 int64, others=2 *string", "Pair")["Pair"]
      >>> pair.FromString(pair(first=3, others=["a"]).SerializeToString()).first
      3
    """
    from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

    kinds = descriptor_pb2.FieldDescriptorProto
    file = descriptor_pb2.FileDescriptorProto(name="messages.proto", package="spanax", syntax="proto3")
    for line in text.replace(",\n ", ",").strip().splitlines():
        name, _, fields = line.partition(": ")
        message = file.message_type.add(name=name)
        for entry in fields.split(", "):
            field, kind = entry.split()
            field_name, number = field.split("=")
            label = kinds.LABEL_REPEATED if kind.startswith("*") else kinds.LABEL_OPTIONAL
            added = message.field.add(name=field_name, number=int(number), label=label)
            if (kind := kind.lstrip("*"))[0].isupper():
                added.type = kinds.TYPE_MESSAGE
                added.type_name = f".spanax.{kind}"
            else:
                added.type = kinds.Type.Value(f"TYPE_{kind.upper()}")
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return {name: message_factory.GetMessageClass(pool.FindMessageTypeByName(f"spanax.{name}")) for name in names}
