"""Text corpora from files and folders, split into train and validation."""

import errno
import os
import platform
import sysconfig
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from spanax.errors import DataError, FileError, MissingFileError
from spanax.sealed import digest
from spanax.train.data.folder_files import check_inside, files_of
from spanax.train.data.order import HELD_OUT

TABLES = ".jsonl, .csv, .parquet, .arrow, .array_record"
"""The kinds of tables, which are read by rows; other files are read as text."""

PYTHON_CORPUS_BYTES = 8_000_000
SKIPPED_FOLDERS = frozenset({"__pycache__", "node_modules"})
SKIPPED_LIBRARY_FOLDERS = SKIPPED_FOLDERS | {
    *("site-packages", "dist-packages", "test", "tests", "idle_test", "idlelib", "lib2to3", "turtledemo"),
    *("encodings", "pydoc_data", "ensurepip", "distutils"),  # tables, copies, and modules that later versions removed
}


@dataclass(frozen=True)
class Corpus:
    """UTF-8 text split into train and validation; documents are joined by a newline."""

    name: str
    train: bytes
    validation: bytes


def load_corpus(source: str | os.PathLike[str]) -> Corpus:
    """Loads the corpus `"python"` (the source of the standard library), a text file or a folder of text files.

    Files of a folder are held out by the hash of their path, about one in 20 and at least one; for a single file,
    the last twentieth is held out. Hidden and binary files of a folder are excluded.
    """
    if source == "python":
        return _python_corpus()
    path = Path(source)
    if not path.exists():
        raise MissingFileError(
            f"no file or folder '{path}'.",
            where=f"looked in {path.absolute().parent}",
            fix=f"a text file or {TABLES}, a folder of them, a .bin of tokens, or 'python'",
        )
    if path.is_dir():
        return _folder_corpus(path)
    text = _read_text(path)
    if not text:
        raise DataError(f"'{path}' is empty.", fix="a file with text in it, or 'python' for the built-in corpus")
    return _file_corpus(path.name, text)


def _read_text(path: Path, *, may_be_binary: bool = False) -> bytes:
    """Returns the bytes of a UTF-8 text file, and nothing of a binary file if it may be one."""
    try:
        if not path.is_file():
            raise OSError(errno.EINVAL, "it is not a regular file")  # reading from a pipe or device may never end
        text = path.read_bytes()
    except OSError as error:
        raise FileError.of(path, error) from None
    if may_be_binary and b"\0" in text[:8192]:  # git's test for a binary file
        return b""
    try:
        text.decode("utf-8")
    except UnicodeDecodeError as error:
        raise FileError(
            f"'{path}' is not UTF-8 text.",
            where=f"byte {error.start:,} is 0x{text[error.start]:02x}",
            fix="convert it (iconv -f latin1 -t utf-8), or remove it from the folder",
        ) from None
    return text


def _python_corpus() -> Corpus:
    """Returns the source of the standard library: text that is available on any machine without a download."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    # Generated tables of build settings depend on the machine; the corpus must depend on the Python version alone.
    names = [n for n in _names(folder, SKIPPED_LIBRARY_FOLDERS) if n.endswith(".py") and "_sysconfigdata" not in n]
    documents: dict[str, bytes] = {}
    num_bytes = 0
    # Sorted by hash, so that the size limit selects a uniform sample of the library.
    for name in sorted(names, key=digest):
        document = (folder / name).read_bytes()
        is_text = document.strip() and document.decode("utf-8", "ignore").encode() == document
        if num_bytes + len(document) <= PYTHON_CORPUS_BYTES and is_text:
            documents[name] = document
            num_bytes += len(document)
    if len(documents) < 2:
        message = "this Python has no source of its standard library."
        raise DataError(message, where=str(folder), fix="a text file or folder")
    return _split(f"python-{platform.python_version()}", documents)


def _folder_corpus(folder: Path) -> Corpus:
    names = _names(folder, SKIPPED_FOLDERS)
    check_inside(folder, (folder / name for name in names))
    texts = {name: _read_text(folder / name, may_be_binary=True) for name in names}
    documents = {name: text for name, text in texts.items() if text}
    if not documents:
        other = f"; skipped files: {len(names)}, such as '{names[0]}'" if names else ""
        raise DataError(f"folder '{folder}' has no text{other}.", fix="a folder with text files in it")
    if len(documents) == 1:
        ((name, document),) = documents.items()
        return _file_corpus(name, document)
    return _split(folder.name, documents)


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
    train = b"\n".join(documents[path] for path in sorted(documents) if path not in held_out)
    return Corpus(name, train, b"\n".join(documents[path] for path in sorted(held_out)))


def _names(folder: Path, skipped: Collection[str]) -> list[str]:
    """Returns the sorted relative POSIX paths of the files of a folder."""
    files = files_of(folder, skipped=skipped, hidden=(".", "config-"))
    return sorted(file.relative_to(folder).as_posix() for file in files if file.is_file())
