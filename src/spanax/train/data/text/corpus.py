"""Text corpora from files and folders, split into train and validation."""

import errno
import os
import platform
import sysconfig
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from spanax.errors import DataError, FileError, MissingFileError, UnknownNameError, nearest
from spanax.train.data.elements import digest

SPLITS = ("train", "validation")
HELD_OUT = 20
"""One in this many parts is held out for validation."""


TABLES = ".jsonl, .parquet, .arrow, .array_record"
"""The kinds of tables, which are read by rows; other files are read as text."""

PYTHON_CORPUS_BYTES = 8_000_000
SKIPPED_FOLDERS = frozenset({"__pycache__", "node_modules"})
SKIPPED_LIBRARY_FOLDERS = SKIPPED_FOLDERS | {
    *("site-packages", "dist-packages", "test", "tests", "idle_test", "idlelib", "lib2to3", "turtledemo"),
    *("encodings", "pydoc_data", "ensurepip", "distutils"),  # tables, copies, and modules that later versions removed
}


@dataclass(frozen=True)
class Corpus:
    """Text split into train and validation.

    Args:
      name: the name in errors and saved positions.
      train: UTF-8 text; documents are joined by a newline.
      validation: UTF-8 text held out from training.
      skipped: the binary files of a folder, which are excluded.

    Example:
      >>> Corpus("notes", b"to be or not", b" to be").text("validation")
      b' to be'
    """

    name: str
    train: bytes
    validation: bytes
    skipped: tuple[str, ...] = ()

    @property
    def key(self) -> tuple[bytes, ...]:
        """Identifies the text that a tokenizer is trained on."""
        return (self.train,)

    @property
    def size_bytes(self) -> int:
        """The size of the training text."""
        return len(self.train)

    def documents(self) -> Iterator[bytes]:
        """Yields the training text."""
        yield self.train

    def text(self, split: str) -> bytes:
        """Returns the text of a split, `"train"` or `"validation"`."""
        return self.train if check_split(split) == "train" else self.validation


def load_corpus(source: str | os.PathLike[str]) -> Corpus:
    """Loads the corpus `"python"` (the source of the standard library), a text file or a folder of text files.

    Files of a folder are held out by the hash of their path, about one in 20 and at least one; for a single file,
    the last twentieth is held out. Hidden and binary files of a folder are excluded.

    Raises:
      DataError: the source does not exist, is empty, or is not UTF-8.

    Example:
      >>> load_corpus("python").train.count(b"import ") > 1000
      True
    """
    if source == "python":
        return _python_corpus()
    path = Path(source)
    if not path.exists():
        raise MissingFileError(
            f"no file or folder '{path}'.",
            where=f"looked in {path.absolute().parent}",
            fix=f"a text file or {TABLES}, a folder of them, a .bin of tokens, or 'python'; a .csv is read as text",
        )
    return _folder_corpus(path) if path.is_dir() else _file_corpus(path.name, read_text(path))


def read_text(path: Path) -> bytes:
    """Returns the bytes of a UTF-8 text file.

    Raises:
      DataError: the file cannot be read, is empty, or is not UTF-8; includes the first invalid byte.
    """
    try:
        if not path.is_file():
            raise OSError(errno.EINVAL, "it is not a regular file")  # reading from a pipe or device may never end
        text = path.read_bytes()
    except OSError as error:
        raise FileError(f"cannot read '{path}': {error.strerror}.", fix="a readable file") from None
    if not text:
        raise DataError(f"'{path}' is empty.", fix="a file with text in it, or 'python' for the built-in corpus")
    _check_utf8(text, str(path))
    return text


def check_inside(folder: Path, paths: Iterable[Path]) -> None:
    """Checks that no file is a link out of the folder, which could expose any file of this machine.

    Raises:
      DataError: a file is outside of the folder.
    """
    root = Path(os.path.realpath(folder))
    for path in paths:
        if not (target := Path(os.path.realpath(path))).is_relative_to(root):
            raise FileError(
                f"'{path}' is a link out of the data folder.",
                where=f"to {target}",
                fix="the folder that contains both, the files (--data 'folder/*.jsonl'), or a copy of the file",
            )


def check_split(split: str) -> str:
    """Returns `split`; raises SpanaxError if it is not in `SPLITS`."""
    if split not in SPLITS:
        raise UnknownNameError(f"unknown split '{split}'.", fix=nearest(split, SPLITS))
    return split


def _python_corpus() -> Corpus:
    """Returns the source of the standard library: text that is available on any machine without a download."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    # Generated tables of build settings depend on the machine; the corpus must depend on the Python version alone.
    names = [n for n in _walk(folder, SKIPPED_LIBRARY_FOLDERS) if n.endswith(".py") and "_sysconfigdata" not in n]
    documents: dict[str, bytes] = {}
    num_bytes = 0
    # Sorted by hash, so that the size limit selects a uniform sample of the library.
    for name in sorted(names, key=digest):
        document = (folder / name).read_bytes()
        if num_bytes + len(document) <= PYTHON_CORPUS_BYTES and document.strip() and _is_utf8(document):
            documents[name] = document
            num_bytes += len(document)
    if len(documents) < 2:
        raise DataError(
            "this Python has no source of its standard library.", where=str(folder), fix="a text file or folder"
        )
    return _split(f"python-{platform.python_version()}", documents)


def _folder_corpus(folder: Path) -> Corpus:
    documents: dict[str, bytes] = {}
    skipped = []
    names = _walk(folder, SKIPPED_FOLDERS)
    check_inside(folder, (folder / name for name in names))
    for name in names:
        try:
            document = (folder / name).read_bytes()
        except OSError as error:
            raise FileError(f"cannot read '{folder / name}': {error.strerror}.", fix="remove it") from None
        if b"\0" in document[:8192]:  # git's test for a binary file
            skipped.append(name)
        elif document:
            _check_utf8(document, str(folder / name))
            documents[name] = document
    if not documents:
        other = f"; skipped binary files: {len(skipped)}, such as '{skipped[0]}'" if skipped else ""
        raise DataError(f"folder '{folder}' has no text{other}.", fix="a folder with text files in it")
    if len(documents) == 1:
        ((name, document),) = documents.items()
        return _file_corpus(name, document)
    corpus = _split(folder.name, documents)
    return Corpus(corpus.name, corpus.train, corpus.validation, tuple(skipped))


def _file_corpus(name: str, text: bytes) -> Corpus:
    end = len(text) - max(1, len(text) // HELD_OUT)
    while end < len(text) and text[end] & 0xC0 == 0x80:  # never inside a character
        end += 1
    return Corpus(name, text[:end], text[end:])


def _split(name: str, documents: dict[str, bytes]) -> Corpus:
    """Splits two or more documents by hash, so that adding or removing files does not move others to another split."""
    held_out = {path for path in documents if int(digest(path), 16) % HELD_OUT == 0}
    held_out = held_out or {min(documents, key=digest)}
    if len(held_out) == len(documents):
        held_out.remove(max(documents, key=digest))

    def join(predicate: Callable[[str], bool]) -> bytes:
        return b"\n".join(documents[path] for path in sorted(documents) if predicate(path))

    return Corpus(name, join(lambda path: path not in held_out), join(lambda path: path in held_out))


def _walk(folder: Path, skipped: frozenset[str]) -> list[str]:
    """Returns the sorted relative POSIX paths of the files in a folder; links to folders are not followed."""
    paths = []
    for parent, folders, files in os.walk(folder):
        folders[:] = [f for f in folders if f not in skipped and not f.startswith((".", "config-"))]
        base = Path(parent).relative_to(folder)
        paths += [(base / name).as_posix() for name in files if not name.startswith(".")]
    return sorted(name for name in paths if (folder / name).is_file())


def _is_utf8(text: bytes) -> bool:
    try:
        text.decode("utf-8")
    except UnicodeDecodeError:
        return False
    return True


def _check_utf8(text: bytes, path: str) -> None:
    try:
        text.decode("utf-8")
    except UnicodeDecodeError as error:
        raise FileError(
            f"'{path}' is not UTF-8 text.",
            where=f"byte {error.start:,} is 0x{text[error.start]:02x}",
            fix="convert it (iconv -f latin1 -t utf-8), or remove it from the folder",
        ) from None
