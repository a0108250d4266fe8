"""Reads the rows of Arrow, Feather, Parquet and CSV files with pyarrow, and those of Hugging Face datasets in memory.

Each column is streamed, and validated before use, since damaged offsets would crash the process.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from spanax.errors import DataError, FileError, NotInstalledError, SpanaxError
from spanax.train.data.cache import check_expansion

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
      fields: the names of its columns.
      batches: streams a column, a few rows at a time.
    """

    path: Path
    fields: tuple[str, ...]
    batches: Callable[[str], Iterator[Any]]

    def values(self, field: str) -> Iterator[Any]:
        if field not in self.fields:
            where = f"it has {', '.join(self.fields)[:120]}"
            raise DataError(f"'{self.path}' has no field '{field}'.", where=where, fix="--field NAME")
        number = 0
        num_bytes = 0
        with _arrow_errors(self.path):
            for batch in self.batches(field):
                column = batch.column(field)
                column.validate(full=True)  # invalid offsets would crash the process, also in `nbytes`
                num_bytes += column.nbytes
                check_expansion(self.path, num_bytes)
                for start in range(0, len(column), ROWS_AT_ONCE):
                    rows = column.slice(start, ROWS_AT_ONCE)
                    yield from _values(self.path, number, rows)
                    number += len(rows)


def open_arrow(path: Path) -> ArrowRows:
    """Opens an Arrow file or stream, the format of Feather files and of Hugging Face datasets."""
    with _arrow_errors(path):
        return ArrowRows(path, tuple(_reader(path).schema.names), lambda column: _batches(path))


def open_parquet(path: Path) -> ArrowRows:
    """Opens a Parquet file."""
    arrow = pyarrow()

    def open_() -> Any:
        return arrow.parquet.ParquetFile(str(path), buffer_size=1 << 20, pre_buffer=False)

    def batches(column: str) -> Iterator[Any]:
        yield from open_().iter_batches(ROWS_AT_ONCE, columns=[column])

    with _arrow_errors(path):
        return ArrowRows(path, tuple(open_().schema_arrow.names), batches)


def open_csv(path: Path) -> ArrowRows:
    """Opens a CSV file with a header; the first megabyte determines whether a column has numbers or texts."""
    arrow = pyarrow()

    def open_(schema: Any = None, columns: Sequence[str] = ()) -> Any:
        convert = arrow.csv.ConvertOptions(column_types=schema, include_columns=columns, strings_can_be_null=False)
        read = arrow.csv.ReadOptions(use_threads=False)  # with threads, an error names no row
        return arrow.csv.open_csv(str(path), read, arrow.csv.ParseOptions(newlines_in_values=True), convert)

    with _arrow_errors(path):
        inferred = list(open_().schema)
        schema = arrow.schema([each if _is_numeric(each) else each.with_type(arrow.string()) for each in inferred])
        return ArrowRows(path, tuple(schema.names), lambda column: open_(schema, [column]))


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


def _values(path: Path, first: int, column: Any) -> Iterable[Any]:
    """Returns the values of rows: numbers, texts, or arrays, whose dims are nested lists.

    Args:
      path: the file that errors name.
      first: the number of the first row in the file.
      column: the rows.
    """
    arrow = pyarrow()
    types = arrow.types
    inner = getattr(column, "storage", column)  # of an extension type
    inner = inner.dictionary_decode() if types.is_dictionary(inner.type) else inner
    shape = [len(inner)]
    problem = None
    while types.is_list(inner.type) or types.is_large_list(inner.type) or types.is_fixed_size_list(inner.type):
        lengths = arrow.compute.list_value_length(inner).unique().to_pylist()
        problem = problem or _problem(inner, lengths)
        shape.append(lengths[0] if lengths else 0)
        inner = inner.flatten()
    problem = problem or _problem(inner, [])
    if problem and len(column) > 1:  # rows may differ in length, but not within
        return [value for row in range(len(column)) for value in _values(path, first + row, column.slice(row, 1))]
    if problem:
        message, fix = problem
        raise DataError(f"row {first:,} of '{path}' has {message}.", fix=fix)
    if _is_text(inner):
        texts: list[Any] = inner.to_pylist()
        return texts if len(shape) == 1 else [np.array(texts, object)]
    if not _is_numeric(inner):
        raise DataError(
            f"'{path}' has a field of type {str(inner.type)[:80]}, which is neither text nor numbers.",
            fix="numbers; for images, pass a datasets.Dataset in Python, which decodes them",
        )
    array: np.ndarray = inner.to_numpy(zero_copy_only=False)
    return array.reshape(shape)


def _problem(column: Any, lengths: Sequence[Any]) -> tuple[str, str] | None:
    """Returns why values do not form one array, and what to write instead; None if they do."""
    if column.null_count:
        return "a null in a field", "rows with a value in each field"
    if len(lengths) > 1:
        return "lists of different lengths", "lists of equal length"
    return None


def _is_numeric(col: Any) -> bool:
    types = pyarrow().types
    return bool(types.is_integer(col.type) or types.is_floating(col.type) or types.is_boolean(col.type))


def _is_text(col: Any) -> bool:
    types = pyarrow().types
    return bool(types.is_string(col.type) or types.is_large_string(col.type))


@dataclass(frozen=True)
class DatasetRows:
    """The rows of a `datasets.Dataset`."""

    dataset: Any

    @property
    def fields(self) -> tuple[str, ...]:
        return tuple(self.dataset.column_names)

    def values(self, field: str) -> Iterator[Any]:
        for batch in self.dataset.select_columns([field]).with_format(None).iter(ROWS_AT_ONCE):
            yield from batch[field]
