"""Files that accompany weights, such as tokenizers, and the folders that weights are written to."""

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from spanax.documents import parse_json
from spanax.entries.folder import Folder
from spanax.entries.names import IMPORTED, MODEL, MODEL_FILE_BYTES, Name
from spanax.errors import FileErrors, InUseError, WeightsError, WorkloadError, WriteError, first_line
from spanax.interop.safetensors import INDEX, SINGLE, inside
from spanax.models.imported import SavedModel


def auxiliary_files(folder: Path) -> list[Path]:
    """Returns the files of a folder that accompany its weights.

    Raises:
      DataError: a file is a link to outside of the folder, or too large.
    """
    names = (*IMPORTED[:-1], *((INDEX,) if not (folder / SINGLE).exists() else ()))
    paths = [folder / name for name in names if (folder / name).exists() or (folder / name).is_symlink()]
    for path in paths:
        size = inside(path, folder).stat().st_size
        if size > MODEL_FILE_BYTES:
            raise WeightsError(f"'{path}' has {size:,} bytes, and at most {MODEL_FILE_BYTES:,} are copied.")
    return paths


@contextmanager
def writing(folder: Path) -> Iterator[None]:
    """A context that writes to a new or empty folder, and deletes what was written if an error occurs.

    Raises:
      WriteError: the folder is not empty, or cannot be written.
    """
    is_new = not folder.exists()
    with FileErrors(WriteError, f"cannot write to '{folder}'."):
        folder.mkdir(parents=True, exist_ok=True)
        existing = next(folder.iterdir(), None)
    if existing is not None:
        raise InUseError(
            f"'{folder}' is not empty.", where=f"it contains '{existing.name}'", fix="--output-dir with a new folder"
        )
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


def write_model(folder: Path, model: SavedModel) -> None:
    """Writes the model that the weights of a folder belong to, its adapters, and the naming scheme of the weights."""
    naming = {"is_bare": model.is_bare, "twice": model.twice}
    data = {"version": 1, "model": model.kind, "shape": asdict(model.config), "theirs": naming}
    if model.into is not None:
        data["class"] = model.into
    if model.adapters is not None:
        data["lora"] = str(model.adapters)
    Folder.of(folder).replace(MODEL, [json.dumps(data, indent=1) + "\n"])


def copy_out(folder: Path, name: Name, out: Path) -> None:
    """Copies a file of an imported folder to a new folder.

    Raises:
      EntryError: it is not a regular file, or is too large.
    """
    with Folder.of(folder).reading(name) as source, open(out / name, "xb") as file:
        shutil.copyfileobj(source, file)


def read_imported(folder: Path) -> dict[str, Any]:
    """Reads the config.json that was imported with the weights of a folder.

    Raises:
      SpanaxError: it cannot be read, or is not a JSON object.
    """
    what = f"cannot read '{folder / IMPORTED[0]}', which was imported with the weights."
    with FileErrors(WorkloadError, what, fix="import the weights again"):
        config = parse_json(Folder.of(folder).read(IMPORTED[0]))
        if not isinstance(config, dict):
            raise ValueError("it is not a JSON object")
    return config
