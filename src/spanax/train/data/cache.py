"""The cache folder, and atomic writes of files to it."""

import atexit
import fcntl
import functools
import os
import shutil
import stat
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

from spanax.entries.local_path import local_path
from spanax.errors import WriteError


def cache_folder(cache_dir: str | os.PathLike[str] | None = None, environ: Mapping[str, str] = os.environ) -> Path:
    """Returns the folder for compiled programs, trained tokenizers and encoded text.

    It is `cache_dir`, or `spanax` in `XDG_CACHE_HOME`, or `~/.cache/spanax`. Relative folders and folders that other
    users can write to are skipped with a warning; the last resort is a temporary folder.
    """
    if cache_dir is not None:
        return local_path(cache_dir)
    # An empty variable counts as unset: XDG Base Directory Specification 0.8.
    homes = [environ.get("XDG_CACHE_HOME") or None, os.path.expanduser("~/.cache")]
    for home in filter(None, homes):
        folder = Path(home) / "spanax"
        reason = untrusted(folder)
        if not reason:
            return folder
        warnings.warn(f"the cache folder '{folder}' is not used: {reason}.", stacklevel=2)
    return _temporary_folder()


def untrusted(folder: Path) -> str:
    """Returns why other users could write to a folder, which may not exist yet; empty if they cannot.

    Example:
      >>> untrusted(Path("caches"))
      'it is not an absolute path'
    """
    if not folder.is_absolute():
        return "it is not an absolute path"
    path = Path(os.path.realpath(folder))
    for ancestor in (path, *path.parents):
        try:
            status = ancestor.stat()
        except (FileNotFoundError, NotADirectoryError):
            continue
        except OSError as error:
            return f"'{ancestor}' cannot be read: {error.strerror}"
        is_sticky = ancestor != path and status.st_mode & stat.S_ISVTX
        if status.st_mode & stat.S_IWOTH and not is_sticky:
            return f"every user can write to '{ancestor}'"
        if status.st_uid not in (0, os.geteuid()):
            return f"'{ancestor}' belongs to another user"
    return ""


@functools.cache
def _temporary_folder() -> Path:
    """Returns a temporary folder, which is removed when the process exits."""
    folder = tempfile.mkdtemp(prefix="spanax-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return Path(folder)


def keep(
    path: Path,
    write: Callable[[BinaryIO], Any],
    cache_dir: str | os.PathLike[str] | None,
    *,
    is_required: bool = False,
) -> None:
    """Writes a file of the cache atomically; warns if the default cache cannot be written and is not required.

    Raises:
      WriteError: `cache_dir`, or a required cache, cannot be written.
    """
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
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
        message = f"cannot write '{path.name}' to '{path.parent}': {error.strerror}."
        if cache_dir is not None or is_required:
            setting = "XDG_CACHE_HOME=DIR" if cache_dir is None else "cache_dir=DIR"
            raise WriteError(message, fix=f"{setting}, a writable directory with free space") from None
        warnings.warn(f"{message} It is computed again at each start.", stacklevel=2)  # a read-only home is allowed


@contextmanager
def exclusive(path: Path) -> Iterator[None]:
    """Holds a lock file, so that one process of a machine writes to the cache while others wait."""
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
