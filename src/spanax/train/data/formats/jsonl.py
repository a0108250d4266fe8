"""Reads JSON Lines files, with one JSON object per line, uncompressed or compressed by gzip.

Neither Grain nor pyarrow reads random rows of it. To read all of 46 MiB, `pyarrow.json` takes 0.2 s and 64 MiB
of memory, `JsonRows` 1.1 s and 45 MiB (`benchmarks/data_formats.py`); but `pyarrow.json` infers types, so that texts
like dates become timestamps.
"""

import gzip
import json
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from spanax.errors import DataError, FileError
from spanax.train.data.formats.decompression import DecompressionLimit

MAX_LINE_BYTES = 1 << 26
"""The maximum length of a line, so that a malformed file of one line is not read into memory."""


@dataclass(frozen=True)
class JsonRows:
    """The rows of a JSON Lines file; empty lines are skipped.

    Example:
      >>> import tempfile
      >>> path = Path(tempfile.mkdtemp()) / "a.jsonl"
      >>> _ = path.write_text('{"text": "to be"}' + chr(10) + '{"text": "or not"}')
      >>> JsonRows(path).fields, list(JsonRows(path).values("text"))
      (('text',), ['to be', 'or not'])
    """

    path: Path

    @cached_property
    def fields(self) -> tuple[str, ...]:
        """The field names of the first object."""
        for number, _, line in self._lines():
            return tuple(self._object(number, line))
        raise DataError(f"'{self.path}' is empty.", fix="a file with one JSON object per line")

    @property
    def num_rows(self) -> int:
        """The number of lines that are not empty; the first access reads all of the file."""
        return len(self._starts)

    def rows(self, indices: Sequence[int], fields: Sequence[str]) -> list[dict[str, Any]]:
        """Returns fields of the rows at the given indices, seeking to the start of each line."""
        result = []
        with open(self.path, "rb") as file:
            for index in indices:
                file.seek(self._starts[index])
                row = self._object(index, file.readline(MAX_LINE_BYTES))
                result.append({field: self._value(index, row, field) for field in fields})
        return result

    def values(self, field: str) -> Iterator[Any]:
        """Yields a field of every row in order."""
        for number, _, line in self._lines():
            yield self._value(number, self._object(number, line), field)

    @cached_property
    def _starts(self) -> array:
        if self.path.suffix == ".gz":
            raise FileError(f"rows of '{self.path}' cannot be read at random.", fix=f"gunzip '{self.path}'")
        return array("q", (start for _, start, _ in self._lines()))

    def _lines(self) -> Iterator[tuple[int, int, bytes]]:
        """Yields the number, start and text of each line that is not empty."""
        number = start = 0
        is_compressed, limit = self.path.suffix == ".gz", DecompressionLimit(self.path)
        try:
            with gzip.open(self.path) if is_compressed else open(self.path, "rb") as file:
                while line := file.readline(MAX_LINE_BYTES + 1):
                    if is_compressed:
                        limit.add(len(line))
                    if len(line) > MAX_LINE_BYTES:
                        raise self._bad(number, f"it is longer than {MAX_LINE_BYTES:,} bytes")
                    if not line.isspace():
                        yield number, start, line
                        number += 1
                    start += len(line)
        except (OSError, EOFError) as error:
            reason = getattr(error, "strerror", None) or str(error)
            raise FileError(f"cannot read '{self.path}': {reason}.", fix="copy it again") from None

    def _object(self, number: int, line: bytes) -> dict[str, Any]:
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise self._bad(number, str(error)[:120]) from None
        if not isinstance(row, dict):
            raise self._bad(number, f"it is not a JSON object: {line[:60]!r}")
        return row

    def _value(self, number: int, row: dict[str, Any], field: str) -> Any:
        if field not in row:
            raise self._bad(number, f"no field '{field}' among: {', '.join(row)[:80] or 'none'}")
        value = row[field]
        if not isinstance(value, list):
            return value
        try:
            return np.asarray(value)
        except ValueError:
            raise self._bad(number, f"the lists in '{field}' have different lengths") from None

    def _bad(self, number: int, reason: str) -> DataError:
        return FileError(
            f"row {number:,} of '{self.path}' cannot be read.",
            where=reason,
            fix="one JSON object with the same fields per line",
        )
