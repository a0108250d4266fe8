"""Reads the rows of Arrow, Feather and Parquet files.

Uncompressed files are memory-mapped. Compressed files are streamed to read a column, and decompressed once into the
cache for random access to rows.
"""

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from spanax.errors import DataError, SpanaxError, WriteError
from spanax.run.data.cache import alone, cache_folder, keep
from spanax.run.data.elements import digest
from spanax.run.data.formats.decompression import Room, Unpacking

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
        raise SpanaxError("Arrow and Parquet files need pyarrow.", fix='pip install "spanax[parquet]"') from None
    return pyarrow


@dataclass(frozen=True)
class MappedTable:
    """The rows of an uncompressed Arrow file; the untrusted data is validated before use.

    Attributes:
      path: the file.
      open: opens a reader of the file.
    """

    path: Path
    open: Callable[[], Any]

    @cached_property
    def fields(self) -> tuple[str, ...]:
        """The names of the columns."""
        with _telling(self.path):
            return tuple(self.open().schema.names)

    @property
    def num_rows(self) -> int:
        """The number of rows."""
        return int(self._ends[-1]) if len(self._ends) else 0

    def rows(self, indices: Sequence[int], fields: Sequence[str]) -> list[dict[str, Any]]:
        """Returns fields of the rows at the given indices."""
        result = []
        with _telling(self.path):
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
        yield from _values(self.path, _batches(self.open), field)

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
        with _telling(self.path):
            return list(_batches(self.open))

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
        with _telling(self.path):
            return self.count()

    def rows(self, indices: Sequence[int], fields: Sequence[str]) -> list[dict[str, Any]]:
        """Returns fields of the rows at the given indices; the first call decompresses these fields of all rows."""
        columns = tuple(sorted(self._known(field) for field in fields))
        if columns not in self._unpacked:
            self._unpacked[columns] = self._unpack(columns)
        return self._unpacked[columns].rows(indices, fields)

    def values(self, field: str) -> Iterator[Any]:
        """Yields a field of every row in order."""
        yield from _values(self.path, self._counted([self._known(field)]), field)

    def _counted(self, columns: Sequence[str]) -> Iterator[Any]:
        """Yields the batches of columns; raises if the file expands to an implausible size."""
        unpacking = Unpacking(self.path)
        for batch in self.batches(columns):
            unpacking.add(batch.nbytes)
            yield batch

    @cached_property
    def _unpacked(self) -> dict[tuple[str, ...], MappedTable]:
        return {}

    def _unpack(self, columns: Sequence[str]) -> MappedTable:
        arrow = pyarrow()
        cached = cache_folder(self.cache_dir) / f"rows-{digest(self.key, *columns)}.arrow"

        def write(file: BinaryIO) -> None:
            schema = arrow.schema([self.schema.field(column) for column in columns])
            room = Room(cached.parent)
            with arrow.ipc.new_file(file, schema) as sink:
                for batch in self._counted(columns):
                    batch.validate(full=True)
                    room.take(batch.nbytes)
                    sink.write_batch(batch.select(list(columns)))

        with _telling(self.path), alone(cached.with_suffix(".lock")):
            if not _is_whole(cached, self.num_rows):
                keep(cached, write, self.cache_dir)
        if not cached.is_file():
            message = f"there is no place for the unpacked rows of '{self.path}'."
            raise WriteError(message, where=str(cached), fix="XDG_CACHE_HOME=DIR, a folder that can be written")
        return MappedTable(cached, lambda: _reader(cached))

    def _known(self, field: str) -> str:
        if field not in self.fields:
            raise _no_field(self.path, field, self.fields)
        return field


def open_arrow(path: Path, key: str, cache_dir: str | os.PathLike[str] | None) -> MappedTable | CompressedTable:
    """Opens an Arrow file or stream, the format of Feather files and of Hugging Face datasets."""
    arrow = pyarrow()

    def open_() -> Any:
        return _reader(path)

    def count() -> int:
        return sum(batch.num_rows for batch in _batches(open_))

    with _telling(path):
        before = arrow.total_allocated_bytes()
        first = next(_batches(open_), None)
        if first is None or arrow.total_allocated_bytes() == before:
            return MappedTable(path, open_)
        return CompressedTable(path, key, cache_dir, open_().schema, lambda columns: _batches(open_), count)


def open_parquet(path: Path, key: str, cache_dir: str | os.PathLike[str] | None) -> CompressedTable:
    """Opens a Parquet file."""
    arrow = pyarrow()

    def open_() -> Any:
        return arrow.parquet.ParquetFile(str(path), buffer_size=1 << 20, pre_buffer=False)

    def batches(columns: Sequence[str]) -> Iterator[Any]:
        yield from open_().iter_batches(ROWS_AT_ONCE, columns=list(columns))

    with _telling(path):
        opened = open_()
        return CompressedTable(path, key, cache_dir, opened.schema_arrow, batches, lambda: opened.metadata.num_rows)


@contextmanager
def _telling(path: Path) -> Iterator[None]:
    """Raises errors of Arrow as DataError with the path of the file."""
    try:
        yield
    except SpanaxError:
        raise
    except (OSError, ValueError, NotImplementedError, MemoryError, LookupError, TypeError) as error:
        detail = " ".join(str(error).split())[:120]
        raise DataError(f"cannot read '{path}'.", where=detail, fix="write the file again, or leave it out") from None


def _reader(path: Path) -> Any:
    arrow = pyarrow()
    mapped = arrow.memory_map(str(path))
    try:
        return arrow.ipc.open_file(mapped)
    except arrow.ArrowInvalid:
        mapped.seek(0)
        return arrow.ipc.open_stream(mapped)


def _batches(open_: Callable[[], Any]) -> Iterator[Any]:
    reader = open_()
    if hasattr(reader, "get_batch"):
        yield from map(reader.get_batch, range(reader.num_record_batches))
    else:
        yield from reader


def _is_whole(path: Path, num_rows: int) -> bool:
    """Returns whether a file of the cache exists and is complete."""
    try:
        return path.is_file() and sum(batch.num_rows for batch in _batches(lambda: _reader(path))) == num_rows
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
    types, number = pyarrow().types, 0
    with _telling(path):
        for batch in batches:
            for start in range(0, batch.num_rows, ROWS_AT_ONCE):
                column = _column(path, batch.slice(start, ROWS_AT_ONCE), field)
                if (types.is_string(column.type) or types.is_large_string(column.type)) and not column.null_count:
                    yield from column.to_pylist()
                else:
                    yield from (_value(path, number + i, column.slice(i, 1)) for i in range(len(column)))
                number += len(column)


def _value(path: Path, index: int, col: Any) -> Any:
    """Returns the value in a column of one row: a number, a text, or an array, whose dims are nested lists."""
    arrow, shape = pyarrow(), []
    types = arrow.types
    while (is_list := types.is_list(col.type) or types.is_large_list(col.type)) or types.is_fixed_size_list(col.type):
        _check_all(path, index, col)
        lengths = np.diff(col.offsets.to_numpy()) if is_list else np.full(len(col), col.type.list_size)
        if (lengths != lengths[:1]).any():
            raise DataError(f"the lists in row {index:,} of '{path}' are of several lengths.", fix="equal ones")
        shape.append(int(lengths[0]) if len(lengths) else 0)
        col = col.flatten()
    _check_all(path, index, col)
    if types.is_string(col.type) or types.is_large_string(col.type):
        return np.array(col.to_pylist(), object) if shape else col[0].as_py()
    if not (types.is_integer(col.type) or types.is_floating(col.type) or types.is_boolean(col.type)):
        raise DataError(
            f"'{path}' holds {str(col.type)[:80]}: neither text nor numbers.",
            fix="numbers; pictures as a datasets.Dataset in Python, which unpacks them",
        )
    array = col.to_numpy(zero_copy_only=False).reshape(shape)
    return array if shape else array[()]


def _check_all(path: Path, index: int, col: Any) -> None:
    if col.null_count:
        raise DataError(f"row {index:,} of '{path}' has nothing in a field.", fix="rows that have all fields")
