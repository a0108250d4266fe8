"""Cache: what is worth keeping between runs, in a folder of its own."""

import os
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

from spanax.errors import WriteError


def cache_folder(cache_dir: str | os.PathLike[str] | None = None) -> Path:
    """Where trained tokenizers and encoded text are kept."""
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache_dir) if cache_dir is not None else Path(home) / "spanax"


def keep(path: Path, write: Callable[[BinaryIO], Any], cache_dir: str | os.PathLike[str] | None) -> None:
    """Writes a file of the cache, whole or not at all."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, prefix=path.name, suffix=".tmp", delete=False) as file:
            try:
                write(file)  # type: ignore[arg-type]
                file.flush()
                os.fsync(file.fileno())
                os.replace(file.name, path)
            except BaseException:
                os.unlink(file.name)
                raise
    except OSError as error:
        told = f"cannot keep '{path.name}' in '{path.parent}': {error.strerror}."
        if cache_dir is not None:
            raise WriteError(told, fix="a cache_dir that can be written") from None
        warnings.warn(f"{told} It is made again at every start.", stacklevel=2)  # a read-only home is no error
