"""Cache: what is worth keeping between runs, in a folder of its own."""

import fcntl
import os
import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
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


@contextmanager
def alone(path: Path) -> Iterator[None]:
    """Of several processes of one machine one makes what is to be kept, and the others wait for it."""
    file = None
    try:
        with suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True)
            file = open(path, "ab")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield
    finally:
        if file is not None:
            file.close()
