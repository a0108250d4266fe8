"""Reads the rows of Arrow, Feather and Parquet files with pyarrow.

Uncompressed files are memory-mapped. Compressed files are streamed to read a column, and decompressed once into the
cache for random access to rows.

The libraries' random access is not used: for 320 random rows of 470 MiB of Parquet, `CompressedTable` takes 4.3 s
and 84 MiB of memory (0.05 s from the cache), `pyarrow.dataset` 202 s and 5.8 GiB, because it decodes row groups for
each batch; of uncompressed Arrow, `MappedTable` takes 0.03 s and 15 MiB, `pyarrow.dataset` 1.6 s and 192 MiB. Grain's
`ParquetIterDataset` has no random access, and takes 3.0 GiB for the first rows (`benchmarks/data_formats.py`).
"""

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from spanax.errors import DataError, FileError, NotInstalledError, SpanaxError
from spanax.train.data.cache import cache_folder, exclusive, keep
from spanax.train.data.elements import digest
from spanax.train.data.formats.decompression import DecompressionLimit, DiskSpace

ROWS_AT_ONCE = 256
"""The number of decompressed rows in memory; a row group of a Parquet file may have millions."""


def pyarrow() -> Any:
    """Imports and returns pyarrow.

    Raises:
      SpanaxError: pyarrow is not installed.
    """
    try:
        import pyarrow
        import pyarrow.compute
        import pyarrow.parquet
    except ImportError:
        raise NotInstalledError("Arrow and Parquet files need pyarrow.", fix='pip install "spanax[parquet]"') from None
    return pyarrow


@dataclass(frozen=True)
class MappedTable:
    """The rows of an uncompressed Arrow file; the untrusted data is validated before use.

    Attributes:
      path: the file.
    """

    path: Path

    @cached_property
    def fields(self) -> tuple[str, ...]:
        """The names of the columns."""
        with _arrow_errors(self.path):
            return tuple(_reader(self.path).schema.names)

    @property
    def num_rows(self) -> int:
        """The number of rows."""
        return int(self._ends[-1]) if len(self._ends) else 0

    def rows(self, indices: Sequence[int], fields: Sequence[str]) -> list[dict[str, Any]]:
        """Returns fields of the rows at the given indices."""
        result = []
        with _arrow_errors(self.path):
            for index in indices:
                number = int(np.searchsorted(self._ends, index, side="right"))
                first = int(self._ends[number - 1]) if number else 0
                columns = ((field, self._checked(number, field)) for field in fields)
                result.append({
                    field: _value(self.path, index, column.slice(index - first, 1)) for field, column in columns
                })  # fmt: skip
        return result

    def values(self, field: str) -> Iterator[Any]:
        """Yields a field of every row in order."""
        yield from _values(self.path, _batches(self.path), field)

    def _checked(self, number: int, field: str) -> Any:
        """Returns a column of a batch; the first access validates all of it."""
        key = (number, field)
        if key not in self._columns:
            self._columns[key] = _column(self.path, self._batches[number], field)
        return self._columns[key]

    @cached_property
    def _columns(self) -> dict[tuple[int, str], Any]:
        return {}

    @cached_property
    def _batches(self) -> list[Any]:
        with _arrow_errors(self.path):
            return list(_batches(self.path))

    @cached_property
    def _ends(self) -> np.ndarray:
        return np.cumsum([batch.num_rows for batch in self._batches], dtype=np.int64)


@dataclass(frozen=True)
class CompressedTable:
    """The rows of a Parquet file, or of an Arrow file whose columns are compressed.

    Attributes:
      path: the file.
      key: identifies the content.
      cache_dir: the directory for decompressed rows.
      schema: the columns and their types.
      batches: streams columns, a few rows at a time.
      count: returns the number of rows.
    """

    path: Path
    key: str
    cache_dir: str | os.PathLike[str] | None
    schema: Any
    batches: Callable[[Sequence[str]], Iterator[Any]]
    count: Callable[[], int]

    @property
    def fields(self) -> tuple[str, ...]:
        """The names of the columns."""
        return tuple(self.schema.names)

    @cached_property
    def num_rows(self) -> int:
        """The number of rows."""
        with _arrow_errors(self.path):
            return self.count()

    def rows(self, indices: Sequence[int], fields: Sequence[str]) -> list[dict[str, Any]]:
        """Returns fields of the rows at the given indices; the first call decompresses these fields of all rows."""
        columns = tuple(sorted(self._known(field) for field in fields))
        if columns not in self._decompressed:
            self._decompressed[columns] = self._decompress(columns)
        return self._decompressed[columns].rows(indices, fields)

    def values(self, field: str) -> Iterator[Any]:
        """Yields a field of every row in order."""
        yield from _values(self.path, self._limited([self._known(field)]), field)

    def _limited(self, columns: Sequence[str]) -> Iterator[Any]:
        """Yields the batches of columns; raises if the file expands to an implausible size."""
        limit = DecompressionLimit(self.path)
        with _arrow_errors(self.path):  # damage must not be reported as a failure to write
            for batch in self.batches(columns):
                limit.add(batch.nbytes)
                yield batch

    @cached_property
    def _decompressed(self) -> dict[tuple[str, ...], MappedTable]:
        return {}

    def _decompress(self, columns: Sequence[str]) -> MappedTable:
        arrow = pyarrow()
        cached = cache_folder(self.cache_dir) / f"rows-{digest(self.key, *columns)}.arrow"

        def write(file: BinaryIO) -> None:
            schema = arrow.schema([self.schema.field(column) for column in columns])
            space = DiskSpace(cached.parent)
            with arrow.ipc.new_file(file, schema) as sink:
                for batch in self._limited(columns):
                    batch.validate(full=True)
                    space.reserve(batch.nbytes)
                    sink.write_batch(batch.select(list(columns)))

        with _arrow_errors(self.path), exclusive(cached.with_suffix(".lock")):
            if not _has_rows(cached, self.num_rows):
                keep(cached, write, self.cache_dir, is_required=True)
        return MappedTable(cached)

    def _known(self, field: str) -> str:
        if field not in self.fields:
            raise _no_field(self.path, field, self.fields)
        return field


def open_arrow(path: Path, key: str, cache_dir: str | os.PathLike[str] | None) -> MappedTable | CompressedTable:
    """Opens an Arrow file or stream, the format of Feather files and of Hugging Face datasets."""
    arrow = pyarrow()
    with _arrow_errors(path):
        before = arrow.total_allocated_bytes()
        first = next(_batches(path), None)
        if first is None or arrow.total_allocated_bytes() == before:
            return MappedTable(path)
        count = partial(_count, path)
        return CompressedTable(path, key, cache_dir, first.schema, lambda columns: _batches(path), count)


def open_parquet(path: Path, key: str, cache_dir: str | os.PathLike[str] | None) -> CompressedTable:
    """Opens a Parquet file."""
    arrow = pyarrow()

    def open_() -> Any:
        return arrow.parquet.ParquetFile(str(path), buffer_size=1 << 20, pre_buffer=False)

    def batches(columns: Sequence[str]) -> Iterator[Any]:
        yield from open_().iter_batches(ROWS_AT_ONCE, columns=list(columns))

    with _arrow_errors(path):
        opened = open_()
        return CompressedTable(path, key, cache_dir, opened.schema_arrow, batches, lambda: opened.metadata.num_rows)


@contextmanager
def _arrow_errors(path: Path) -> Iterator[None]:
    """Raises errors of Arrow as DataError with the path of the file."""
    try:
        yield
    except SpanaxError:
        raise
    except (OSError, ValueError, NotImplementedError, MemoryError, LookupError, TypeError) as error:
        detail = " ".join(str(error).split())[:120]
        raise FileError(f"cannot read '{path}'.", where=detail, fix="write the file again, or remove it") from None


def _reader(path: Path) -> Any:
    arrow = pyarrow()
    mapped = arrow.memory_map(str(path))
    try:
        return arrow.ipc.open_file(mapped)
    except arrow.ArrowInvalid:
        mapped.seek(0)
        return arrow.ipc.open_stream(mapped)


def _batches(path: Path) -> Iterator[Any]:
    reader = _reader(path)
    if hasattr(reader, "get_batch"):
        yield from map(reader.get_batch, range(reader.num_record_batches))
    else:
        yield from reader


def _count(path: Path) -> int:
    return sum(batch.num_rows for batch in _batches(path))


def _has_rows(path: Path, num_rows: int) -> bool:
    """Returns whether a file of the cache exists and is complete."""
    try:
        return path.is_file() and _count(path) == num_rows
    except (OSError, ValueError):
        return False


def _no_field(path: Path, field: str, fields: Sequence[str]) -> DataError:
    return DataError(f"'{path}' has no field '{field}'.", where=f"it has {', '.join(fields)[:120]}", fix="--field NAME")


def _column(path: Path, batch: Any, field: str) -> Any:
    """Returns a validated column; invalid offsets would crash the process."""
    if field not in batch.schema.names:
        raise _no_field(path, field, batch.schema.names)
    column = batch.column(batch.schema.names.index(field))
    column.validate(full=True)
    column = getattr(column, "storage", column)
    return column.dictionary_decode() if pyarrow().types.is_dictionary(column.type) else column


def _values(path: Path, batches: Iterator[Any], field: str) -> Iterator[Any]:
    """Yields the texts or the arrays of numbers of a column, in bounded memory."""
    number = 0
    with _arrow_errors(path):
        for batch in batches:
            for start in range(0, batch.num_rows, ROWS_AT_ONCE):
                column = _column(path, batch.slice(start, ROWS_AT_ONCE), field)
                if _is_text(column) and not column.null_count:
                    yield from column.to_pylist()
                else:
                    yield from (_value(path, number + i, column.slice(i, 1)) for i in range(len(column)))
                number += len(column)


def _value(path: Path, index: int, col: Any) -> Any:
    """Returns the value in a column of one row: a number, a text, or an array, whose dims are nested lists."""
    arrow, types, shape = pyarrow(), pyarrow().types, []
    while types.is_list(col.type) or types.is_large_list(col.type) or types.is_fixed_size_list(col.type):
        _check_all(path, index, col)
        lengths = arrow.compute.list_value_length(col).unique().to_pylist()
        if len(lengths) > 1:
            raise DataError(f"row {index:,} of '{path}' has lists of different lengths.", fix="lists of equal length")
        shape.append(lengths[0] if lengths else 0)
        col = col.flatten()
    _check_all(path, index, col)
    if _is_text(col):
        return np.array(col.to_pylist(), object) if shape else col[0].as_py()
    if not (types.is_integer(col.type) or types.is_floating(col.type) or types.is_boolean(col.type)):
        raise DataError(
            f"'{path}' has a field of type {str(col.type)[:80]}, which is neither text nor numbers.",
            fix="numbers; for images, pass a datasets.Dataset in Python, which decodes them",
        )
    array = col.to_numpy(zero_copy_only=False).reshape(shape)
    return array if shape else array[()]


def _is_text(col: Any) -> bool:
    types = pyarrow().types
    return bool(types.is_string(col.type) or types.is_large_string(col.type))


def _check_all(path: Path, index: int, col: Any) -> None:
    if col.null_count:
        raise DataError(f"row {index:,} of '{path}' has a null in a field.", fix="rows with a value in each field")
