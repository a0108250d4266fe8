"""JAX's persistent compilation cache, in the cache folder of the user.

Compiled programs are code, and a run folder may come from an untrusted source, so they are never stored in run folders.
"""

import os
import warnings
from collections.abc import MutableMapping
from contextlib import suppress
from pathlib import Path

from spanax.train.data.cache import cache_folder, untrusted

FOLDER = "JAX_COMPILATION_CACHE_DIR"
"""The environment variable from which JAX reads the folder of its cache at import."""

THRESHOLD = "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"
"""The environment variable for the minimal compile time of a cached program.

Most programs that initialize a state compile in less than JAX's default of one second.
"""

MAX_BYTES = 2 << 30
"""The size to which the cache is pruned."""


def enable_compilation_cache(environ: MutableMapping[str, str] = os.environ) -> None:
    """Enables JAX's compilation cache; call before importing JAX.

    A threshold set in the environment is unchanged, and so is a folder, unless other users can write to it. If no
    folder is writable and trusted, the cache stays disabled. Each folder that is not used is warned about.

    Example:
      >>> import tempfile
      >>> environ = {"XDG_CACHE_HOME": tempfile.mkdtemp()}
      >>> enable_compilation_cache(environ)
      >>> Path(environ["JAX_COMPILATION_CACHE_DIR"]).is_dir()
      True
    """
    drop_untrusted_folder(environ)
    if FOLDER in environ:  # its owner prunes it
        environ.setdefault(THRESHOLD, "0")
        return
    folder = cache_folder(environ=environ) / "compiled"
    with suppress(OSError):
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    reason = untrusted(folder) if os.access(folder, os.W_OK | os.X_OK) else "it is not writable"
    if reason:
        warnings.warn(f"compiled programs are not cached in '{folder}': {reason}.", stacklevel=2)
        return
    prune(folder, MAX_BYTES)
    environ[FOLDER] = str(folder)
    environ.setdefault(THRESHOLD, "0")


def drop_untrusted_folder(environ: MutableMapping[str, str] = os.environ) -> None:
    """Removes the folder from the environment, with a warning, if other users can write to it."""
    requested = environ.get(FOLDER)
    if not requested or "://" in requested:  # the cache is disabled, or in a cloud storage, which has no modes
        return
    if reason := untrusted(Path(requested)):
        del environ[FOLDER]
        warnings.warn(f"{FOLDER}='{requested}' is not used: {reason}.", stacklevel=2)


def prune(folder: Path, max_bytes: int) -> None:
    """Removes the least recently used files of a folder until the others take at most `max_bytes`.

    JAX's own limit (jax_compilation_cache_max_size) fails in 0.10.2 at the first file written without a limit.
    """
    files = []
    for path in folder.iterdir():
        with suppress(OSError):  # another run may remove it concurrently
            stat = path.stat()
            files.append((max(stat.st_atime, stat.st_mtime), stat.st_size, path))
    num_bytes = sum(size for _, size, _ in files)
    for _, size, path in sorted(files):
        if num_bytes <= max_bytes:
            return
        with suppress(OSError):
            path.unlink()
        num_bytes -= size
