"""Kept: the files that lie beside weights and go with them, and the folder they all go into."""

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from spanax.documents import parse_json
from spanax.entries.folder import Folder
from spanax.entries.names import IMPORTED, MODEL, MODEL_FILE_BYTES, Name
from spanax.errors import DataError, EntryError, WriteError, first_line
from spanax.interop.safetensors import INDEX, SINGLE, inside


def auxiliary_files(folder: Path) -> list[Path]:
    """The files of a folder that go with its weights.

    Raises:
      DataError: one of them is a link out of the folder, or far too large.
    """
    names = (*IMPORTED[:-1], *((INDEX,) if not (folder / SINGLE).exists() else ()))
    found = [folder / name for name in names if (folder / name).exists() or (folder / name).is_symlink()]
    for path in found:
        size = inside(path, folder).stat().st_size
        if size > MODEL_FILE_BYTES:
            raise DataError(f"'{path}' has {size:,} bytes, and at most {MODEL_FILE_BYTES:,} are taken along.")
    return found


@contextmanager
def writing(folder: Path) -> Iterator[None]:
    """A new or empty folder to write into; whatever goes wrong, nothing is left in it.

    Raises:
      WriteError: it holds something, or cannot be written.
    """
    is_new = not folder.exists()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        held = next(folder.iterdir(), None)
    except OSError as error:
        raise WriteError(f"cannot write to '{folder}'.", where=first_line(error)) from None
    if held is not None:
        raise WriteError(f"'{folder}' is not empty.", where=f"it holds '{held.name}'", fix="--out, a new folder")
    try:
        yield
    except BaseException as error:
        for path in folder.iterdir():
            shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink(missing_ok=True)
        if is_new:
            folder.rmdir()
        if isinstance(error, OSError):
            raise WriteError(f"cannot write to '{folder}'.", where=first_line(error)) from None
        raise


def write_model(folder: Path, kind: str, shape: dict[str, Any], *, is_bare: bool, twice: tuple[str, ...]) -> None:
    """Write down which model the weights of a folder are of, and how they were called."""
    theirs = {"is_bare": is_bare, "twice": twice}
    text = json.dumps({"version": 1, "model": kind, "shape": shape, "theirs": theirs}, indent=1)
    Folder.of(folder).replace(MODEL, [text + "\n"])


def copy_out(folder: Path, name: Name, out: Path) -> None:
    """Copy a file of an imported folder into a new one.

    Raises:
      EntryError: it is something other than a regular file, or far too large.
    """
    with Folder.of(folder).reading(name) as source, open(out / name, "xb") as file:
        shutil.copyfileobj(source, file)


def read_names(folder: Path) -> tuple[bool, tuple[str, ...]]:
    """How the weights of a folder were called: whether without the prefix, and which names repeated another.

    Raises:
      DataError: it does not say.
    """
    try:
        theirs = parse_json(Folder.of(folder).read(MODEL))["theirs"]
        return bool(theirs["is_bare"]), tuple(str(name) for name in theirs["twice"])
    except EntryError:
        raise
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(f"'{folder / MODEL}' describes no model.", where=first_line(error)) from None
