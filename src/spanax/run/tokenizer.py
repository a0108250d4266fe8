"""Tokenizer: text into token ids by bytes, a BPE trained once on the corpus, or a tokenizer.json; ids into windows.

Shapes: B examples of the global batch, R of them read by this process, T tokens of one example.
"""

import json
import os
import tempfile
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np

from spanax.errors import DataError, SpanaxError, WriteError, nearest
from spanax.run.corpus import HELD_OUT, Corpus, Order, check_split, described, digest, load_corpus

if TYPE_CHECKING:
    import tokenizers

    from spanax.plan.plan import Placement

BPE_VOCAB_SIZE = 4096
PIECE_BYTES = 1 << 16
"""Text is encoded in pieces: an encoding takes a hundred bytes a token, and pieces run on all cores."""
PIECES_AT_ONCE = 64
BPE_TRAINING_BYTES = 1 << 26
"""A larger corpus is thinned evenly for training: more text changes the merges little and takes minutes."""


@dataclass(frozen=True)
class Tokenizer:
    """Text into token ids.

    Args:
      name: its kind, with the hash of what it was made from where there is more than one.
      vocab_size: how many ids there are; every id is smaller.
      encode: UTF-8 text -> ids, of shape [N] and the smallest unsigned dtype that holds them.

    Example:
      >>> load_tokenizer("bytes").encode("to be").tolist()
      [116, 111, 32, 98, 101]
    """

    name: str
    vocab_size: int
    encode: Callable[[str | bytes], np.ndarray]


@dataclass(frozen=True)
class Tokens:
    """The token ids of one split of a source, mapped from disk where they are large.

    Args:
      name: what errors and saved positions call them: source, split, tokenizer and a hash of the content.
      ids: of shape [N].
      tokenizer: what made them; None for a `.bin`, whose maker is not known.
    """

    name: str
    ids: np.ndarray = field(repr=False)
    tokenizer: Tokenizer | None = None

    @cached_property
    def vocab_size(self) -> int:
        """The smallest vocabulary that holds every id; of a `.bin` the ids are read once to know."""
        if self.tokenizer:
            return self.tokenizer.vocab_size
        return max(int(self.ids[i : i + (1 << 24)].max()) for i in range(0, len(self.ids), 1 << 24)) + 1


def load_tokens(
    source: str | os.PathLike[str],
    tokenizer: str = "bytes",
    split: str = "train",
    cache_dir: str | os.PathLike[str] | None = None,
) -> Tokens:
    """The tokens of one split of a text file, a folder, a `.bin`, or of `"python"`.

    Args:
      source: see `load_corpus`; a path that ends in `.bin` holds token ids already.
      tokenizer: see `load_tokenizer`; not used for a `.bin`.
      split: `"train"` or `"validation"`.
      cache_dir: where a trained tokenizer and encoded text are kept; `~/.cache/spanax` by default.

    Example:
      >>> load_tokens("python", split="validation").vocab_size
      256
    """
    check_split(split)
    if source != "python" and Path(source).suffix == ".bin":
        ids = load_bin(Path(source), split)
        # Sixty-four samples: a file of terabytes is told apart without reading it.
        samples = [ids[i : i + 1024] for i in np.linspace(0, len(ids), 64, endpoint=False, dtype=np.int64)]
        return Tokens(f"{Path(source).name} {split} {digest(f'{len(ids)} {ids.dtype}', *samples)}", ids)
    corpus = load_corpus(source)
    made = load_tokenizer(tokenizer, corpus, cache_dir)
    text = corpus.text(split)
    ids = made.encode(text) if made.name == "bytes" else _cached_ids(text, made, cache_dir)
    return Tokens(f"{corpus.name} {split} {made.name} {digest(text)}", ids, made)


def load_bin(path: Path, split: str) -> np.ndarray:
    """The tokens of a flat binary file, mapped and not read: all but its last twentieth, or just that.

    The ids are little-endian uint16, unless `<path>.json` says otherwise: `{"dtype": "uint32"}`.

    Raises:
      DataError: the file is missing, empty, cut short, or its sidecar cannot be read.
    """
    dtype = _bin_dtype(path)
    try:
        size_bytes = path.stat().st_size
    except OSError as error:
        raise DataError(f"cannot read '{path}': {error.strerror}.", fix="the path of a .bin file of tokens") from None
    if size_bytes == 0:
        raise DataError(f"'{path}' is empty.", fix="a file of token ids")
    if size_bytes % dtype.itemsize:
        raise DataError(
            f"'{path}' is cut short: {size_bytes:,} bytes are no whole number of {dtype} tokens.",
            fix=f'copy it again, or name its type in {path.name}.json: {{"dtype": "uint32"}}',
        )
    # A plain array over the map: indexing np.memmap itself returns np.memmap again, an order slower.
    tokens = np.asarray(np.memmap(path, dtype=dtype, mode="r"))
    num_train = len(tokens) - max(1, len(tokens) // HELD_OUT)
    return tokens[:num_train] if check_split(split) == "train" else tokens[num_train:]


def window_reader(
    tokens: Tokens, placements: Sequence["Placement"], rows_R: np.ndarray, *, seed: int, shuffle: bool, repeat: bool
) -> tuple[Callable[[int], dict[str, np.ndarray] | None], int | None]:
    """What reads a batch of windows of T + 1 tokens, and how many batches there are; None for no end.

    Windows share only their ends; the first T tokens are the inputs, the last T the targets.

    Raises:
      DataError: the plan takes something else, or there are too few tokens for one batch.
    """
    shapes, kinds = {leaf.shape for leaf in placements}, {np.dtype(leaf.dtype).kind for leaf in placements}
    fits = {leaf.path for leaf in placements} == {"inputs", "targets"} and len(shapes) == 1 and kinds <= {"i", "u"}
    if not fits or len(placements[0].shape) != 2:
        raise DataError(
            "text and tokens make 'inputs' and 'targets', integers of one shape [B, T]; the plan takes others.",
            where=f"{tokens.name}; the plan takes {described({leaf.path: leaf for leaf in placements})}",
            fix="an iterable of batches with the plan's own leaves",
        )
    (batch_size, length), ids = placements[0].shape, tokens.ids
    order = Order(max(0, len(ids) - 1) // length, batch_size, seed, shuffle)
    if order.num_examples < batch_size:
        raise DataError(
            f"the data has {len(ids):,} tokens, and one batch takes {batch_size * length + 1:,}.",
            where=f"{tokens.name}; a batch of {batch_size} x {length} tokens",
            fix="more data, a smaller batch or shorter sequences",
        )
    num_batches = None if repeat else order.num_examples // batch_size
    highest = min(int(np.iinfo(leaf.dtype).max) for leaf in placements)

    def read(index: int) -> dict[str, np.ndarray] | None:
        if num_batches is not None and index >= num_batches:
            return None
        starts_R1 = order.examples(index, rows_R)[:, None] * length
        windows_RT = ids[starts_R1 + np.arange(length + 1)]
        if windows_RT.max(initial=0) > highest:
            raise DataError(
                f"token {windows_RT.max()} does not fit the plan's {placements[0].dtype}.", where=tokens.name
            )
        parts = {"inputs": windows_RT[:, :-1], "targets": windows_RT[:, 1:]}
        return {leaf.path: parts[leaf.path].astype(leaf.dtype) for leaf in placements}

    return read, num_batches


def load_tokenizer(
    name: str, corpus: Corpus | None = None, cache_dir: str | os.PathLike[str] | None = None
) -> Tokenizer:
    """The tokenizer called `"bytes"`, `"bpe"`, `"bpe:8192"`, or by the path of a tokenizer.json.

    Args:
      name: `bpe` is trained once on the corpus's training text and kept; `bpe:N` says its vocabulary.
      corpus: what a `bpe` is trained on.
      cache_dir: where a trained one is kept; `~/.cache/spanax` by default.

    Raises:
      SpanaxError: the name is unknown.
      DataError: the file is missing or damaged.

    Example:
      >>> load_tokenizer("bytes").vocab_size
      256
    """
    kind, colon, size = name.partition(":")
    if name == "bytes":
        return Tokenizer("bytes", 256, _encode_bytes)
    if kind == "bpe":
        if (colon and not size.isdecimal()) or (colon and int(size) < 257):
            raise SpanaxError(f"tokenizer '{name}' needs a vocabulary of at least 257.", fix=f"bpe:{BPE_VOCAB_SIZE}")
        if corpus is None:
            raise SpanaxError(f"tokenizer '{name}' is trained, and there is no text to train it on.", fix="bytes")
        return _trained(corpus.train, int(size or BPE_VOCAB_SIZE), cache_dir)
    if name.endswith(".json") or os.sep in name:
        return _from_file(Path(name))
    raise SpanaxError(
        f"unknown tokenizer '{name}'.", fix=nearest(name, ["bytes", "bpe", f"bpe:{BPE_VOCAB_SIZE}", "tokenizer.json"])
    )


def cache_folder(cache_dir: str | os.PathLike[str] | None = None) -> Path:
    """Where trained tokenizers and encoded text are kept."""
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache_dir) if cache_dir is not None else Path(home) / "spanax"


def _encode_bytes(text: str | bytes) -> np.ndarray:
    return np.frombuffer(text.encode() if isinstance(text, str) else text, np.uint8)


def _trained(text: bytes, vocab_size: int, cache_dir: str | os.PathLike[str] | None) -> Tokenizer:
    from tokenizers import Tokenizer as Engine

    key = digest(text, str(vocab_size))
    path = cache_folder(cache_dir) / f"tokenizer-{key}.json"
    try:
        engine = Engine.from_str(path.read_text(encoding="utf-8"))
    except Exception:  # not there, or damaged: the library raises a bare Exception; training makes it again
        engine = _train(text, vocab_size)
        written = engine.to_str().encode()
        _keep(path, lambda file: file.write(written), cache_dir)
    return _wrapped(f"bpe:{vocab_size}@{key}", engine)


def _train(text: bytes, vocab_size: int) -> "tokenizers.Tokenizer":
    from tokenizers import Tokenizer as Engine
    from tokenizers import decoders, models, pre_tokenizers, trainers

    engine = Engine(models.BPE())
    engine.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    engine.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),  # all 256 bytes: no text is out of reach
        show_progress=False,
        special_tokens=[],
    )
    step = 1 + len(text) // BPE_TRAINING_BYTES
    pieces = (piece for i, piece in enumerate(_pieces(text)) if i % step == 0)
    engine.train_from_iterator(pieces, trainer)
    return engine


def _from_file(path: Path) -> Tokenizer:
    from tokenizers import Tokenizer as Engine

    try:
        written = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise DataError(f"cannot read tokenizer '{path}': {reason}.", fix="bytes, bpe, or a tokenizer.json") from None
    try:
        engine = Engine.from_str(written)
    except Exception as error:  # the library raises a bare Exception
        raise DataError(
            f"'{path}' is no tokenizer, or is damaged.",
            where=" ".join(str(error).split())[:120],
            fix="download the file again, or use bytes or bpe",
        ) from None
    engine.no_truncation()
    engine.no_padding()
    return _wrapped(f"{path.name}@{digest(written)}", engine)


def _wrapped(name: str, engine: "tokenizers.Tokenizer") -> Tokenizer:
    # The highest id, not the number of entries: published vocabularies have gaps.
    vocab_size = max(engine.get_vocab(with_added_tokens=True).values(), default=0) + 1
    dtype = np.uint16 if vocab_size <= 1 << 16 else np.uint32

    def encode(text: str | bytes) -> np.ndarray:
        pieces = list(_pieces(text.encode() if isinstance(text, str) else text))
        parts = [np.empty(0, dtype)]
        for first in range(0, len(pieces), PIECES_AT_ONCE):
            encoded = engine.encode_batch(pieces[first : first + PIECES_AT_ONCE], add_special_tokens=False)
            parts += [np.array(piece.ids, dtype) for piece in encoded]
        return np.concatenate(parts)

    return Tokenizer(name, vocab_size, encode)


def _pieces(text: bytes) -> Iterator[str]:
    """The text in parts of about `PIECE_BYTES` that end before a newline, else before a blank."""
    start = 0
    while start < len(text):
        stop = min(start + PIECE_BYTES, len(text))
        if stop < len(text):
            breaks = (text.rfind(mark, start + 1, stop) for mark in (b"\n", b" "))
            stop = next((found for found in breaks if found > 0), stop)
            while stop < len(text) and text[stop] & 0xC0 == 0x80:  # never inside a character
                stop += 1
        yield text[start:stop].decode("utf-8")
        start = stop


def _cached_ids(text: bytes, tokenizer: Tokenizer, cache_dir: str | os.PathLike[str] | None) -> np.ndarray:
    path = cache_folder(cache_dir) / f"tokens-{digest(text, tokenizer.name)}.npy"
    try:
        return np.asarray(np.load(path, mmap_mode="r", allow_pickle=False))
    except (OSError, ValueError, EOFError):  # not there, or damaged
        ids = tokenizer.encode(text)
        _keep(path, lambda file: np.save(file, ids, allow_pickle=False), cache_dir)
        return ids


def _keep(path: Path, write: Callable[[BinaryIO], Any], cache_dir: str | os.PathLike[str] | None) -> None:
    """Writes a file of the cache, whole or not at all."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, prefix=path.name, suffix=".tmp", delete=False) as file:
            try:
                write(file)  # type: ignore[arg-type]
                file.flush()
                os.fsync(file.fileno())
                os.replace(file.name, path)
            except BaseException:
                os.unlink(file.name)
                raise
    except OSError as error:
        told = f"cannot keep '{path.name}' in '{path.parent}': {error.strerror}."
        if cache_dir is not None:
            raise WriteError(told, fix="a cache_dir that can be written") from None
        warnings.warn(f"{told} It is made again at every start.", stacklevel=2)  # a read-only home is no error


def _bin_dtype(path: Path) -> np.dtype:
    sidecar = path.with_name(path.name + ".json")
    if not sidecar.exists():
        return np.dtype("<u2")
    try:
        dtype = np.dtype(json.loads(sidecar.read_text(encoding="utf-8"))["dtype"]).newbyteorder("<")
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise DataError(
            f"cannot read '{sidecar}'.", where=f"{type(error).__name__}: {error}", fix='{"dtype": "uint32"}'
        ) from None
    if dtype.kind not in "iu":
        raise DataError(f"tokens cannot have dtype {dtype}.", where=str(sidecar), fix='{"dtype": "uint16"}')
    return dtype
