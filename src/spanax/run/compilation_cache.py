"""Kept programs: what JAX compiled for one run, for the next one to begin with.

They are code: a run folder may come from a stranger, so they lie in the cache folder of who trains.
"""

import os
import warnings
from collections.abc import MutableMapping
from contextlib import suppress
from pathlib import Path

from spanax.run.data.cache import cache_folder, untrusted

FOLDER = "JAX_COMPILATION_CACHE_DIR"
"""The variable with which JAX is told where, when it is imported."""

THRESHOLD = "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"
"""The variable that says what compiles too fast to be kept: JAX's own second leaves out most of what makes a state."""

MOST_BYTES = 2 << 30


def keep_programs(environ: MutableMapping[str, str] = os.environ) -> None:
    """Have JAX keep what it compiles; to be called before it is imported.

    A place and a threshold that the environment names stay; nothing is kept where nothing can be written, and a warning
    says so.

    Example:
      >>> import tempfile
      >>> environ = {"XDG_CACHE_HOME": tempfile.mkdtemp()}
      >>> keep_programs(environ)
      >>> Path(environ["JAX_COMPILATION_CACHE_DIR"]).is_dir()
      True
    """
    if FOLDER in environ:  # its owner prunes it
        environ.setdefault(THRESHOLD, "0")
        return
    folder = cache_folder(environ=environ) / "compiled"
    with suppress(OSError):
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    reason = untrusted(folder) if os.access(folder, os.W_OK | os.X_OK) else "it cannot be written"
    if reason:
        warnings.warn(f"compiled programs are not kept in '{folder}': {reason}.", stacklevel=2)
        return
    prune(folder, MOST_BYTES)
    environ[FOLDER] = str(folder)
    environ.setdefault(THRESHOLD, "0")


def prune(folder: Path, most_bytes: int) -> None:
    """Remove the files of a folder that were read or written longest ago, until the others take so many bytes at most.

    JAX's own bound (jax_compilation_cache_max_size) ends, in 0.10.2, at the first file that was written without one.
    """
    found = []
    for path in folder.iterdir():
        with suppress(OSError):  # another run may remove it at the same time
            stat = path.stat()
            found.append((max(stat.st_atime, stat.st_mtime), stat.st_size, path))
    left = sum(size for _, size, _ in found)
    for _, size, path in sorted(found):
        if left <= most_bytes:
            return
        with suppress(OSError):
            path.unlink()
        left -= size
