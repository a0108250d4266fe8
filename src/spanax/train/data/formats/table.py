"""Tables in files: rows with named fields, split into train and validation, with random access by row."""

import glob
import os
import re
import stat
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from spanax.documents import read_json
from spanax.errors import DataError, FileError, MissingFileError
from spanax.train.data.elements import digest
from spanax.train.data.text.corpus import HELD_OUT, check_inside, check_split

NUM_SAMPLES, SAMPLE_BYTES = 64, 1024
"""The samples that a digest of large files hashes, instead of terabytes."""

HASH_ALL_BYTES = 1 << 26
"""The total size up to which a digest hashes all of the content, which takes a tenth of a second."""

SUFFIXES = {
    ".jsonl": "jsonl", ".ndjson": "jsonl", ".jsonl.gz": "jsonl", ".ndjson.gz": "jsonl", ".json.gz": "jsonl",
    ".parquet": "parquet", ".arrow": "arrow", ".feather": "arrow",
    ".array_record": "array_record", ".arrayrecord": "array_record",
}  # fmt: skip

_ABOUT_DATA = re.compile(r"(?:readme|licen[cs]e)[^/]*|.*\.(?:md|json)", re.IGNORECASE)
_SIDE = re.compile(r"(train|validation|valid|val|dev|test)(?![a-z])", re.IGNORECASE)


class Part(Protocol):
    """The rows of one file, or of a dataset in memory."""

    @property
    def fields(self) -> tuple[str, ...]:
        """The field names."""

    @property
    def num_rows(self) -> int:
        """The number of rows."""

    def rows(self, indices: Sequence[int], fields: Sequence[str]) -> list[dict[str, Any]]:
        """Returns fields of the rows at the given indices, as arrays, numbers and texts."""

    def values(self, field: str) -> Iterator[Any]:
        """Yields a field of every row in order, as texts or arrays, in bounded memory."""


@dataclass(frozen=True)
class Table:
    """The rows of one split.

    Attributes:
      name: the name in errors and saved positions.
      parts: the rows of each file, concatenated in order.
      digest: a hash of the content.
      changed: the modification times of the files if the digest covers only samples of them; else empty.
      size_bytes: the size of all files.
      split: `"train"` or `"validation"`.
      holds_out: whether every twentieth row is the validation split; else all rows belong to this split.

    Example:
      >>> import tempfile
      >>> path = Path(tempfile.mkdtemp()) / "numbers.jsonl"
      >>> _ = path.write_text("".join(f'{{"x": {i}}}' + chr(10) for i in range(40)))
      >>> table = open_table(path, split="validation")
      >>> table.num_rows, table.rows([0, 1], ["x"])
      (2, [{'x': 1}, {'x': 21}])
    """

    name: str
    parts: tuple[Part, ...]
    digest: str
    size_bytes: int
    split: str = "train"
    holds_out: bool = True
    changed: str = ""

    @property
    def cache_key(self) -> str:
        """The key in the cache, which changes when the files are modified."""
        return digest(self.digest, self.changed) if self.changed else self.digest

    @property
    def fields(self) -> tuple[str, ...]:
        """The field names of the first part."""
        return self.parts[0].fields

    @cached_property
    def num_rows(self) -> int:
        """The number of rows of the split."""
        total = int(self._ends[-1])
        held_out = (total + HELD_OUT - 2) // HELD_OUT if self.holds_out else 0
        return held_out if self.holds_out and self.split == "validation" else total - held_out

    def rows(self, indices: Sequence[int], fields: Sequence[str]) -> list[dict[str, Any]]:
        """Returns fields of the rows of the split at the given indices."""
        numbers = self._numbers(np.asarray(indices, np.int64))
        files = np.searchsorted(self._ends, numbers, side="right")
        result: list[dict[str, Any]] = [{}] * len(numbers)
        for file in np.unique(files):
            (positions,) = np.nonzero(files == file)
            first = int(self._ends[file - 1]) if file else 0
            part_rows = self.parts[file].rows((numbers[positions] - first).tolist(), fields)
            for position, row in zip(positions, part_rows, strict=True):
                result[position] = row
        return result

    def values(self, field: str) -> Iterator[tuple[bool, Any]]:
        """Yields a field of all rows of both splits, as pairs (whether the row is held out, value)."""
        number = 0
        for part in self.parts:
            for value in part.values(field):
                yield self.holds_out and number % HELD_OUT == 1, value
                number += 1

    @cached_property
    def _ends(self) -> np.ndarray:
        return np.cumsum([part.num_rows for part in self.parts], dtype=np.int64)

    def _numbers(self, indices: np.ndarray) -> np.ndarray:
        """Maps row indices of the split to those of the table, where row 1 of every twenty is held out."""
        if not self.holds_out:
            return indices
        if self.split == "validation":
            return indices * HELD_OUT + 1
        groups, offsets = np.divmod(np.maximum(indices - 1, 0), HELD_OUT - 1)
        return np.where(indices == 0, 0, groups * HELD_OUT + offsets + 2)


def is_table(source: str | os.PathLike[str]) -> bool:
    """Returns whether a path, a folder or a pattern such as `shards/*.parquet` names tables.

    Example:
      >>> is_table("a.jsonl"), is_table("shards/*.parquet"), is_table("a.txt")
      (True, True, False)
    """
    path = Path(source)
    if not path.is_dir():
        return kind_of(path) is not None
    return bool(_saved_splits(path)) or _is_saved(path) or bool(_table_files(path))


def kind_of(path: Path) -> str | None:
    """Returns the kind of table by the suffix of a file name; None for other files."""
    return next((kind for suffix, kind in SUFFIXES.items() if path.name.lower().endswith(suffix)), None)


def open_table(
    source: str | os.PathLike[str], *, split: str = "train", cache_dir: str | os.PathLike[str] | None = None
) -> Table:
    """Opens one split of a file, of the files of a folder, or of the files that match a pattern.

    The folder may be one written by `Dataset.save_to_disk` or `DatasetDict.save_to_disk`. If the folder has splits
    (saved as such, or files named `train-...` and `validation-...`), they are used; otherwise a twentieth of the rows
    is held out for validation.

    Raises:
      DataError: no such file exists, or the files are of several kinds.
    """
    check_split(split)
    paths, name, holds_out = _files(source, split)
    kinds = {kind_of(path) for path in paths}
    if len(kinds) > 1:
        listed = ", ".join(sorted(str(kind) for kind in kinds))
        raise DataError(f"'{source}' has several kinds of tables: {listed}.", fix=f"'{source}/*.jsonl'")
    opener = _opener(kinds.pop() or "", cache_dir)
    table = Table(name, tuple(opener(path) for path in paths), _digest(paths), sum(map(_size_bytes, paths)), split)
    return replace(table, holds_out=holds_out, changed=_changed(paths))


def _files(source: str | os.PathLike[str], split: str) -> tuple[list[Path], str, bool]:
    """Returns the files of a split in order, their name, and whether validation rows must be held out."""
    path = Path(source)
    if path.is_file() or (kind_of(path) and not glob.has_magic(str(source))):
        return [path], path.name, True
    if not path.is_dir():
        matches = sorted(Path(name) for name in glob.glob(str(source), recursive=True) if os.path.isfile(name))
        if not matches:
            raise MissingFileError(
                f"no file matches '{source}'.", where=f"looked in {Path.cwd()}", fix="shards/*.parquet"
            )
        return matches, str(source), True
    listed, name, holds_out = _files_of_folder(path, split)
    check_inside(path, listed)
    return listed, name, holds_out


def _files_of_folder(path: Path, split: str) -> tuple[list[Path], str, bool]:
    if splits := _saved_splits(path):
        side = split if split in splits or split == "train" else "train"
        if side not in splits:
            raise DataError(
                f"'{path}' has no split 'train'.", where=f"it has {', '.join(splits)}", fix=f"{path}/{splits[0]}"
            )
        return _saved_files(path / side), f"{path.name}/{side}", "validation" not in splits
    if _is_saved(path):
        return _saved_files(path), path.name, True
    files = _table_files(path)
    sides = {file: _side(file.relative_to(path)) for file in files}
    if "train" not in sides.values() or None in sides.values():
        return files, path.name, True
    has_validation = "validation" in sides.values()
    chosen = split if has_validation else "train"
    return [file for file in files if sides[file] == chosen], f"{path.name}/{chosen}", not has_validation


def _side(path: Path) -> str | None:
    """Returns the split that the first folder or the name of a path indicates, or None."""
    match = _SIDE.match(path.parts[0]) or _SIDE.match(path.name)
    side = match[1].lower() if match else None
    return "validation" if side in ("valid", "val", "dev") else side


def _table_files(folder: Path) -> list[Path]:
    """Returns the tables of a folder that has only tables and files about them; links to folders are not followed."""
    files = []
    for parent, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if not name.startswith(".")]
        files += [Path(parent) / name for name in names if not name.startswith(".")]
    tables = [file for file in files if kind_of(file)]
    others = [file for file in files if not kind_of(file) and not _ABOUT_DATA.fullmatch(file.name)]
    return [] if others else sorted(tables)


def _saved_splits(folder: Path) -> list[str]:
    """Returns the splits of a saved DatasetDict; empty for other folders."""
    if not (folder / "dataset_dict.json").is_file():
        return []
    splits = _metadata(folder / "dataset_dict.json").get("splits")
    return [name for name in splits if Path(str(name)).name == name] if isinstance(splits, list) else []


def _is_saved(folder: Path) -> bool:
    return (folder / "state.json").is_file() and (folder / "dataset_info.json").is_file()


def _saved_files(folder: Path) -> list[Path]:
    listed = _metadata(folder / "state.json").get("_data_files")
    names = (
        [str(entry.get("filename")) for entry in listed if isinstance(entry, Mapping)]
        if isinstance(listed, list)
        else []
    )
    if not names or any(Path(name).name != name or not name.endswith(".arrow") for name in names):
        raise DataError(f"'{folder}' does not list its files.", where="state.json", fix="Dataset.save_to_disk again")
    return [folder / name for name in names]


def _metadata(path: Path) -> Mapping[str, Any]:
    try:
        content = read_json(path)
    except (OSError, ValueError) as error:
        raise FileError(f"cannot read '{path}'.", where=str(error), fix="Dataset.save_to_disk again") from None
    return content if isinstance(content, Mapping) else {}


def _opener(kind: str, cache_dir: str | os.PathLike[str] | None) -> Callable[[Path], Part]:
    """Returns the function that opens files of a kind; imports only the library of that kind."""
    if kind == "jsonl":
        from spanax.train.data.formats.jsonl import JsonRows

        return JsonRows
    if kind == "array_record":
        from spanax.train.data.formats.array_record import ArrayRecordRows

        return ArrayRecordRows
    from spanax.train.data.formats.arrow import open_arrow, open_parquet

    open_ = open_arrow if kind == "arrow" else open_parquet
    return lambda path: open_(path, digest(_digest([path]), _changed([path])), cache_dir)


def _size_bytes(path: Path) -> int:
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):
            raise OSError(None, "it is not a regular file")
        return status.st_size
    except OSError as error:
        raise FileError(f"cannot read '{path}': {error.strerror}.", fix="a readable file") from None


def _is_small(paths: Sequence[Path]) -> bool:
    return sum(map(_size_bytes, paths)) <= HASH_ALL_BYTES


def _changed(paths: Sequence[Path]) -> str:
    """Returns the modification times in nanoseconds; empty if the digest covers all of the content."""
    return "" if _is_small(paths) else " ".join(str(path.stat().st_mtime_ns) for path in paths)


def _digest(paths: Sequence[Path]) -> str:
    contents: list[str | bytes] = []
    num_samples = max(2, NUM_SAMPLES // len(paths))
    is_small = _is_small(paths)
    for path in paths:
        size_bytes = _size_bytes(path)
        contents.append(f"{path.name} {size_bytes}")
        with open(path, "rb") as file:
            if is_small:
                contents.append(file.read(HASH_ALL_BYTES))
                continue
            for start in np.linspace(0, max(0, size_bytes - SAMPLE_BYTES), num_samples, dtype=np.int64).tolist():
                file.seek(start)
                contents.append(file.read(SAMPLE_BYTES))
    return digest(*contents)
