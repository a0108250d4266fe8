"""Files of tensors from strangers: every header, index and link is validated."""

import json
import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from spanax.errors import DataError
from spanax.interop import import_weights
from spanax.interop.safetensors import INDEX, SINGLE, Writer, tensors

ONE = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}


def file(header: Any, data: bytes = bytes(8)) -> bytes:
    """A file with a header, as it is written there."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def two() -> bytes:
    return file({"a": ONE, "b": {"dtype": "F32", "shape": [2], "data_offsets": [8, 16]}}, bytes(16))


HOSTILE: dict[str, tuple[bytes, str]] = {
    "nothing": (b"", "header too small"),
    "no JSON": (file(b"\x80\x04\x95pickle"), "not a safetensors file"),
    "a dtype that NumPy does not have": (file({"a": ONE | {"dtype": "F4", "shape": [16]}}), "'a' is F4"),
}
"""The package finds all but the last one, and has tests of its own."""


@pytest.mark.parametrize("name", HOSTILE)
def test_an_invalid_header_raises(name: str, tmp_path: Path) -> None:
    content, says = HOSTILE[name]
    (tmp_path / SINGLE).write_bytes(content)
    with pytest.raises(DataError, match=says) as caught:
        tensors(tmp_path)
    assert len(str(caught.value).splitlines()) <= 4


def indexed(folder: Path, weight_map: Any) -> None:
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    (folder / "one.safetensors").write_bytes(two())


INDEXES: dict[str, tuple[Any, str]] = {
    "a way out": ({"a": "../one.safetensors", "b": "one.safetensors"}, "is not a safetensors file in its folder"),
    "no file": ({"a": "two.safetensors", "b": "one.safetensors"}, "missing, or not a regular file"),
    "pickled": ({"a": "one.bin", "b": "one.safetensors"}, "is not a safetensors file in its folder"),
    "nothing": ({}, "not a table of tensors"),
    "a list": (["a"], "not a table of tensors"),
    "one tensor too few": ({"a": "one.safetensors"}, "differ in 1 tensors"),
    "one too many": ({name: "one.safetensors" for name in "abc"}, "differ in 1 tensors"),
}


@pytest.mark.parametrize("name", INDEXES)
def test_an_invalid_index_raises(name: str, tmp_path: Path) -> None:
    weight_map, says = INDEXES[name]
    indexed(tmp_path, weight_map)
    with pytest.raises(DataError, match=says):
        tensors(tmp_path)
    indexed(tmp_path, {"a": "one.safetensors", "b": "one.safetensors"})
    assert sorted(tensors(tmp_path)) == ["a", "b"]


def linked_out(folder: Path) -> None:
    (folder.parent / "elsewhere").write_bytes(two())
    (folder / SINGLE).symlink_to(folder.parent / "elsewhere")


def linked_index(folder: Path) -> None:
    indexed(folder, {"a": "one.safetensors", "b": "one.safetensors"})
    (folder / "one.safetensors").rename(folder.parent / "elsewhere")
    (folder / "one.safetensors").symlink_to(folder.parent / "elsewhere")


def piped(folder: Path) -> None:
    os.mkfifo(folder / SINGLE)


def pickled(folder: Path) -> None:
    (folder / "pytorch_model.bin").write_bytes(b"\x80\x04")


PLACES: dict[str, tuple[Callable[[Path], None], str]] = {
    "a link out": (linked_out, "is a link out of its folder"),
    "a link out of an index": (linked_index, "is a link out of its folder"),
    "a pipe": (piped, "not a regular file"),
    "pickled weights": (pickled, "has pickled weights"),
    "nothing": (lambda folder: None, "has no safetensors files"),
}


@pytest.mark.parametrize("name", PLACES)
def test_a_folder_without_weights_raises(name: str, tmp_path: Path) -> None:
    prepare, says = PLACES[name]
    folder = tmp_path / "folder"
    folder.mkdir()
    prepare(folder)
    with pytest.raises(DataError, match=says):
        import_weights(folder, "gpt2", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_copied_files_must_not_be_links(tmp_path: Path) -> None:
    """The target of a linked tokenizer.json would be copied, and published by the next export."""
    weights = Path(__file__).parent / "weights" / "gpt2"
    for name in (SINGLE, "config.json"):
        (tmp_path / name).write_bytes((weights / name).read_bytes())
    (tmp_path / "tokenizer.json").symlink_to("/etc/passwd")
    with pytest.raises(DataError, match="is a link out of its folder"):
        import_weights(tmp_path, "gpt2", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_the_cache_of_the_hub_is_read(tmp_path: Path) -> None:
    """Its snapshots are links to blobs in the cache."""
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshots" / "607a30"
    blobs.mkdir()
    snapshot.mkdir(parents=True)
    (blobs / "248dfc").write_bytes(two())
    (snapshot / SINGLE).symlink_to("../../blobs/248dfc")
    assert sorted(tensors(snapshot)) == ["a", "b"]


def test_a_file_that_is_truncated_raises(tmp_path: Path) -> None:
    (tmp_path / SINGLE).write_bytes(two())
    by_name = tensors(tmp_path)
    os.truncate(tmp_path / SINGLE, (tmp_path / SINGLE).stat().st_size - 4)
    with pytest.raises(DataError, match="not fully covered"):
        by_name["b"].read()


@pytest.mark.parametrize("dtype", ["float64", "float32", "float16", "bfloat16", "int64", "uint8", "bool"])
def test_every_dtype_is_restored(dtype: str, tmp_path: Path) -> None:
    expected = np.arange(6).reshape(3, 2).astype(dtype)
    with Writer(tmp_path / SINGLE, {"a": expected, "none": expected[:0], "one": expected[0, 1]}) as file:
        for name, array in (("one", expected[0, 1]), ("none", expected[:0]), ("a", expected)):
            file.put(name, np.asarray(array))
    by_name = {name: tensor.read() for name, tensor in tensors(tmp_path).items()}
    assert by_name["a"].dtype == expected.dtype and by_name["a"].tobytes() == expected.tobytes()
    assert by_name["none"].shape == (0, 2) and by_name["one"].shape == ()


def test_files_are_those_of_the_safetensors_package(tmp_path: Path) -> None:
    arrays = {
        name: np.arange(12).reshape(3, 4).astype(dtype)
        for name, dtype in {"z": "float32", "é": "float16", "b": "float32", "c": "uint8", "d": "int64"}.items()
    }
    with Writer(tmp_path / "ours", arrays) as file:
        for name in arrays:
            file.put(name, arrays[name])
    save_file(arrays, tmp_path / "theirs", metadata={"format": "pt"})
    assert (tmp_path / "ours").read_bytes() == (tmp_path / "theirs").read_bytes()
