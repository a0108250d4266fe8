"""Loads the token ids of a text or a `.bin`, and slices them into windows, the examples of a batch.

Shapes: B examples in the global batch, R of them read by this process, T tokens in an example.
"""

import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from spanax.batch_dims import dims_by_name
from spanax.documents import read_json
from spanax.errors import DataError, FileError, TooFewExamplesError
from spanax.train.data.cache import cache_folder, keep
from spanax.train.data.elements import BatchLeaf, Leaves, described, digest
from spanax.train.data.examples import Examples
from spanax.train.data.text.corpus import HELD_OUT, Corpus
from spanax.train.data.text.tokenizer import Tokenizer
from spanax.train.data.text.tokens import Tokens


def corpus_tokens(
    corpus: Corpus, tokenizer: Tokenizer, split: str, cache_dir: str | os.PathLike[str] | None = None
) -> Tokens:
    """Returns the tokens of one split of a corpus."""
    text = corpus.text(split)
    ids = tokenizer.encode(text) if tokenizer.name == "bytes" else _encoded(text, tokenizer, cache_dir)
    return Tokens(f"{corpus.name} {split} {tokenizer.name} {digest(text)}", ids, tokenizer)


def bin_tokens(path: Path, split: str) -> Tokens:
    """Memory-maps the tokens of a flat binary file; the validation split is its last twentieth.

    The ids are little-endian uint16 unless `<path>.json` specifies another dtype: `{"dtype": "uint32"}`.

    Raises:
      DataError: the file is missing, empty or truncated, or its sidecar cannot be read.
    """
    dtype = _bin_dtype(path)
    try:
        size_bytes = path.stat().st_size
    except OSError as error:
        raise FileError(f"cannot read '{path}': {error.strerror}.", fix="the path of a .bin file of tokens") from None
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


def windows(tokens: Tokens, placements: Sequence[BatchLeaf], least: int | None = None) -> Examples:
    """Returns windows of T + 1 tokens as examples: the first T tokens are the inputs, the last T the targets.

    Consecutive windows overlap by one token.

    Raises:
      DataError: the plan has other leaves, or there are too few tokens for one batch.
    """
    shapes, kinds = {leaf.shape for leaf in placements}, {np.dtype(leaf.dtype).kind for leaf in placements}
    fits = {leaf.path for leaf in placements} == {"inputs", "targets"} and len(shapes) == 1 and kinds <= {"i", "u"}
    if not fits or len(placements[0].shape) != 2:
        raise DataError(
            "text and tokens provide 'inputs' and 'targets', integers of one shape [B, T], not the leaves of the plan.",
            where=f"{tokens.name}; the plan expects {described({leaf.path: leaf for leaf in placements})}",
            fix="an iterable of batches with the leaves of the plan",
        )
    ids, dim = tokens.ids, dims_by_name(placements)[0] or 0
    batch_size, length = placements[0].shape[dim], placements[0].shape[1 - dim]
    num_windows = max(0, len(ids) - 1) // length
    if num_windows < (batch_size if least is None else least):
        raise TooFewExamplesError(
            f"the data has {len(ids):,} tokens, and one batch needs {batch_size * length + 1:,}.",
            where=f"{tokens.name}; a batch of {batch_size} x {length} tokens",
            fix="more data, a smaller batch or shorter sequences",
        )
    highest = min(int(np.iinfo(leaf.dtype).max) for leaf in placements)

    def read(indices_R: np.ndarray) -> Leaves:
        windows_RT = ids[indices_R[:, None] * length + np.arange(length + 1)]
        if windows_RT.max(initial=0) > highest:
            raise DataError(
                f"token {windows_RT.max()} does not fit the plan's {placements[0].dtype}.", where=tokens.name
            )
        parts = {"inputs": windows_RT[:, :-1], "targets": windows_RT[:, 1:]}
        return {leaf.path: np.moveaxis(parts[leaf.path], 0, dim).astype(leaf.dtype) for leaf in placements}

    return Examples(tokens.name, {"inputs": None, "targets": None}, num_windows, read, tokens)


def cached_ids(path: Path) -> np.ndarray | None:
    """Memory-maps the ids in a file of the cache; returns None if the file is missing or damaged."""
    try:
        # Only a plain array: np.load would also read an archive. (Arrays of objects cannot be mapped.)
        ids = np.asarray(np.lib.format.open_memmap(path, mode="r"))
    except (OSError, ValueError, EOFError):
        return None
    return ids if ids.ndim == 1 and ids.dtype in (np.uint8, np.uint16, np.uint32) else None


def _encoded(text: bytes, tokenizer: Tokenizer, cache_dir: str | os.PathLike[str] | None) -> np.ndarray:
    path = cache_folder(cache_dir) / f"tokens-{digest(text, tokenizer.name)}.npy"
    ids = cached_ids(path)
    if ids is None:
        ids = tokenizer.encode(text)
        keep(path, lambda file: np.save(file, ids, allow_pickle=False), cache_dir)
    return ids


def _bin_dtype(path: Path) -> np.dtype:
    sidecar = path.with_name(path.name + ".json")
    if not os.path.lexists(sidecar):
        return np.dtype("<u2")
    try:
        name = read_json(sidecar)["dtype"]
        # NumPy also accepts lists and dicts, for structured dtypes; str() rejects them.
        dtype = np.dtype(str(name)).newbyteorder("<")
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise FileError(
            f"cannot read '{sidecar}'.", where=f"{type(error).__name__}: {error}", fix='{"dtype": "uint32"}'
        ) from None
    if dtype.kind not in "iu":
        raise DataError(f"tokens cannot have dtype {dtype}.", where=str(sidecar), fix='{"dtype": "uint16"}')
    return dtype
