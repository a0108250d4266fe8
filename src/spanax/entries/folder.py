"""Opens the entries of a run folder so that nothing outside of the folder is read, written or deleted.

A run folder may be untrusted: any file in it may have been replaced by a symbolic link, a FIFO or a device. Every entry
is therefore opened relative to a descriptor of its parent folder, one path component at a time. Links are not followed,
only regular files are opened, and reads are bounded. The path of the folder itself is the user's: links in it are
followed.

Nothing else in Spanax opens files of a run folder (`tests/test_house.py`, `unbounded_entries`).
"""

import errno
import os
import re
import secrets
import shutil
import stat
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any

from spanax.documents import json_lines
from spanax.entries.kind import Kind, open_folder, refused
from spanax.entries.local_path import local_path
from spanax.entries.names import Name
from spanax.errors import EntryError

Place = str | os.PathLike[str]
"""A path of the user, or a `Folder`."""

MAX_DEPTH = 16
"""Maximum depth of folders below a run folder."""

TEMPORARY = re.compile(r"\.[^/]+\.[0-9a-f]{16}\.new")
"""Names of files that are being written."""


@dataclass(frozen=True)
class Folder:
    """A folder of a run, which may not exist yet.

    Attributes:
      root: the folder that the user names; links in its path are followed.
      below: the path components from there to this folder; a link among them is refused.

    Example:
      >>> import tempfile
      >>> from spanax.entries.names import CONFIG, PLAN
      >>> folder = Folder.of(tempfile.mkdtemp())
      >>> folder.replace(CONFIG, ["steps = 4"])
      >>> folder.read(CONFIG), folder.kind(PLAN)
      (b'steps = 4', None)
      >>> os.symlink("/etc/passwd", folder.path / PLAN)
      >>> folder.read(PLAN)
      Traceback (most recent call last):
      spanax.errors.EntryError: 'plan.json' is a symbolic link, and has to be a regular file. [SPX505]
        where: in '...'; it leads to /etc/passwd
        fix: replace the link with its target, or remove it
    """

    root: Path
    below: tuple[str, ...] = ()

    @staticmethod
    def of(place: Place) -> "Folder":
        """Returns the folder at a path of the user; a `Folder` is returned unchanged."""
        return place if isinstance(place, Folder) else Folder(local_path(place))

    def __fspath__(self) -> str:
        return str(self.path)

    def __str__(self) -> str:
        return str(self.path)

    @property
    def path(self) -> Path:
        """The path, for messages and comparisons."""
        return self.root.joinpath(*self.below)

    @property
    def name(self) -> str:
        """The last component of the path."""
        return self.path.name

    @property
    def outer(self) -> "Folder":
        """The parent folder."""
        return replace(self, below=self.below[:-1]) if self.below else Folder(self.root.parent)

    def inner(self, *names: str) -> "Folder":
        """Returns a folder below this one."""
        return replace(self, below=(*self.below, *(part for name in names for part in _parts(name))))

    def resolved(self) -> "Folder":
        """Returns the same folder, with links in the user's path resolved."""
        return replace(self, root=self.root.resolve())

    # ---- inspecting

    def kind(self, name: str = "") -> Kind | None:
        """Returns the kind of an entry, or of this folder; None if it does not exist.

        Raises:
          EntryError: a component of its path is not a folder.
          OSError: its status cannot be read.
        """
        status = self.stat(name)
        return None if status is None else Kind.of(status.st_mode)

    def stat(self, name: str = "") -> os.stat_result | None:
        """Returns the status of an entry, without following a link; None if it does not exist."""
        try:
            if not name and not self.below:
                return os.stat(self.root)
            parent, last = self._parent(name)
            with parent.opened() as descriptor:
                return os.stat(last, dir_fd=descriptor, follow_symlinks=False)
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            if error.errno == errno.ELOOP:  # the user's path contains a cycle of links
                return None
            raise

    def link(self, name: str) -> str:
        """Returns the target of a link."""
        parent, last = self._parent(name)
        with parent.opened() as descriptor:
            return os.readlink(last, dir_fd=descriptor)

    def names(self) -> list[str]:
        """Returns the names of the entries, sorted; empty if the folder does not exist."""
        try:
            with self.opened() as descriptor:
                return sorted(os.listdir(descriptor))
        except (FileNotFoundError, NotADirectoryError):
            return []

    def walk(self) -> Iterator[tuple[str, os.stat_result]]:
        """Yields every entry below this folder, with its relative name and its own status.

        Raises:
          EntryError: folders are nested too deeply.
        """
        pending: list[tuple[str, ...]] = [()]
        while pending:
            parts = pending.pop()
            if len(parts) > MAX_DEPTH:
                raise EntryError(f"folders are nested deeper than {MAX_DEPTH} in '{self}'.", fix="remove them")
            with self.inner(*parts).opened() as descriptor:
                for name in sorted(os.listdir(descriptor)):
                    status = os.stat(name, dir_fd=descriptor, follow_symlinks=False)
                    yield "/".join((*parts, name)), status
                    if stat.S_ISDIR(status.st_mode):
                        pending.append((*parts, name))

    def checked_path(self, *, may_link_inside: bool = False) -> Path:
        """Returns the path, for a library that opens files by path, after checking that everything below is regular.

        An attacker who can write to the folder at the same time could still replace an entry after the check; the check
        protects against folders that were received from others.

        Args:
          may_link_inside: allow links that cannot lead out of the folder: relative and without `..`, as those of
            Weights & Biases.

        Raises:
          EntryError: an entry is neither a regular file nor a folder.
        """
        for name, status in self.walk():
            kind = Kind.of(status.st_mode)
            target = self.link(name) if kind is Kind.LINK else ""
            if may_link_inside and target and not target.startswith("/") and ".." not in target.split("/"):
                continue
            if kind not in (Kind.FILE, Kind.FOLDER):
                raise refused(self.root, self._full_name(name), kind, Kind.FILE, target)
        return self.path

    # ---- reading

    @contextmanager
    def reading(self, name: Name, *, is_tail: bool = False) -> Iterator[IO[bytes]]:
        """Opens a regular file of at most the name's `max_bytes`, or with `is_tail` the last lines of a larger one.

        Raises:
          EntryError: it is not a regular file, or larger.
          OSError: it cannot be read.
        """
        with os.fdopen(self._open(name, os.O_RDONLY), "rb") as file:
            size_bytes = os.fstat(file.fileno()).st_size
            if size_bytes > name.max_bytes and is_tail:
                file.seek(size_bytes - name.max_bytes)
                file.readline(name.max_bytes)
            elif size_bytes > name.max_bytes:
                message = f"'{self._full_name(name)}' has {size_bytes:,} bytes, over the limit of {name.max_bytes:,}."
                raise EntryError(message, where=f"in '{self.root}'", fix="remove it, or restore a backup")
            yield file

    def read(self, name: Name) -> bytes:
        """Returns the content of a regular file; see `reading`."""
        with self.reading(name) as file:
            return file.read(name.max_bytes)

    def lines(self, name: Name, *, is_tail: bool = False) -> Iterator[Mapping[str, Any] | None]:
        """Yields the objects of a JSON-lines file, None for a damaged line; nothing if the file does not exist."""
        try:
            with self.reading(name, is_tail=is_tail) as file:
                yield from json_lines(file)
        except FileNotFoundError:
            return

    # ---- writing

    def make(self, name: str = "") -> "Folder":
        """Creates a folder in this one, which must exist; without a name, this folder and its parents. Returns it.

        Raises:
          EntryError: a link, or another entry that is not a folder, has its name.
          OSError: it cannot be created.
        """
        folder, first = (self.inner(name), len(self.below)) if name else (self, 0)
        if not name:
            self.root.mkdir(parents=True, exist_ok=True)
        for depth in range(first, len(folder.below)):
            with replace(folder, below=folder.below[:depth]).opened() as descriptor, suppress(FileExistsError):
                os.mkdir(folder.below[depth], dir_fd=descriptor)
        with folder.opened():
            return folder

    def make_new(self) -> None:
        """Creates this folder, which must not exist.

        Raises:
          FileExistsError: an entry has its name.
        """
        with self.outer.opened() as descriptor:
            os.mkdir(self.name, dir_fd=descriptor)

    def replace(self, name: str, parts: Iterable[str | bytes], *, is_durable: bool = True) -> None:
        """Replaces the content of a file atomically: other processes see the old content or the new one.

        Args:
          name: the file; its parent folder must exist.
          parts: the content; text is encoded as UTF-8.
          is_durable: flush it to disk first, so that it survives a power failure.

        Raises:
          EntryError: an entry that is not a regular file has its name.
          OSError: it cannot be written; the file is unchanged.
        """
        parent, last = self._parent(name)
        with parent.opened() as descriptor:
            self._check_regular(name, descriptor, last)
            temporary = f".{last}.{secrets.token_hex(8)}.new"
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
            try:
                with os.fdopen(os.open(temporary, flags, 0o666, dir_fd=descriptor), "wb") as file:
                    file.writelines(part.encode() if isinstance(part, str) else part for part in parts)
                    if is_durable:
                        file.flush()
                        os.fsync(file.fileno())
                os.rename(temporary, last, src_dir_fd=descriptor, dst_dir_fd=descriptor)
            except BaseException:
                with suppress(OSError):
                    os.unlink(temporary, dir_fd=descriptor)
                raise
            if is_durable:
                os.fsync(descriptor)

    @contextmanager
    def appending(self, name: str) -> Iterator[int]:
        """Opens a regular file, created if missing, and yields a descriptor that appends, and reads anywhere.

        A file with a second name (a hard link) is refused: appending would also change the other name's content.

        Raises:
          EntryError: it is not a regular file, or has another name.
          OSError: it cannot be opened.
        """
        descriptor = self._open(name, os.O_RDWR | os.O_APPEND | os.O_CREAT)
        try:
            if os.fstat(descriptor).st_nlink > 1:
                message = f"'{self._full_name(name)}' has another name (a hard link), whose content would change too."
                raise EntryError(message, where=f"in '{self.root}'", fix="copy the run folder: cp -r")
            yield descriptor
        finally:
            os.close(descriptor)

    def touch(self, name: str) -> None:
        """Sets the modification time of a regular file to now, if it exists."""
        if self.kind(name) is not None:
            with self.appending(name) as descriptor:
                os.utime(descriptor)

    def rename(self, name: str, to: str) -> None:
        """Renames an entry of this folder."""
        with self.opened() as descriptor:
            os.rename(_only(name), _only(to), src_dir_fd=descriptor, dst_dir_fd=descriptor)

    def flush(self) -> None:
        """Flushes the folder's entries to disk, so that new names survive a power failure."""
        with self.opened() as descriptor:
            os.fsync(descriptor)

    # ---- deleting

    def remove(self, name: str) -> None:
        """Removes an entry that is not a folder, if it exists; links are removed, not followed."""
        parent, last = self._parent(name)
        with suppress(FileNotFoundError), parent.opened() as descriptor:
            os.unlink(last, dir_fd=descriptor)

    def remove_folder(self, name: str) -> None:
        """Removes a folder with its content, if it exists; links are removed, not followed.

        Raises:
          EntryError: it is not a folder.
          OSError: it cannot be removed.
        """
        parent, last = self._parent(name)
        kind = self.kind(name)
        if kind is not None and kind is not Kind.FOLDER:
            raise refused(self.root, self._full_name(name), kind, Kind.FOLDER)
        with suppress(FileNotFoundError), parent.opened() as descriptor:
            try:
                shutil.rmtree(last, dir_fd=descriptor)
            except RecursionError:
                message = f"'{self._full_name(name)}' contains folders that are nested too deeply to be removed."
                raise EntryError(message, where=f"in '{self.root}'", fix="remove it") from None

    def remove_if_empty(self, name: str = "") -> bool:
        """Removes an empty folder, by default this one; returns whether it was removed."""
        folder = self.inner(name) if name else self
        with suppress(OSError), folder.outer.opened() as descriptor:
            os.rmdir(folder.name, dir_fd=descriptor)
            return True
        return False

    def sweep(self) -> None:
        """Removes temporary files that a killed process left in this folder."""
        for name in self.names():
            if TEMPORARY.fullmatch(name) and self.kind(name) is Kind.FILE:
                self.remove(name)

    # ---- descriptors

    @contextmanager
    def opened(self) -> Iterator[int]:
        """Yields a descriptor of this folder; see `open_folder`."""
        descriptor = open_folder(self.root, self.below)
        try:
            yield descriptor
        finally:
            os.close(descriptor)

    def _open(self, name: str, flags: int) -> int:
        """Returns a descriptor of a regular file."""
        parent, last = self._parent(name)
        with parent.opened() as parent_descriptor:
            # Opening a device may have side effects, such as rewinding a tape.
            self._check_regular(name, parent_descriptor, last)
            flags |= os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
            try:
                descriptor = os.open(last, flags, 0o666, dir_fd=parent_descriptor)
            except OSError:
                self._check_regular(name, parent_descriptor, last)  # it may have been replaced meanwhile
                raise
        kind = Kind.of(os.fstat(descriptor).st_mode)
        if kind is not Kind.FILE:
            os.close(descriptor)
            raise refused(self.root, self._full_name(name), kind, Kind.FILE)
        return descriptor

    def _check_regular(self, name: str, parent_descriptor: int, last: str) -> None:
        with suppress(FileNotFoundError):
            kind = Kind.of(os.stat(last, dir_fd=parent_descriptor, follow_symlinks=False).st_mode)
            if kind is not Kind.FILE:
                link = os.readlink(last, dir_fd=parent_descriptor) if kind is Kind.LINK else ""
                raise refused(self.root, self._full_name(name), kind, Kind.FILE, link)

    def _parent(self, name: str) -> tuple["Folder", str]:
        """Returns the parent folder of an entry and the entry's name there; without a name, those of this folder."""
        *before, last = (*self.below, *_parts(name))
        return replace(self, below=tuple(before)), last

    def _full_name(self, name: str) -> str:
        return "/".join((*self.below, name))


def _parts(name: str) -> list[str]:
    parts = [part for part in name.split("/") if part] if name else []
    if any(part in (".", "..") or "\0" in part for part in parts) or name.startswith("/"):
        raise ValueError(f"{name!r} is not the name of an entry")
    return parts


def _only(name: str) -> str:
    (part,) = _parts(name)
    return part
