"""Cache: what is worth keeping between runs, in a folder of its own."""

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

from spanax.errors import WriteError


def cache_folder(cache_dir: str | os.PathLike[str] | None = None, environ: Mapping[str, str] = os.environ) -> Path:
    """Where compiled programs, trained tokenizers and encoded text are kept.

    It is `cache_dir`, or `spanax` in `XDG_CACHE_HOME`, or `~/.cache/spanax`. A folder that others can change is not
    used, nor a relative one: a warning says so, and the next of the three is taken, a temporary folder at last.
    """
    if cache_dir is not None:
        return Path(cache_dir)
    # Empty is as if it was not set: XDG Base Directory Specification 0.8.
    homes = [environ.get("XDG_CACHE_HOME") or None, os.path.expanduser("~/.cache")]
    for home in filter(None, homes):
        folder = Path(home) / "spanax"
        reason = untrusted(folder)
        if not reason:
            return folder
        warnings.warn(f"the cache folder '{folder}' is not used: {reason}.", stacklevel=2)
    return _temporary_folder()


def untrusted(folder: Path) -> str:
    """Why others could put files into a folder, or into one that is made there; empty where they cannot.

    Example:
      >>> untrusted(Path("caches"))
      'it is not an absolute path'
    """
    if not folder.is_absolute():
        return "it is not an absolute path"
    path = Path(os.path.realpath(folder))
    for one in (path, *path.parents):
        try:
            found = one.stat()
        except (FileNotFoundError, NotADirectoryError):
            continue
        except OSError as error:
            return f"'{one}' cannot be read: {error.strerror}"
        is_sticky = one != path and found.st_mode & stat.S_ISVTX
        if found.st_mode & stat.S_IWOTH and not is_sticky:
            return f"everybody can write to '{one}'"
        if found.st_uid not in (0, os.geteuid()):
            return f"'{one}' belongs to another user"
    return ""


@functools.cache
def _temporary_folder() -> Path:
    """A folder for this process alone, which is removed with it."""
    folder = tempfile.mkdtemp(prefix="spanax-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return Path(folder)


def keep(path: Path, write: Callable[[BinaryIO], Any], cache_dir: str | os.PathLike[str] | None) -> None:
    """Writes a file of the cache, whole or not at all."""
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
