"""Corpus: what is read and in which order: text, split once into train and validation; examples; any loader."""

import hashlib
import json
import os
import platform
import sys
import sysconfig
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from spanax.errors import DataError, SpanaxError, nearest

SPLITS = ("train", "validation")
HELD_OUT = 20
"""One part in so many is held out for validation."""

NUM_READERS = 16
FEISTEL_ROUNDS = 8
END = object()
"""What a loader holds behind its last element."""

PYTHON_CORPUS_BYTES = 8_000_000
SKIPPED_FOLDERS = frozenset({"__pycache__", "node_modules"})
SKIPPED_LIBRARY_FOLDERS = SKIPPED_FOLDERS | {
    *("site-packages", "dist-packages", "test", "tests", "idle_test", "idlelib", "lib2to3", "turtledemo"),
    *("encodings", "pydoc_data", "ensurepip", "distutils"),  # tables, copies and what later versions dropped
}


@dataclass(frozen=True)
class Corpus:
    """Text split into train and validation.

    Args:
      name: what errors and saved positions call it.
      train: UTF-8 text; documents are joined by a newline.
      validation: UTF-8 text that training never sees.
      skipped: files of a folder that were left out because they are binary.

    Example:
      >>> Corpus("notes", b"to be or not", b" to be").text("validation")
      b' to be'
    """

    name: str
    train: bytes
    validation: bytes
    skipped: tuple[str, ...] = ()

    def text(self, split: str) -> bytes:
        """The text of one split, `"train"` or `"validation"`."""
        return self.train if check_split(split) == "train" else self.validation


def load_corpus(source: str | os.PathLike[str]) -> Corpus:
    """The corpus of `"python"` (the standard library's own source), of a text file or of a folder of them.

    A folder's files are held out by the hash of their path, about one in 20 and at least one; of a single file
    the last twentieth is held out. Hidden and binary files of a folder are left out.

    Raises:
      DataError: nothing is there, or it is empty or no UTF-8.

    Example:
      >>> load_corpus("python").train.count(b"import ") > 1000
      True
    """
    if source == "python":
        return _python_corpus()
    path = Path(source)
    if not path.exists():
        raise DataError(
            f"no file or folder '{path}'.",
            where=f"looked in {path.absolute().parent}",
            fix="a text file, a folder of them, a .bin of tokens, or 'python' for the built-in corpus",
        )
    return _folder_corpus(path) if path.is_dir() else _file_corpus(path.name, read_text(path))


def read_text(path: Path) -> bytes:
    """The bytes of a file that is UTF-8 text and not empty.

    Raises:
      DataError: it cannot be read, is empty, or is not UTF-8; names the first wrong byte.
    """
    try:
        text = path.read_bytes()
    except OSError as error:
        raise DataError(f"cannot read '{path}': {error.strerror}.", fix="a file that you may read") from None
    if not text:
        raise DataError(f"'{path}' is empty.", fix="a file with text in it, or 'python' for the built-in corpus")
    _check_utf8(text, str(path))
    return text


def check_split(split: str) -> str:
    """`split`, if it is one of `SPLITS`."""
    if split not in SPLITS:
        raise SpanaxError(f"unknown split '{split}'.", fix=nearest(split, SPLITS))
    return split


def digest(*parts: str | bytes | np.ndarray) -> str:
    """Twelve hex digits that tell contents apart, the same on every machine.

    Example:
      >>> digest("a", "bc") == digest("ab", "c")
      False
    """
    state = hashlib.blake2b(digest_size=6)
    for part in parts:
        data = part.tobytes() if isinstance(part, np.ndarray) else part.encode() if isinstance(part, str) else part
        state.update(len(data).to_bytes(8, "little"))
        state.update(data)
    return state.hexdigest()


def described(leaves: Mapping[str, Any]) -> str:
    """Paths, dtypes and shapes of arrays, or of placements.

    Example:
      >>> described({"x": np.zeros((2, 3), np.int32)})
      'x int32[2,3]'
    """
    sizes = {path: ",".join(map(str, leaf.shape)) for path, leaf in leaves.items()}
    return ", ".join(f"{path} {leaf.dtype}[{sizes[path]}]" for path, leaf in leaves.items()) or "nothing"


def flat(item: Any, path: str = "") -> dict[str, Any]:
    """The leaves of a batch by path, as a program names them; a list is data, and a tuple holds leaves.

    Example:
      >>> flat({"image": {"pixels": 1}, "pair": (2, 3)})
      {'image.pixels': 1, 'pair.0': 2, 'pair.1': 3}
    """
    if not isinstance(item, Mapping | tuple):
        return {path or "batch": item}
    pairs = item.items() if isinstance(item, Mapping) else enumerate(item)
    inner = (flat(value, f"{path}.{key}" if path else str(key)) for key, value in pairs)
    return {leaf: value for part in inner for leaf, value in part.items()}


def nested(like: Any, leaves: Mapping[str, Any], path: str = "") -> Any:
    """Leaves in the nesting of `like`: what `flat` took apart.

    Example:
      >>> nested({"image": {"pixels": None}}, {"image.pixels": 1})
      {'image': {'pixels': 1}}
    """
    if isinstance(like, Mapping):
        return {key: nested(inner, leaves, f"{path}.{key}" if path else str(key)) for key, inner in like.items()}
    if isinstance(like, tuple):
        return tuple(nested(inner, leaves, f"{path}.{i}" if path else str(i)) for i, inner in enumerate(like))
    return leaves[path or "batch"]


@dataclass(frozen=True)
class Order:
    """Which example stands where in the endless row of global batches: a pure function, of a few bytes.

    Example:
      >>> order = Order(num_examples=6, batch_size=4, seed=0)
      >>> epoch = np.concatenate([order.examples(0, np.arange(4)), order.examples(1, np.arange(2))])
      >>> np.sort(epoch).tolist()
      [0, 1, 2, 3, 4, 5]
    """

    num_examples: int
    batch_size: int
    seed: int = 0
    shuffle: bool = True

    def examples(self, batch_index: int, rows_R: np.ndarray) -> np.ndarray:
        """The examples in some rows of one batch, of shape [R]; each example comes once an epoch."""
        epochs_R, places_R = np.divmod(batch_index * self.batch_size + rows_R.astype(np.int64), self.num_examples)
        return _permuted(places_R, epochs_R, self.num_examples, self.seed) if self.shuffle else places_R


Fetch = Callable[[int, np.ndarray], list[Any] | None]
"""From the index of a batch and the rows wanted of it to the elements; None behind the last batch."""


def sequence_fetch(source: Any, order: Order, repeat: bool) -> tuple[Fetch, int | None]:
    """Random access to a sequence in an order, and how many batches there are; None for no end."""
    endless = order.num_examples >= sys.maxsize
    num_batches = None if repeat or endless else order.num_examples // order.batch_size
    read: Callable[[list[int]], Any] = partial(map, source.__getitem__)
    grain = sys.modules.get("grain")  # if it was never imported, this is none of its datasets
    if grain and isinstance(source, grain.MapDataset):
        # Grain shuffles and repeats itself: it seeds random transformations anew in every epoch.
        source = source.shuffle(seed=order.seed % 2**32) if order.shuffle and not endless else source
        source = source.repeat(None) if repeat and not endless else source
        order = Order(len(source), order.batch_size, shuffle=False)
        read = partial(ThreadPoolExecutor(NUM_READERS, "spanax-read").map, source.__getitem__)

    def fetch(index: int, rows_R: np.ndarray) -> list[Any] | None:
        if num_batches is not None and index >= num_batches:
            return None
        return list(read(order.examples(index, rows_R).tolist()))

    return fetch, num_batches


class Loader:
    """An iterable, or a function that returns one: how far it was read, and how to start it again.

    Attributes:
      held: the first element, read ahead to see what it is; `END` if there is none.
    """

    def __init__(self, source: Any, repeat: bool):
        self._open = partial(iter, source) if isinstance(source, Iterable) else source
        self._items = iter(self._open())
        self._once = self._items is source
        self._repeat = repeat and not self._once
        self._index = 0
        self.held = next(self._items, END)

    def read(self, num_elements: int, index: int, rows_R: np.ndarray) -> list[Any] | None:
        """Rows of one batch, those of the batches before it being read past; None behind the last one."""
        elements: list[Any] = []
        while self._index <= index:
            elements = [self._element() for _ in range(num_elements)]
            if elements[-1] is END:
                return None
            self._index += 1
        return [elements[row] for row in rows_R]

    def mark(self) -> Any:
        """Where the iterator says it is, if it says so in JSON, as Grain's do: it jumps there instead of reading."""
        try:
            return json.loads(json.dumps(self._items.get_state()))
        except (AttributeError, TypeError, ValueError):
            return None

    def seek(self, index: int, mark: Any) -> None:
        """Makes batch `index` the next one.

        Raises:
          DataError: it is behind, and the iterator cannot be started again.
        """
        if mark is not None and hasattr(self._items, "set_state"):
            self._items.set_state(mark)
            self._index, self.held = index, END
        elif index < self._index:
            if self._once:
                raise DataError(
                    f"batch {index} is gone: an iterator is read only once, and was read to batch {self._index}.",
                    fix="a function that returns a new iterator",
                )
            self._items, self._index, self.held = iter(self._open()), 0, END

    def _element(self) -> Any:
        element, self.held = self.held, END
        element = next(self._items, END) if element is END else element
        if element is END and self._repeat:
            self._items = iter(self._open())
            element = next(self._items, END)
        return element


def _permuted(places_R: np.ndarray, epochs_R: np.ndarray, size: int, seed: int) -> np.ndarray:
    """A permutation of range(size) for each seed and epoch, without a table and the same in any version of numpy.

    A Feistel network permutes the next power of four; what falls outside is sent through again until it is inside.
    """
    half = np.uint64(max(1, ((size - 1).bit_length() + 1) // 2))
    mask = (np.uint64(1) << half) - np.uint64(1)
    keys_R = _mixed(_mixed(np.array([seed % 2**64], np.uint64)) + epochs_R.astype(np.uint64))
    values_R = places_R.astype(np.uint64)
    outside_R = np.ones(len(values_R), bool)
    while outside_R.any():
        left, right, keys = values_R[outside_R] >> half, values_R[outside_R] & mask, keys_R[outside_R]
        for turn in range(FEISTEL_ROUNDS):
            left, right = right, left ^ (_mixed(right + keys + np.uint64(turn)) & mask)
        values_R[outside_R] = left << half | right
        outside_R = values_R >= np.uint64(size)
    return values_R.astype(np.int64)


def _mixed(values: np.ndarray) -> np.ndarray:
    """The finalizer of splitmix64: every bit of the input reaches every bit of the output."""
    values = (values ^ values >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ values >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
    return values ^ values >> np.uint64(31)


def _python_corpus() -> Corpus:
    """The library of the running Python: real text on any machine, nothing downloaded."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    # Generated tables of build settings name this machine; the corpus must be that of the Python version alone.
    names = [n for n in _walk(folder, SKIPPED_LIBRARY_FOLDERS) if n.endswith(".py") and "_sysconfigdata" not in n]
    documents: dict[str, bytes] = {}
    num_bytes = 0
    # By hash, so that the cap takes a fair sample of the library and not the head of the alphabet.
    for name in sorted(names, key=_rank):
        document = (folder / name).read_bytes()
        if num_bytes + len(document) <= PYTHON_CORPUS_BYTES and document.strip() and _is_utf8(document):
            documents[name] = document
            num_bytes += len(document)
    if len(documents) < 2:
        raise DataError(
            "this Python came without the source of its library.", where=str(folder), fix="a text file or folder"
        )
    return _split(f"python-{platform.python_version()}", documents)


def _folder_corpus(folder: Path) -> Corpus:
    documents: dict[str, bytes] = {}
    skipped = []
    for name in _walk(folder, SKIPPED_FOLDERS):
        try:
            document = (folder / name).read_bytes()
        except OSError as error:
            raise DataError(f"cannot read '{folder / name}': {error.strerror}.", fix="leave it out") from None
        if b"\0" in document[:8192]:  # git's test for a binary file
            skipped.append(name)
        elif document:
            _check_utf8(document, str(folder / name))
            documents[name] = document
    if not documents:
        other = f"; binary files left out: {len(skipped)}, such as '{skipped[0]}'" if skipped else ""
        raise DataError(f"folder '{folder}' holds no text{other}.", fix="a folder with text files in it")
    if len(documents) == 1:
        ((name, document),) = documents.items()
        return _file_corpus(name, document)
    corpus = _split(folder.name, documents)
    return Corpus(corpus.name, corpus.train, corpus.validation, tuple(skipped))


def _file_corpus(name: str, text: bytes) -> Corpus:
    cut = len(text) - max(1, len(text) // HELD_OUT)
    while cut < len(text) and text[cut] & 0xC0 == 0x80:  # never inside a character
        cut += 1
    return Corpus(name, text[:cut], text[cut:])


def _split(name: str, documents: dict[str, bytes]) -> Corpus:
    """At least two documents into train and validation: a file keeps its side when others come or go."""
    held_out = {path for path in documents if int(_rank(path), 16) % HELD_OUT == 0}
    held_out = held_out or {min(documents, key=_rank)}
    if len(held_out) == len(documents):
        held_out.remove(max(documents, key=_rank))

    def join(wanted: Callable[[str], bool]) -> bytes:
        return b"\n".join(documents[path] for path in sorted(documents) if wanted(path))

    return Corpus(name, join(lambda path: path not in held_out), join(lambda path: path in held_out))


def _walk(folder: Path, skipped: frozenset[str]) -> list[str]:
    """Paths of the files under a folder, relative and with '/', sorted; links to folders are not followed."""
    found = []
    for parent, folders, files in os.walk(folder):
        folders[:] = [f for f in folders if f not in skipped and not f.startswith((".", "config-"))]
        base = Path(parent).relative_to(folder)
        found += [(base / name).as_posix() for name in files if not name.startswith(".")]
    return sorted(name for name in found if (folder / name).is_file())


def _rank(path: str) -> str:
    return digest(path)


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
        raise DataError(
            f"'{path}' is not UTF-8 text.",
            where=f"byte {error.start:,} is 0x{text[error.start]:02x}",
            fix="convert it (iconv -f latin1 -t utf-8), or leave it out of the folder",
        ) from None
