"""Tables in files: rows with named fields, split into train and validation, with random access by row."""

import glob
import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from spanax.errors import DataError, MissingFileError
from spanax.sealed import digest
from spanax.train.data.cache import cache_folder, exclusive, reserve, writing
from spanax.train.data.folder_files import check_inside, file_bytes, files_of
from spanax.train.data.order import HELD_OUT, SPLITS

NUM_SAMPLES = 64
SAMPLE_BYTES = 1024
"""The samples that a digest of large files hashes, instead of terabytes."""

HASH_ALL_BYTES = 1 << 26
"""The total size up to which a digest hashes all of the content, which takes a tenth of a second."""

HEADER_BYTES = 128
"""The size of the header of a `.npy` file, which NumPy pads for any number of rows."""

SUFFIXES = {
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".jsonl.gz": "jsonl",
    ".ndjson.gz": "jsonl",
    ".json.gz": "jsonl",
    ".parquet": "parquet",
    ".arrow": "arrow",
    ".feather": "arrow",
    ".array_record": "array_record",
    ".arrayrecord": "array_record",
    ".csv": "csv",
}

_ABOUT_DATA = re.compile(r"(?:readme|licen[cs]e)[^/]*|.*\.(?:md|json)", re.IGNORECASE)
_SIDE = re.compile(r"(train|validation|valid|val|dev|test)(?![a-z])", re.IGNORECASE)


@dataclass(frozen=True)
class Table:
    """The rows of one split.

    Attributes:
      name: the name in errors and saved positions.
      fields: the names of the fields.
      read: yields a field of every row in order, as texts, numbers or arrays, in bounded memory.
      digest: a hash of the content.
      cache_key: the key in the cache, which also changes when files are modified of which the hash covers only samples.
      size_bytes: the size of all files.
      split: `"train"` or `"validation"`.
      holds_out: whether every twentieth row is the validation split; else all rows belong to this split.
      objects: yields some fields of every row as Python objects, with a function that returns where the row is.
    """

    name: str
    fields: tuple[str, ...]
    read: Callable[[str], Iterator[Any]]
    digest: str
    cache_key: str
    size_bytes: int
    split: str = "train"
    holds_out: bool = True
    objects: Callable[[Sequence[str]], Iterator[tuple[Callable[[], str], dict[str, Any]]]] = lambda fields: iter(())

    def values(self, field: str) -> Iterator[tuple[bool, Any]]:
        """Yields a field of all rows of both splits, as pairs (whether the row is held out, value)."""
        for number, value in enumerate(self.read(field)):
            yield self.is_held_out(number), value

    def is_held_out(self, number: int) -> bool:
        """Returns whether the row of a number is in the validation split of a table that has both."""
        return self.holds_out and number % HELD_OUT == 1

    def stored(
        self,
        key: str,
        dtype: np.dtype,
        items: Iterable[tuple[bool, np.ndarray]],
        cache_dir: str | os.PathLike[str] | None,
    ) -> np.ndarray:
        """Returns the rows of an array of the split, memory-mapped from the cache; raises WriteError if that is full.

        `key` is what the array is computed from, besides the content of the table. If the cache has no such array, it
        is written from `items`, which yields for both splits whether rows are held out, and the rows.
        """
        prefix = f"rows-{digest(self.cache_key, key, str(dtype), str(self.holds_out))}"
        paths = [cache_folder(cache_dir) / f"{prefix}-{split}.npy" for split in SPLITS]
        path = paths[self.holds_out and self.split == "validation"]
        with exclusive(path.with_name(f"{prefix}.lock")):
            array = read_array(path, dtype)
            if array is None:
                _write(paths, dtype, items)
                array = read_array(path, dtype)
        assert array is not None, path
        return array


def is_table(source: str | os.PathLike[str]) -> bool:
    """Returns whether a path, a folder or a pattern such as `shards/*.parquet` names tables."""
    path = Path(source)
    return _is_saved(path) or bool(_table_files(path)) if path.is_dir() else kind_of(path) is not None


def kind_of(path: Path) -> str | None:
    """Returns the kind of table by the suffix of a file name; None for other files."""
    return next((kind for suffix, kind in SUFFIXES.items() if path.name.lower().endswith(suffix)), None)


def open_table(source: str | os.PathLike[str], *, split: str = "train") -> Table:
    """Opens one split of a file, of the files of a folder, or of the files that match a pattern.

    If a folder has splits (saved by `DatasetDict.save_to_disk`, or files named `train-...` and `validation-...`), they
    are used; otherwise a twentieth of the rows is held out for validation.
    """
    paths, name, holds_out = _files(source, split)
    kinds = sorted({str(kind_of(path)) for path in paths})
    if len(kinds) > 1:
        raise DataError(f"'{source}' has several kinds of tables: {', '.join(kinds)}.", fix=f"'{source}/*.jsonl'")
    sizes = [file_bytes(path) for path in paths]
    key, cache_key = _digests(paths, sizes)
    fields, read = _opened(paths[0], kinds[0])
    if not fields:
        raise DataError(f"'{paths[0]}' is empty.", fix="a file with rows in it")
    read_all = partial(_read, read, paths[1:], kinds[0])
    objects = partial(_objects, paths, kinds[0])
    return Table(name, fields, read_all, key, cache_key, sum(sizes), split, holds_out, objects)


def _reader(kind: str) -> Any:
    """Returns the module that reads a kind of file; imports only the library of this kind."""
    if kind in ("jsonl", "array_record"):
        from spanax.train.data.formats import records

        return records
    from spanax.train.data.formats import arrow

    return arrow


def _opened(path: Path, kind: str) -> tuple[tuple[str, ...], Callable[[str], Iterator[Any]]]:
    """Returns the fields of a file, and a function that yields one."""
    fields, read = _reader(kind).opened(path, kind)
    return fields, read


def _objects(
    paths: Sequence[Path], kind: str, fields: Sequence[str]
) -> Iterator[tuple[Callable[[], str], dict[str, Any]]]:
    for path in paths:
        for index, row in enumerate(_reader(kind).objects(path, kind, fields)):
            yield partial(_place, path, kind, index), row


def _place(path: Path, kind: str, index: int) -> str:
    return f"'{path}', line {_reader(kind).line_of(path, index):,}" if kind == "jsonl" else f"row {index:,} of '{path}'"


def _read(first: Callable[[str], Iterator[Any]], others: Sequence[Path], kind: str, field: str) -> Iterator[Any]:
    yield from first(field)
    for path in others:
        yield from _opened(path, kind)[1](field)


def _files(source: str | os.PathLike[str], split: str) -> tuple[list[Path], str, bool]:
    """Returns the files of a split in order, their name, and whether validation rows must be held out."""
    path = Path(source)
    if path.is_dir():
        return _files_of_folder(path, split)
    if path.is_file() or (kind_of(path) and not glob.has_magic(str(source))):
        return [path], path.name, True
    files = sorted(Path(name) for name in glob.glob(str(source), recursive=True) if os.path.isfile(name))
    if not files:
        where = f"looked in {Path.cwd()}"
        raise MissingFileError(f"no file matches '{source}'.", where=where, fix="shards/*.parquet")
    return files, str(source), True


def _files_of_folder(folder: Path, split: str) -> tuple[list[Path], str, bool]:
    files = _table_files(folder)
    is_dict = (folder / "dataset_dict.json").is_file()
    names = [file.relative_to(folder) for file in files]
    sides = [name.parts[0] if is_dict else _side(name) for name in names]
    name = folder.name
    holds_out = True
    if is_dict and "train" not in sides:
        where = f"it has {', '.join(sorted({*map(str, sides)})) or 'no rows'}"
        raise DataError(f"'{folder}' has no split 'train'.", where=where, fix="the folder of one of its splits")
    if not files:
        raise DataError(f"'{folder}' has no rows.", fix="Dataset.save_to_disk again")
    if is_dict or ("train" in sides and None not in sides):
        holds_out = "validation" not in sides
        chosen = "train" if holds_out else split
        files = [file for file, side in zip(files, sides, strict=True) if side == chosen]
        name = f"{name}/{chosen}"
    check_inside(folder, files)
    return files, name, holds_out


def _side(path: Path) -> str | None:
    """Returns the split that the first folder or the name of a path indicates, or None."""
    match = _SIDE.match(path.parts[0]) or _SIDE.match(path.name)
    side = match[1].lower() if match else None
    return "validation" if side in ("valid", "val", "dev") else side


def _table_files(folder: Path) -> list[Path]:
    """Returns the tables of a folder that has only tables and files about them, or was saved by `datasets`."""
    files = files_of(folder)
    # `datasets` also caches results of computations, next to a dataset that it saved.
    cached = [file for file in files if file.name.startswith("cache-") and (file.parent / "state.json").is_file()]
    tables = [file for file in files if kind_of(file) and file not in cached]
    others = [file for file in files if not kind_of(file) and not _ABOUT_DATA.fullmatch(file.name)]
    return sorted(tables) if _is_saved(folder) or not others else []


def _is_saved(folder: Path) -> bool:
    return any((folder / name).is_file() for name in ("dataset_dict.json", "state.json"))


def _write(paths: Sequence[Path], dtype: np.dtype, items: Iterable[tuple[bool, np.ndarray]]) -> None:
    """Writes the arrays of the splits in one pass."""
    sizes = [0] * len(paths)
    shape: tuple[int, ...] = ()
    with ExitStack() as stack:
        files = [stack.enter_context(writing(path)) for path in paths]
        for file in files:
            file.write(bytes(HEADER_BYTES))
        for is_held_out, rows in items:
            reserve(paths[0].parent, rows.nbytes)
            files[is_held_out].write(rows.tobytes())
            sizes[is_held_out] += len(rows)
            shape = rows.shape[1:]
        for file, size in zip(files, sizes, strict=True):
            file.seek(0)
            header = {"descr": np.lib.format.dtype_to_descr(dtype), "fortran_order": False, "shape": (size, *shape)}
            np.lib.format.write_array_header_1_0(file, header)
            assert file.tell() == HEADER_BYTES


def read_array(path: Path, dtype: np.dtype) -> np.ndarray | None:
    """Memory-maps an array of the cache; returns None if the file is missing or damaged."""
    try:
        # Only a plain array: np.load would also read an archive. (Arrays of objects cannot be mapped.)
        array = np.asarray(np.lib.format.open_memmap(path, mode="r"))
    except (OSError, ValueError, EOFError):
        return None
    return array if array.dtype == dtype else None


def _digests(paths: Sequence[Path], sizes: Sequence[int]) -> tuple[str, str]:
    """Returns a hash of the content of files, and a key that also changes when large files are modified."""
    is_small = sum(sizes) <= HASH_ALL_BYTES
    length = HASH_ALL_BYTES if is_small else SAMPLE_BYTES
    num_samples = 1 if is_small else max(2, NUM_SAMPLES // len(paths))
    contents: list[str | bytes] = []
    for path, size_bytes in zip(paths, sizes, strict=True):
        contents.append(f"{path.name} {size_bytes}")
        with open(path, "rb") as file:
            for start in np.linspace(0, max(0, size_bytes - length), num_samples, dtype=np.int64).tolist():
                file.seek(start)
                contents.append(file.read(length))
    key = digest(*contents)
    changed = " ".join(str(path.stat().st_mtime_ns) for path in paths)
    return key, key if is_small else digest(key, changed)
