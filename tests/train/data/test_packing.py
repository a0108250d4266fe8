"""Packed conversations: each in one row, apart from the others, in an order of the seed, and what is cut or refused."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from batched import B, leaf, plan_of
from spanax.errors import SpanaxError
from spanax.train.data.batches import Batches
from spanax.train.data.destination import Destination
from spanax.train.data.open_source import open_source
from spanax.train.data.packing import packed
from spanax.train.data.source import Options
from spanax.train.data.text.chat_template import ChatTemplate

T = 16
WEIGHTS = leaf("weights", (B, T), "float32")
ONE_EACH = plan_of(*(leaf(path, (B, T)) for path in ("inputs", "targets")), WEIGHTS)
PACKED = plan_of(*(leaf(path, (B, T)) for path in ("inputs", "targets", "segments", "positions")), WEIGHTS)
ROWS = [{"prompt": f"{i:03}" + "?" * (i % 3), "completion": "a" * (i % 5)} for i in range(200)]


@pytest.fixture
def read(tmp_path: Path, opened: Callable[..., Batches]) -> Callable[..., Batches]:
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return lambda plan, source=path, **options: opened(source, plan, cache_dir=tmp_path / "cache", **options)


def documents(batch: Any) -> list[tuple[bytes, bytes]]:
    """The inputs with the last target of each document of a batch, and its targets that count."""
    found = []
    batch = {path: np.asarray(array) for path, array in batch.items()}
    for row in range(B):
        of_row = {path: array[row] for path, array in batch.items()}
        segments = of_row["segments"]
        assert sorted(set(segments[segments > 0])) == list(range(1, segments.max() + 1))
        for number in range(1, segments.max() + 1):
            (places,) = np.nonzero(segments == number)
            assert np.array_equal(places, np.arange(places[0], places[-1] + 1))
            assert np.array_equal(of_row["positions"][places], np.arange(len(places)))
            inputs, targets = (of_row[path][places] for path in ("inputs", "targets"))
            assert np.array_equal(inputs[1:], targets[:-1])
            counted = targets[of_row["weights"][places] == 1]
            found.append((bytes([*inputs.tolist(), int(targets[-1])]), bytes(counted.tolist())))
        assert not any(of_row[path][segments == 0].any() for path in of_row)
    return found


def test_each_conversation_is_in_one_row_of_an_epoch(read: Callable[..., Batches]) -> None:
    data = read(PACKED, seed=3, drop_remainder=False, epochs=1)
    found = [pair for batch in data if len(batch["inputs"]) == B for pair in documents(batch)]
    expected = {
        (f"{row['prompt']}{row['completion']}\n".encode(), f"{row['completion']}\n".encode())
        for index, row in enumerate(ROWS)
        if index % 20 != 1
    }
    assert len(found) == len(set(found)) > 8 * B and set(found) <= expected
    padded = read(ONE_EACH, seed=3)
    first = {path: np.asarray(array) for path, array in next(padded).items()}
    assert first["inputs"].shape == (B, T) and len(padded) == 190 // B
    assert all(bytes(row[:3].tolist()).isdigit() and not row[-1] for row in first["inputs"])


def test_rows_are_those_of_the_seed_and_the_position(read: Callable[..., Batches]) -> None:
    plain = {each.path: np.zeros(each.shape, each.dtype) for each in PACKED.batch}
    data = read(PACKED, seed=3, epochs=None)
    taken = [next(data) for _ in range(9)]
    resumed = read(plain, seed=3, epochs=None)  # NumPy arrays: the rows do not depend on the mesh
    assert [documents(batch) for batch in taken] == [documents(next(resumed)) for _ in range(9)]
    again = read(PACKED, seed=3, epochs=None, position={**data.state(), "next_index": 5})
    assert documents(next(again)) == documents(taken[5])
    other = read(PACKED, seed=4, epochs=None)
    assert documents(next(other)) != documents(taken[0])
    bare = ChatTemplate("{% for message in messages %}{{ message.content }}-{% endfor %}")
    with pytest.raises(SpanaxError, match="belongs to other data"):
        read(PACKED, seed=3, epochs=None, chat_template=bare, position=data.state())


def test_a_process_reads_its_rows_of_the_batch(read: Callable[..., Batches], tmp_path: Path) -> None:
    options = Options(seed=3, epochs=None, cache_dir=tmp_path / "cache")
    whole, part = (
        open_source(tmp_path / "a.jsonl", Destination(PACKED.batch, None, rows_B), options).read(7)
        for rows_B in (np.arange(B), np.array([1, 2, 6]))
    )
    assert all(np.array_equal(part[path], whole[path][[1, 2, 6]]) for path in whole) and whole["weights"].any()


def test_a_long_conversation_is_cut_at_its_end(read: Callable[..., Batches], tmp_path: Path) -> None:
    path = tmp_path / "long.jsonl"
    rows = [{"prompt": "p", "completion": "c" * (10 + 10 * (i == 4))} for i in range(40)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.warns(UserWarning, match=r"1 of 38 conversations of long.jsonl.* longer than 16 tokens, and are cut"):
        data = read(PACKED, path)
    assert max(len(text) for batch in data for text, _ in documents(batch)) == T + 1
    rows[4] = {"prompt": "p" * 20, "completion": "c"}
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(SpanaxError, match=r"long.jsonl', line 5: the assistant writes nothing in the first 16 tokens"):
        read(PACKED, path)


def test_a_batch_without_weights_or_with_others_is_refused(read: Callable[..., Batches]) -> None:
    with pytest.raises(SpanaxError, match="conversations need `weights` in the batch"):
        read(plan_of(*ONE_EACH.batch[:2]))
    for other in (leaf("weights", (B, T)), leaf("segments", (B, T, 1)), leaf("segments", (B, T), "float32")):
        leaves = {each.path: each for each in PACKED.batch} | {other.path: other}
        with pytest.raises(SpanaxError, match="conversations provide inputs, targets, weights"):
            read(plan_of(*leaves.values()))
    with pytest.raises(SpanaxError, match="examples, and one batch needs"):
        read(plan_of(*(leaf(each.path, (512, T), each.dtype) for each in PACKED.batch)))


@pytest.mark.parametrize("tokenizer", ["bytes", "bpe:300"])
def test_documents_of_texts_are_packed_whole(read: Callable[..., Batches], tmp_path: Path, tokenizer: str) -> None:
    path = tmp_path / "texts.jsonl"
    random = np.random.default_rng(0)
    texts = ["".join(random.choice(list("abcd "), size)) + f"{index}" for index, size in enumerate([*range(60), 1, 99])]
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in ["", *texts]))
    options: dict[str, Any] = {"seed": 3, "tokenizer": tokenizer, "pack": True}
    data = read(PACKED, path, drop_remainder=False, **options)
    rows = [{name: np.asarray(array) for name, array in batch.items()} for batch in data]
    assert sum(row["weights"].sum() for row in rows) == sum((row["segments"] > 0).sum() for row in rows)
    if tokenizer == "bytes":
        found = {text for batch in rows if len(batch["inputs"]) == B for text, _ in documents(batch)}
        whole = {f"{text}\n".encode() for text in texts if len(text) <= T}
        last = f"{texts[-1]}\n".encode()  # in pieces of T targets, each of which begins with the last of the one before
        pieces = {last[begin : begin + T + 1] for begin in range(0, len(last) - 1, T)}
        assert len(found & whole) > len(whole) / 2 and found & pieces
        assert all(any(text in f"{each}\n".encode() for each in texts) for text in found)
    data = read(PACKED, path, epochs=None, **options)
    taken = [next(data) for _ in range(5)]
    again = read(PACKED, path, epochs=None, position={**data.state(), "next_index": 3}, **options)
    assert np.array_equal(next(again)["inputs"], taken[3]["inputs"])


def test_what_has_no_documents_is_not_packed(read: Callable[..., Batches], tmp_path: Path) -> None:
    with pytest.raises(SpanaxError, match="pack=True needs positions, segments, weights in the batch"):
        read(plan_of(*ONE_EACH.batch[:2]), pack=True)
    path = tmp_path / "a.txt"
    path.write_text("words and words " * 999)
    for source in (path, [{"inputs": np.zeros(T, "int32")}] * 9):
        with pytest.raises(SpanaxError, match="pack=True packs the rows of tables"):
            read(PACKED, source, pack=True)
    assert documents(next(read(PACKED, pack=True, seed=3))) == documents(next(read(PACKED, seed=3)))


def test_packing_fills_rows() -> None:
    lengths = np.random.default_rng(0).integers(1, 300, 5000)
    order, begins = packed(lengths, 512)
    assert sorted(order) == list(range(5000))
    sums = np.add.reduceat(lengths[order], begins[:-1])
    assert sums.max() <= 512 and sums.sum() / (512 * len(sums)) > 0.995
    assert [array.tolist() for array in packed([], 4)] == [[], [0]]
