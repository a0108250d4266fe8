"""Corpora: files that are read, the validation split, and errors."""

from pathlib import Path

import pytest

from spanax.errors import DataError
from spanax.train.data.formats.table import SUFFIXES
from spanax.train.data.text.corpus import PYTHON_CORPUS_BYTES, TABLES, load_corpus


def test_python_is_a_corpus_of_some_size() -> None:
    corpus = load_corpus("python")
    size = len(corpus.train) + len(corpus.validation)
    assert 0.5 * PYTHON_CORPUS_BYTES < size <= 1.001 * PYTHON_CORPUS_BYTES
    assert 0.02 < len(corpus.validation) / size < 0.15
    assert load_corpus("python") == corpus
    corpus.train.decode(), corpus.validation.decode()


def test_the_last_twentieth_of_a_file_is_the_validation_split(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("ab" * 50)
    assert len(load_corpus(path).validation) == 5
    for length in range(1, 45):  # a character is never divided
        path.write_text("€" * length)
        corpus = load_corpus(path)
        corpus.train.decode(), corpus.validation.decode()
        assert corpus.train + corpus.validation == path.read_bytes()


def test_a_folder_holds_out_complete_files(tmp_path: Path) -> None:
    for i in range(60):
        (tmp_path / f"d{i % 3}").mkdir(exist_ok=True)
        (tmp_path / f"d{i % 3}" / f"{i:02}.md").write_text(f"file {i:02}")
    corpus = load_corpus(tmp_path)
    train, validation = (set(part.decode().split("\n")) for part in (corpus.train, corpus.validation))
    assert train | validation == {f"file {i:02}" for i in range(60)}
    assert not train & validation and 1 <= len(validation) <= 9
    assert corpus.train.decode().split("\n")[0] == "file 00"  # by path, so d0 comes first
    (tmp_path / "new.txt").write_text("new")  # a new file does not move others
    assert set(load_corpus(tmp_path).validation.decode().split("\n")) - {"new"} == validation


@pytest.mark.parametrize("num_files", range(2, 9))
def test_a_small_folder_has_both_sides(num_files: int, tmp_path: Path) -> None:
    for i in range(num_files):
        (tmp_path / f"{i}.txt").write_text(f"file {i}")
    corpus = load_corpus(tmp_path)
    assert corpus.train and corpus.validation


def test_hidden_and_binary_files_are_excluded(tmp_path: Path) -> None:
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


NO_TEXT = "folder '{source}' has no text{skipped}.\n  fix: a folder with text files in it"
NOT_UTF8 = (
    "'{source}{file}' is not UTF-8 text.\n  where: byte 1,234 is 0xe9\n"
    "  fix: convert it (iconv -f latin1 -t utf-8), or remove it from the folder"
)
LATIN = b"x" * 1234 + "é".encode("latin1") + b"x"


@pytest.mark.parametrize(
    "name, files, message",
    [
        (
            "no.txt",
            {},
            "no file or folder '{source}'.\n  where: looked in {folder}\n"
            f"  fix: a text file or {TABLES}, a folder of them, a .bin of tokens, or 'python'",
        ),
        (
            "a.txt",
            {"a.txt": b""},
            "'{source}' is empty.\n  fix: a file with text in it, or 'python' for the built-in corpus",
        ),
        ("inner", {"inner/.hidden": b"x"}, NO_TEXT.replace("{skipped}", "")),
        ("inner", {"inner/a.png": b"\0"}, NO_TEXT.replace("{skipped}", "; skipped files: 1, such as 'a.png'")),
        ("a.txt", {"a.txt": LATIN}, NOT_UTF8.replace("{file}", "")),
        ("inner", {"inner/b.txt": LATIN}, NOT_UTF8.replace("{file}", "/b.txt")),
    ],
)
def test_a_source_without_text_raises(name: str, files: dict[str, bytes], message: str, tmp_path: Path) -> None:
    for file, content in files.items():
        (tmp_path / file).parent.mkdir(exist_ok=True)
        (tmp_path / file).write_bytes(content)
    with pytest.raises(DataError) as error:
        load_corpus(tmp_path / name)
    assert error.value.exit_code == 65
    assert error.value.args[0] == message.format(source=tmp_path / name, folder=tmp_path)


def test_the_kinds_of_tables_are_named() -> None:
    assert {f".{kind}" for kind in SUFFIXES.values()} == {*TABLES.split(", ")}
