"""Provides the kinds of entries in a run folder, and opens a folder without following links."""

import os
import stat
from collections.abc import Sequence
from enum import Enum
from pathlib import Path

from spanax.errors import EntryError, UnsupportedError

SUPPORTED = {os.open, os.stat, os.mkdir, os.unlink, os.rmdir, os.rename, os.readlink} <= (
    os.supports_dir_fd
) and os.listdir in os.supports_fd
"""Whether this system opens files relative to a folder, as Linux and macOS do."""


class Kind(Enum):
    """The kind of an entry."""

    FILE = "a regular file"
    FOLDER = "a folder"
    LINK = "a symbolic link"
    FIFO = "a FIFO"
    DEVICE = "a device"
    SOCKET = "a socket"

    @staticmethod
    def of(mode: int) -> "Kind":
        """Returns the kind for a mode of `os.stat`."""
        return _KINDS.get(stat.S_IFMT(mode), Kind.DEVICE)


_KINDS = {
    stat.S_IFREG: Kind.FILE,
    stat.S_IFDIR: Kind.FOLDER,
    stat.S_IFLNK: Kind.LINK,
    stat.S_IFIFO: Kind.FIFO,
    stat.S_IFSOCK: Kind.SOCKET,
}


def open_folder(root: Path, below: Sequence[str]) -> int:
    """Returns a descriptor of the folder `below` a root; links are followed in the path of `root` only.

    Raises:
      EntryError: a component of `below` is not a folder.
      FileNotFoundError: the folder does not exist.
      OSError: it cannot be opened.
      SpanaxError: this system cannot open files relative to a folder.
    """
    if not SUPPORTED:
        raise UnsupportedError("this system cannot open files relative to a folder.", fix="use Linux or macOS")
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NONBLOCK | os.O_CLOEXEC
    descriptor = os.open(root, flags)
    try:
        for depth, name in enumerate(below, 1):
            outer, descriptor = descriptor, _open_inner(descriptor, name, flags, root, "/".join(below[:depth]))
            os.close(outer)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _open_inner(parent: int, name: str, flags: int, root: Path, full_name: str) -> int:
    try:
        return os.open(name, flags | os.O_NOFOLLOW, dir_fd=parent)
    except FileNotFoundError:
        raise
    except OSError:
        kind = Kind.of(os.stat(name, dir_fd=parent, follow_symlinks=False).st_mode)
        if kind is Kind.FOLDER:
            raise
        link = os.readlink(name, dir_fd=parent) if kind is Kind.LINK else ""
        raise refused(root, full_name, kind, Kind.FOLDER, link) from None


def refused(root: Path, name: str, kind: Kind, expected: Kind, link: str = "") -> EntryError:
    """Returns the error for an entry of the wrong kind; `link` is the target of a link."""
    return EntryError(
        f"'{name}' is {kind.value}, and has to be {expected.value}.",
        where=f"in '{root}'" + (f"; it leads to {link}" if link else ""),
        fix="replace the link with its target, or remove it" if link else "remove it",
    )
