"""Readers and writers of the safetensors format that hold one tensor in memory at a time.

A file consists of the length of its header (8 bytes, little-endian), the header (JSON: dtype, shape and offsets of
each tensor), and the contiguous bytes of the tensors. The safetensors package memory-maps the files it reads, so the
pages that were read count as resident, and writes all tensors of a file at once. For 1.1 GiB it takes 1,122 and
1,108 MiB of memory (0.8.0), and this module 19 MiB.

Source: the section "Format" of huggingface/safetensors, README.md.
"""

import json
import math
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import ml_dtypes  # noqa: F401, which registers bfloat16 and similar dtypes with NumPy
import numpy as np

from spanax.documents import MAX_BYTES, parse_json, read_bytes
from spanax.errors import DataError, EntryError, first_line

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"

DTYPES = {
    "U64": "uint64", "I64": "int64", "F64": "float64", "F32": "float32", "U32": "uint32", "I32": "int32",
    "BF16": "bfloat16", "F16": "float16", "U16": "uint16", "I16": "int16", "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2", "I8": "int8", "U8": "uint8", "BOOL": "bool",
}  # fmt: skip
"""The dtypes of the format and their NumPy names, in the order in which the package writes tensors."""

_ORDER = {name: place for place, name in enumerate(DTYPES.values())}
_NAMES = {name: format_name for format_name, name in DTYPES.items()}
MAX_DIMS, MAX_FILES = 8, 4096


@dataclass(frozen=True)
class Tensor:
    """A tensor in a file that is read lazily; `start` is its offset in the file in bytes.

    Example:
      >>> Tensor(Path("model.safetensors"), "bfloat16", (4, 2), start=96).num_bytes
      16
    """

    file: Path
    dtype: str
    shape: tuple[int, ...]
    start: int

    @property
    def num_bytes(self) -> int:
        """The size of the tensor in bytes."""
        return math.prod(self.shape) * np.dtype(self.dtype).itemsize

    def read(self) -> np.ndarray:
        """Reads the values of the tensor into memory.

        Raises:
          DataError: the file was truncated, or cannot be read.
        """
        array = np.empty(self.shape, self.dtype)
        try:
            with open(self.file, "rb", buffering=0) as file:
                file.seek(self.start)
                into = array.reshape(-1).view(np.uint8).data
                while len(into) and (count := file.readinto(into)):
                    into = into[count:]
        except OSError as error:
            raise DataError(f"cannot read '{self.file}'.", where=first_line(error)) from None
        if len(into):
            raise DataError(f"'{self.file}' has become shorter while it was read.")
        return array


def tensors(path: Path) -> dict[str, Tensor]:
    """Returns the tensors of a file, or of a folder from `save_pretrained`, by name; only headers are read.

    Raises:
      DataError: there are no tensors, they are pickled, or a header or index is invalid.
    """
    if path.is_file():
        return _header(inside(path, path.parent)) if path.suffix == ".safetensors" else _refuse(path)
    if not path.is_dir():
        raise DataError(f"there is no file or folder '{path}'.", fix="a folder with model.safetensors and config.json")
    if (path / SINGLE).exists() or not (path / INDEX).exists():
        single = path / SINGLE
        return _header(inside(single, path)) if single.exists() else _refuse(path)
    by_name: dict[str, Tensor] = {}
    listed = read_index(path)
    for name in dict.fromkeys(listed.values()):
        for tensor, tensor_entry in _header(inside(path / name, path)).items():
            if listed.get(tensor) != name:
                where = f"'{INDEX}' has it in '{listed.get(tensor)}'" if tensor in listed else f"not in '{INDEX}'"
                raise DataError(f"'{name}' holds the tensor '{tensor[:200]}'.", where=where)
            by_name[tensor] = tensor_entry
    missing = [tensor for tensor in listed if tensor not in by_name]
    if missing:
        raise DataError(
            f"{len(missing)} tensors are not in the files that '{INDEX}' names.",
            where=", ".join(f"{tensor[:100]} in {listed[tensor][:100]}" for tensor in missing[:3]),
        )
    return by_name


def inside(path: Path, folder: Path) -> Path:
    """Resolves a file of a folder; a link may point into the folder, or to the `blobs` of its Hugging Face cache.

    Raises:
      DataError: the target is outside of these folders, or not a regular file.
    """
    real, root = path.resolve(), folder.resolve()
    blobs = root.parent.parent / "blobs"
    if not real.is_file():
        raise DataError(f"'{path}' is missing, or no plain file.", where=str(folder))
    if root not in real.parents and not (root.parent.name == "snapshots" and real.parent == blobs):
        raise DataError(
            f"'{path}' is a link out of its folder.", where=f"it leads to {real}", fix="copy the file there"
        )
    return real


def order(listed: Mapping[str, Any]) -> list[str]:
    """Returns names in the order in which the safetensors package writes them: by dtype, widest first, then by name.

    Example:
      >>> order({"b": np.zeros(1, "float16"), "c": np.zeros(1, "float32"), "a": np.zeros(1, "float16")})
      ['c', 'a', 'b']
    """
    return sorted(listed, key=lambda name: (_ORDER[str(listed[name].dtype)], name))


class Writer:
    """A context manager that writes a file: first the header, then the tensors in any order.

    Args:
      path: the file, which must not exist.
      listed: name -> an object with a dtype and a shape.

    Example:
      >>> import tempfile
      >>> path = Path(tempfile.mkdtemp(), "model.safetensors")
      >>> with Writer(path, {"w": np.zeros((2, 2), "bfloat16")}) as file:
      ...     file.put("w", np.ones((2, 2), "bfloat16"))
      >>> tensors(path)["w"].read().tolist()
      [[1.0, 1.0], [1.0, 1.0]]
    """

    def __init__(self, path: Path, listed: Mapping[str, Any]):
        self._path, self._left, offset = path, dict(listed), 0
        header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        for name in order(listed):
            end = offset + math.prod(listed[name].shape) * np.dtype(listed[name].dtype).itemsize
            dtype, shape = _NAMES[str(listed[name].dtype)], list(listed[name].shape)
            header[name], offset = {"dtype": dtype, "shape": shape, "data_offsets": [offset, end]}, end
        text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
        text += b" " * (-len(text) % 8)
        self._starts = {name: 8 + len(text) + header[name]["data_offsets"][0] for name in listed}
        self._file = open(path, "xb", buffering=0)
        self._file.write(len(text).to_bytes(8, "little") + text)
        self._file.truncate(8 + len(text) + offset)

    def put(self, name: str, tensor: np.ndarray) -> None:
        """Writes a tensor at its offset."""
        entry = self._left.pop(name)
        assert (tensor.shape, str(tensor.dtype)) == (tuple(entry.shape), str(entry.dtype)), name
        remaining = np.ascontiguousarray(tensor).reshape(-1).view(np.uint8).data
        self._file.seek(self._starts[name])
        while len(remaining):
            remaining = remaining[self._file.write(remaining) :]

    def __enter__(self) -> "Writer":
        return self

    def __exit__(self, kind: Any, *_: Any) -> None:
        if kind is None and not self._left:
            os.fsync(self._file.fileno())
        self._file.close()
        assert kind is not None or not self._left, f"never written: {sorted(self._left)[:3]}"


def _header(path: Path) -> dict[str, Tensor]:
    """Returns the tensors of a file, validating its header against the size of the file."""
    try:
        with open(path, "rb") as file:
            length, size = int.from_bytes(file.read(8), "little"), path.stat().st_size
            if size < 8 or length > size - 8:
                raise ValueError(f"its header has {length:,} bytes, and the file {size:,}")
            if length > MAX_BYTES:
                raise ValueError(f"its header has {length:,} bytes, and at most {MAX_BYTES:,} are read")
            listed = parse_json(file.read(length))
        if not isinstance(listed, dict):
            raise ValueError("its header is no object")
        listed.pop("__metadata__", None)
        spans = {name: _span(name, entry) for name, entry in listed.items()}
        offset = 0
        for start, end, name in sorted((*span[2], name) for name, span in spans.items()):
            if start != offset:
                raise ValueError(f"'{name[:200]}' begins at byte {start:,}, and what is before it ends at {offset:,}")
            offset = end
        if offset != size - 8 - length:
            raise ValueError(f"its tensors take {offset:,} bytes, and it holds {size - 8 - length:,}")
    except (OSError, ValueError) as error:
        raise DataError(f"'{path}' is no safetensors file.", where=first_line(error)) from None
    return {name: Tensor(path, dtype, shape, 8 + length + span[0]) for name, (dtype, shape, span) in spans.items()}


def _span(name: str, entry: Any) -> tuple[str, tuple[int, ...], tuple[int, int]]:
    """Validates the header of a tensor, and returns its dtype, shape and offsets."""
    known = isinstance(entry, dict) and entry.keys() == {"dtype", "shape", "data_offsets"}
    if not known or not isinstance(entry["dtype"], str) or entry["dtype"] not in DTYPES:
        raise ValueError(f"'{name[:200]}' is {repr(entry)[:200]}: no tensor that is known here")
    shape, offsets = entry["shape"], entry["data_offsets"]
    if not _are_counts(shape) or len(shape) > MAX_DIMS or not _are_counts(offsets) or len(offsets) != 2:
        raise ValueError(f"'{name[:200]}' has shape {repr(shape)[:100]} at {repr(offsets)[:100]}")
    dtype, (start, end) = DTYPES[entry["dtype"]], offsets
    if math.prod(shape) * np.dtype(dtype).itemsize != end - start:
        raise ValueError(f"'{name[:200]}', {dtype}{shape}, takes {end - start:,} bytes")
    return dtype, tuple(shape), (start, end)


def _are_counts(values: Any) -> bool:
    return isinstance(values, list) and all(type(value) is int and 0 <= value < 1 << 62 for value in values)


def read_index(folder: Path) -> dict[str, str]:
    """Reads the index of a folder: name of a tensor -> name of its file.

    Raises:
      DataError: the index is invalid, or a name in it is not that of a safetensors file.
    """
    path = inside(folder / INDEX, folder)
    return parse_index(partial(read_bytes, path), path)


def parse_index(read: Callable[[], bytes], path: Path) -> dict[str, str]:
    """Parses an index: name of a tensor -> name of its file; `path` is for error messages.

    Raises:
      DataError: the index cannot be read, is invalid, or a name in it is not that of a safetensors file.
    """
    try:
        listed = parse_json(read())["weight_map"]
        if not isinstance(listed, dict) or not listed or len(set(map(str, listed.values()))) > MAX_FILES:
            raise ValueError("its weight_map is no table of tensors")
        for name in listed.values():
            if not isinstance(name, str) or not re.fullmatch(r"\w[\w.-]*\.safetensors", name):
                raise ValueError(f"{repr(name)[:200]} is no file beside it")
    except EntryError:
        raise
    except (OSError, ValueError, KeyError, TypeError) as error:
        reason = "it has no weight_map" if isinstance(error, KeyError | TypeError) else first_line(error)
        raise DataError(f"'{path}' is no index of safetensors.", where=reason) from None
    return listed


def _refuse(path: Path) -> Any:
    """Raises the error for a path without safetensors."""
    others = [path] if path.is_file() else sorted(path.iterdir())
    pickled = [other.name for other in others if other.suffix in (".bin", ".pt", ".pth", ".ckpt", ".pkl")]
    if pickled:
        raise DataError(
            f"'{path}' holds pickled weights, which run code when they are read.",
            where=pickled[0],
            fix="write them as safetensors where you trust them: model.save_pretrained(folder), by transformers",
        )
    raise DataError(f"'{path}' holds no safetensors.", fix="a folder with model.safetensors and config.json")


def split(sizes: Sequence[tuple[str, int]], most_bytes: int) -> list[list[str]]:
    """Partitions names into files in order, each up to `most_bytes` unless it has a single larger tensor.

    Example:
      >>> split([("a", 3), ("b", 3), ("c", 9), ("d", 1)], most_bytes=6)
      [['a', 'b'], ['c'], ['d']]
    """
    files: list[list[str]] = [[]]
    room = most_bytes
    for name, size in sizes:
        if files[-1] and size > room:
            files.append([])
            room = most_bytes
        files[-1].append(name)
        room -= size
    return files
