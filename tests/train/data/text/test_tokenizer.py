"""Tokenizer: bytes, a BPE that is trained once and comes back from the cache, files, and what is refused."""

import json
import os
from pathlib import Path

import numpy as np
import pytest
import tokenizers

from spanax.errors import DataError, SpanaxError, WriteError
from spanax.train.data.open_source import WINDOWS, opened
from spanax.train.data.source import Options
from spanax.train.data.text import tokenizer
from spanax.train.data.text.tokenizer import TrainedTokenizer, TrainingText, load_tokenizer
from spanax.train.data.text.tokens import Tokens

TEXT = "the cat sat on the mat; the café is closed.\n" * 40


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text(TEXT)
    return path


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


def load_tokens(
    source: Path | str, tokenizer: str = "bytes", split: str = "train", cache_dir: Path | None = None
) -> Tokens:
    """The tokens of one split of a source."""
    ((tokens, _),) = opened(source, WINDOWS, Options(tokenizer, split, cache_dir=cache_dir))
    return tokens


def training_text(text: bytes) -> TrainingText:
    return TrainingText((text,), len(text), [text])


def refuse_training(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenizer, "_train", lambda *args: pytest.fail("trained again"))


def test_a_tokenizer_as_json_has_the_same_ids(text: Path, cache: Path, tmp_path: Path) -> None:
    """Also bytes, whose tokenizer.json has the 256 bytes as its vocabulary."""
    every = "日本\t\r\n\n  \U0001f600 " + "".join(map(chr, range(0x250))) + TEXT
    assert load_tokenizer("bytes").encode("é".encode()).tolist() == [0xC3, 0xA9]
    for name in ("bytes", "bpe:300"):
        encoder = load_tokenizer(name, [training_text(text.read_bytes())], cache)
        (tmp_path / "tokenizer.json").write_text(encoder.to_json())
        again = load_tokenizer(str(tmp_path / "tokenizer.json"))
        assert again.encode(every.encode()).tolist() == encoder.encode(every.encode()).tolist(), name
        assert again.vocab_size == encoder.vocab_size and again.to_json() == encoder.to_json()
        assert tokenizers.Tokenizer.from_str(again.to_json()).decode(again.encode(every.encode()).tolist()) == every


def test_a_tokenizer_of_a_run_is_not_trained_again(
    text: Path, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    corpus = training_text(text.read_bytes())
    first = load_tokenizer("bpe:300", [corpus], cache)
    refuse_training(monkeypatch)
    again = load_tokenizer(TrainedTokenizer("bpe:300", first.to_json()), [corpus], tmp_path / "empty")
    assert again.name == first.name and again.encode(TEXT.encode()).tolist() == first.encode(TEXT.encode()).tolist()
    with pytest.raises(DataError, match="'tokenizer.json of the run' is not a tokenizer"):
        load_tokenizer(TrainedTokenizer("bpe:300", "{}"), [corpus], cache)


@pytest.mark.parametrize("piece_bytes", [1 << 16, 7])
def test_a_bpe_decodes_the_training_text(
    piece_bytes: int, text: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokenizer, "PIECE_BYTES", piece_bytes)
    text.write_text(TEXT + "€" * 30 + "\n" * 20)
    tokens = load_tokens(text, "bpe:300", "train", cache)
    (cached,) = cache.glob("tokenizer-*.json")
    engine = tokenizers.Tokenizer.from_file(str(cached))
    trained_on = text.read_bytes()[: -(len(text.read_bytes()) // 20)]
    assert engine.decode(tokens.ids.tolist()).encode() == trained_on
    assert tokens.vocab_size <= 300 and len(tokens.ids) < len(trained_on) / 2
    assert tokens.ids.dtype == np.uint16 and tokens.ids.max() < tokens.vocab_size
    rest = load_tokens(text, "bpe:300", "validation", cache)
    assert rest.tokenizer and rest.tokenizer.name == tokens.tokenizer.name
    assert engine.decode(rest.ids.tolist()).encode() == text.read_bytes()[len(trained_on) :]


def test_a_second_start_trains_and_encodes_nothing(text: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = load_tokens(text, "bpe:300", "train", cache)
    refuse_training(monkeypatch)
    monkeypatch.setattr(tokenizer, "_pieces", lambda *args: pytest.fail("encoded again"))
    second = load_tokens(text, "bpe:300", "train", cache)
    assert np.array_equal(first.ids, second.ids) and first.name == second.name
    assert not list(cache.glob("*.tmp"))


def test_another_text_or_size_is_another_tokenizer(text: Path, cache: Path) -> None:
    names = {load_tokens(text, "bpe:300", "train", cache).name, load_tokens(text, "bpe:301", "train", cache).name}
    text.write_text(TEXT + "x")
    names.add(load_tokens(text, "bpe:300", "train", cache).name)
    assert len(names) == 3


@pytest.mark.parametrize("pattern", ["tokenizer-*.json", "tokens-*.npy"])
@pytest.mark.parametrize("keep", [0, 50])
def test_a_truncated_cache_is_rebuilt(pattern: str, keep: int, text: Path, cache: Path) -> None:
    first = load_tokens(text, "bpe:300", "train", cache)
    (cached,) = cache.glob(pattern)
    complete = cached.read_bytes()
    cached.write_bytes(complete[:keep])
    second = load_tokens(text, "bpe:300", "train", cache)
    assert np.array_equal(first.ids, second.ids) and cached.read_bytes() == complete


def test_a_cache_that_cannot_be_written(text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(WriteError, match="cannot write 'tokenizer-"):
        load_tokens(text, "bpe:300", "train", tmp_path / "file")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.warns(UserWarning, match="It is computed again at each start"):
        assert len(load_tokens(text, "bpe:300").ids)


def test_pieces_are_bounded_and_concatenate_to_the_text(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenizer, "PIECE_BYTES", 7)
    for text in ("", "€" * 30, "a b\nc" * 9, "\n" * 20, "word " * 5 + "€uro\n", "x" * 7, "x" * 8):
        pieces = list(tokenizer._pieces(text.encode()))
        assert "".join(piece for _, piece in pieces) == text
        assert [is_last for is_last, _ in pieces] == [False] * (len(pieces) - 1) + [True]
        assert all(bool(text) <= len(piece.encode()) <= 7 + 3 for _, piece in pieces)


def test_a_large_corpus_is_thinned_for_training(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    corpus = training_text(" ".join(f"w{i} " * 2 for i in range(200)).encode())
    sizes = []
    for kept_bytes in (1 << 20, 100):
        monkeypatch.setattr(tokenizer, "PIECE_BYTES", 50)
        monkeypatch.setattr(tokenizer, "BPE_TRAINING_BYTES", kept_bytes)
        sizes.append(load_tokenizer("bpe:1000", [corpus], cache / str(kept_bytes)).vocab_size)
    assert 256 < sizes[1] < sizes[0] < 1000


def test_a_tokenizer_file(text: Path, cache: Path, tmp_path: Path) -> None:
    encoder = load_tokenizer("bpe:300", [training_text(TEXT.encode())], cache)
    (cached,) = cache.glob("tokenizer-*.json")
    engine = tokenizers.Tokenizer.from_file(str(cached))
    engine.enable_truncation(3)  # such settings of the file must not eat text
    engine.enable_padding(length=9)
    engine.save(str(tmp_path / "mine.json"))
    loaded = load_tokenizer(str(tmp_path / "mine.json"))
    assert loaded.vocab_size == encoder.vocab_size and loaded.name.startswith("mine.json@")
    assert np.array_equal(loaded.encode(TEXT.encode()), encoder.encode(TEXT.encode()))
    words = tokenizers.models.WordLevel({"a": 0, "b": 70_000}, unk_token="a")
    tokenizers.Tokenizer(words).save(str(tmp_path / "gaps.json"))
    encoder = load_tokenizer(str(tmp_path / "gaps.json"))  # its size is that of its highest id
    assert encoder.vocab_size == 70_001 and encoder.encode(b"b").tolist() == [70_000]


# ---- what is refused


def message_of(kind: type[SpanaxError], name: str, folder: Path | None = None) -> str:
    with pytest.raises(kind) as error:
        load_tokenizer(name, [training_text(b"a")])
    assert error.value.exit_code == kind.exit_code and error.value.args[0].count("\n") <= 3
    return error.value.args[0].replace(str(folder), "...")


def test_an_unknown_tokenizer(tmp_path: Path) -> None:
    assert message_of(SpanaxError, "byts") == (
        "unknown tokenizer 'byts'.\n  fix: did you mean 'bytes'? known: bytes, bpe, bpe:4096, tokenizer.json"
    )
    for name in ("bpe:", "bpe:many", "bpe:256", "bpe:-1"):
        assert message_of(SpanaxError, name) == (
            f"tokenizer '{name}' needs a vocabulary of at least 257.\n  fix: bpe:4096"
        )
    assert message_of(DataError, str(tmp_path / "no.json"), tmp_path) == (
        "cannot read tokenizer '.../no.json': No such file or directory.\n  fix: bytes, bpe, or a tokenizer.json"
    )


PANICS = b'{"version": "1.0", "added_tokens": [], "model": {"type": "BPE", "vocab": {"a": 7}, "merges": [["a", "a"]]}}'
"""A merge without its result: the library checks this, or its Rust code panics with a BaseException."""

CHARACTERS = b'{"normalizer": {"type": "Precompiled", "precompiled_charsmap": "AAAA"}, "version": "1.0", '
PANICS_TOO = CHARACTERS + b'"model": {"type": "BPE", "vocab": {"a": 0}, "merges": []}, "added_tokens": []}'


@pytest.mark.parametrize("content", [b"", b"{", b'{"version": "1.0"}', b"\xff\xfe", PANICS, PANICS_TOO])
def test_a_damaged_tokenizer_file(content: bytes, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.json").write_bytes(content)
    first = message_of(DataError, str(tmp_path / "a.json"), tmp_path).splitlines()[0]
    bad_text = "cannot read tokenizer '.../a.json': it is not UTF-8 text."
    assert first == (bad_text if content[:1] == b"\xff" else "'.../a.json' is not a tokenizer, or is damaged.")
    assert not capfd.readouterr().err  # of Rust


def test_text_that_a_tokenizer_cannot_encode_raises(tmp_path: Path) -> None:
    model = {"type": "WordLevel", "vocab": {"be": 0}, "unk_token": "[UNK]"}
    (tmp_path / "words.json").write_text(json.dumps({"version": "1.0", "added_tokens": [], "model": model}))
    encoder = load_tokenizer(str(tmp_path / "words.json"))
    assert encoder.encode(b"be").tolist() == [0]
    for encode in (lambda: encoder.encode(b"not"), lambda: list(encoder.encode_documents([(False, b"not")]))):
        with pytest.raises(
            DataError, match=r"tokenizer 'words.json@\w+' cannot encode this text(?s:.*)Missing \[UNK\]"
        ):
            encode()


@pytest.mark.parametrize(
    "size_bytes, sidecar, first",
    [
        (None, None, "cannot read '.../t.bin': No such file or directory."),
        (0, None, "'.../t.bin' is empty."),
        (7, None, "'.../t.bin' is truncated: 7 bytes are not a multiple of the 2 bytes of uint16."),
        (6, '{"dtype": "uint32"}', "'.../t.bin' is truncated: 6 bytes are not a multiple of the 4 bytes of uint32."),
        (8, "{", "cannot read '.../t.bin.json'."),
        (8, "[]", "cannot read '.../t.bin.json'."),
        (8, '{"dtype": "uint17"}', "cannot read '.../t.bin.json'."),
        (8, '{"dtype": "float32"}', "tokens cannot have dtype float32."),
    ],
)
def test_a_damaged_bin(size_bytes: int | None, sidecar: str | None, first: str, tmp_path: Path) -> None:
    path = tmp_path / "t.bin"
    if size_bytes is not None:
        path.write_bytes(bytes(size_bytes))
    if sidecar:
        Path(f"{path}.json").write_text(sidecar)
    with pytest.raises(DataError) as error:
        load_tokens(path)
    assert error.value.args[0].replace(str(tmp_path), "...").splitlines()[0] == first


def test_a_bin_file_is_memory_mapped(tmp_path: Path) -> None:
    path = tmp_path / "t.bin"
    with open(path, "wb") as file:
        os.truncate(file.fileno(), 1 << 40)  # a terabyte of nothing, on no disk
    assert len(load_tokens(path).ids) == (1 << 39) - (1 << 39) // 20
