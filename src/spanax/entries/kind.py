"""Kind: what an entry of a run folder is, and a folder opened on a path in which no link is followed."""

import os
import stat
from collections.abc import Sequence
from enum import Enum
from pathlib import Path

from spanax.errors import EntryError, SpanaxError

SUPPORTED = {os.open, os.stat, os.mkdir, os.unlink, os.rmdir, os.rename, os.readlink} <= (
    os.supports_dir_fd
) and os.listdir in os.supports_fd
"""Whether this system opens files relative to a folder: Linux and macOS do."""


class Kind(Enum):
    """What an entry is."""

    FILE = "a regular file"
    FOLDER = "a folder"
    LINK = "a symbolic link"
    FIFO = "a FIFO"
    DEVICE = "a device"
    SOCKET = "a socket"

    @staticmethod
    def of(mode: int) -> "Kind":
        """The kind that a mode of `os.stat` stands for."""
        return _KINDS.get(stat.S_IFMT(mode), Kind.DEVICE)


_KINDS = {
    stat.S_IFREG: Kind.FILE, stat.S_IFDIR: Kind.FOLDER, stat.S_IFLNK: Kind.LINK, stat.S_IFIFO: Kind.FIFO,
    stat.S_IFSOCK: Kind.SOCKET,
}  # fmt: skip


def open_folder(root: Path, below: Sequence[str]) -> int:
    """A descriptor of a folder: `root`, in whose path links are followed, and from there `below`, in which none is.

    Raises:
      EntryError: something other than a folder is on the way from the root to it.
      FileNotFoundError: it is not there.
      OSError: it cannot be opened.
      SpanaxError: this system opens no files relative to a folder.
    """
    if not SUPPORTED:
        raise SpanaxError("this system cannot open files relative to a folder.", fix="Linux or macOS")
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


def _open_inner(holder: int, name: str, flags: int, root: Path, full_name: str) -> int:
    try:
        return os.open(name, flags | os.O_NOFOLLOW, dir_fd=holder)
    except FileNotFoundError:
        raise
    except OSError:
        kind = Kind.of(os.stat(name, dir_fd=holder, follow_symlinks=False).st_mode)
        if kind is Kind.FOLDER:
            raise
        link = os.readlink(name, dir_fd=holder) if kind is Kind.LINK else ""
        raise refused(root, full_name, kind, Kind.FOLDER, link) from None


def refused(root: Path, name: str, kind: Kind, expected: Kind, link: str = "") -> EntryError:
    """The error of an entry that is another kind of thing than it has to be; `link` is what it leads to."""
    return EntryError(
        f"'{name}' is {kind.value}, and has to be {expected.value}.",
        where=f"in '{root}'" + (f"; it leads to {link}" if link else ""),
        fix="put what it leads to in its place, or remove it" if link else "remove it",
    )
