"""Corpus: what is read, what is held out, and what is refused. Bigram: against the sum written out."""

import math
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from spanax.errors import DataError
from spanax.run.data.text import bigram
from spanax.run.data.text.bigram import bigram_loss
from spanax.run.data.text.corpus import PYTHON_CORPUS_BYTES, load_corpus


def told(source: Path) -> str:
    """The whole message, with the folder of the test left out."""
    with pytest.raises(DataError) as error:
        load_corpus(source)
    assert error.value.exit_code == 65
    return str(error.value).replace(f"{source.parent}", "...")


def test_python_is_a_corpus_of_some_size() -> None:
    corpus = load_corpus("python")
    size = len(corpus.train) + len(corpus.validation)
    assert 0.5 * PYTHON_CORPUS_BYTES < size <= 1.001 * PYTHON_CORPUS_BYTES
    assert 0.02 < len(corpus.validation) / size < 0.15
    assert load_corpus("python") == corpus
    corpus.train.decode(), corpus.validation.decode()


def test_a_file_keeps_its_last_twentieth_for_validation(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("ab" * 50)
    corpus = load_corpus(path)
    assert (len(corpus.train), len(corpus.validation)) == (95, 5)
    assert corpus.train + corpus.validation == path.read_bytes()


def test_a_character_is_never_cut(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    for length in range(1, 45):
        path.write_text("€" * length)
        corpus = load_corpus(path)
        corpus.train.decode(), corpus.validation.decode()
        assert corpus.train + corpus.validation == path.read_bytes()


def test_a_folder_holds_whole_files_out(tmp_path: Path) -> None:
    for i in range(60):
        (tmp_path / f"d{i % 3}").mkdir(exist_ok=True)
        (tmp_path / f"d{i % 3}" / f"{i:02}.md").write_text(f"file {i:02}")
    corpus = load_corpus(tmp_path)
    train, validation = (set(part.decode().split("\n")) for part in (corpus.train, corpus.validation))
    assert train | validation == {f"file {i:02}" for i in range(60)}
    assert not train & validation and 1 <= len(validation) <= 9
    assert corpus.train.decode().split("\n")[0] == "file 00"  # by path, so d0 comes first


def test_a_new_file_moves_no_other_to_the_other_side(tmp_path: Path) -> None:
    for i in range(60):
        (tmp_path / f"{i}.txt").write_text(f"file {i}")
    held_out = set(load_corpus(tmp_path).validation.decode().split("\n"))
    (tmp_path / "new.txt").write_text("new")
    assert set(load_corpus(tmp_path).validation.decode().split("\n")) - {"new"} == held_out


@pytest.mark.parametrize("num_files", range(2, 9))
def test_a_small_folder_has_both_sides(num_files: int, tmp_path: Path) -> None:
    for i in range(num_files):
        (tmp_path / f"{i}.txt").write_text(f"file {i}")
    corpus = load_corpus(tmp_path)
    assert corpus.train and corpus.validation


def test_hidden_and_binary_files_are_left_out(tmp_path: Path) -> None:
    (tmp_path / ".git").mkdir()
    (tmp_path / ".git" / "config").write_text("hidden")
    (tmp_path / "__pycache__").mkdir()
    (tmp_path / "__pycache__" / "a.txt").write_text("hidden")
    (tmp_path / "image.png").write_bytes(b"\x89PNG\0\xff")
    (tmp_path / "empty.txt").touch()
    (tmp_path / "a.txt").write_text("first")
    (tmp_path / "b.txt").write_text("second")
    corpus = load_corpus(tmp_path)
    assert {corpus.train, corpus.validation} == {b"first", b"second"}
    assert corpus.skipped == ("image.png",)


def test_a_missing_file(tmp_path: Path) -> None:
    assert told(tmp_path / "no.txt") == (
        "no file or folder '.../no.txt'.\n"
        "  where: looked in ...\n"
        "  fix: a text file, a folder of them, a .bin of tokens, or 'python' for the built-in corpus"
    )


def test_an_empty_file(tmp_path: Path) -> None:
    (tmp_path / "a.txt").touch()
    assert told(tmp_path / "a.txt") == (
        "'.../a.txt' is empty.\n  fix: a file with text in it, or 'python' for the built-in corpus"
    )


def test_a_folder_without_text(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    fix = "\n  fix: a folder with text files in it"
    assert told(folder) == "folder '.../folder' holds no text." + fix
    (folder / "a.png").write_bytes(b"\0")
    assert told(folder) == "folder '.../folder' holds no text; binary files left out: 1, such as 'a.png'." + fix


@pytest.mark.parametrize("name", ["a.txt", "folder"])
def test_text_that_is_not_utf8(name: str, tmp_path: Path) -> None:
    path = tmp_path / name
    bad = path if name.endswith(".txt") else path / "b.txt"
    bad.parent.mkdir(exist_ok=True)
    bad.write_bytes(b"x" * 1234 + "é".encode("latin1") + b"x")
    assert told(path) == (
        f"'.../{bad.relative_to(tmp_path)}' is not UTF-8 text.\n"
        "  where: byte 1,234 is 0xe9\n"
        "  fix: convert it (iconv -f latin1 -t utf-8), or leave it out of the folder"
    )


# ---- bigram


def written_out(train: list[int], validation: list[int], vocab_size: int, smoothing: float) -> float:
    """The loss as its docstring says it, one pair at a time."""
    pairs, before, each = Counter(zip(train, train[1:], strict=False)), Counter(train[:-1]), Counter(train)
    followers = Counter(first for first, _ in pairs)
    total = 0.0
    for a, b in zip(validation, validation[1:], strict=False):
        unigram = (each[b] + 1) / (len(train) + vocab_size)
        weight = smoothing * max(followers[a], 1)
        total -= math.log((pairs[a, b] + weight * unigram) / (before[a] + weight))
    return total / (len(validation) - 1)


@pytest.mark.parametrize("dense_pairs", [bigram.DENSE_PAIRS, 0], ids=["dense", "sparse"])
@pytest.mark.parametrize("smoothing", [0.5, 2.0])
def test_the_bigram_loss_is_the_sum_written_out(
    smoothing: float, dense_pairs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bigram, "DENSE_PAIRS", dense_pairs)
    random = np.random.default_rng(0)
    train, validation = random.integers(0, 9, 300), random.integers(0, 12, 100)  # 9, 10 and 11 were never seen
    found = bigram_loss(train, validation, 12, smoothing)
    assert found == pytest.approx(written_out(train.tolist(), validation.tolist(), 12, smoothing), rel=1e-12)
    assert bigram_loss(train.astype(np.uint8), validation.astype(np.uint16), 12, smoothing) == found


@pytest.mark.parametrize("dense_pairs", [bigram.DENSE_PAIRS, 0], ids=["dense", "sparse"])
def test_a_bigram_that_saw_nothing_knows_nothing(dense_pairs: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bigram, "DENSE_PAIRS", dense_pairs)
    nothing = np.zeros(0, np.int32)
    assert bigram_loss(nothing, np.arange(16), 16) == pytest.approx(math.log(16))


def test_the_chances_after_a_token_sum_to_one() -> None:
    train = np.random.default_rng(1).integers(0, 7, 50)
    chances = [math.exp(-bigram_loss(train, np.array([3, b]), 8)) for b in range(8)]
    assert sum(chances) == pytest.approx(1)


def test_tokens_outside_the_vocabulary_are_refused() -> None:
    with pytest.raises(ValueError, match="token 9 is outside a vocabulary of 9"):
        bigram_loss(np.arange(10), np.arange(3), 9)
