"""Tensors of safetensors files, read by the safetensors package and written one tensor at a time.

The package validates headers. Tensors are read with NumPy at their offsets: for NumPy, safetensors 0.8.0 has no float8.
Its `save_file` needs all tensors of a file in memory: 548 MiB for 512 MiB, and `Writer` 15 MiB, for the same bytes.

Source: the section "Format" of huggingface/safetensors, README.md.
"""

import json
import math
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import ml_dtypes  # noqa: F401, which registers bfloat16 and similar dtypes with NumPy
import numpy as np
from safetensors import SafetensorError, safe_open

from spanax.documents import parse_json, read_bytes
from spanax.errors import EntryError, MissingFileError, WeightsError, first_line

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"

DTYPES = {
    "U64": "uint64", "I64": "int64", "F64": "float64", "F32": "float32", "U32": "uint32", "I32": "int32",
    "BF16": "bfloat16", "F16": "float16", "U16": "uint16", "I16": "int16", "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2", "I8": "int8", "U8": "uint8", "BOOL": "bool",
}  # fmt: skip
"""The dtypes of the format and their NumPy names, in the order in which the package writes tensors."""

_ORDER = {name: place for place, name in enumerate(DTYPES.values())}
_NAMES = {name: format_name for format_name, name in DTYPES.items()}
MAX_FILES = 4096


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
        try:
            content = np.fromfile(self.file, np.uint8, self.num_bytes, offset=self.start)
        except OSError as error:
            raise WeightsError(f"cannot read '{self.file}'.", where=first_line(error)) from None
        if content.size < self.num_bytes:
            raise WeightsError(f"'{self.file}' was truncated while it was read.")
        return content.view(self.dtype).reshape(self.shape)


def tensors(path: Path) -> dict[str, Tensor]:
    """Returns the tensors of a file, or of a folder from `save_pretrained`, by name; only headers are read.

    Raises:
      DataError: there are no tensors, they are pickled, or a header or index is invalid.
    """
    if path.is_file():
        return _header(inside(path, path.parent)) if path.suffix == ".safetensors" else _refuse(path)
    if not path.is_dir():
        raise MissingFileError(f"'{path}' does not exist.", fix="a folder with model.safetensors and config.json")
    if (path / SINGLE).exists() or not (path / INDEX).exists():
        single = path / SINGLE
        return _header(inside(single, path)) if single.exists() else _refuse(path)
    by_name: dict[str, Tensor] = {}
    listed = read_index(path)
    for name in dict.fromkeys(listed.values()):
        for tensor, tensor_entry in _header(inside(path / name, path)).items():
            if listed.get(tensor) != name:
                where = f"'{INDEX}' lists it in '{listed.get(tensor)}'" if tensor in listed else f"not in '{INDEX}'"
                raise WeightsError(f"'{name}' has the tensor '{tensor[:200]}'.", where=where)
            by_name[tensor] = tensor_entry
    missing = [tensor for tensor in listed if tensor not in by_name]
    if missing:
        raise WeightsError(
            f"{len(missing)} tensors are not in the files that '{INDEX}' lists.",
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
        raise MissingFileError(f"'{path}' is missing, or not a regular file.", where=str(folder))
    if root not in real.parents and not (root.parent.name == "snapshots" and real.parent == blobs):
        raise WeightsError(
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
    """Returns the tensors of a file, whose header the package validates: its tensors cover the file without overlap."""
    try:
        with safe_open(path, framework="numpy", backend="pread") as file:
            slices = {name: file.get_slice(name) for name in file.offset_keys()}
            entries = [(name, part.get_dtype(), tuple(part.get_shape())) for name, part in slices.items()]
        size = path.stat().st_size
    except (OSError, SafetensorError) as error:
        raise WeightsError(f"'{path}' is not a safetensors file.", where=first_line(error)) from None
    if unknown := [f"'{name[:100]}' is {dtype}" for name, dtype, _ in entries if dtype not in DTYPES]:
        what = f"'{path}' has {len(unknown)} tensors of a dtype that is not supported."
        raise WeightsError(what, where=", ".join(unknown[:3]))
    listed = {name: Tensor(path, DTYPES[dtype], shape, start=0) for name, dtype, shape in entries}
    start = size - sum(tensor.num_bytes for tensor in listed.values())
    for name, tensor in listed.items():
        listed[name] = replace(tensor, start=start)
        start += tensor.num_bytes
    return listed


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
            raise ValueError("its weight_map is not a table of tensors")
        for name in listed.values():
            if not isinstance(name, str) or not re.fullmatch(r"\w[\w.-]*\.safetensors", name):
                raise ValueError(f"{repr(name)[:200]} is not a safetensors file in its folder")
    except EntryError:
        raise
    except (OSError, ValueError, KeyError, TypeError) as error:
        reason = "it has no weight_map" if isinstance(error, KeyError | TypeError) else first_line(error)
        raise WeightsError(f"'{path}' is not an index of safetensors files.", where=reason) from None
    return listed


def _refuse(path: Path) -> Any:
    """Raises the error for a path without safetensors."""
    others = [path] if path.is_file() else sorted(path.iterdir())
    pickled = [other.name for other in others if other.suffix in (".bin", ".pt", ".pth", ".ckpt", ".pkl")]
    if pickled:
        raise WeightsError(
            f"'{path}' has pickled weights, which can run code when they are loaded.",
            where=pickled[0],
            fix="if you trust them, convert them to safetensors with transformers: model.save_pretrained(folder)",
        )
    raise MissingFileError(f"'{path}' has no safetensors files.", fix="a folder with model.safetensors and config.json")


def partition(sizes: Sequence[tuple[str, int]], most_bytes: int) -> list[list[str]]:
    """Partitions names into files in order, each up to `most_bytes` unless it has a single larger tensor.

    Example:
      >>> partition([("a", 3), ("b", 3), ("c", 9), ("d", 1)], most_bytes=6)
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
