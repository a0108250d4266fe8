"""Table: rows with named fields in files, split into train and validation, read one by one or a field at a time."""

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
from spanax.errors import DataError
from spanax.run.data.elements import digest
from spanax.run.data.text.corpus import HELD_OUT, check_inside, check_split

NUM_SAMPLES, SAMPLE_BYTES = 64, 1024
"""What tells the content of files apart without reading terabytes."""

READ_WHOLE_BYTES = 1 << 26
"""Files of up to so many bytes together are told apart by all of their content: a tenth of a second."""

SUFFIXES = {
    ".jsonl": "jsonl", ".ndjson": "jsonl", ".jsonl.gz": "jsonl", ".ndjson.gz": "jsonl", ".json.gz": "jsonl",
    ".parquet": "parquet", ".arrow": "arrow", ".feather": "arrow",
    ".array_record": "array_record", ".arrayrecord": "array_record",
}  # fmt: skip

_SAID_OF_DATA = re.compile(r"(?:readme|licen[cs]e)[^/]*|.*\.(?:md|json)", re.IGNORECASE)
_SIDE = re.compile(r"(train|validation|valid|val|dev|test)(?![a-z])", re.IGNORECASE)


class Part(Protocol):
    """The rows of one file, or of a dataset in memory."""

    @property
    def fields(self) -> tuple[str, ...]:
        """The names that a row has."""

    @property
    def num_rows(self) -> int:
        """How many rows there are."""

    def rows(self, indices: Sequence[int], fields: Sequence[str]) -> list[dict[str, Any]]:
        """Some rows, with these fields as arrays and numbers."""

    def values(self, field: str) -> Iterator[Any]:
        """One field of all rows in their order, as texts or arrays, in bounded memory."""


@dataclass(frozen=True)
class Table:
    """The rows of one split.

    Attributes:
      name: what errors and saved positions call it.
      parts: where the rows are, one behind the other.
      digest: tells its content from that of others.
      changed: when the files were last changed, where their content is told apart by samples; else empty.
      size_bytes: of all files.
      split: `"train"` or `"validation"`.
      holds_out: whether every twentieth row is the validation split; else all rows are of this one.

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
        """Tells what is kept of it from what was kept of the same files before they changed."""
        return digest(self.digest, self.changed) if self.changed else self.digest

    @property
    def fields(self) -> tuple[str, ...]:
        """The names that a row of the first part has."""
        return self.parts[0].fields

    @cached_property
    def num_rows(self) -> int:
        """How many rows the split has."""
        total = int(self._ends[-1])
        held_out = (total + HELD_OUT - 2) // HELD_OUT if self.holds_out else 0
        return held_out if self.holds_out and self.split == "validation" else total - held_out

    def rows(self, indices: Sequence[int], fields: Sequence[str]) -> list[dict[str, Any]]:
        """Some rows of the split."""
        numbers = self._numbers(np.asarray(indices, np.int64))
        files = np.searchsorted(self._ends, numbers, side="right")
        found: list[dict[str, Any]] = [{}] * len(numbers)
        for file in np.unique(files):
            (here,) = np.nonzero(files == file)
            first = int(self._ends[file - 1]) if file else 0
            part_rows = self.parts[file].rows((numbers[here] - first).tolist(), fields)
            for place, row in zip(here, part_rows, strict=True):
                found[place] = row
        return found

    def values(self, field: str) -> Iterator[tuple[bool, Any]]:
        """One field of all rows of both splits: whether the row is held out, and what it holds."""
        number = 0
        for part in self.parts:
            for value in part.values(field):
                yield self.holds_out and number % HELD_OUT == 1, value
                number += 1

    @cached_property
    def _ends(self) -> np.ndarray:
        return np.cumsum([part.num_rows for part in self.parts], dtype=np.int64)

    def _numbers(self, indices: np.ndarray) -> np.ndarray:
        """Rows of the split among the rows of all: row 1 of every twenty is held out."""
        if not self.holds_out:
            return indices
        if self.split == "validation":
            return indices * HELD_OUT + 1
        turns, rest = np.divmod(np.maximum(indices - 1, 0), HELD_OUT - 1)
        return np.where(indices == 0, 0, turns * HELD_OUT + rest + 2)


def is_table(source: str | os.PathLike[str]) -> bool:
    """Whether a path, a folder or a pattern such as `shards/*.parquet` names tables.

    Example:
      >>> is_table("a.jsonl"), is_table("shards/*.parquet"), is_table("a.txt")
      (True, True, False)
    """
    path = Path(source)
    if not path.is_dir():
        return kind_of(path) is not None
    return bool(_saved_splits(path)) or _is_saved(path) or bool(_table_files(path))


def kind_of(path: Path) -> str | None:
    """The kind of table that a file name says; None for other files."""
    return next((kind for suffix, kind in SUFFIXES.items() if path.name.lower().endswith(suffix)), None)


def open_table(
    source: str | os.PathLike[str], *, split: str = "train", cache_dir: str | os.PathLike[str] | None = None
) -> Table:
    """The rows of one split of a file, of a folder of files, or of a pattern.

    A folder that `Dataset.save_to_disk` or `DatasetDict.save_to_disk` wrote is one too. Where a folder has splits of
    its own (saved as such, or files called `train-...` and `validation-...`) these are taken, else a twentieth of the
    rows is held out.

    Raises:
      DataError: there is no such file, or they are of several kinds.
    """
    check_split(split)
    paths, name, holds_out = _files(source, split)
    kinds = {kind_of(path) for path in paths}
    if len(kinds) > 1:
        told = ", ".join(sorted(str(kind) for kind in kinds))
        raise DataError(f"'{source}' holds several kinds of tables: {told}.", fix=f"'{source}/*.jsonl', say")
    opener = _opener(kinds.pop() or "", cache_dir)
    table = Table(name, tuple(opener(path) for path in paths), _digest(paths), sum(map(_size_bytes, paths)), split)
    return replace(table, holds_out=holds_out, changed=_changed(paths))


def _files(source: str | os.PathLike[str], split: str) -> tuple[list[Path], str, bool]:
    """The files of a split in their order, what to call them, and whether validation is still to be held out."""
    path = Path(source)
    if path.is_file() or (kind_of(path) and not glob.has_magic(str(source))):
        return [path], path.name, True
    if not path.is_dir():
        found = sorted(Path(name) for name in glob.glob(str(source), recursive=True) if os.path.isfile(name))
        if not found:
            raise DataError(f"no file is called '{source}'.", where=f"looked in {Path.cwd()}", fix="shards/*.parquet")
        return found, str(source), True
    listed, name, holds_out = _files_of_folder(path, split)
    check_inside(path, listed)
    return listed, name, holds_out


def _files_of_folder(path: Path, split: str) -> tuple[list[Path], str, bool]:
    if splits := _saved_splits(path):
        side = split if split in splits or split == "train" else "train"
        if side not in splits:
            raise DataError(f"'{path}' has no split 'train'.", where=f"it has {', '.join(splits)}", fix="name one")
        return _saved_files(path / side), f"{path.name}/{side}", "validation" not in splits
    if _is_saved(path):
        return _saved_files(path), path.name, True
    files = _table_files(path)
    sides = {file: _side(file.relative_to(path)) for file in files}
    if "train" not in sides.values() or None in sides.values():
        return files, path.name, True
    has_validation = "validation" in sides.values()
    wanted = split if has_validation else "train"
    return [file for file in files if sides[file] == wanted], f"{path.name}/{wanted}", not has_validation


def _side(path: Path) -> str | None:
    """The split that a path says, by its first folder or its name."""
    found = _SIDE.match(path.parts[0]) or _SIDE.match(path.name)
    side = found[1].lower() if found else None
    return "validation" if side in ("valid", "val", "dev") else side


def _table_files(folder: Path) -> list[Path]:
    """The tables of a folder in which nothing else lies but what says something of them; no links to folders."""
    files = []
    for parent, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if not name.startswith(".")]
        files += [Path(parent) / name for name in names if not name.startswith(".")]
    tables = [file for file in files if kind_of(file)]
    others = [file for file in files if not kind_of(file) and not _SAID_OF_DATA.fullmatch(file.name)]
    return [] if others else sorted(tables)


def _saved_splits(folder: Path) -> list[str]:
    """The splits of a saved DatasetDict; none of other folders."""
    if not (folder / "dataset_dict.json").is_file():
        return []
    said = _said(folder / "dataset_dict.json").get("splits")
    return [name for name in said if Path(str(name)).name == name] if isinstance(said, list) else []


def _is_saved(folder: Path) -> bool:
    return (folder / "state.json").is_file() and (folder / "dataset_info.json").is_file()


def _saved_files(folder: Path) -> list[Path]:
    listed = _said(folder / "state.json").get("_data_files")
    names = [str(one.get("filename")) for one in listed if isinstance(one, Mapping)] if isinstance(listed, list) else []
    if not names or any(Path(name).name != name or not name.endswith(".arrow") for name in names):
        raise DataError(f"'{folder}' names no files of its own.", where="state.json", fix="Dataset.save_to_disk again")
    return [folder / name for name in names]


def _said(path: Path) -> Mapping[str, Any]:
    try:
        found = read_json(path)
    except (OSError, ValueError) as error:
        raise DataError(f"cannot read '{path}'.", where=str(error), fix="Dataset.save_to_disk again") from None
    return found if isinstance(found, Mapping) else {}


def _opener(kind: str, cache_dir: str | os.PathLike[str] | None) -> Callable[[Path], Part]:
    """What opens a file of a kind; the libraries behind are imported for their own kind only."""
    if kind == "jsonl":
        from spanax.run.data.formats.jsonl import JsonRows

        return JsonRows
    if kind == "array_record":
        from spanax.run.data.formats.array_record import ArrayRecordRows

        return ArrayRecordRows
    from spanax.run.data.formats.arrow import open_arrow, open_parquet

    open_ = open_arrow if kind == "arrow" else open_parquet
    return lambda path: open_(path, digest(_digest([path]), _changed([path])), cache_dir)


def _size_bytes(path: Path) -> int:
    try:
        found = path.stat()
        if not stat.S_ISREG(found.st_mode):
            raise OSError(None, "it is no plain file")
        return found.st_size
    except OSError as error:
        raise DataError(f"cannot read '{path}': {error.strerror}.", fix="a file that you may read") from None


def _is_small(paths: Sequence[Path]) -> bool:
    return sum(map(_size_bytes, paths)) <= READ_WHOLE_BYTES


def _changed(paths: Sequence[Path]) -> str:
    """When files were last changed, in nanoseconds; empty where their digest is of all of their content."""
    return "" if _is_small(paths) else " ".join(str(path.stat().st_mtime_ns) for path in paths)


def _digest(paths: Sequence[Path]) -> str:
    told: list[str | bytes] = []
    num_samples = max(2, NUM_SAMPLES // len(paths))
    is_small = _is_small(paths)
    for path in paths:
        size_bytes = _size_bytes(path)
        told.append(f"{path.name} {size_bytes}")
        with open(path, "rb") as file:
            if is_small:
                told.append(file.read(READ_WHOLE_BYTES))
                continue
            for start in np.linspace(0, max(0, size_bytes - SAMPLE_BYTES), num_samples, dtype=np.int64).tolist():
                file.seek(start)
                told.append(file.read(SAMPLE_BYTES))
    return digest(*told)
