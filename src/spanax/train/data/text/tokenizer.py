"""Tokenizers: bytes, a BPE trained on the corpus, or a tokenizer.json."""

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from spanax.documents import read_bytes, read_json
from spanax.entries.local_path import local_path
from spanax.errors import FileError, MissingError, RangeError, UnknownNameError, nearest
from spanax.sealed import digest
from spanax.train.data.cache import cache_folder, keep
from spanax.units import whole_number

if TYPE_CHECKING:
    import tokenizers


BPE_VOCAB_SIZE = 4096
PIECE_BYTES = 1 << 16
"""The size of the pieces in which text is encoded, so that all cores encode a long one."""
GROUP_CHARS = 1 << 22
"""The size of the pieces encoded at once: this bounds memory, 100 bytes per token."""
MAX_FILE_BYTES = 1 << 26
MAX_GAP = 1 << 17
"""Limits for a tokenizer.json; published ones have up to 35 MB, and few gaps in their ids."""
BPE_TRAINING_BYTES = 1 << 26
"""A larger corpus is subsampled for training: more text hardly changes the merges and takes minutes."""


END_OF_TEXT = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|eos|>", "<|end|>")
"""The end-of-text tokens of published tokenizers, for files without a tokenizer_config.json."""


class TrainingText(NamedTuple):
    """Text for training a tokenizer: what identifies it, its approximate size, and its documents."""

    key: tuple[str | bytes, ...]
    size_bytes: int
    documents: Iterable[bytes]


@dataclass(frozen=True)
class Tokenizer:
    """Encodes text as token ids below `vocab_size`.

    The name is followed by a hash of the training text or the file if it has one. `bytes` has neither an engine of the
    tokenizers library nor its JSON. `end_id` is the end-of-text token.
    """

    name: str
    vocab_size: int
    engine: "tokenizers.Tokenizer | None" = None
    json: str = ""
    end_id: int | None = None

    @property
    def dtype(self) -> np.dtype:
        """The smallest unsigned dtype for the ids."""
        if self.engine is None:
            return np.dtype(np.uint8)
        return np.dtype(np.uint16 if self.vocab_size <= 1 << 16 else np.uint32)

    def encode(self, text: bytes) -> np.ndarray:
        """Returns the ids of a UTF-8 text, of shape [N]."""
        if self.engine is None:
            return np.frombuffer(text, np.uint8)
        return np.concatenate([ids for _, _, ids in self._encoded([(False, text)])])

    def encode_documents(self, documents: Iterable[tuple[bool, bytes]]) -> Iterator[tuple[bool, bool, np.ndarray]]:
        """Yields the ids of documents, each followed by the end-of-text token, or by a newline if there is none.

        A long document is yielded in parts: the bool of the document, whether it is held out, whether a part is its
        last, and the ids.
        """
        if self.end_id is None:
            documents = ((is_held_out, text + b"\n") for is_held_out, text in documents)
        if self.engine is None:
            yield from ((is_held_out, True, np.frombuffer(text, np.uint8)) for is_held_out, text in documents)
            return
        for is_held_out, is_last, ids in self._encoded(documents):
            has_end = is_last and self.end_id is not None
            yield is_held_out, is_last, np.append(ids, ids.dtype.type(self.end_id)) if has_end else ids

    def to_json(self) -> str:
        """Returns the tokenizer as the text of a tokenizer.json, the format of the tokenizers library."""
        return self.json or _bytes_json()

    def _encoded(self, documents: Iterable[tuple[bool, bytes]]) -> Iterator[tuple[bool, bool, np.ndarray]]:
        """Yields for each piece the bool of its document, whether it is the last of it, and its ids."""
        group: list[tuple[bool, bool, str]] = []
        num_chars = 0
        for is_held_out, text in documents:
            for is_last, piece in _pieces(text):
                group.append((is_held_out, is_last, piece))
                num_chars += len(piece)
                if num_chars >= GROUP_CHARS:
                    yield from self._encoded_group(group)
                    group = []
                    num_chars = 0
        yield from self._encoded_group(group)

    def _encoded_group(self, group: list[tuple[bool, bool, str]]) -> Iterator[tuple[bool, bool, np.ndarray]]:
        assert self.engine is not None
        with encoding_errors(self.name):
            encodings = self.engine.encode_batch([piece for _, _, piece in group], add_special_tokens=False)
        for (side, is_last, _), encoding in zip(group, encodings, strict=True):
            yield side, is_last, np.array(encoding.ids, self.dtype)


@dataclass(frozen=True)
class TrainedTokenizer:
    """The tokenizer.json of a run, to resume it with the same ids; a name other than `bpe` is loaded as usual."""

    name: str
    json: str


def load_tokenizer(
    tokenizer: str | TrainedTokenizer,
    texts: Sequence[TrainingText] = (),
    cache_dir: str | os.PathLike[str] | None = None,
) -> Tokenizer:
    """Returns the tokenizer `"bytes"`, `"bpe"` or `"bpe:8192"`, or the one at the path of a tokenizer.json.

    A `bpe` is trained once on the texts and cached; a TrainedTokenizer is not trained again.
    """
    name = tokenizer if isinstance(tokenizer, str) else tokenizer.name
    kind, colon, size = name.partition(":")
    if name == "bytes":
        return Tokenizer("bytes", 256)
    if kind == "bpe":
        if colon and (whole_number(size) or 0) < 257:
            raise RangeError(f"tokenizer '{name}' needs a vocabulary of at least 257.", fix=f"bpe:{BPE_VOCAB_SIZE}")
        if not texts:
            raise MissingError(f"tokenizer '{name}' needs text to train on, and the source has none.", fix="bytes")
        vocab_size = int(size or BPE_VOCAB_SIZE)
        key = digest(*(part for text in texts for part in text.key), str(vocab_size))
        name = f"bpe:{vocab_size}@{key}"
        if isinstance(tokenizer, TrainedTokenizer):
            engine = _parsed(tokenizer.json, "tokenizer.json of the run", fix="restore it from a copy")
            return _wrapped(name, engine, tokenizer.json)
        path = cache_folder(cache_dir) / f"tokenizer-{key}.json"
        try:
            content = path.read_text(encoding="utf-8")
            return _wrapped(name, _parsed(content, path.name, fix=""), content)
        except (OSError, ValueError, FileError):  # missing or damaged: trained again
            engine = _train(texts, vocab_size)
            keep(path, lambda file: file.write(engine.to_str().encode()), cache_dir)
            return _wrapped(name, engine, engine.to_str())
    if name.endswith(".json") or os.sep in name:
        return _from_file(local_path(name))
    raise UnknownNameError(
        f"unknown tokenizer '{name}'.", fix=nearest(name, ["bytes", "bpe", f"bpe:{BPE_VOCAB_SIZE}", "tokenizer.json"])
    )


def _bytes_json() -> str:
    """Returns the tokenizer `bytes` as a tokenizer.json: byte-level BPE without merges, whose ids are the bytes."""
    from tokenizers import models, pre_tokenizers

    # In byte-level BPE a printable byte stands for itself, and each of the others for the next character above 0xFF.
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    others = (char for char in alphabet if ord(char) > 0xFF)
    characters = [chr(byte) if chr(byte) in alphabet else next(others) for byte in range(0x100)]
    return _byte_level(models.BPE(vocab={char: byte for byte, char in enumerate(characters)}, merges=[])).to_str()


def _byte_level(model: "tokenizers.models.BPE") -> "tokenizers.Tokenizer":
    from tokenizers import Tokenizer as Engine
    from tokenizers import decoders, pre_tokenizers

    engine = Engine(model)
    engine.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    engine.decoder = decoders.ByteLevel()
    return engine


def _train(texts: Sequence[TrainingText], vocab_size: int) -> "tokenizers.Tokenizer":
    from tokenizers import models, pre_tokenizers, trainers

    engine = _byte_level(models.BPE())
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),  # all 256 bytes: every text can be encoded
        show_progress=False,
        special_tokens=[],
    )
    step = 1 + sum(text.size_bytes for text in texts) // BPE_TRAINING_BYTES
    pieces = (piece for text in texts for document in text.documents if document for _, piece in _pieces(document))
    engine.train_from_iterator((piece for i, piece in enumerate(pieces) if i % step == 0), trainer)
    return engine


def _from_file(path: Path) -> Tokenizer:
    try:
        content = read_bytes(path, max_bytes=MAX_FILE_BYTES).decode()
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        if isinstance(error, UnicodeDecodeError):
            reason = "it is not UTF-8 text"
        raise FileError(f"cannot read tokenizer '{path}': {reason}.", fix="bytes, bpe, or a tokenizer.json") from None
    engine = _parsed(content, str(path), fix="download the file again, or use bytes or bpe")
    engine.no_truncation()
    engine.no_padding()
    tokenizer = _wrapped(f"{path.name}@{digest(content)}", engine, content, _end_id(engine, path))
    if tokenizer.vocab_size > MAX_GAP + 2 * engine.get_vocab_size():
        raise FileError(
            f"'{path}' has {engine.get_vocab_size():,} tokens, and their largest id is {tokenizer.vocab_size - 1:,}.",
            fix="a tokenizer with contiguous ids; a model allocates an embedding for each",
        )
    return tokenizer


def _parsed(content: str, name: str, *, fix: str) -> "tokenizers.Tokenizer":
    from tokenizers import Tokenizer as Engine

    with _raising(f"'{name}' is not a tokenizer, or is damaged.", fix), _without_stderr():
        return Engine.from_str(content)


def encoding_errors(name: str) -> AbstractContextManager[None]:
    """Returns a context that raises errors of the tokenizers library in encoding a text as FileError."""
    return _raising(f"tokenizer '{name}' cannot encode this text.", "a tokenizer with an unknown token, or bytes")


@contextmanager
def _raising(message: str, fix: str) -> Iterator[None]:
    """Raises a FileError for an error of the tokenizers library."""
    try:
        yield
    except BaseException as error:  # the library raises a bare Exception, or a panic of Rust, which is none
        if not isinstance(error, Exception) and type(error).__module__ != "pyo3_runtime":
            raise
        raise FileError(message, where=" ".join(str(error).split())[:120], fix=fix) from None


@contextmanager
def _without_stderr() -> Iterator[None]:
    """Discards what this process writes to descriptor 2: Rust prints a panic, and its stack, before it raises it."""
    saved = os.dup(2)
    null = os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(null, 2)
        yield
    finally:
        os.dup2(saved, 2)
        os.close(saved)
        os.close(null)


def tokenizer_config(content: str) -> dict[str, str]:
    """Returns the tokenizer_config.json that lets transformers read a tokenizer.json as it is.

    Without it, transformers chooses the class of the model's family, which builds its own rules around the vocabulary.
    """
    vocab = _parsed(content, "tokenizer.json", fix="restore it from a copy").get_vocab(with_added_tokens=True)
    end = next((name for name in END_OF_TEXT if name in vocab), None)
    return {"tokenizer_class": "PreTrainedTokenizerFast"} | ({} if end is None else {"eos_token": end})


def token_text(token: Any) -> Any:
    """Returns the text of a special token of tokenizer_config.json, which is a string or an object."""
    return token.get("content") if isinstance(token, Mapping) else token


def begin_ids(tokenizer: Any) -> tuple[int, ...]:
    """Returns the ids that a tokenizer writes before a text."""
    plain = plain_ids(tokenizer, "a", add_special_tokens=False)
    whole = plain_ids(tokenizer, "a")
    return tuple(whole[: whole.index(plain[0])]) if plain and plain[0] in whole else ()


def plain_ids(tokenizer: Any, text: str, **options: bool) -> list[int]:
    """Returns the ids of a text by a tokenizer of the library `tokenizers` or `transformers`."""
    encoding = tokenizer.encode(text, **options)
    return [int(each) for each in getattr(encoding, "ids", encoding)]


def _end_id(engine: "tokenizers.Tokenizer", path: Path) -> int | None:
    """Returns the id of the end-of-text token, from tokenizer_config.json in the same folder or by its usual names."""
    try:
        config = read_json(path.with_name("tokenizer_config.json"))
        token = config.get("eos_token") if isinstance(config, Mapping) else None
        names: Sequence[object] = [token_text(token)]
    except (OSError, ValueError):
        names = END_OF_TEXT
    ids = (engine.token_to_id(name) for name in names if isinstance(name, str))
    return next((token_id for token_id in ids if token_id is not None), None)


def _wrapped(name: str, engine: "tokenizers.Tokenizer", content: str, end_id: int | None = None) -> Tokenizer:
    # The highest id, not the number of entries: published vocabularies have gaps.
    vocab_size = max(engine.get_vocab(with_added_tokens=True).values(), default=0) + 1
    return Tokenizer(name, vocab_size, engine, content, end_id)


def _pieces(text: bytes) -> Iterator[tuple[bool, str]]:
    """Yields a text in pieces of about `PIECE_BYTES`, and whether each is the last.

    The others end before a newline or a space. An empty text is one piece.
    """
    start = 0
    while True:
        stop = min(start + PIECE_BYTES, len(text))
        if stop < len(text):
            breaks = (text.rfind(mark, start + 1, stop) for mark in (b"\n", b" "))
            stop = next((position for position in breaks if position > 0), stop)
            while stop < len(text) and text[stop] & 0xC0 == 0x80:  # never inside a UTF-8 character
                stop += 1
        yield stop == len(text), text[start:stop].decode("utf-8")
        if stop == len(text):
            return
        start = stop
