"""Mixtures: exact shares over any stretch, the same rows on any processes and after a resume, and what is refused."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import grain
import numpy as np
import pytest

from batched import B, leaf, plan_of, take
from spanax.errors import DataError, SpanaxError
from spanax.train.data.batches import batches
from spanax.train.data.mixture import Mixture, mixture, named, picked, places_until
from spanax.train.data.order import shuffled

PLAN = plan_of(leaf("x", (B,), spec=(("data",),)))
TEXT = plan_of(leaf("inputs", (B, 4)), leaf("targets", (B, 4)))
PARTS = [
    ([{"x": 1000 * part + i} for i in range(size)], weight)
    for part, (size, weight) in enumerate([(40, 5), (9, 2), (16, 1)])
]


def xs(num: int, source: Any = None, **options: Any) -> list[list[int]]:
    reader = batches(source or mixture(PARTS), PLAN, prefetch=0, **options)
    return [batch["x"] for batch in take(reader, num)]


# ---- shares


@pytest.mark.parametrize("weights", [(7, 3), (1, 1, 1), (5, 3, 2), (97, 2, 1), (1,) * 9, (1, 10**6)])
def test_every_prefix_has_its_shares(weights: tuple[int, ...]) -> None:
    for start in (0, 10**11):
        part_R, inner_R = picked(start + np.arange(2000), weights)
        for part, weight in enumerate(weights):
            share = weight / sum(weights)
            counts = np.cumsum(part_R == part)
            assert np.abs(counts - share * np.arange(1, 2001)).max() < 2
            indices = inner_R[part_R == part]
            assert np.array_equal(np.diff(indices), np.ones(max(0, len(indices) - 1)))  # none twice, none missing
            if len(indices):
                assert abs(indices[0] - share * start) < 2


def test_mixture_weights_are_represented_exactly() -> None:
    assert mixture({"a": 0.7, "b": 0.3}).weights == (7, 3)
    assert mixture({"a": 1, "b": 1.0, "c": 2}).weights == (1, 1, 2)
    assert mixture([("a", 1e-3), ("b", 0.999)]).weights == (1, 999)


def test_the_order_of_a_mixture_is_stable() -> None:
    """A saved position means nothing if a new version deals otherwise."""
    part_R, inner_R = picked(np.arange(10), (5, 3, 2))
    assert part_R.tolist() == [0, 1, 0, 1, 0, 2, 0, 1, 0, 2]
    assert inner_R.tolist() == [0, 0, 1, 1, 2, 0, 3, 2, 4, 1]


@pytest.mark.parametrize("sizes", [(40, 9, 16), (1, 1, 1), (1000, 1, 1)])
def test_no_part_of_a_mixture_is_exceeded(sizes: tuple[int, ...]) -> None:
    most = places_until(sizes, (5, 2, 1))
    counts = [Counter(picked(np.arange(num), (5, 2, 1))[0].tolist()) for num in (most, most + 1)]
    assert [all(count[part] <= size for part, size in enumerate(sizes)) for count in counts] == [True, False]


# ---- batches


def test_each_part_has_an_order_and_a_share() -> None:
    actual = [x for batch in xs(20, seed=4, epochs=None) for x in batch]
    assert Counter(x // 1000 for x in actual) == {0: 100, 1: 40, 2: 20}
    for part, (items, _) in enumerate(PARTS):
        part_indices = [x % 1000 for x in actual if x // 1000 == part]
        assert part_indices == shuffled(np.arange(len(part_indices)), len(items), 4 + part).tolist()


def test_the_first_part_that_ends_ends_all() -> None:
    reader = batches(mixture(PARTS), PLAN, prefetch=0)
    assert [round(share.share, 3) for share in reader.shares] == [0.625, 0.25, 0.125]
    assert [share.epochs(20) for share in reader.shares] == [2.5, pytest.approx(40 / 9), 1.25]
    assert len(xs(99)) == places_until((40, 9, 16), (5, 2, 1)) // B == 4
    assert len(xs(99, epochs=3)) == places_until((120, 27, 48), (5, 2, 1)) // B == 13


def test_a_position_gives_the_same_rows_on_another_mesh() -> None:
    reader = batches(mixture(PARTS), PLAN, prefetch=2, seed=2)
    take(reader, 3)
    position = json.loads(json.dumps(reader.state()))
    rest = [batch["x"] for batch in take(reader, 4)]
    reader.close()
    again = batches(mixture(PARTS), plan_of(*PLAN.batch, mesh="data=2,model=2"), position=position, seed=2)
    assert [batch["x"] for batch in take(again, 4)] == rest
    again.close()
    other = mixture([(PARTS[0][0], 4), *PARTS[1:]])
    with pytest.raises(DataError, match="its source differs"):
        batches(other, PLAN, position=position, seed=2)


# ---- files


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    Path("a.jsonl").write_text("".join(json.dumps({"content": "aaaa " * 30}) + "\n" for _ in range(60)))
    Path("b.txt").write_text("bbbb " * 900)
    return tmp_path


def test_files_are_mixed_by_a_text(files: Path) -> None:
    assert isinstance(named("a.jsonl=0.75,b.txt=0.25"), Mixture)
    reader = batches("a.jsonl=0.75,b.txt=0.25", TEXT, field="content", prefetch=0)
    rows = [row for batch in take(reader, 4) for row in batch["inputs"]]
    assert sum(ord("a") in row for row in rows) == 24 and sum(ord("b") in row for row in rows) == 8
    assert [share.source.split()[0] for share in reader.shares] == ["a.jsonl[content]", "b.txt"]
    held_out = batches("a.jsonl=0.75,b.txt=0.25", TEXT, field="content", prefetch=0, split="validation")
    assert held_out.num_batches == 18


def test_one_tokenizer_is_trained_on_all_of_it(files: Path) -> None:
    batches("a.jsonl=0.75,b.txt=0.25", TEXT, field="content", prefetch=0, tokenizer="bpe:262")
    (cached,) = (files / "cache" / "spanax").glob("tokenizer-*.json")
    assert {"aa", "bb"} <= set(json.loads(cached.read_text())["model"]["vocab"])


def test_a_text_names_a_mixture_unless_it_is_a_path(files: Path) -> None:
    with pytest.raises(SpanaxError, match="--data a.jsonl=0,b.txt=1"):
        named("a.jsonl=0,b.txt=1")
    Path("b=0.5,c=0.5").mkdir()
    (Path("b=0.5,c=0.5") / "0.txt").write_text("c" * 1000)
    assert named("b=0.5,c=0.5") == "b=0.5,c=0.5" and named("lr=3/x.txt") == "lr=3/x.txt"


# ---- what is refused


@pytest.mark.parametrize(
    "sources, message",
    [
        ({"a": 1}, "a mixture needs at least two sources."),
        ({"a": 1, "b": 0}, "the weight of b must be a number > 0, not 0."),
        ({"a": 1, "b": float("nan")}, "the weight of b must be a number > 0, not nan."),
        ({"a": 1, "b": True}, "the weight of b must be a number > 0, not True."),
        ({"a": 0.123456789, "b": 1}, "the weights have too many digits."),
    ],
)
def test_invalid_mixture_weights_raise(sources: dict[str, Any], message: str) -> None:
    with pytest.raises(SpanaxError) as error:
        mixture(sources)
    assert error.value.args[0].splitlines()[0] == message


@pytest.mark.parametrize(
    "part, message",
    [
        (iter([{"x": 1}]), "a list_iterator cannot be part of a mixture."),
        (grain.MapDataset.range(9), "cannot be part of a mixture.\n  fix: grain.MapDataset.mix"),
        ([{"x": list(range(B))}], "a list of batches cannot be part of a mixture"),
        ([{"y": 1}] * 9, "the data has no leaf 'x'"),
        ([{"x": 1}] * 3, "list has 3 examples, and one batch needs 8."),
    ],
    ids=["iterator", "grain", "batches", "leaf", "few"],
)
def test_parts_that_cannot_be_mixed(part: Any, message: str) -> None:
    with pytest.raises(SpanaxError) as error:
        batches(mixture([(part, 1), PARTS[0]]), PLAN)
    assert message in error.value.args[0]
