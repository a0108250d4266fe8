"""Rows that are parsed one by one: JSON Lines, and ArrayRecord files, which Grain reads.

pyarrow's reader of JSON Lines names no row, and it infers types, so that texts like dates become timestamps
(`benchmarks/data_formats.py` compares its speed).
"""

import gzip
import json
import zlib
from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from spanax.documents import message_classes
from spanax.errors import DataError, FileError
from spanax.train.data.cache import check_expansion

MAX_LINE_BYTES = 1 << 26
"""The maximum length of a line, so that a malformed file of one line is not read into memory."""

RECORDS_AT_ONCE = 256

Parser = Callable[[bytes], dict[str, Any]]
"""Returns the fields of a record."""


def _lines(path: Path) -> Iterator[bytes]:
    """Yields the lines of a file that are not empty; the file may be compressed by gzip."""
    number = 0
    num_bytes = 0
    is_compressed = path.name.lower().endswith(".gz")
    try:
        with gzip.open(path) if is_compressed else open(path, "rb") as file:
            while line := file.readline(MAX_LINE_BYTES + 1):
                num_bytes += len(line)
                if is_compressed:
                    check_expansion(path, num_bytes)
                if len(line) > MAX_LINE_BYTES:
                    raise _bad(path, number, f"it is longer than {MAX_LINE_BYTES:,} bytes")
                if not line.isspace():
                    yield line
                    number += 1
    except (OSError, EOFError, zlib.error) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise FileError(f"cannot read '{path}': {reason}.", fix="copy it again") from None


def _array_records(path: Path) -> Iterator[bytes]:
    """Yields the records of an ArrayRecord file."""
    from grain.sources import ArrayRecordDataSource

    first = 0
    try:
        source = ArrayRecordDataSource([str(path)])
        size = len(source)
        while first < size:
            records = source.__getitems__(list(range(first, min(first + RECORDS_AT_ONCE, size))))
            yield from records
            first += len(records)
    except Exception as error:  # the library raises the exceptions of its C++ code
        raise _bad(path, first, error) from None


def opened(path: Path, kind: str) -> tuple[tuple[str, ...], Callable[[str], Iterator[Any]]]:
    """Returns the fields of the first row of a file of kind `jsonl` or `array_record`, and a function that yields one.

    A file without rows has no fields.
    """
    for record in _records(path, kind):
        # The first record shows what all are.
        parse = _parser(kind, record)
        return tuple(_row(path, 0, record, parse)), partial(_rows, path, kind, parse)
    return (), lambda field: iter(())


def _rows(path: Path, kind: str, parse: Parser, field: str) -> Iterator[Any]:
    """Yields a field of every row, as texts, numbers or arrays."""
    for index, record in enumerate(_records(path, kind)):
        row = _row(path, index, record, parse)
        if field not in row:
            raise _bad(path, index, f"no field '{field}' among: {', '.join(row)[:80] or 'none'}")
        value = row[field]
        try:
            value = np.asarray(value) if isinstance(value, list) else value
        except ValueError:
            raise _bad(path, index, f"the lists in '{field}' have different lengths") from None
        yield value


def objects(path: Path, kind: str, fields: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Yields the given fields of every row, those that it has, as JSON has them."""
    parse: Parser = _json_row
    for index, record in enumerate(_records(path, kind)):
        parse = _parser(kind, record) if index == 0 else parse
        row = _row(path, index, record, parse)
        yield {field: row[field] for field in fields if field in row}


def line_of(path: Path, index: int) -> int:
    """Returns the number, from 1, of the line of a row of JSON Lines: rows are counted without empty lines."""
    is_compressed = path.name.lower().endswith(".gz")
    with gzip.open(path) if is_compressed else open(path, "rb") as file:
        numbers = (number for number, line in enumerate(file, 1) if not line.isspace())
        return next(islice(numbers, index, None))


def _records(path: Path, kind: str) -> Iterator[bytes]:
    return _lines(path) if kind == "jsonl" else _array_records(path)


def _row(path: Path, index: int, record: bytes, parse: Parser) -> dict[str, Any]:
    try:
        return parse(record)
    except (ValueError, RecursionError) as error:
        raise _bad(path, index, error) from None


def _parser(kind: str, first: bytes) -> Parser:
    """Returns the parser of the records of a file."""
    if kind == "jsonl" or first.lstrip().startswith(b"{"):
        return _json_row
    try:
        return _example_row if _example_row(first) else _text_row
    except ValueError:
        return _text_row


def _bad(path: Path, index: int, reason: object) -> DataError:
    where = " ".join(str(reason).split())[:120]
    return FileError(f"row {index:,} of '{path}' cannot be read.", where=where, fix="correct the row, or remove it")


def _json_row(record: bytes) -> dict[str, Any]:
    row = json.loads(record)
    if not isinstance(row, dict):
        raise ValueError(f"it is not a JSON object: {record[:60]!r}")
    return row


def _text_row(record: bytes) -> dict[str, Any]:
    return {"text": record.decode("utf-8")}


def _example_row(record: bytes) -> dict[str, Any]:
    """Returns the features of a `tf.train.Example`: bytes as UTF-8 text, a single number as a scalar."""
    from google.protobuf.message import DecodeError

    example = _example_type()["Example"]()
    try:
        example.ParseFromString(record)
    except DecodeError as error:
        raise ValueError(str(error)) from None
    row: dict[str, Any] = {}
    for entry in example.features.feature:
        name = entry.key
        kind = next((field.name for field, _ in entry.value.ListFields()), "")
        values = list(getattr(entry.value, kind).value) if kind else []
        if kind == "bytes_list":
            row[name] = values[0].decode("utf-8") if len(values) == 1 else values
        else:
            numbers = np.array(values, np.float32 if kind == "float_list" else np.int64)
            row[name] = numbers[0] if len(numbers) == 1 else numbers
    return row


EXAMPLE = """
BytesList: value=1 *bytes
FloatList: value=1 *float
Int64List: value=1 *int64
Feature: bytes_list=1 BytesList, float_list=2 FloatList, int64_list=3 Int64List
Entry: key=1 string, value=2 Feature
Features: feature=1 *Entry
Example: features=1 Features
"""
"""The messages of tensorflow/core/example/example.proto, which no dependency of Spanax contains; array_record itself
imports TensorFlow for it. On the wire, a map is a list of entries, and a union the one field that is present."""

_example_type = cache(partial(message_classes, EXAMPLE, "Example"))
