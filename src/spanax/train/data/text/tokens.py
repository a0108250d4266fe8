"""Token ids of a text, a `.bin` or a field of a table, and the windows of them that are the examples of a batch.

Memory use is bounded: the texts of a table are read, encoded and written to the cache a few megabytes at a time, and
the ids are memory-mapped.

Shapes: B examples in the global batch, R of them read by this process, T tokens in an example.
"""

import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from spanax.documents import read_json
from spanax.errors import DataError, FileError
from spanax.sealed import digest
from spanax.train.data.cache import cache_folder, keep
from spanax.train.data.folder_files import file_bytes
from spanax.train.data.formats.table import Table, read_array
from spanax.train.data.order import HELD_OUT
from spanax.train.data.text.corpus import Corpus
from spanax.train.data.text.tokenizer import Tokenizer, TrainingText

MAX_VOCAB_SIZE = 1 << 22
"""The limit for a `.bin`: a file that is read with the wrong dtype has arbitrarily large ids."""


@dataclass(frozen=True)
class Tokens:
    """The token ids of one split of a source, of shape [N], mapped from disk where they are large.

    The name in errors and saved positions has the source, the split, the tokenizer and a hash of the content. A `.bin`
    has no tokenizer.
    """

    name: str
    ids: np.ndarray = field(repr=False)
    tokenizer: Tokenizer | None = None

    @cached_property
    def vocab_size(self) -> int:
        """The size of the smallest vocabulary with every id; the first access reads all of a `.bin`."""
        if self.tokenizer:
            return self.tokenizer.vocab_size
        pieces = [self.ids[i : i + (1 << 24)] for i in range(0, len(self.ids), 1 << 24)]
        lowest = min(int(piece.min()) for piece in pieces)
        highest = max(int(piece.max()) for piece in pieces)
        if lowest < 0 or highest >= MAX_VOCAB_SIZE:
            raise DataError(
                f"the token ids range from {lowest:,} to {highest:,}, which is implausible for a vocabulary.",
                where=f"{self.name}, read as {self.ids.dtype}",
                fix='the dtype in the .json next to the file, such as {"dtype": "uint32"}',
            )
        return highest + 1


def corpus_tokens(corpus: Corpus, tokenizer: Tokenizer, split: str, cache_dir: str | os.PathLike[str] | None) -> Tokens:
    """Returns the tokens of one split of a corpus; all but bytes are encoded once."""
    text = corpus.train if split == "train" else corpus.validation
    path = cache_folder(cache_dir) / f"tokens-{digest(text, tokenizer.name)}.npy" if tokenizer.name != "bytes" else None
    ids = read_array(path, tokenizer.dtype) if path else None
    if ids is None:
        encoded = ids = tokenizer.encode(text)
        if path:
            keep(path, lambda file: np.save(file, encoded, allow_pickle=False), cache_dir)
    return Tokens(f"{corpus.name} {split} {tokenizer.name} {digest(text)}", ids, tokenizer)


def bin_tokens(path: Path, split: str) -> Tokens:
    """Memory-maps the tokens of a flat binary file; the validation split is its last twentieth.

    The ids are little-endian uint16 unless `<path>.json` specifies another dtype: `{"dtype": "uint32"}`.
    """
    dtype = _bin_dtype(path)
    size_bytes = file_bytes(path)
    if size_bytes == 0:
        raise DataError(f"'{path}' is empty.", fix="a file of token ids")
    if size_bytes % dtype.itemsize:
        raise FileError(
            f"'{path}' is truncated: {size_bytes:,} bytes are not a multiple of the {dtype.itemsize} bytes of {dtype}.",
            fix=f'copy it again, or specify its dtype in {path.name}.json: {{"dtype": "uint32"}}',
        )
    # A plain array: indexing np.memmap returns np.memmap, which is ten times slower.
    ids = np.asarray(np.memmap(path, dtype=dtype, mode="r"))
    num_train = len(ids) - max(1, len(ids) // HELD_OUT)
    ids = ids[:num_train] if split == "train" else ids[num_train:]
    # A hash of 64 samples identifies a file of terabytes without reading all of it.
    samples = [ids[i : i + 1024] for i in np.linspace(0, len(ids), 64, endpoint=False, dtype=np.int64)]
    return Tokens(f"{path.name} {split} {digest(f'{len(ids)} {ids.dtype}', *samples)}", ids)


def _bin_dtype(path: Path) -> np.dtype:
    sidecar = path.with_name(path.name + ".json")
    if not os.path.lexists(sidecar):
        return np.dtype("<u2")
    try:
        # NumPy also accepts lists and dicts, for structured dtypes; str() rejects them.
        dtype = np.dtype(str(read_json(sidecar)["dtype"])).newbyteorder("<")
    except (OSError, ValueError, TypeError, KeyError) as error:
        reason = f"{type(error).__name__}: {error}"
        raise FileError(f"cannot read '{sidecar}'.", where=reason, fix='{"dtype": "uint32"}') from None
    if dtype.kind not in "iu":
        raise DataError(f"tokens cannot have dtype {dtype}.", where=str(sidecar), fix='{"dtype": "uint16"}')
    return dtype


@dataclass(frozen=True)
class Column:
    """A field of a table, with a text or a list of token ids in each row."""

    table: Table
    field: str

    @cached_property
    def holds_text(self) -> bool:
        """Whether the rows are texts, not token ids."""
        for _, value in self.table.values(self.field):
            return isinstance(value, str)
        raise DataError(f"'{self.table.name}' is empty.", fix="a source with rows in it")

    @property
    def training_text(self) -> TrainingText:
        documents = (text for is_held_out, text in self._texts() if not is_held_out)
        return TrainingText((self.table.digest, self.field), self.table.size_bytes, documents)

    def tokens(self, tokenizer: Tokenizer | None, cache_dir: str | os.PathLike[str] | None = None) -> Tokens:
        """Returns the tokens of the table's split, all documents concatenated.

        Each text ends with the tokenizer's end-of-text token, or with a newline if it has none; token ids are
        unchanged.
        """
        table = self.table
        encoding = tokenizer.name if tokenizer else "ids"
        settings = (self.field, encoding, str(tokenizer and tokenizer.end_id), str(table.holds_out))
        items = ((is_held_out, ids) for is_held_out, _, ids in self.documents(tokenizer))
        ids = table.stored(str(settings), tokenizer.dtype if tokenizer else np.dtype(np.uint32), items, cache_dir)
        name = f"{table.name}[{self.field}] {table.split} {encoding} {digest(table.digest, *settings)}"
        return Tokens(name, ids, tokenizer)

    def documents(self, tokenizer: Tokenizer | None) -> Iterator[tuple[bool, bool, np.ndarray]]:
        """Yields the ids of the rows, in parts: whether a row is held out, whether a part is its last, and the ids."""
        if tokenizer:
            return tokenizer.encode_documents(self._texts())
        return ((is_held_out, True, ids) for is_held_out, ids in self._ids())

    def _texts(self) -> Iterator[tuple[bool, bytes]]:
        for number, (is_held_out, value) in enumerate(self.table.values(self.field)):
            try:
                yield is_held_out, value.encode()
            except (AttributeError, UnicodeEncodeError):
                raise self._bad(number, value, "text") from None

    def _ids(self) -> Iterator[tuple[bool, np.ndarray]]:
        for number, (is_held_out, value) in enumerate(self.table.values(self.field)):
            ids = np.atleast_1d(np.asarray(value))
            is_integer = ids.ndim == 1 and (ids.dtype.kind in "iu" or not len(ids))
            if not is_integer or (len(ids) and not 0 <= ids.min() <= ids.max() < 1 << 32):
                raise self._bad(number, value, "token ids")
            yield is_held_out, ids.astype(np.uint32)

    def _bad(self, number: int, value: Any, expected: str) -> DataError:
        return DataError(
            f"row {number:,} of '{self.table.name}' does not have {expected} in '{self.field}'.",
            where=f"{type(value).__name__}: {repr(value)[:60]}",
            fix="--field NAME, a field of texts or of lists of token ids",
        )
