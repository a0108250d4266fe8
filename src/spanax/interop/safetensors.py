"""Tensors of safetensors files, read by the safetensors package and written one tensor at a time.

The package validates headers. Its `save_file` needs all tensors of a file in memory: 548 MiB for 512 MiB, and `Writer`
15 MiB, for the same bytes.

Source: the section "Format" of huggingface/safetensors, README.md.
"""

import json
import math
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import ml_dtypes  # noqa: F401, which registers bfloat16 with NumPy
import numpy as np
from safetensors import SafetensorError, safe_open

from spanax.documents import parse_json, read_bytes
from spanax.errors import FileErrors, MissingFileError, WeightsError, first_line

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"

DTYPES = {
    "U64": "uint64",
    "I64": "int64",
    "F64": "float64",
    "F32": "float32",
    "U32": "uint32",
    "I32": "int32",
    "BF16": "bfloat16",
    "F16": "float16",
    "U16": "uint16",
    "I16": "int16",
    "I8": "int8",
    "U8": "uint8",
    "BOOL": "bool",
}
"""The dtypes that the package reads into NumPy arrays, in the order in which it writes tensors."""

_NAMES = {name: format_name for format_name, name in DTYPES.items()}
MAX_FILES = 4096


@dataclass(frozen=True)
class Tensor:
    """A tensor in a file that is read lazily."""

    file: Path
    name: str
    dtype: str
    shape: tuple[int, ...]

    def read(self) -> np.ndarray:
        """Reads the values of the tensor into memory.

        Raises:
          DataError: the file was changed, or cannot be read.
        """
        try:
            with safe_open(self.file, framework="numpy", backend="pread") as file:
                values = file.get_tensor(self.name)
        except (OSError, SafetensorError) as error:
            raise WeightsError(f"cannot read '{self.file}'.", where=first_line(error)) from None
        if (values.shape, str(values.dtype)) != (self.shape, self.dtype):
            raise WeightsError(f"'{self.file}' was changed while it was read.")
        return values


def tensors(path: Path) -> dict[str, Tensor]:
    """Returns the tensors of a file, or of a folder from `save_pretrained`, by name; only headers are read.

    Raises:
      DataError: there are no tensors, they are pickled, or a header or index is invalid.
    """
    if not path.exists():
        raise MissingFileError(f"'{path}' does not exist.", fix="a folder with model.safetensors and config.json")
    file = path / SINGLE if path.is_dir() else path
    if not file.exists() and (path / INDEX).exists():
        return _indexed(path)
    if not file.exists() or file.suffix != ".safetensors":
        _refuse(path)
    return _header(inside(file, file.parent))


def _indexed(folder: Path) -> dict[str, Tensor]:
    """Returns the tensors of the files that an index lists."""
    path = inside(folder / INDEX, folder)
    listed = parse_index(partial(read_bytes, path), path)
    headers = {name: _header(inside(folder / name, folder)) for name in dict.fromkeys(listed.values())}
    differ = listed.items() ^ {(tensor, name) for name, header in headers.items() for tensor in header}
    if differ:
        where = ", ".join(f"{tensor[:100]} in {name[:100]}" for tensor, name in sorted(differ)[:3])
        raise WeightsError(f"the index '{path}' and its files differ in {len(differ)} tensors.", where=where)
    return {tensor: entry for header in headers.values() for tensor, entry in header.items()}


def inside(path: Path, folder: Path) -> Path:
    """Resolves a file of a folder; a link may point into the folder, or to the `blobs` of its Hugging Face cache.

    Raises:
      DataError: the target is outside of these folders, or not a regular file.
    """
    real = path.resolve()
    root = folder.resolve()
    blobs = root.parent.parent / "blobs"
    if not real.is_file():
        raise MissingFileError(f"'{path}' is missing, or not a regular file.", where=str(folder))
    if root not in real.parents and not (root.parent.name == "snapshots" and real.parent == blobs):
        raise WeightsError(
            f"'{path}' is a link out of its folder.", where=f"it leads to {real}", fix="copy the file there"
        )
    return real


class Writer:
    """A context manager that writes a file: first the header, then the tensors in any order.

    Tensors are laid out as by the safetensors package: by dtype, widest first, then by name.

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
        order = list(_NAMES)
        header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        offset = 0
        for name in sorted(listed, key=lambda name: (order.index(str(listed[name].dtype)), name)):
            dtype = str(listed[name].dtype)
            shape = list(listed[name].shape)
            end = offset + math.prod(shape) * np.dtype(dtype).itemsize
            header[name] = {"dtype": _NAMES[dtype], "shape": shape, "data_offsets": [offset, end]}
            offset = end
        text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
        text += b" " * (-len(text) % 8)
        self._starts = {name: 8 + len(text) + header[name]["data_offsets"][0] for name in listed}
        self._listed = listed
        self._file = open(path, "xb")
        self._file.write(len(text).to_bytes(8, "little") + text)
        self._file.truncate(8 + len(text) + offset)

    def put(self, name: str, tensor: np.ndarray) -> None:
        """Writes a tensor at its offset."""
        expected = self._listed[name]
        assert (tensor.shape, str(tensor.dtype)) == (tuple(expected.shape), str(expected.dtype)), name
        self._file.seek(self._starts.pop(name))
        self._file.write(np.ascontiguousarray(tensor).reshape(-1).view(np.uint8).data)

    def __enter__(self) -> "Writer":
        return self

    def __exit__(self, kind: Any, *_: Any) -> None:
        with self._file:
            if kind is None:
                assert not self._starts, f"never written: {sorted(self._starts)[:3]}"
                self._file.flush()
                os.fsync(self._file.fileno())


def _header(path: Path) -> dict[str, Tensor]:
    """Returns the tensors of a file, whose header the package validates: its tensors cover the file without overlap."""
    try:
        with safe_open(path, framework="numpy", backend="pread") as file:
            slices = {name: file.get_slice(name) for name in file.offset_keys()}
            entries = [(name, part.get_dtype(), tuple(part.get_shape())) for name, part in slices.items()]
    except (OSError, SafetensorError) as error:
        raise WeightsError(f"'{path}' is not a safetensors file.", where=first_line(error)) from None
    if unknown := [f"'{name[:100]}' is {dtype}" for name, dtype, _ in entries if dtype not in DTYPES]:
        what = f"'{path}' has {len(unknown)} tensors of a dtype that is not supported."
        raise WeightsError(what, where=", ".join(unknown[:3]))
    return {name: Tensor(path, name, DTYPES[dtype], shape) for name, dtype, shape in entries}


def parse_index(read: Callable[[], bytes], path: Path) -> dict[str, str]:
    """Parses an index: name of a tensor -> name of its file; `path` is for error messages.

    Raises:
      DataError: the index cannot be read, is invalid, or a name in it is not that of a safetensors file.
    """
    with FileErrors(WeightsError, f"'{path}' is not an index of safetensors files."):
        index = parse_json(read())
        listed = index.get("weight_map") if isinstance(index, dict) else None
        if not isinstance(listed, dict) or not listed or len(set(map(str, listed.values()))) > MAX_FILES:
            raise ValueError("its weight_map is not a table of tensors")
        for name in listed.values():
            if not isinstance(name, str) or not re.fullmatch(r"\w[\w.-]*\.safetensors", name):
                raise ValueError(f"{repr(name)[:200]} is not a safetensors file in its folder")
    return listed


def _refuse(path: Path) -> NoReturn:
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
