"""Documents: JSON and TOML from files that anybody may have written, read in bounded time and memory.

Nothing read here can name code. What is too large, too deep, said twice or no number is refused with a ValueError that
says so; whoever reads a file tells the user which one it was.
"""

import json
import math
import os
import re
import stat
import tomllib
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import IO, Any

from spanax.sealed import Opened, opened

MAX_BYTES = 1 << 24
"""Of a JSON file. The plan of a model of 10,000 arrays takes 5 MB."""

MAX_TOML_BYTES, MAX_DOTS = 1 << 16, 64
"""Of a TOML file, and of one of its keys: Python's reader takes time that grows with the square of a key's length."""

MAX_VALUES, MAX_DEPTH, MAX_INT = 1 << 20, 64, 1 << 62
"""How many values, one inside the other how often, and how large a whole number may be."""

_QUOTED, _LONG_QUOTES = re.compile(r""""(?:[^"\\\n]|\\.)*"|'[^'\n]*'"""), re.compile("\"{3}|'{3}")


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
    """The table in a TOML file; see `read_bytes` and `parse_toml`."""
    return parse_toml(read_bytes(path, max_bytes=MAX_TOML_BYTES).decode("utf-8"))


def read_opened(path: str | os.PathLike[str]) -> Opened:
    """The text of a file that may be sealed.

    Raises:
      OSError: it cannot be read.
      ValueError: it is no plain file, or no UTF-8; a DamagedError where it is not what was sealed.
    """
    return opened(read_bytes(path).decode("utf-8"))


def parse_toml(text: str) -> dict[str, Any]:
    """The table of a TOML text.

    Raises:
      ValueError: it is no TOML, or one that nobody would write.

    Example:
      >>> parse_toml('data = "a.b"')
      {'data': 'a.b'}
    """
    if len(text) > MAX_TOML_BYTES:
        raise ValueError(f"it has more than {MAX_TOML_BYTES:,} bytes")
    # What stands in quotes is no key; where quotes may go on in the next line, nobody can say so line by line.
    bare = text if _LONG_QUOTES.search(text) else _QUOTED.sub("", text)
    if any(line.count(".") >= MAX_DOTS for line in bare.split("\n")):
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


def json_lines(file: IO[bytes], max_bytes: int = 1 << 20) -> Iterator[Mapping[str, Any] | None]:
    """The objects in a file of JSON lines, one at a time; None for a damaged line: it is none, or over `max_bytes`.

    The end of a file that is not a line yet is left out: whoever writes it may be about to go on.

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
