"""The files of a data folder."""

import os
import stat
from collections.abc import Collection, Iterable
from pathlib import Path

from spanax.errors import FileError


def files_of(folder: Path, *, skipped: Collection[str] = (), hidden: tuple[str, ...] = (".",)) -> list[Path]:
    """Returns the files of a folder that are not hidden; links to folders are not followed.

    Args:
      folder: the folder.
      skipped: the names of inner folders that are skipped.
      hidden: how the names of hidden inner folders start; hidden files start with a dot.
    """
    files: list[Path] = []
    for parent, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if name not in skipped and not name.startswith(hidden)]
        files += [Path(parent, name) for name in names if not name.startswith(".")]
    return files


def check_inside(folder: Path, paths: Iterable[Path]) -> None:
    """Checks that no file is a link out of the folder, which could expose any file of this machine."""
    root = Path(os.path.realpath(folder))
    for path in paths:
        target = Path(os.path.realpath(path))
        if not target.is_relative_to(root):
            raise FileError(
                f"'{path}' is a link out of the data folder.",
                where=f"to {target}",
                fix="the folder that contains both, the files (--data 'folder/*.jsonl'), or a copy of the file",
            )


def file_bytes(path: Path) -> int:
    """Returns the size of a file; raises FileError if it is missing, or a pipe or device, which may never end."""
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):
            raise OSError(None, "it is not a regular file")
        return status.st_size
    except OSError as error:
        raise FileError.of(path, error) from None
