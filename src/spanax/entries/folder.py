"""Folder: what a run folder holds, opened so that nothing outside of the folder is read, written or deleted.

A run folder may come from a stranger, who may have put a symbolic link, a FIFO or a device in place of any file in it.
So every entry is opened relative to a descriptor of the folder that holds it, one component after another. No link is
followed, only regular files are opened, and what is read is bounded. The path of the folder itself is the user's:
links in that are followed.

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
from spanax.entries.names import Name
from spanax.errors import EntryError

Place = str | os.PathLike[str]
"""What names a folder: a path of the user, or a `Folder`."""

MAX_DEPTH = 16
"""Folders in each other, below a run folder."""

TEMPORARY = re.compile(r"\.[^/]+\.[0-9a-f]{16}\.new")
"""The names of files that are being written."""


@dataclass(frozen=True)
class Folder:
    """A folder of a run, which may not be there yet.

    Attributes:
      root: the folder that the user names; links in its path are followed.
      below: what leads from there to this one; a link in it is refused.

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
      spanax.errors.EntryError: 'plan.json' is a symbolic link, and has to be a regular file.
        where: in '...'; it leads to /etc/passwd
        fix: put what it leads to in its place, or remove it
    """

    root: Path
    below: tuple[str, ...] = ()

    @staticmethod
    def of(place: Place) -> "Folder":
        """The folder that a path of the user names; a `Folder` as it is."""
        return place if isinstance(place, Folder) else Folder(Path(place))

    def __fspath__(self) -> str:
        return str(self.path)

    def __str__(self) -> str:
        return str(self.path)

    @property
    def path(self) -> Path:
        """Its path, for messages and comparisons."""
        return self.root.joinpath(*self.below)

    @property
    def name(self) -> str:
        """Its own name."""
        return self.path.name

    @property
    def outer(self) -> "Folder":
        """The folder that holds this one."""
        return replace(self, below=self.below[:-1]) if self.below else Folder(self.root.parent)

    def inner(self, *names: str) -> "Folder":
        """A folder in this one."""
        return replace(self, below=(*self.below, *(part for name in names for part in _parts(name))))

    def resolved(self) -> "Folder":
        """The same, without links in the path of the user."""
        return replace(self, root=self.root.resolve())

    # ---- looking

    def kind(self, name: str = "") -> Kind | None:
        """What an entry is, or this folder without a name; None where there is nothing.

        Raises:
          EntryError: a folder on the way to it is not a folder.
          OSError: it cannot be looked at.
        """
        status = self.stat(name)
        return None if status is None else Kind.of(status.st_mode)

    def stat(self, name: str = "") -> os.stat_result | None:
        """The status of an entry itself, and not of what a link leads to; None where there is nothing."""
        try:
            if not name and not self.below:
                return os.stat(self.root)
            within, last = self._holder(name)
            with within.opened() as descriptor:
                return os.stat(last, dir_fd=descriptor, follow_symlinks=False)
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            if error.errno == errno.ELOOP:  # the path of the user leads to itself
                return None
            raise

    def link(self, name: str) -> str:
        """What a link leads to, as it says."""
        within, last = self._holder(name)
        with within.opened() as descriptor:
            return os.readlink(last, dir_fd=descriptor)

    def names(self) -> list[str]:
        """The names of what it holds, sorted; none where there is no folder."""
        try:
            with self.opened() as descriptor:
                return sorted(os.listdir(descriptor))
        except (FileNotFoundError, NotADirectoryError):
            return []

    def walk(self) -> Iterator[tuple[str, os.stat_result]]:
        """Everything below it, with its name from here and its own status.

        Raises:
          EntryError: it is nested too deep.
        """
        waiting: list[tuple[str, ...]] = [()]
        while waiting:
            parts = waiting.pop()
            if len(parts) > MAX_DEPTH:
                raise EntryError(f"folders are nested deeper than {MAX_DEPTH} in '{self}'.", fix="remove them")
            with self.inner(*parts).opened() as descriptor:
                for name in sorted(os.listdir(descriptor)):
                    status = os.stat(name, dir_fd=descriptor, follow_symlinks=False)
                    yield "/".join((*parts, name)), status
                    if stat.S_ISDIR(status.st_mode):
                        waiting.append((*parts, name))

    def checked_path(self, *, may_link_inside: bool = False) -> Path:
        """The path for a library that opens files by path, once there are only folders and regular files below it.

        Somebody who can write to the folder could still swap an entry between this check and the library's own opening
        of it: a folder that comes from a stranger is checked by it, one that a stranger writes to at the time is not.

        Args:
          may_link_inside: whether there may be links that cannot lead out, as Weights & Biases makes them: relative,
            and without `..`.

        Raises:
          EntryError: there is something else.
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
    def reading(self, name: Name) -> Iterator[IO[bytes]]:
        """A regular file of at most as many bytes as its name allows, open to be read.

        Raises:
          EntryError: it is something else, or larger.
          OSError: it cannot be read.
        """
        with os.fdopen(self._open(name, os.O_RDONLY), "rb") as file:
            size_bytes = os.fstat(file.fileno()).st_size
            if size_bytes > name.max_bytes:
                what = f"'{self._full_name(name)}' has {size_bytes:,} bytes, and at most {name.max_bytes:,} are read."
                raise EntryError(what, where=f"in '{self.root}'", fix="remove it, or bring a good copy back")
            yield file

    def read(self, name: Name) -> bytes:
        """What a regular file holds; see `reading`."""
        with self.reading(name) as file:
            return file.read(name.max_bytes)

    def lines(self, name: Name) -> Iterator[Mapping[str, Any] | None]:
        """The objects of a file of JSON lines, None for a damaged line; nothing where there is no file."""
        try:
            with self.reading(name) as file:
                yield from json_lines(file)
        except FileNotFoundError:
            return

    # ---- writing

    def make(self, name: str = "") -> "Folder":
        """Makes a folder in this one, which must be there; without a name this one and all that lead to it. Returns it.

        Raises:
          EntryError: a link, or something else that is not a folder, has its name.
          OSError: it cannot be made.
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
        """Makes this folder, which must not be there.

        Raises:
          FileExistsError: something has its name.
        """
        with self.outer.opened() as descriptor:
            os.mkdir(self.name, dir_fd=descriptor)

    def replace(self, name: str, parts: Iterable[str | bytes], *, is_durable: bool = True) -> None:
        """Writes a file anew: another process sees the old content or the new one, and never a part of it.

        Args:
          name: the file; the folder that it lies in must be there.
          parts: its content; text is written as UTF-8.
          is_durable: whether it is flushed to disk first, so that it outlasts a power cut.

        Raises:
          EntryError: something other than a regular file has its name.
          OSError: it cannot be written; the file stays as it was.
        """
        within, last = self._holder(name)
        with within.opened() as descriptor:
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
        """A descriptor of a regular file, created where it is missing, that writes to its end and reads anywhere.

        A file with a second name (a hard link) is refused: what is appended would also change what has the other name.

        Raises:
          EntryError: it is something else.
          OSError: it cannot be opened.
        """
        descriptor = self._open(name, os.O_RDWR | os.O_APPEND | os.O_CREAT)
        try:
            if os.fstat(descriptor).st_nlink > 1:
                what = f"'{self._full_name(name)}' has another name (a hard link), which would change with it."
                raise EntryError(what, where=f"in '{self.root}'", fix="copy the run folder: cp -r")
            yield descriptor
        finally:
            os.close(descriptor)

    def touch(self, name: str) -> None:
        """Sets the time of a regular file to now, if it is there."""
        if self.kind(name) is not None:
            with self.appending(name) as descriptor:
                os.utime(descriptor)

    def rename(self, name: str, to: str) -> None:
        """Gives an entry another name in this folder."""
        with self.opened() as descriptor:
            os.rename(_only(name), _only(to), src_dir_fd=descriptor, dst_dir_fd=descriptor)

    def flush(self) -> None:
        """Makes new names in it outlast a power cut."""
        with self.opened() as descriptor:
            os.fsync(descriptor)

    # ---- deleting

    def remove(self, name: str) -> None:
        """Removes an entry that is not a folder, if it is there; of a link the link itself."""
        within, last = self._holder(name)
        with suppress(FileNotFoundError), within.opened() as descriptor:
            os.unlink(last, dir_fd=descriptor)

    def remove_folder(self, name: str) -> None:
        """Removes a folder and what is in it, if it is there; of links in it the links themselves.

        Raises:
          EntryError: it is not a folder.
          OSError: it cannot be removed.
        """
        within, last = self._holder(name)
        kind = self.kind(name)
        if kind is not None and kind is not Kind.FOLDER:
            raise refused(self.root, self._full_name(name), kind, Kind.FOLDER)
        with suppress(FileNotFoundError), within.opened() as descriptor:
            try:
                shutil.rmtree(last, dir_fd=descriptor)
            except RecursionError:
                what = f"'{self._full_name(name)}' holds folders that are nested too deep to be removed."
                raise EntryError(what, where=f"in '{self.root}'", fix="remove it") from None

    def remove_if_empty(self, name: str = "") -> bool:
        """Removes an empty folder, or this one; whether it is gone."""
        folder = self.inner(name) if name else self
        with suppress(OSError), folder.outer.opened() as descriptor:
            os.rmdir(folder.name, dir_fd=descriptor)
            return True
        return False

    def sweep(self) -> None:
        """Removes the temporary files that a killed process left in this folder."""
        for name in self.names():
            if TEMPORARY.fullmatch(name) and self.kind(name) is Kind.FILE:
                self.remove(name)

    # ---- descriptors

    @contextmanager
    def opened(self) -> Iterator[int]:
        """A descriptor of this folder; see `open_folder`."""
        descriptor = open_folder(self.root, self.below)
        try:
            yield descriptor
        finally:
            os.close(descriptor)

    def _open(self, name: str, flags: int) -> int:
        """A descriptor of a regular file."""
        within, last = self._holder(name)
        with within.opened() as holder:
            # Opening a device may already do something, such as rewinding a tape.
            self._check_regular(name, holder, last)
            flags |= os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
            try:
                descriptor = os.open(last, flags, 0o666, dir_fd=holder)
            except OSError:
                self._check_regular(name, holder, last)  # it may have been swapped in between
                raise
        kind = Kind.of(os.fstat(descriptor).st_mode)
        if kind is not Kind.FILE:
            os.close(descriptor)
            raise refused(self.root, self._full_name(name), kind, Kind.FILE)
        return descriptor

    def _check_regular(self, name: str, holder: int, last: str) -> None:
        with suppress(FileNotFoundError):
            kind = Kind.of(os.stat(last, dir_fd=holder, follow_symlinks=False).st_mode)
            if kind is not Kind.FILE:
                link = os.readlink(last, dir_fd=holder) if kind is Kind.LINK else ""
                raise refused(self.root, self._full_name(name), kind, Kind.FILE, link)

    def _holder(self, name: str) -> tuple["Folder", str]:
        """The folder that holds an entry, and its name there; without a name this folder in its own."""
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
