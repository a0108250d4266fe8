"""Tables: the same rows from every format, the validation split, tokens in one pass, and errors."""

import csv
import gzip
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pytest
import tokenizers
from pyarrow import feather, parquet

from batched import B, leaf, plan_of, take
from spanax.errors import DataError, SpanaxError, WriteError
from spanax.train.data import cache as caches
from spanax.train.data.batches import Batches, batches
from spanax.train.data.formats import records as parsed
from spanax.train.data.formats import table as tables
from spanax.train.data.formats.records import _example_type
from spanax.train.data.formats.table import Table, is_table, open_table
from spanax.train.data.open_source import WINDOWS, vocab_size
from spanax.train.data.open_source import opened as parts
from spanax.train.data.source import Options
from spanax.train.data.text.tokenizer import load_tokenizer
from spanax.train.data.text.tokens import Column

N = 300
ROWS = [{"text": f"row {i} é", "ids": [i % 7] * (i % 4), "image": [[i, 0.5], [1.0, 2.0]], "label": i} for i in range(N)]
IMAGES = plan_of(leaf("image", (B, 2, 2), "float32"), leaf("label", (B,)))
LABELS = plan_of(leaf("label", (3,)))
TEXT = plan_of(leaf("inputs", (B, 4)), leaf("targets", (B, 4)))


def arrow(path: Path, kind: str) -> None:
    """The rows as a file that pyarrow writes."""
    table = pyarrow.Table.from_pylist(ROWS)
    if kind == "parquet":
        parquet.write_table(table, path, row_group_size=70)
    elif kind == "stream":
        with pyarrow.ipc.new_stream(str(path), table.schema) as sink:
            for batch in table.to_batches(max_chunksize=64):
                sink.write_batch(batch)
    else:
        feather.write_feather(table, path, compression=kind, chunksize=90)


def records(path: Path, rows: list[bytes]) -> None:
    from array_record.python.array_record_module import ArrayRecordWriter

    writer = ArrayRecordWriter(str(path), "group_size:1")
    for row in rows:
        writer.write(row)
    writer.close()


def as_example(row: dict[str, Any]) -> bytes:
    example = _example_type()["Example"]()
    features = {name: example.features.feature.add(key=name).value for name in ("text", "ids", "label")}
    features["text"].bytes_list.value.append(row["text"].encode())
    features["ids"].int64_list.value.extend(row["ids"])
    features["label"].int64_list.value.append(row["label"])
    return example.SerializeToString()


def as_csv(path: Path) -> None:
    with open(path, "w", newline="") as file:
        writer = csv.DictWriter(file, ["text", "label", "day"], extrasaction="ignore")
        writer.writeheader()
        writer.writerows(row | {"day": "2024-01-01"} for row in ROWS)


def lines(rows: list[dict[str, Any]]) -> bytes:
    return "\n\n".join(json.dumps(row) for row in rows).encode() + b"\n"


WRITERS: dict[str, Callable[[Path], Any]] = {
    "a.jsonl": lambda path: path.write_bytes(lines(ROWS)),
    "a.jsonl.gz": lambda path: path.write_bytes(gzip.compress(lines(ROWS))),
    "a.parquet": lambda path: arrow(path, "parquet"),
    "packed.feather": lambda path: arrow(path, "lz4"),
    "plain.feather": lambda path: arrow(path, "uncompressed"),
    "stream.arrow": lambda path: arrow(path, "stream"),
    "json.array_record": lambda path: records(path, [json.dumps(row).encode() for row in ROWS]),
    "example.array_record": lambda path: records(path, [as_example(row) for row in ROWS]),
    "a.csv": as_csv,
}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "spanax"


def written(folder: Path, name: str) -> Path:
    WRITERS[name](folder / name)
    return folder / name


def of_split(table: Table, field: str) -> list[Any]:
    is_chosen = table.holds_out and table.split == "validation"
    return [value for is_held_out, value in table.values(field) if is_held_out == is_chosen]


# ---- the same rows out of every format


@pytest.mark.parametrize("name", WRITERS)
def test_every_format_has_the_same_rows(name: str, tmp_path: Path, opened: Callable[..., Batches]) -> None:
    path = written(tmp_path, name)
    table = open_table(path)
    assert {"text", "label"} <= set(table.fields)
    assert [value for _, value in table.values("text")] == [row["text"] for row in ROWS]
    assert [number for number, (held, _) in enumerate(table.values("label")) if held] == list(range(1, N, 20))
    if "ids" in table.fields:
        assert [np.atleast_1d(value).tolist() for _, value in table.values("ids")] == [row["ids"] for row in ROWS]
    # As examples, each row is in one of the splits.
    sides = {split: opened(path, LABELS, split=split, shuffle=False) for split in ("train", "validation")}
    labels = {split: [int(label) for batch in side for label in batch["label"]] for split, side in sides.items()}
    assert labels["validation"] == list(range(1, N, 20))
    assert sorted(labels["train"] + labels["validation"]) == list(range(N))
    if "image" in table.fields:
        for batch in opened(path, IMAGES, shuffle=False):
            np.testing.assert_array_equal(batch["image"], [ROWS[label]["image"] for label in batch["label"]])
    # As text, the documents are concatenated.
    joined = "".join(f"{row['text']}\n" for number, row in enumerate(ROWS) if number % 20 != 1).encode()
    reader = opened(path, TEXT, shuffle=False)
    assert reader.tokens is not None and reader.tokens.ids.tobytes() == joined and reader.vocab_size == 256
    assert np.ravel(next(reader)["inputs"]).astype(np.uint8).tobytes() == joined[:32]
    rest = "".join(f"{row['text']}\n" for row in ROWS[1::20]).encode()
    assert opened(path, TEXT, split="validation").tokens.ids.tobytes() == rest


@pytest.mark.parametrize("name", ["a.jsonl", "a.parquet"])
def test_fields_become_the_leaves_of_their_names(name: str, tmp_path: Path, opened: Callable[..., Batches]) -> None:
    path = written(tmp_path, name)
    reader = opened(path, IMAGES, seed=3, epochs=None)
    labels = [label for batch in take(reader, 72) for label in batch["label"]]
    expected = {row["label"] for number, row in enumerate(ROWS) if number % 20 != 1}
    assert set(labels[: len(expected)]) == expected and labels[:9] != sorted(labels[:9])
    assert reader.shares[0].num_examples == len(expected)
    state = opened(path, IMAGES, seed=3).state() | {"next_index": 5}
    assert take(opened(path, IMAGES, seed=3, position=state), 1)[0]["label"] == labels[5 * B : 6 * B]
    renamed = plan_of(leaf("image", (B, 2, 2), "float32"), leaf("y", (B,)))
    assert next(opened(path, renamed, field="y=label", seed=3))["y"].tolist() == labels[:B]
    assert next(opened(path, renamed, field={"y": "label"}, seed=3))["y"].tolist() == labels[:B]


def test_leaves_may_be_nested_or_alone(tmp_path: Path, opened: Callable[..., Batches]) -> None:
    path = written(tmp_path, "a.jsonl")
    pair = plan_of(leaf("0", (B,)), leaf("1.inner", (B,)))
    first, second = next(opened(path, pair, field="0=label,1.inner=label", shuffle=False))
    assert first.tolist() == second["inner"].tolist() == [0, 2, 3, 4, 5, 6, 7, 8]
    alone = next(opened(path, plan_of(leaf("batch", (B,))), field="batch=label", shuffle=False))
    assert alone.tolist() == first.tolist()


# ---- text and tokens


def ended(folder: Path, **config: Any) -> str:
    """A tokenizer.json whose vocabulary has an end of text."""
    engine = tokenizers.Tokenizer(tokenizers.models.WordLevel({"row": 0, "é": 1, "?": 2}, unk_token="?"))
    engine.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    engine.add_special_tokens(["<|endoftext|>", "<stop>"])
    engine.save(str(folder / "t.json"))
    if config:
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return str(folder / "t.json")


@pytest.mark.parametrize(
    "config, end",
    [({}, 3), ({"eos_token": "<stop>"}, 4), ({"eos_token": {"content": "<stop>"}}, 4), ({"eos_token": None}, None)],
)
def test_the_end_of_text_token_is_that_of_the_tokenizer(
    config: dict[str, Any], end: int | None, tmp_path: Path
) -> None:
    encoder = load_tokenizer(ended(tmp_path, **config))
    assert encoder.end_id == end
    ids = Column(open_table(written(tmp_path, "a.jsonl")), "text").tokens(encoder).ids
    assert ids[:8].tolist() == ([0, 2, 1, end, 0, 2, 1, end] if end else [0, 2, 1, 0, 2, 1, 0, 2])


def test_a_bpe_is_trained_only_on_the_training_split(tmp_path: Path, cache: Path) -> None:
    rows = [{"text": "zebra " * 50 if number % 20 == 1 else "the cat sat on the mat "} for number in range(100)]
    (tmp_path / "a.jsonl").write_bytes(lines(rows))
    column = Column(open_table(tmp_path / "a.jsonl"), "text")
    engine = load_tokenizer("bpe:300", [column.training_text])
    assert len(engine.encode(b" zebra")) > 2 > len(engine.encode(b" cat")) > 0
    tokens = column.tokens(engine)
    (cached,) = cache.glob("tokenizer-*.json")
    text = tokenizers.Tokenizer.from_file(str(cached)).decode(tokens.ids.tolist())
    assert text == "the cat sat on the mat \n" * 95


def test_the_encoding_does_not_depend_on_the_number_of_texts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from spanax.train.data.text import tokenizer

    monkeypatch.setattr(tokenizer, "PIECE_BYTES", 100)
    monkeypatch.setattr(tokenizer, "GROUP_CHARS", 1000)
    texts = ["word " * (number % 50) for number in range(200)]
    (tmp_path / "a.jsonl").write_bytes(lines([{"text": text} for text in texts]))
    encoder = load_tokenizer(ended(tmp_path))
    actual = Column(open_table(tmp_path / "a.jsonl"), "text").tokens(encoder).ids
    expected = [id_ for number, text in enumerate(texts) if number % 20 != 1 for id_ in [2] * text.count("word") + [3]]
    assert actual.tolist() == expected


def test_token_ids_are_taken_as_they_are(tmp_path: Path, opened: Callable[..., Batches]) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(lines([{"input_ids": [70_000 + i, 1, 2]} for i in range(100)]))
    reader = opened(path, TEXT, shuffle=False)
    assert reader.tokens.ids[:6].tolist() == [70_000, 1, 2, 70_002, 1, 2]
    ((part, _),) = parts(path, WINDOWS, Options())
    assert vocab_size([part]) == reader.vocab_size == 70_100


def test_a_second_start_reads_no_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
    path = written(tmp_path, "a.jsonl")
    column = Column(open_table(path), "text")
    first = column.tokens(load_tokenizer("bytes"))
    ids = first.ids.copy()
    monkeypatch.setattr(Table, "values", lambda *args: pytest.fail("read again"))
    again = Column(open_table(path, split="validation"), "text").tokens(load_tokenizer("bytes"))
    assert len(again.ids) and first.name.startswith("a.jsonl[text] train bytes ")
    monkeypatch.undo()
    (cached,) = cache.glob("rows-*-train.npy")
    cached.write_bytes(cached.read_bytes()[:100])  # truncated: encoded again
    assert np.array_equal(Column(open_table(path), "text").tokens(load_tokenizer("bytes")).ids, ids)


MEASURE = """
import re, sys
from pathlib import Path
from spanax.train.data.text.tokens import Column
from spanax.train.data.formats.table import open_table
from spanax.train.data.text.tokenizer import load_tokenizer
folder = Path(sys.argv[1])
encoder = load_tokenizer("bytes")
Column(open_table(folder / f"small.{sys.argv[2]}"), "text").tokens(encoder, cache_dir=folder)
def peak_kib():  # not ru_maxrss, which begins with what the parent had
    return int(re.search(r"VmHWM:\\s+(\\d+)", Path("/proc/self/status").read_text())[1])
before = peak_kib()
tokens = Column(open_table(folder / f"large.{sys.argv[2]}"), "text").tokens(encoder, cache_dir=folder)
print(len(tokens.ids), peak_kib() - before)
"""


@pytest.mark.skipif(
    not Path("/proc/self/status").exists(), reason="this system does not tell how much memory was needed"
)
@pytest.mark.parametrize(
    "kind, most_mib", [("jsonl", 24), ("parquet", 80), ("csv", 80)]
)  # Arrow keeps some memory to use again
def test_memory_does_not_grow_with_the_file(kind: str, most_mib: int, tmp_path: Path) -> None:
    text = "to be or not to be " * 500
    for name, num_rows in (("small", 400), ("large", 12000)):
        rows = [f"{number} {text}" for number in range(num_rows)]
        if kind == "jsonl":
            (tmp_path / f"{name}.jsonl").write_bytes(b"\n".join(b'{"text": "%s"}' % row.encode() for row in rows))
        elif kind == "csv":
            (tmp_path / f"{name}.csv").write_text("\n".join(["text", *rows]))
        else:
            parquet.write_table(pyarrow.table({"text": rows}), tmp_path / f"{name}.parquet")
    run = subprocess.run(
        [sys.executable, "-c", MEASURE, str(tmp_path), kind], capture_output=True, text=True, timeout=240
    )
    assert run.returncode == 0, run.stderr
    num_tokens, grown_kib = map(int, run.stdout.split())
    assert num_tokens > 108_000_000 and grown_kib < most_mib << 10


def test_only_one_of_several_processes_encodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, encoder, write = written(tmp_path, "a.jsonl"), load_tokenizer("bytes"), tables._write
    calls: list[int] = []

    def slow(*args: Any) -> None:
        calls.append(1)
        time.sleep(0.2)
        write(*args)

    monkeypatch.setattr(tables, "_write", slow)
    with ThreadPoolExecutor() as pool:  # a lock is of the open file, so threads stand for processes
        actual = list(pool.map(lambda _: Column(open_table(path), "text").tokens(encoder).ids.tobytes(), range(3)))
    assert len(calls) == 1 and len(set(actual)) == 1


# ---- which files


def test_tables_are_recognized(tmp_path: Path) -> None:
    for folder, names in {
        "tables": ["b/2.jsonl", "a/1.jsonl", "README.md", ".git/x.py"],
        "text": ["a.jsonl", "a.py"],
        "documents": ["a.md", "b.json"],
    }.items():
        for name in names:
            (tmp_path / folder / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / folder / name).write_text(json.dumps({"text": name}) + "\n")
    assert [is_table(tmp_path / name) for name in ("tables", "text", "documents")] == [True, False, False]
    texts = list(open_table(tmp_path / "tables").read("text"))
    assert texts == ["a/1.jsonl", "b/2.jsonl"]
    assert of_split(open_table(str(tmp_path / "*" / "?" / "[12].jsonl")), "text") == [
        "a/1.jsonl"
    ]  # one of two rows is held out


@pytest.mark.parametrize("layout", ["{split}-00000.jsonl", "{split}/0.jsonl"])
@pytest.mark.parametrize("validation", ["validation", "val", None])
def test_a_folder_may_define_its_splits(layout: str, validation: str | None, tmp_path: Path) -> None:
    folder = tmp_path / "data"
    for split in filter(None, ["train", validation, "test"]):
        path = folder / layout.format(split=split)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(lines([{"split": split}] * 40))
    for split in ("train", "validation"):
        table = open_table(folder, split=split)
        held_out = 2 if validation is None else 40
        expected = validation if split == "validation" and validation else "train"
        num_rows = held_out if split == "validation" else 40 if validation else 38
        assert of_split(table, "split") == [expected] * num_rows


def test_a_saved_dataset_is_read_without_its_library(tmp_path: Path) -> None:
    folder = tmp_path / "saved" / "train"
    folder.mkdir(parents=True)
    written(folder, "stream.arrow")
    (folder / "state.json").write_text('{"_data_files": [{"filename": "stream.arrow"}]}')
    (folder / "dataset_info.json").write_text("{}")
    assert len(of_split(open_table(folder), "label")) == N - 15
    (tmp_path / "saved" / "dataset_dict.json").write_text('{"splits": ["train"]}')
    assert len(of_split(open_table(tmp_path / "saved", split="validation"), "label")) == 15
    (folder / "cache-1.arrow").write_bytes(b"of another computation")
    (folder / "notes.txt").write_text("mine")
    assert len(of_split(open_table(tmp_path / "saved"), "label")) == N - 15
    for file in folder.glob("*.arrow"):
        file.unlink()
    for saved in (folder, tmp_path / "saved"):
        with pytest.raises(DataError, match="has no rows|has no split 'train'"):
            open_table(saved)


# ---- Hugging Face's own objects


def test_a_dataset_and_a_dict_of_them(tmp_path: Path, opened: Callable[..., Batches]) -> None:
    datasets = pytest.importorskip("datasets", reason='pip install "spanax[datasets]"')
    dataset = datasets.Dataset.from_list(ROWS).remove_columns("ids")
    plan = plan_of(leaf("image", (B, 2, 2), "float32"), leaf("label", (B,)))
    turned = dataset.with_transform(lambda rows: rows | {"label": [N - 1 - label for label in rows["label"]]})
    rows = [
        row
        for batch in take(opened(turned, plan, drop_remainder=False), 38)
        for row in zip(batch["label"], batch["image"], strict=True)
    ]
    assert all(image[0][0] == N - 1 - label for label, image in rows)
    labels = [label for label, _ in rows]
    assert sorted(labels[:N]) == list(range(N))  # all of it: nothing is held out of a dataset in memory
    splits = datasets.DatasetDict({"train": dataset, "validation": dataset.select(range(20))})
    reader = opened(splits, TEXT, split="validation", shuffle=False)
    assert reader.tokens.ids.tobytes() == "".join(f"{row['text']}\n" for row in ROWS[:20]).encode()
    with pytest.raises(SpanaxError, match="has no split 'validation'"):
        batches(datasets.DatasetDict({"train": dataset}), TEXT, split="validation")
    splits.save_to_disk(str(tmp_path / "saved"))
    again = opened(tmp_path / "saved", TEXT, split="validation", shuffle=False)
    assert np.array_equal(again.tokens.ids, reader.tokens.ids)


def test_an_iterable_dataset_is_read_past_on_a_resume(opened: Callable[..., Batches]) -> None:
    datasets = pytest.importorskip("datasets", reason='pip install "spanax[datasets]"')
    stream = datasets.Dataset.from_list([{"label": i} for i in range(64)]).to_iterable_dataset(num_shards=4)
    plan = plan_of(leaf("label", (B,)))
    reader = opened(stream, plan)
    take(reader, 3)
    position = json.loads(json.dumps(reader.state()))
    assert "mark" not in position  # datasets' own state_dict is not used
    rest = [batch["label"] for batch in take(reader, 7)]
    assert [batch["label"] for batch in take(opened(stream, plan, position=position), 7)] == rest


# ---- what is refused


def message_of(kind: type[SpanaxError], source: Any, plan: Any = TEXT, **options: Any) -> str:
    with pytest.raises(kind) as error:
        batches(source, plan, **options)
    assert error.value.exit_code == kind.exit_code and error.value.args[0].count("\n") <= 3
    return error.value.args[0]


def test_a_missing_field_raises(tmp_path: Path) -> None:
    path = written(tmp_path, "a.jsonl")
    (tmp_path / "b.jsonl").write_text('{"id": 1, "content": "x"}\n')
    expected = plan_of(leaf("picture", (B, 2, 2), "float32"), leaf("label", (B,)))
    assert message_of(SpanaxError, tmp_path / "b.jsonl") == (
        "'b.jsonl' has no field 'text' or 'input_ids'.\n"
        "  where: it has id, content; the plan expects inputs, targets\n"
        "  fix: --field NAME, the column with the text; for a model of the columns see A CSV file, docs/data.md"
    )
    assert message_of(DataError, path, field="txt") == (
        "'a.jsonl' has no field 'txt'.\n  fix: did you mean 'text'? known: text, ids, image, label"
    )
    assert message_of(DataError, path, expected) == (
        "'a.jsonl' has no field 'picture'.\n"
        "  where: it has text, ids, image, label; the plan expects picture, label\n"
        "  fix: --field picture=NAME; for a model of the columns see A CSV file, docs/data.md"
    )
    assert message_of(SpanaxError, path, expected, field="pic=image") == (
        "no array of the batch is called 'pic', so no field of 'a.jsonl' can fill it.\n"
        "  where: --field pic=image; fields: text, ids, image, label\n"
        "  fix: --field ARRAY=FIELD; arrays are picture, label"
    )


GOOD = '{"text": "to be or not to be"}\n' * 5
ANY_ROW, NO_TEXT, NO_IDS = (
    "row 5 of '{}' cannot",
    "row 5 of 'a.jsonl' does not have text",
    "row 1 of 'a.jsonl' does not",
)
BAD_ROWS = {
    "half": ("a.jsonl", GOOD + '{"text": "half', ANY_ROW),
    "a list": ("a.jsonl", GOOD + "[1, 2]", ANY_ROW),
    "another field": ("a.jsonl", GOOD + '{"other": 1}', ANY_ROW),
    "nested deep": ("a.jsonl", GOOD + "[" * 100_000, ANY_ROW),
    "a number": ("a.jsonl", GOOD + '{"text": 7}', NO_TEXT),
    "a surrogate": ("a.jsonl", GOOD + '{"text": "\\ud800"}', NO_TEXT),
    "no row": ("a.jsonl", "", "'{}' is empty."),
    "ragged ids": ("a.jsonl", '{"input_ids": [[1], 2]}', "row 0 of '{}' cannot be read."),
    "a CSV with a short row": ("a.csv", "text,x\na,1\nb\n", "cannot read '{}'."),
    "a CSV with an open quote": ("a.csv", 'text,x\n"a,1\n', "cannot read '{}'."),
    "a CSV with an invalid name": ("a.csv", "text,\xa5\na,1\n", "cannot read '{}'."),
    "a CSV of nothing": ("a.csv", "", "cannot read '{}'."),
}
BAD_ROWS |= {
    f"ids {ids}": ("a.jsonl", f'{{"input_ids": [1]}}\n{{"input_ids": {ids}}}', NO_IDS)
    for ids in ("[-1]", "[4294967296]", "[0.5]", '"7"', "[[1]]")
}


@pytest.mark.parametrize("name, content, message", BAD_ROWS.values(), ids=list(BAD_ROWS))
def test_a_bad_row_is_named(name: str, content: str, message: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(content.encode("latin-1"))
    assert message_of(DataError, tmp_path / name).startswith(message.format(tmp_path / name))


def test_a_bad_row_of_arrow_or_csv_is_named(tmp_path: Path) -> None:
    path, plan = tmp_path / "a.parquet", plan_of(leaf("label", (2,)))
    for label in ([1, 2, None, 4], [[1], [2], [[]] and None, [4]]):
        parquet.write_table(pyarrow.table({"label": label}), path)
        text = plan if isinstance(label[0], int) else TEXT
        options = {} if text is plan else {"field": "label"}
        with pytest.raises(DataError, match=f"row 2 of '{path}' has a null in a field"):
            take(batches(path, text, prefetch=0, shuffle=False, **options), 9)
    (tmp_path / "late.csv").write_text("label\n" + "1234567\n" * 200_000 + "x\n")
    message = message_of(DataError, tmp_path / "late.csv", plan)
    assert "Row #200002: CSV conversion error to int64: invalid value 'x'" in message


@pytest.mark.parametrize(
    "name, text, read",
    [("a.csv", "label\n1\n2\n3", [1.0, 3.0]), ("a.jsonl", '{"label": 1}\n{"label": 2}\n{"label": 2.5}', [1.0, 2.5])],
)
def test_a_float_that_a_text_file_writes_as_an_integer_is_read(
    name: str, text: str, read: list[float], tmp_path: Path
) -> None:
    (tmp_path / name).write_text(text)
    plan = plan_of(leaf("label", (2,), "float32"))
    assert take(batches(tmp_path / name, plan, prefetch=0, shuffle=False), 1) == [{"label": read}]


def test_a_line_without_an_end_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parsed, "MAX_LINE_BYTES", 1 << 16)
    path = tmp_path / "a.jsonl"
    with open(path, "wb") as file:
        os.truncate(file.fileno(), 1 << 40)
    assert "longer than 65,536 bytes" in message_of(DataError, path)
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(bytes(1 << 20)))
    assert "longer than 65,536 bytes" in message_of(DataError, tmp_path / "b.jsonl.gz")


@pytest.mark.parametrize("name", ["a.jsonl.gz", "a.parquet"])
def test_a_file_that_unpacks_too_far_is_refused(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(caches, "ALWAYS_BYTES", 1 << 16)
    rows = [{"text": "to be" * 100}] * 5_000
    if name.endswith(".gz"):
        (tmp_path / name).write_bytes(gzip.compress(lines(rows) + (b" " * 1023 + b"\n") * 4096))
    else:
        parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / name)
    text = message_of(DataError, tmp_path / name)
    assert f"{name}' decompresses to more than" in text and "over 200 times its size" in text
    monkeypatch.setattr(caches, "MAX_RATIO", 1 << 20)
    assert take(batches(tmp_path / name, TEXT, field="text", cache_dir=tmp_path / "cache"), 1)


def test_tokens_leave_room_on_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.jsonl").write_bytes(lines(ROWS))
    monkeypatch.setattr(caches, "FREE_BYTES", 1 << 60)
    for cache_dir in (tmp_path / "cache", None):
        text = message_of(WriteError, tmp_path / "a.jsonl", cache_dir=cache_dir)
        assert "cannot write" in text and not list((tmp_path / "cache").glob("**/*.[nt]*p*")), text


@pytest.mark.parametrize("name", ["a.jsonl", "text"])
def test_a_link_out_of_a_data_folder_raises(name: str, tmp_path: Path) -> None:
    (tmp_path / "data" / "inside").mkdir(parents=True)
    content = lines(ROWS) if name == "a.jsonl" else b"to be or not to be\n" * 400
    (tmp_path / name).write_bytes(content)
    (tmp_path / "data" / "inside" / f"b{name}").write_bytes(content)
    (tmp_path / "data" / f"c{name}").symlink_to(Path("inside", f"b{name}"))
    options = {"field": "text"} if name == "a.jsonl" else {}
    assert take(batches(tmp_path / "data", TEXT, cache_dir=tmp_path / "cache", **options), 1)
    (tmp_path / "data" / name).symlink_to(tmp_path / name)
    assert f"data/{name}' is a link out of the data folder" in message_of(DataError, tmp_path / "data")
    # On request it is read: with a folder that contains both.
    assert take(batches(tmp_path, TEXT, cache_dir=tmp_path / "data" / ".cache", **options), 1)
    if name == "a.jsonl":
        pattern = str(tmp_path / "data" / "*.jsonl")
        assert take(batches(pattern, TEXT, cache_dir=tmp_path / "cache", **options), 1)


@pytest.mark.parametrize("hashed, moved_ns", [(None, 0), (0, 1000)], ids=["small", "large"])
def test_an_edited_file_of_the_same_size_is_encoded_again(
    hashed: int | None, moved_ns: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All of a small file counts; of a large one samples, which do not show this edit, and the time it was changed."""
    if hashed is not None:
        monkeypatch.setattr(tables, "HASH_ALL_BYTES", hashed)
    path = tmp_path / "a.jsonl"
    content = lines([{"text": "here" if number == 2_002 else "to be"} for number in range(20_000)])
    path.write_bytes(content)
    changed_ns = path.stat().st_mtime_ns + moved_ns
    for word in (b"here", b"gone"):
        path.write_bytes(content.replace(b"here", word))
        if word == b"gone":
            os.utime(path, ns=(changed_ns, changed_ns))
        tokens = Column(open_table(path), "text").tokens(load_tokenizer("bytes"), cache_dir=tmp_path / "cache")
        assert word in tokens.ids.tobytes()


@pytest.mark.parametrize("name", [name for name in WRITERS if not name.endswith((".jsonl", ".csv"))])
def test_a_truncated_file_or_one_of_another_kind_raises(name: str, tmp_path: Path) -> None:
    path = written(tmp_path, name)
    complete = path.read_bytes()
    contents = [complete[: len(complete) // 2], b"", b"nonsense" * 999]
    contents += [complete[:200] + bytes(50) + complete[250:]] * name.endswith(".gz")
    for content in contents:
        path.write_bytes(content)
        assert name in message_of(DataError, path, field="text").splitlines()[0]


@pytest.mark.parametrize("kind", ["text", "ids"])
def test_invalid_offsets_raise(kind: str, tmp_path: Path) -> None:
    rows = ["aaaaa", "bbbbbbb"] if kind == "text" else [[1] * 5, [2] * 7]
    batch = pyarrow.RecordBatch.from_arrays([pyarrow.array(rows)], ["text"])
    with pyarrow.ipc.new_file(str(tmp_path / "a.arrow"), batch.schema) as sink:
        sink.write_batch(batch)
    good, bad = (np.array(offsets, np.int32).tobytes() for offsets in ([0, 5, 12], [0, 1 << 29, 1 << 30]))
    content = (tmp_path / "a.arrow").read_bytes()
    assert content.count(good) == 1
    (tmp_path / "a.arrow").write_bytes(content.replace(good, bad))
    assert message_of(DataError, tmp_path / "a.arrow").startswith(f"cannot read '{tmp_path}/a.arrow'.")


def test_too_few_held_out_examples_warn(tmp_path: Path) -> None:
    from types import SimpleNamespace

    from spanax.errors import TooFewExamplesError
    from spanax.train.config import TrainConfig
    from spanax.train.job.job import Job
    from spanax.train.record.telemetry import open_telemetry

    def read(source: Any, **options: Any) -> Any:
        raise (TooFewExamplesError if source == "few.jsonl" else DataError)(f"{source} is bad.", fix="more")

    def job(source: str) -> Any:
        return SimpleNamespace(config=TrainConfig(data=source), workload=None, read=read)

    events: list[dict[str, Any]] = []
    with open_telemetry(tmp_path, rank=0, attempt=0, emit=events.append) as telemetry:
        assert Job.held_out_batches(job("few.jsonl"), telemetry) is None
        assert events == [{"event": "warning", "message": "no held-out loss: few.jsonl is bad."}]
        with pytest.raises(DataError, match="damaged"):
            Job.held_out_batches(job("damaged.jsonl"), telemetry)


def test_sources_that_are_no_tables_raise(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert message_of(DataError, tmp_path / "no.jsonl").startswith(f"cannot read '{tmp_path}/no.jsonl': No such file")
    assert message_of(DataError, f"{tmp_path}/*.parquet").startswith(f"no file matches '{tmp_path}/*.parquet'.")
    for name in ("a.jsonl", "b.parquet"):
        (tmp_path / name).write_text("x")
    assert message_of(DataError, tmp_path).startswith(f"'{tmp_path}' has several kinds of tables: jsonl, parquet.")
    os.mkfifo(tmp_path / "pipe.jsonl")
    assert "it is not a regular file" in message_of(DataError, tmp_path / "pipe.jsonl")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    assert message_of(SpanaxError, tmp_path / "b.parquet") == (
        'Arrow, Parquet and CSV files need pyarrow.\n  fix: pip install "spanax[parquet]"'
    )


def test_a_cache_that_cannot_be_written_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = written(tmp_path, "a.jsonl")
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    for source, plan in ((path, TEXT), (written(tmp_path, "a.parquet"), IMAGES)):
        assert message_of(WriteError, source, plan).startswith("cannot write '")


def test_a_damaged_row_is_not_a_write_error(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    parquet.write_table(pyarrow.table({"label": list(range(9999))}), path, use_dictionary=False)
    content = bytearray(path.read_bytes())
    content[4:400] = bytes(396)
    path.write_bytes(content)
    assert message_of(DataError, path, plan_of(leaf("label", (B,)))).startswith(f"cannot read '{path}'.")
