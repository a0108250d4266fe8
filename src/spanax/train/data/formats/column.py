"""Token ids from a field of a table, which has text, encoded once and cached, or token ids.

Memory use is bounded: texts are read, encoded and written a few megabytes at a time, and the ids are memory-mapped.
"""

import os
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from spanax.errors import DataError, UnknownNameError
from spanax.train.data.cache import cache_folder, exclusive, keep
from spanax.train.data.elements import digest
from spanax.train.data.formats.decompression import DiskSpace
from spanax.train.data.formats.table import Table
from spanax.train.data.text.corpus import SPLITS
from spanax.train.data.text.token_windows import cached_ids
from spanax.train.data.text.tokenizer import Tokenizer
from spanax.train.data.text.tokens import Tokens

GROUP_BYTES = 1 << 22
"""The size of the texts encoded at once; the tokenizer takes about 100 bytes of memory per token."""


@dataclass(frozen=True)
class Column:
    """A field of a table, with a text or a list of token ids in each row.

    Example:
      >>> import tempfile
      >>> from spanax.train.data.formats.table import open_table
      >>> from spanax.train.data.text.tokenizer import load_tokenizer
      >>> folder = Path(tempfile.mkdtemp())
      >>> _ = (folder / "a.jsonl").write_text('{"text": "to be"}' + chr(10) + '{"text": "or not"}')
      >>> column = Column(open_table(folder / "a.jsonl"), "text")
      >>> bytes(column.tokens(load_tokenizer("bytes"), cache_dir=folder).ids)
      b'to be\\n'
    """

    table: Table
    field: str

    @cached_property
    def holds_text(self) -> bool:
        """Whether the rows are texts, not token ids."""
        for _, value in self.table.values(self.field):
            return isinstance(value, str)
        raise DataError(f"'{self.table.name}' is empty.", fix="a source with rows in it")

    @property
    def key(self) -> tuple[str, ...]:
        """Identifies the text that a tokenizer is trained on."""
        return (self.table.digest, self.field)

    @property
    def size_bytes(self) -> int:
        """The approximate size: the size of the files."""
        return self.table.size_bytes

    def documents(self) -> Iterator[bytes]:
        """Returns the texts of the training split."""
        return (text for is_held_out, text in self._texts() if not is_held_out)

    def tokens(self, tokenizer: Tokenizer | None, *, cache_dir: str | os.PathLike[str] | None = None) -> Tokens:
        """Returns the tokens of the table's split, all documents concatenated.

        Each text ends with the tokenizer's end-of-text token, or with a newline if it has none; token ids are
        unchanged.

        Raises:
          DataError: a row is neither text nor token ids.
          WriteError: the ids cannot be written to the cache.
        """
        encoding = tokenizer.name if tokenizer else "ids"
        settings = (self.field, encoding, str(tokenizer and tokenizer.end_id), str(self.table.holds_out))
        key, cache_key = digest(self.table.digest, *settings), digest(self.table.cache_key, *settings)
        folder = cache_folder(cache_dir)
        paths = {split: folder / f"ids-{cache_key}-{split}.npy" for split in SPLITS}
        path = paths[self.table.split]
        ids = cached_ids(path)
        if ids is not None and self.table.changed:
            warnings.warn(
                f"the tokens of '{self.table.name}' come from the cache: files of this size are compared by samples "
                f"and modification time. After an edit that preserves the time, remove '{path}'.",
                stacklevel=2,
            )
        if ids is None:
            with exclusive(folder / f"ids-{cache_key}.lock"):
                if cached_ids(path) is None:
                    self._write(tokenizer, paths, cache_dir)
                ids = cached_ids(path)
        assert ids is not None, path
        return Tokens(f"{self.table.name}[{self.field}] {self.table.split} {encoding} {key}", ids, tokenizer)

    def _write(
        self, tokenizer: Tokenizer | None, paths: dict[str, Path], cache_dir: str | os.PathLike[str] | None
    ) -> None:
        """Writes the ids of both splits to the cache in one pass over the rows."""
        write_file = partial(keep, cache_dir=cache_dir, is_required=True)
        parts = self._ids() if tokenizer is None else self._encoded(tokenizer)
        dtype = np.dtype(np.uint32) if tokenizer is None else tokenizer.encode("").dtype

        def write(*files: BinaryIO) -> None:
            sizes, space = [0] * len(files), DiskSpace(paths[self.table.split].parent)
            for file in files:
                _write_header(file, dtype, 0)
            for is_held_out, ids in parts:
                space.reserve(ids.nbytes)
                files[is_held_out].write(ids.tobytes())
                sizes[is_held_out] += len(ids)
            for file, size in zip(files, sizes, strict=True):
                file.seek(0)
                _write_header(file, dtype, size)

        if not self.table.holds_out:
            write_file(paths[self.table.split], write)
            return
        write_file(
            paths["train"], lambda train: write_file(paths["validation"], lambda validation: write(train, validation))
        )

    def _encoded(self, tokenizer: Tokenizer) -> Iterator[tuple[bool, np.ndarray]]:
        group: list[tuple[bool, bytes]] = []
        size_bytes = 0
        for item in self._texts():
            group.append(item)
            size_bytes += len(item[1])
            if size_bytes >= GROUP_BYTES:
                yield from _encoded(tokenizer, group)
                group, size_bytes = [], 0
        yield from _encoded(tokenizer, group)

    def _texts(self) -> Iterator[tuple[bool, bytes]]:
        for number, (is_held_out, value) in enumerate(self.table.values(self.field)):
            try:
                yield is_held_out, value.encode()
            except (AttributeError, UnicodeEncodeError):
                raise self._bad(number, value, "text") from None

    def _ids(self) -> Iterator[tuple[bool, np.ndarray]]:
        for number, (is_held_out, value) in enumerate(self.table.values(self.field)):
            ids = np.atleast_1d(np.asarray(value))
            is_empty = ids.ndim == 1 and not len(ids)
            if not is_empty and (
                ids.ndim != 1 or ids.dtype.kind not in "iu" or not 0 <= ids.min() <= ids.max() < 1 << 32
            ):
                raise self._bad(number, value, "token ids")
            yield is_held_out, ids.astype(np.uint32)

    def _bad(self, number: int, value: Any, expected: str) -> DataError:
        return DataError(
            f"row {number:,} of '{self.table.name}' does not have {expected} in '{self.field}'.",
            where=f"{type(value).__name__}: {repr(value)[:60]}",
            fix="--field NAME, a field of texts or of lists of token ids",
        )


def _encoded(tokenizer: Tokenizer, group: list[tuple[bool, bytes]]) -> Iterator[tuple[bool, np.ndarray]]:
    encoded = tokenizer.encode_documents([text for _, text in group])
    yield from zip((is_held_out for is_held_out, _ in group), encoded, strict=True)


def _write_header(file: BinaryIO, dtype: np.dtype, size: int) -> None:
    """Writes the header of a `.npy` file, which NumPy pads to a constant length for any size."""
    header = {"descr": np.lib.format.dtype_to_descr(dtype), "fortran_order": False, "shape": (size,)}
    np.lib.format.write_array_header_1_0(file, header)


def default_field(table: Table, *, leaves: str) -> str:
    """Returns the default field with text or tokens.

    Raises:
      SpanaxError: the table has neither of the default fields.
    """
    for name in ("text", "input_ids"):
        if name in table.fields:
            return name
    listed = ", ".join(table.fields)
    raise UnknownNameError(
        f"'{table.name}' has no field 'text' or 'input_ids'.",
        where=f"it has {listed[:150]}; the plan expects {leaves[:150]}",
        fix="--field NAME, or --field leaf=field,leaf=field for leaves of the plan",
    )
