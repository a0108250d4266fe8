"""Reads ArrayRecord files with Grain; records are JSON objects, `tf.train.Example` messages, or plain text."""

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import numpy as np

from spanax.errors import DataError, FileError

RECORDS_AT_ONCE = 256
TEXT = "text"
"""The name of the only field if records are plain text."""


@dataclass(frozen=True)
class ArrayRecordRows:
    """The rows of an ArrayRecord file; the first record determines the format of all records.

    Attributes:
      path: the file.
    """

    path: Path

    @property
    def fields(self) -> tuple[str, ...]:
        """The field names of the first record."""
        return tuple(self._row(0, self._first))

    @cached_property
    def num_rows(self) -> int:
        """The number of records."""
        try:
            return len(self._source)
        except Exception as error:  # the library raises the exceptions of its C++ code
            raise self._bad(0, error) from None

    def rows(self, indices: Sequence[int], fields: Sequence[str]) -> list[dict[str, Any]]:
        """Returns fields of the records at the given indices."""
        records = self._read(indices)
        rows = [self._row(index, record) for index, record in zip(indices, records, strict=True)]
        return [
            {field: self._field(index, row, field) for field in fields}
            for index, row in zip(indices, rows, strict=True)
        ]

    def values(self, field: str) -> Iterator[Any]:
        """Yields a field of every record in order."""
        for first in range(0, self.num_rows, RECORDS_AT_ONCE):
            indices = range(first, min(first + RECORDS_AT_ONCE, self.num_rows))
            for index, record in zip(indices, self._read(indices), strict=True):
                yield self._field(index, self._row(index, record), field)

    @cached_property
    def _source(self) -> Any:
        from grain.sources import ArrayRecordDataSource

        return ArrayRecordDataSource([str(self.path)])

    @cached_property
    def _first(self) -> bytes:
        if not self.num_rows:
            raise DataError(f"'{self.path}' is empty.", fix="a file with records in it")
        return self._read([0])[0]

    @cached_property
    def _parse(self) -> Callable[[bytes], dict[str, Any]]:
        if self._first.lstrip()[:1] == b"{":
            return _json_row
        try:
            return _example_row if _example_row(self._first) else _text_row
        except ValueError:
            return _text_row

    def _read(self, indices: Sequence[int]) -> list[bytes]:
        try:
            return list(self._source.__getitems__(list(indices)))
        except Exception as error:  # the library raises the exceptions of its C++ code
            raise self._bad(indices[0], error) from None

    def _row(self, index: int, record: bytes) -> dict[str, Any]:
        try:
            return self._parse(record)
        except (ValueError, RecursionError) as error:
            raise self._bad(index, error) from None

    def _field(self, index: int, row: dict[str, Any], field: str) -> Any:
        if field not in row:
            raise self._bad(index, f"no field '{field}' among: {', '.join(row)[:80] or 'none'}")
        return row[field]

    def _bad(self, index: int, reason: object) -> DataError:
        detail = " ".join(str(reason).split())[:120]
        return FileError(f"record {index:,} of '{self.path}' cannot be read.", where=detail, fix="write the file again")


def _json_row(record: bytes) -> dict[str, Any]:
    row = json.loads(record)
    if not isinstance(row, dict):
        raise ValueError("it is not a JSON object")
    return {name: np.asarray(value) if isinstance(value, list) else value for name, value in row.items()}


def _text_row(record: bytes) -> dict[str, Any]:
    return {TEXT: record.decode("utf-8")}


def _example_row(record: bytes) -> dict[str, Any]:
    """Returns the features of a `tf.train.Example`: bytes as UTF-8 text, a single number as a scalar."""
    from google.protobuf.message import DecodeError

    example = _example_type()()
    try:
        example.ParseFromString(record)
    except DecodeError as error:
        raise ValueError(str(error)) from None
    row: dict[str, Any] = {}
    for name, feature in example.features.feature.items():
        kind = feature.WhichOneof("kind")
        values = list(getattr(feature, kind).value) if kind else []
        if kind == "bytes_list":
            row[name] = values[0].decode("utf-8") if len(values) == 1 else values
        else:
            array = np.array(values, np.float32 if kind == "float_list" else np.int64)
            row[name] = array[0] if len(array) == 1 else array
    return row


EXAMPLE_PROTO = """
name: "spanax/example.proto" package: "spanax" syntax: "proto3"
message_type { name: "BytesList" field { name: "value" number: 1 label: LABEL_REPEATED type: TYPE_BYTES } }
message_type { name: "FloatList" field { name: "value" number: 1 label: LABEL_REPEATED type: TYPE_FLOAT } }
message_type { name: "Int64List" field { name: "value" number: 1 label: LABEL_REPEATED type: TYPE_INT64 } }
message_type {
  name: "Feature" oneof_decl { name: "kind" }
  field { name: "bytes_list" number: 1 type: TYPE_MESSAGE type_name: ".spanax.BytesList" oneof_index: 0 }
  field { name: "float_list" number: 2 type: TYPE_MESSAGE type_name: ".spanax.FloatList" oneof_index: 0 }
  field { name: "int64_list" number: 3 type: TYPE_MESSAGE type_name: ".spanax.Int64List" oneof_index: 0 }
}
message_type {
  name: "Features"
  field { name: "feature" number: 1 label: LABEL_REPEATED type: TYPE_MESSAGE type_name: "Features.FeatureEntry" }
  nested_type {
    name: "FeatureEntry" options { map_entry: true }
    field { name: "key" number: 1 label: LABEL_OPTIONAL type: TYPE_STRING }
    field { name: "value" number: 2 label: LABEL_OPTIONAL type: TYPE_MESSAGE type_name: ".spanax.Feature" }
  }
}
message_type { name: "Example" field { name: "features" number: 1 type: TYPE_MESSAGE type_name: ".spanax.Features" } }
"""
"""The descriptor of tensorflow/core/example/example.proto, which no dependency of Spanax contains; array_record itself
imports TensorFlow for it."""


@cache
def _example_type() -> Any:
    from google.protobuf import descriptor_pb2, descriptor_pool, message_factory, text_format

    pool = descriptor_pool.DescriptorPool()
    pool.Add(text_format.Parse(EXAMPLE_PROTO, descriptor_pb2.FileDescriptorProto()))
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("spanax.Example"))
