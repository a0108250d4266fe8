"""Corpora: files that are read, the validation split, and errors."""

from pathlib import Path

import pytest

from spanax.errors import DataError
from spanax.train.data.formats.table import SUFFIXES
from spanax.train.data.text.corpus import PYTHON_CORPUS_BYTES, TABLES, load_corpus


def message_of(source: Path) -> str:
    """The full message, without the folder of the test."""
    with pytest.raises(DataError) as error:
        load_corpus(source)
    assert error.value.exit_code == 65
    return error.value.args[0].replace(f"{source.parent}", "...")


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
    corpus = load_corpus(path)
    assert (len(corpus.train), len(corpus.validation)) == (95, 5)
    assert corpus.train + corpus.validation == path.read_bytes()


def test_a_character_is_never_divided(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    for length in range(1, 45):
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


def test_a_new_file_does_not_change_the_split_of_others(tmp_path: Path) -> None:
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
    assert corpus.skipped == ("image.png",)


def test_a_missing_file(tmp_path: Path) -> None:
    assert message_of(tmp_path / "no.txt") == (
        "no file or folder '.../no.txt'.\n"
        "  where: looked in ...\n"
        "  fix: a text file or .jsonl, .parquet, .arrow, .array_record, a folder of them, a .bin of tokens, or "
        "'python'; a .csv is read as text"
    )
    assert {f".{kind}" for kind in SUFFIXES.values()} == {*TABLES.split(", ")}


def test_an_empty_file(tmp_path: Path) -> None:
    (tmp_path / "a.txt").touch()
    assert message_of(tmp_path / "a.txt") == (
        "'.../a.txt' is empty.\n  fix: a file with text in it, or 'python' for the built-in corpus"
    )


def test_a_folder_without_text(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    fix = "\n  fix: a folder with text files in it"
    assert message_of(folder) == "folder '.../folder' has no text." + fix
    (folder / "a.png").write_bytes(b"\0")
    assert message_of(folder) == "folder '.../folder' has no text; skipped binary files: 1, such as 'a.png'." + fix


@pytest.mark.parametrize("name", ["a.txt", "folder"])
def test_text_that_is_not_utf8(name: str, tmp_path: Path) -> None:
    path = tmp_path / name
    bad = path if name.endswith(".txt") else path / "b.txt"
    bad.parent.mkdir(exist_ok=True)
    bad.write_bytes(b"x" * 1234 + "é".encode("latin1") + b"x")
    assert message_of(path) == (
        f"'.../{bad.relative_to(tmp_path)}' is not UTF-8 text.\n"
        "  where: byte 1,234 is 0xe9\n"
        "  fix: convert it (iconv -f latin1 -t utf-8), or remove it from the folder"
    )
