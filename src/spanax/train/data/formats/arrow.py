"""Reads the fields of Arrow, Feather, Parquet and CSV files with pyarrow.

Each field is streamed, and validated before use, since damaged offsets would crash the process.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from spanax.errors import DataError, FileError, NotInstalledError, SpanaxError
from spanax.train.data.cache import check_expansion

ROWS_AT_ONCE = 256
"""The number of decompressed rows in memory; a row group of a Parquet file may have millions."""


def opened(path: Path, kind: str) -> tuple[tuple[str, ...], Callable[[str], Iterator[Any]]]:
    """Returns the columns of a file of kind `arrow`, `csv` or `parquet`, and a function that yields the rows of one."""
    with _arrow_errors(path):
        names, read = _opened(path, kind)
        return tuple(names), partial(_rows, path, names, read)


def objects(path: Path, kind: str, fields: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Yields the given fields of every row as Python has them; those of a CSV file as texts."""
    num_bytes = 0
    with _arrow_errors(path):
        if kind == "csv":
            text = _pyarrow().string()
            batches = _open_csv(path, fields, _pyarrow().schema([(field, text) for field in fields]))
        else:
            batches = _opened(path, kind)[1](*fields)
        for batch in batches:
            batch.validate(full=True)
            num_bytes += batch.nbytes
            check_expansion(path, num_bytes)
            columns = batch.select(list(fields))
            for start in range(0, len(columns), ROWS_AT_ONCE):
                yield from columns.slice(start, ROWS_AT_ONCE).to_pylist()


def _rows(path: Path, names: Sequence[str], read: Callable[..., Iterable[Any]], field: str) -> Iterator[Any]:
    """Yields a column as texts, numbers or arrays."""
    if field not in names:
        where = f"it has {', '.join(names)[:120]}"
        raise DataError(f"'{path}' has no field '{field}'.", where=where, fix="--field NAME")
    number = 0
    num_bytes = 0
    with _arrow_errors(path):
        for batch in read(field):
            column = batch.column(field)
            column.validate(full=True)  # invalid offsets would crash the process, also in `nbytes`
            num_bytes += column.nbytes
            check_expansion(path, num_bytes)
            for start in range(0, len(column), ROWS_AT_ONCE):
                rows = column.slice(start, ROWS_AT_ONCE)
                yield from _values(path, number, rows)
                number += len(rows)


def _pyarrow() -> Any:
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


def _opened(path: Path, kind: str) -> tuple[Sequence[str], Callable[..., Iterable[Any]]]:
    """Returns the columns of a file, and a function that streams batches of rows with some of them."""
    arrow = _pyarrow()
    if kind == "parquet":
        file = arrow.parquet.ParquetFile(str(path), buffer_size=1 << 20, pre_buffer=False)
        return file.schema_arrow.names, lambda *fields: file.iter_batches(ROWS_AT_ONCE, columns=fields)
    if kind == "csv":
        schema = _open_csv(path).schema
        # The first megabyte determines whether a column has numbers or texts.
        types = arrow.schema([each if _is_numeric(each.type) else each.with_type(arrow.string()) for each in schema])
        return schema.names, lambda *fields: _open_csv(path, fields, types)
    return _open_ipc(path).schema.names, lambda *fields: _ipc_batches(path)


def _open_ipc(path: Path) -> Any:
    arrow = _pyarrow()
    mapped = arrow.memory_map(str(path))
    try:
        return arrow.ipc.open_file(mapped)
    except arrow.ArrowInvalid:  # a stream, as `datasets` writes it
        mapped.seek(0)
        return arrow.ipc.open_stream(mapped)


def _ipc_batches(path: Path) -> Iterable[Any]:
    reader = _open_ipc(path)
    return map(reader.get_batch, range(reader.num_record_batches)) if hasattr(reader, "get_batch") else reader


def _open_csv(path: Path, columns: Sequence[str] = (), types: Any = None) -> Any:
    csv = _pyarrow().csv
    convert = csv.ConvertOptions(column_types=types, include_columns=columns, strings_can_be_null=False)
    read = csv.ReadOptions(use_threads=False)  # with threads, an error names no row
    return csv.open_csv(str(path), read, csv.ParseOptions(newlines_in_values=True), convert)


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


def _values(path: Path, first: int, rows: Any) -> Iterable[Any]:
    """Returns the values of rows, of which the first has the number `first` in its file."""
    try:
        return _array(path, rows)
    except ValueError as error:
        if len(rows) == 1:
            message = f"row {first:,} of '{path}' has {error}."
            raise DataError(message, fix="a value in each field, and lists of equal length") from None
    # Rows may differ in length, but not within.
    return [value for row in range(len(rows)) for value in _values(path, first + row, rows.slice(row, 1))]


def _array(path: Path, rows: Any) -> Iterable[Any]:
    """Returns texts, or an array whose dims are nested lists; raises ValueError if the rows do not form one."""
    arrow = _pyarrow()
    types = arrow.types
    inner = getattr(rows, "storage", rows)  # of an extension type
    inner = inner.dictionary_decode() if types.is_dictionary(inner.type) else inner
    shape = [len(inner)]
    while types.is_list(inner.type) or types.is_large_list(inner.type) or types.is_fixed_size_list(inner.type):
        _check_no_null(inner)
        lengths = arrow.compute.list_value_length(inner).unique().to_pylist()
        if len(lengths) > 1:
            raise ValueError("lists of different lengths")
        shape += lengths or [0]
        inner = inner.flatten()
    _check_no_null(inner)
    if len(shape) == 1 and (types.is_string(inner.type) or types.is_large_string(inner.type)):
        return list(inner.to_pylist())
    if not _is_numeric(inner.type):
        raise DataError(
            f"'{path}' has a field of type {str(rows.type)[:80]}, which is neither text nor numbers.",
            fix="numbers; for images, pass a datasets.Dataset in Python, which decodes them",
        )
    return inner.to_numpy(zero_copy_only=False).reshape(shape)  # type: ignore[no-any-return]


def _check_no_null(column: Any) -> None:
    if column.null_count:
        raise ValueError("a null in a field")


def _is_numeric(kind: Any) -> bool:
    types = _pyarrow().types
    return bool(types.is_integer(kind) or types.is_floating(kind) or types.is_boolean(kind))
