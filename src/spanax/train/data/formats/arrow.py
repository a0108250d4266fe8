"""Reads the rows of Arrow, Feather, Parquet and CSV files with pyarrow, and those of Hugging Face datasets in memory.

Uncompressed Arrow files are memory-mapped. Other files are streamed to read a column, and written once into the cache,
as an uncompressed Arrow file, for random access to rows.

pyarrow's own random access is not used: for 320 random rows of 470 MiB of Parquet, `ArrowRows` takes 4.3 s and 84
MiB of memory (0.05 s from the cache), `pyarrow.dataset` 202 s and 5.8 GiB, because it decodes row groups for each
batch; of uncompressed Arrow, it takes 0.03 s and 15 MiB, `pyarrow.dataset` 1.6 s and 192 MiB. Grain's
`ParquetIterDataset` has no random access, and takes 3.0 GiB for the first rows (`benchmarks/data_formats.py`).
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from spanax.errors import DataError, FileError, NotInstalledError, SpanaxError
from spanax.train.data.cache import check_expansion, exclusive, reserve, writing

ROWS_AT_ONCE = 256
"""The number of decompressed rows in memory; a row group of a Parquet file may have millions."""


def pyarrow() -> Any:
    """Imports and returns pyarrow; raises SpanaxError if it is not installed."""
    try:
        import pyarrow
        import pyarrow.compute
        import pyarrow.csv
        import pyarrow.parquet
    except ImportError:
        raise NotInstalledError(
            "Arrow, Parquet and CSV files need pyarrow.", fix='pip install "spanax[parquet]"'
        ) from None
    return pyarrow


@dataclass(frozen=True)
class ArrowRows:
    """The rows of a file that pyarrow reads.

    Attributes:
      path: the file.
      cached: the file of the cache with the rows of some columns; None if the file itself is uncompressed Arrow.
      schema: the columns and their types.
      batches: streams columns, a few rows at a time.
      known_rows: the number of rows, if the file has it; else the rows are counted.
    """

    path: Path
    cached: Callable[[Sequence[str]], Path] | None
    schema: Any
    batches: Callable[[Sequence[str]], Iterator[Any]]
    known_rows: int | None = None

    @property
    def fields(self) -> tuple[str, ...]:
        return tuple(self.schema.names)

    @cached_property
    def num_rows(self) -> int:
        if self.known_rows is not None:
            return self.known_rows
        with _arrow_errors(self.path):
            return sum(batch.num_rows for batch in self.batches(self.fields[:1]))

    def values(self, field: str) -> Iterator[Any]:
        self._check([field])
        yield from _values(self.path, self._limited([field]))

    def rows(self, indices: Sequence[int], fields: Sequence[str]) -> list[dict[str, Any]]:
        """Returns fields of the rows at the given indices; the first call converts these fields of all rows."""
        self._check(fields)
        columns = tuple(sorted(fields))
        with _arrow_errors(self.path):
            if columns not in self._mapped:
                self._mapped[columns] = MappedRows(self.path, self._written(columns) if self.cached else self.path)
            return self._mapped[columns].rows(indices, fields)

    def _check(self, fields: Sequence[str]) -> None:
        if unknown := next((field for field in fields if field not in self.fields), None):
            where = f"it has {', '.join(self.fields)[:120]}"
            raise DataError(f"'{self.path}' has no field '{unknown}'.", where=where, fix="--field NAME")

    @cached_property
    def _mapped(self) -> "dict[tuple[str, ...], MappedRows]":
        return {}

    def _limited(self, columns: Sequence[str]) -> Iterator[Any]:
        """Yields validated columns, a batch at a time; raises if the file expands to an implausible size."""
        num_bytes = 0
        with _arrow_errors(self.path):  # damage must not be reported as a failure to write
            for batch in self.batches(columns):
                batch = batch.select(list(columns))
                batch.validate(full=True)  # invalid offsets would crash the process, also in `nbytes`
                num_bytes += batch.nbytes if self.cached else 0
                check_expansion(self.path, num_bytes)
                yield batch

    def _written(self, columns: Sequence[str]) -> Path:
        """Writes the rows of columns to the cache, unless they are there."""
        assert self.cached is not None
        arrow = pyarrow()
        cached = self.cached(columns)
        with exclusive(cached.with_suffix(".lock")):
            if not _has_rows(cached, self.num_rows):
                schema = arrow.schema([self.schema.field(column) for column in columns])
                with writing(cached) as file, arrow.ipc.new_file(file, schema) as sink:
                    for batch in self._limited(columns):
                        reserve(cached.parent, batch.nbytes)
                        sink.write_batch(batch)
        return cached


@dataclass(frozen=True)
class MappedRows:
    """The rows of an uncompressed Arrow file, memory-mapped; the untrusted data is validated before use.

    Attributes:
      path: the file that errors name.
      mapped: the file that is read, the same or one of the cache.
    """

    path: Path
    mapped: Path

    def rows(self, indices: Sequence[int], fields: Sequence[str]) -> list[dict[str, Any]]:
        """Returns fields of the rows at the given indices."""
        result = []
        for index in indices:
            number = int(np.searchsorted(self._ends, index, side="right"))
            place = index - (int(self._ends[number - 1]) if number else 0)
            columns = {field: _plain(self._checked(number, field).slice(place, 1)) for field in fields}
            result.append({field: _value(self.path, index, column) for field, column in columns.items()})
        return result

    def _checked(self, number: int, field: str) -> Any:
        """Returns a column of a batch; the first access validates all of it."""
        key = (number, field)
        if key not in self._columns:
            self._columns[key] = self._batches[number].column(field)
            self._columns[key].validate(full=True)
        return self._columns[key]

    @cached_property
    def _columns(self) -> dict[tuple[int, str], Any]:
        return {}

    @cached_property
    def _batches(self) -> list[Any]:
        return list(_batches(self.mapped))

    @cached_property
    def _ends(self) -> np.ndarray:
        return np.cumsum([batch.num_rows for batch in self._batches], dtype=np.int64)


def open_arrow(path: Path, cached: Callable[[Sequence[str]], Path]) -> ArrowRows:
    """Opens an Arrow file or stream, the format of Feather files and of Hugging Face datasets."""
    arrow = pyarrow()
    with _arrow_errors(path):
        schema = _reader(path).schema
        before = arrow.total_allocated_bytes()
        first = next(_batches(path), None)
        is_mapped = first is None or arrow.total_allocated_bytes() == before
        return ArrowRows(path, None if is_mapped else cached, schema, lambda columns: _batches(path))


def open_parquet(path: Path, cached: Callable[[Sequence[str]], Path]) -> ArrowRows:
    """Opens a Parquet file."""
    arrow = pyarrow()

    def open_() -> Any:
        return arrow.parquet.ParquetFile(str(path), buffer_size=1 << 20, pre_buffer=False)

    def batches(columns: Sequence[str]) -> Iterator[Any]:
        yield from open_().iter_batches(ROWS_AT_ONCE, columns=list(columns))

    with _arrow_errors(path):
        opened = open_()
        return ArrowRows(path, cached, opened.schema_arrow, batches, opened.metadata.num_rows)


def open_csv(path: Path, cached: Callable[[Sequence[str]], Path]) -> ArrowRows:
    """Opens a CSV file with a header; the first megabyte determines whether a column has numbers or texts."""
    arrow = pyarrow()

    def open_(schema: Any = None, columns: Sequence[str] = ()) -> Any:
        convert = arrow.csv.ConvertOptions(column_types=schema, include_columns=columns, strings_can_be_null=False)
        read = arrow.csv.ReadOptions(use_threads=False)  # with threads, an error names no row
        return arrow.csv.open_csv(str(path), read, arrow.csv.ParseOptions(newlines_in_values=True), convert)

    with _arrow_errors(path):
        inferred = list(open_().schema)
        schema = arrow.schema([each if _is_numeric(each) else each.with_type(arrow.string()) for each in inferred])
        return ArrowRows(path, cached, schema, lambda columns: open_(schema, columns))


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


def _has_rows(path: Path, num_rows: int) -> bool:
    """Returns whether a file of the cache exists and is complete."""
    try:
        return path.is_file() and sum(batch.num_rows for batch in _batches(path)) == num_rows
    except (OSError, ValueError):
        return False


def _plain(column: Any) -> Any:
    """Returns a column without an extension type or a dictionary."""
    column = getattr(column, "storage", column)
    return column.dictionary_decode() if pyarrow().types.is_dictionary(column.type) else column


def _values(path: Path, batches: Iterator[Any]) -> Iterator[Any]:
    """Yields the texts or the arrays of numbers of a column, in bounded memory."""
    number = 0
    with _arrow_errors(path):
        for batch in batches:
            for start in range(0, batch.num_rows, ROWS_AT_ONCE):
                column = _plain(batch.column(0).slice(start, ROWS_AT_ONCE))
                if _is_text(column) and not column.null_count:
                    yield from column.to_pylist()
                elif _is_numeric(column) and not column.null_count:
                    yield from column.to_numpy(zero_copy_only=False)
                else:
                    yield from (_value(path, number + i, column.slice(i, 1)) for i in range(len(column)))
                number += len(column)


def _value(path: Path, index: int, col: Any) -> Any:
    """Returns the value in a column of one row: a number, a text, or an array, whose dims are nested lists."""
    arrow = pyarrow()
    types = pyarrow().types
    shape = []
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
    if not _is_numeric(col):
        raise DataError(
            f"'{path}' has a field of type {str(col.type)[:80]}, which is neither text nor numbers.",
            fix="numbers; for images, pass a datasets.Dataset in Python, which decodes them",
        )
    array = col.to_numpy(zero_copy_only=False).reshape(shape)
    return array if shape else array[()]


def _is_numeric(col: Any) -> bool:
    types = pyarrow().types
    return bool(types.is_integer(col.type) or types.is_floating(col.type) or types.is_boolean(col.type))


def _is_text(col: Any) -> bool:
    types = pyarrow().types
    return bool(types.is_string(col.type) or types.is_large_string(col.type))


def _check_all(path: Path, index: int, col: Any) -> None:
    if col.null_count:
        raise DataError(f"row {index:,} of '{path}' has a null in a field.", fix="rows with a value in each field")


@dataclass(frozen=True)
class DatasetRows:
    """The rows of a `datasets.Dataset`, in NumPy types unless the dataset has a format."""

    dataset: Any

    @property
    def fields(self) -> tuple[str, ...]:
        return tuple(self.dataset.column_names)

    @property
    def num_rows(self) -> int:
        return len(self.dataset)

    def rows(self, indices: Sequence[int], fields: Sequence[str]) -> list[dict[str, Any]]:
        dataset = self.dataset if self.dataset.format["type"] else self.dataset.with_format("numpy")
        columns = dataset[[int(index) for index in indices]]
        return [{field: columns[field][i] for field in fields} for i in range(len(indices))]

    def values(self, field: str) -> Iterator[Any]:
        for batch in self.dataset.select_columns([field]).with_format(None).iter(ROWS_AT_ONCE):
            yield from batch[field]
