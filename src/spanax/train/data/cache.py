"""The cache folder, atomic writes of files to it, and limits on what files may become."""

import atexit
import errno
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
from spanax.errors import FileError, WriteError, first_line
from spanax.units import bytes_text

ALWAYS_BYTES = 1 << 28
"""The decompressed size allowed for any file."""

MAX_RATIO = 200
"""The maximum compression ratio. Text compresses 3 to 20 times; gzip at most 1,032 times."""

FREE_BYTES = 1 << 26
"""The disk space that must remain free."""


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
    """Returns why other users could write to a folder, which may not exist yet; empty if they cannot."""
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


def keep(path: Path, write: Callable[[BinaryIO], Any], cache_dir: str | os.PathLike[str] | None) -> None:
    """Writes a file of the cache atomically; warns if the default cache cannot be written."""
    try:
        with writing(path) as file:
            write(file)
    except WriteError as error:
        if cache_dir is not None:
            raise
        warnings.warn(f"{first_line(error)} It is computed again at each start.", stacklevel=2)  # a read-only home


@contextmanager
def writing(path: Path) -> Iterator[BinaryIO]:
    """Opens a file of the cache to write, which appears when it is complete; raises WriteError if it cannot."""
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, prefix=path.name, suffix=".tmp", delete=False) as file:
            try:
                yield file  # type: ignore[misc]
                file.flush()
                os.fsync(file.fileno())
                os.replace(file.name, path)
            except BaseException:
                os.unlink(file.name)
                raise
    except OSError as error:
        message = f"cannot write '{path.name}' to '{path.parent}': {error.strerror}."
        raise WriteError(message, fix="XDG_CACHE_HOME=DIR, a writable directory with free space") from None


def reserve(folder: Path, num_bytes: int) -> None:
    """Raises OSError if less than `FREE_BYTES` of the disk of a folder would remain free."""
    if shutil.disk_usage(folder).free < FREE_BYTES + num_bytes:
        raise OSError(errno.ENOSPC, f"less than {bytes_text(FREE_BYTES)} would remain free")


def check_expansion(path: Path, num_bytes: int) -> None:
    """Raises FileError if a compressed file has become `num_bytes`, more than any text compresses."""
    limit = max(ALWAYS_BYTES, MAX_RATIO * path.stat().st_size)
    if num_bytes > limit:
        raise FileError(
            f"'{path}' decompresses to more than {bytes_text(limit)}, over {MAX_RATIO} times its size.",
            fix="decompress it yourself, if you trust it",
        )


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
