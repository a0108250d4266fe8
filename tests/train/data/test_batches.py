"""Batches: one global order for any processes, positions that count what was consumed, and data that does not fit."""

import gc
import itertools
import json
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grain
import jax
import numpy as np
import pytest

from batched import TEXT_PLAN, B, T, data_threads, leaf, plan_of, take, values
from spanax.errors import DataError, SpanaxError
from spanax.hardware.mesh import MeshShape
from spanax.train.data.batches import Batches, batches
from spanax.train.data.destination import Destination, local_rows
from spanax.train.data.mixture import mixture
from spanax.train.data.open_source import open_source
from spanax.train.data.order import shuffled
from spanax.train.data.source import Options

IMAGE_PLAN = plan_of(leaf("image.pixels", (B, 3), "float32", (("data",),)), leaf("label", (B,), spec=(("data",),)))


def example(i: int) -> dict[str, Any]:
    return {"image": {"pixels": np.full(3, i, np.float32)}, "label": i}


def image_batch(k: int) -> dict[str, Any]:
    items = [example(i) for i in range(k * B, k * B + B)]
    return {"image": {"pixels": np.stack([x["image"]["pixels"] for x in items])}, "label": [x["label"] for x in items]}


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_bytes(bytes(range(32, 127)) * 4)  # 361 tokens to train on: 90 windows, 11 batches and 2 windows
    return path


# ---- the order


@pytest.mark.parametrize("num_examples", [1, 2, 3, 5, 64, 300])
def test_every_example_occurs_once_per_epoch(num_examples: int) -> None:
    epochs = shuffled(np.arange(3 * num_examples), num_examples, seed=3).reshape(3, num_examples)
    assert np.array_equal(np.sort(epochs, axis=1), np.tile(np.arange(num_examples), (3, 1)))
    if num_examples >= 64:
        assert len({tuple(epoch) for epoch in epochs.tolist()}) == 3
        assert not np.array_equal(epochs[0], np.arange(num_examples))


def test_every_first_example_is_about_as_likely() -> None:
    first = [int(shuffled(np.zeros(1, np.int64), 5, seed)[0]) for seed in range(1000)]
    assert np.all(np.abs(np.bincount(first, minlength=5) - 200) < 70)  # 5.5 standard deviations


def test_the_order_is_the_same_forever() -> None:
    """A saved position means nothing if a new version shuffles otherwise."""
    assert shuffled(np.arange(8), 100, seed=0).tolist() == [77, 58, 14, 3, 91, 89, 60, 87]
    far = shuffled(4 * 10**9 + np.arange(4), 10**12, seed=-1)
    assert far.tolist() == [771647305089, 577249420441, 347642108532, 988701477856]


# ---- any number of processes


@pytest.mark.parametrize("mesh, spec", [("data=8", "data"), ("data=2,model=4", "data"), ("model=4,data=2", "data")])
@pytest.mark.parametrize("kind", ["text", "examples", "batches", "mixture"])
def test_two_processes_read_the_batches_of_one(mesh: str, spec: str, kind: str, text: Path) -> None:
    axes = ((spec,),)
    built = MeshShape.of(mesh).build()
    leaves = TEXT_PLAN.batch if kind == "text" else IMAGE_PLAN.batch
    leaves = tuple(leaf(p.path, p.shape, p.dtype, axes) for p in leaves)
    shardings = {p.path: p.sharding(built) for p in leaves}
    everything = list(built.devices.flat)

    examples = [example(i) for i in range(30)]
    source = {
        "text": text, "examples": examples, "batches": [image_batch(k) for k in range(3)],
        "mixture": mixture([(examples, 5), (examples[:9], 2)]),
    }[kind]  # fmt: skip

    def read(devices: list[Any], index: int) -> tuple[np.ndarray, dict[str, np.ndarray]]:
        rows = local_rows(leaves, shardings, devices)
        opened = open_source(source, Destination(leaves, None, rows), Options(seed=1, epochs=None))
        return rows, opened.read(index)

    for index in (0, 1, 5):
        all_rows, complete = read(everything, index)
        assert all_rows.tolist() == list(range(B))
        for half in (everything[:4], everything[4:]):
            rows, part = read(half, index)
            for path, array in part.items():
                expected = complete[path] if array.shape == complete[path].shape else complete[path][rows]
                assert np.array_equal(array, expected)
    halves = [set(local_rows(leaves, shardings, half).tolist()) for half in (everything[:4], everything[4:])]
    assert set.union(*halves) == set(range(B))
    assert (halves[0] == halves[1]) == mesh.startswith("model")  # one model over both: both need every row


@pytest.mark.parametrize("mesh", ["data=1", "data=8", "data=2,context=2,model=2"])
def test_the_mesh_does_not_change_the_batch(mesh: str, text: Path, opened: Callable[..., Batches]) -> None:
    spec = (("data",), ("context",)) if "context" in mesh else (("data",),)
    plan = plan_of(*(leaf(path, (B, T), spec=spec) for path in ("inputs", "targets")), mesh=mesh)
    reader, reference = opened(text, plan), opened(text, TEXT_PLAN)
    batch = next(reader)
    assert values(batch) == values(next(reference))
    for placement in plan.batch:
        array = batch[placement.path]
        assert array.sharding.is_equivalent_to(placement.sharding(plan.mesh.build()), array.ndim)


# ---- what a batch is


def test_text_becomes_windows_of_the_next_token(text: Path, opened: Callable[..., Batches]) -> None:
    reader = opened(text, TEXT_PLAN, shuffle=False)
    tokens = np.frombuffer(text.read_bytes(), np.uint8)[:361]
    batch = next(reader)
    assert np.array_equal(batch["inputs"], tokens[: B * T].reshape(B, T))
    assert np.array_equal(batch["targets"], tokens[1 : B * T + 1].reshape(B, T))
    assert batch["inputs"].dtype == np.int32
    assert len(take(reader, 99)) == 10 and reader.num_batches == 11
    with pytest.raises(StopIteration):
        next(reader)
    assert reader.vocab_size == 256 and reader.tokens is not None and len(reader.tokens.ids) == 361


def test_an_epoch_ends_inside_a_batch(text: Path, opened: Callable[..., Batches]) -> None:
    rows = [tuple(row) for batch in take(opened(text, TEXT_PLAN, epochs=None), 12) for row in batch["inputs"]]
    windows = np.frombuffer(text.read_bytes(), np.uint8)[:360].reshape(90, T)
    assert len(rows[:90]) == 90 and sorted(rows[:90]) == sorted(map(tuple, windows.tolist()))


def test_a_uint32_bin_file_uses_the_dtype_of_its_sidecar(tmp_path: Path, opened: Callable[..., Batches]) -> None:
    path = tmp_path / "tokens.bin"
    np.arange(70_000, 70_100, dtype="<u4").tofile(path)
    Path(f"{path}.json").write_text('{"dtype": "uint32"}')
    reader = opened(path, TEXT_PLAN, shuffle=False)
    assert next(reader)["inputs"][0].tolist() == [70_000, 70_001, 70_002, 70_003]
    assert reader.vocab_size == 70_095  # of the 95 to train on


def sources() -> dict[str, Callable[[], Any]]:
    """Ways to give the same 40 examples in their own order."""
    examples = [example(i) for i in range(40)]
    return {
        "sequence": lambda: examples,
        "batches": lambda: [image_batch(k) for k in range(5)],
        "iterable of examples": lambda: iter(examples),
        "iterable of batches": lambda: (image_batch(k) for k in range(5)),
        "function": lambda: lambda: (image_batch(k) for k in range(5)),
        "MapDataset": lambda: grain.MapDataset.source(examples),
        "MapDataset of batches": lambda: grain.MapDataset.source(examples).batch(B),
        "IterDataset": lambda: grain.MapDataset.source(examples).to_iter_dataset(),
        "IterDataset of batches": lambda: grain.MapDataset.source(examples).to_iter_dataset().batch(B),
    }


@pytest.mark.parametrize("epochs", [1, 3])
@pytest.mark.parametrize("kind", sources())
def test_every_source_gives_the_same_batches_until_its_epochs_end(
    kind: str, epochs: int, opened: Callable[..., Batches]
) -> None:
    once = [values(image_batch(k)) for k in range(5)]
    if kind.startswith("iterable"):  # has one run in it
        assert take(opened(sources()[kind](), IMAGE_PLAN, epochs=1 if epochs == 1 else None), 99) == once
        return
    assert take(opened(sources()[kind](), IMAGE_PLAN, shuffle=False, epochs=None), 7) == once + once[:2]
    reader = opened(sources()[kind](), IMAGE_PLAN, shuffle=False, epochs=epochs)
    states = [reader.state()]
    for batch in reader:
        assert values(batch) == once[(len(states) - 1) % 5]
        states.append(json.loads(json.dumps(reader.state())))
    assert len(states) == 1 + 5 * epochs
    # A position counts the epochs before it, also where the iterator jumps there.
    for index in (1, 5 * epochs - 1, 5 * epochs):
        rest = opened(sources()[kind](), IMAGE_PLAN, shuffle=False, epochs=epochs, position=states[index])
        assert len(take(rest, 99)) == 5 * epochs - index
        reader.restore(states[index])
        assert len(take(reader, 99)) == 5 * epochs - index


def test_a_batch_may_span_two_epochs(text: Path, opened: Callable[..., Batches]) -> None:
    """90 windows in batches of 8: 11 batches in one epoch, 22.5 in two."""
    assert [opened(text, TEXT_PLAN, epochs=epochs).num_batches for epochs in (1, 2, None)] == [11, 22, None]
    for kind in ("sequence", "IterDataset"):
        plan = plan_of(*(leaf(p.path, (12, *p.shape[1:]), p.dtype) for p in IMAGE_PLAN.batch))
        actual = take(opened(sources()[kind](), plan, shuffle=False, epochs=2), 99)
        assert [batch["label"][0] for batch in actual] == [0, 12, 24, 36, 8, 20]


# ---- without a plan


def test_an_example_batch_is_a_plan_for_the_host(opened: Callable[..., Batches]) -> None:
    like = {"label": np.zeros(B, int), "image": {"pixels": jax.ShapeDtypeStruct((B, 3), "float32")}}
    items = [example(i) for i in range(40)]
    reader, planned = opened(items, like, epochs=2, seed=3), opened(items, IMAGE_PLAN, epochs=2, seed=3)
    assert len(reader) == len(planned) == 10 and reader.state() == planned.state()
    batch = next(reader)
    assert isinstance(batch["label"], np.ndarray) and values(batch) == values(next(planned))
    assert take(opened(items, IMAGE_PLAN, epochs=2, seed=3, position=reader.state()), 99) == take(reader, 99)
    assert len(reader) == 10 and reader


def test_an_example_batch_may_be_sharded(text: Path, opened: Callable[..., Batches]) -> None:
    mesh = jax.make_mesh((4, 2), ("a", "b"))
    sharding = jax.NamedSharding(mesh, jax.P("a", "b"))
    like = dict.fromkeys(("inputs", "targets"), jax.ShapeDtypeStruct((B, T), "int32", sharding=sharding))
    reader, planned = opened(text, like), opened(text, TEXT_PLAN)
    batch = next(reader)
    assert batch["inputs"].sharding == sharding and values(batch) == values(next(planned))
    with pytest.raises(SpanaxError, match="'targets' of the example batch has no sharding"):
        opened(text, like | {"targets": jax.ShapeDtypeStruct((B, T), "int32")})
    with pytest.raises(SpanaxError, match="`mesh` needs a plan"):
        opened(text, like, mesh=mesh)
    for wrong in (None, {}, {"inputs": 3}, "fsdp"):
        with pytest.raises(SpanaxError, match="batches need a plan, or an example batch"):
            opened(text, wrong)


def test_an_unknown_length_raises_a_type_error(opened: Callable[..., Batches]) -> None:
    for kind, epochs in (("sequence", None), ("IterDataset", 1)):
        reader = opened(sources()[kind](), IMAGE_PLAN, epochs=epochs)
        with pytest.raises(TypeError, match="the number of batches of .* is unknown"):
            len(reader)
        assert reader
    assert len(list(reader)) == 5


@pytest.mark.parametrize("kind", ["sequence", "MapDataset"])
def test_examples_are_shuffled_and_occur_once(kind: str, opened: Callable[..., Batches]) -> None:
    labels = [x for batch in take(opened(sources()[kind](), IMAGE_PLAN, seed=3, epochs=2), 99) for x in batch["label"]]
    assert sorted(labels[:40]) == sorted(labels[40:]) == list(range(40))
    assert labels[:40] != labels[40:] and labels[:40] != list(range(40))


def test_random_transformations_differ_between_epochs(opened: Callable[..., Batches]) -> None:
    noisy = grain.MapDataset.source([example(i) for i in range(B)]).seed(0)
    noisy = noisy.random_map(lambda item, rng: {**item, "label": int(rng.integers(1 << 30))})
    first, second = take(opened(noisy, IMAGE_PLAN, epochs=None), 2)
    assert not set(first["label"]) & set(second["label"])


def test_the_nesting_is_that_of_the_source(opened: Callable[..., Batches]) -> None:
    pair = plan_of(leaf("0", (B, 3), "float32"), leaf("1", (B,)))
    images, labels = next(opened([(np.zeros(3, np.float32), i) for i in range(B)], pair, shuffle=False))
    assert images.shape == (B, 3) and labels.tolist() == list(range(B))
    assert next(opened([np.zeros(3, np.float32)] * B, plan_of(leaf("batch", (B, 3), "float32")))).shape == (B, 3)


def test_a_loader_may_use_its_buffer_again(opened: Callable[..., Batches]) -> None:
    raw = np.zeros(B * 4 + 64, np.uint8)
    start = -raw.ctypes.data % 64  # where a buffer is aligned like this, an array on a CPU device shares it
    buffer = raw[start : start + B * 4].view(np.int32)

    def loader() -> Iterator[dict[str, np.ndarray]]:
        for k in range(4):
            buffer[:] = k
            yield {"label": buffer}

    reader = opened(loader, plan_of(leaf("label", (B,))), prefetch=3)
    assert [batch["label"][0] for batch in take(reader, 9)] == [0, 1, 2, 3]


# ---- positions


@pytest.mark.parametrize("prefetch", [0, 2])
@pytest.mark.parametrize("kind", ["text", *sources()])
def test_a_position_gives_the_same_batches_at_every_step(
    kind: str, prefetch: int, text: Path, opened: Callable[..., Batches]
) -> None:
    make = (lambda: text) if kind == "text" else sources()[kind]
    plan = TEXT_PLAN if kind == "text" else IMAGE_PLAN
    reader = opened(make(), plan, prefetch=prefetch, epochs=None)
    states = [reader.state()]
    expected = []
    for batch in itertools.islice(reader, 5):
        expected.append(values(batch))
        states.append(reader.state())
    for step, state in enumerate(states[:-1]):
        state = json.loads(json.dumps(state))
        assert state["next_index"] == step
        fresh = opened(make(), plan, prefetch=prefetch, position=state, epochs=None)
        assert fresh.state() == state
        assert take(fresh, 5 - step) == expected[step:]
        if not kind.startswith("iterable"):
            reader.restore(state)
            assert take(reader, 5 - step) == expected[step:]


@pytest.mark.parametrize("kind", sources())
def test_skipped_batches_remain_skipped(kind: str, opened: Callable[..., Batches]) -> None:
    expected = [values(image_batch(k)) for k in (0, 2, 3)]
    reader = opened(sources()[kind](), IMAGE_PLAN, shuffle=False)
    reader.skip(4, 1)
    assert take(reader, 1) == expected[:1] and reader.last_index == 0
    state = json.loads(json.dumps(reader.state()))
    assert state["skipped"] == [1, 4]
    assert take(reader, 99) == expected[1:]
    fresh = opened(sources()[kind](), IMAGE_PLAN, shuffle=False, position=state)
    assert take(fresh, 1) == expected[1:2] and fresh.last_index == 2
    again = opened(sources()[kind](), IMAGE_PLAN, shuffle=False)
    again.restore(state | {"next_index": 0, "mark": None})
    assert take(again, 99) == expected


def test_a_grain_dataset_seeks_to_the_position(opened: Callable[..., Batches]) -> None:
    read: list[int] = []
    dataset = (
        grain.MapDataset.range(800)
        .map(lambda i: (read.append(i), example(i))[1])
        .to_iter_dataset(grain.ReadOptions(num_threads=0, prefetch_buffer_size=0))
    )
    reader = opened(dataset, IMAGE_PLAN, prefetch=0)
    take(reader, 50)
    read.clear()
    fresh = opened(dataset, IMAGE_PLAN, prefetch=0, position=reader.state())
    assert next(fresh)["label"].tolist() == list(range(400, 408))
    assert len(read) == 1 + B  # the first example, to see what it is, and the batch


def test_prefetched_batches_do_not_count(opened: Callable[..., Batches]) -> None:
    indices: list[int] = []

    def loader() -> Iterator[dict[str, Any]]:
        for k in itertools.count():
            indices.append(k)
            yield image_batch(k)

    reader = opened(loader, IMAGE_PLAN, prefetch=3)
    deadline = time.monotonic() + 240
    while len(indices) < 3 and time.monotonic() < deadline:
        time.sleep(0.01)
    time.sleep(0.05)
    assert indices == [0, 1, 2] and reader.state()["next_index"] == 0
    next(reader)
    assert reader.state()["next_index"] == 1


def test_an_iterator_cannot_go_back(opened: Callable[..., Batches]) -> None:
    reader = opened((image_batch(k) for k in range(5)), IMAGE_PLAN, prefetch=0)
    states = [reader.state(), next(reader) and reader.state()]
    reader.restore(states[1])  # where it is: nothing to do
    next(reader)
    with pytest.raises(DataError, match="cannot go back to batch 0: an iterator is read only once, and is at batch 2"):
        reader.restore(states[0])


@pytest.mark.parametrize(
    "change, key",
    [
        ({"source": "other"}, "source"),
        ({"seed": 1}, "order"),
        ({"shuffle": False}, "order"),
        ({"split": "validation"}, "source"),
        ({"plan": plan_of(leaf("inputs", (2, T)), leaf("targets", (2, T)))}, "order"),
    ],
    ids=["source", "seed", "shuffle", "split", "batch"],
)
def test_a_position_of_other_data_is_refused(
    change: dict[str, Any], key: str, tmp_path: Path, opened: Callable[..., Batches]
) -> None:
    path = tmp_path / "text.txt"
    path.write_text("abcdefgh" * 200)
    state = opened(path, TEXT_PLAN).state()
    if change.get("source"):
        path.write_text("abcdefgx" * 200)
        change = {}
    with pytest.raises(DataError, match=f"the saved position belongs to other data: its {key} differs"):
        opened(path, change.pop("plan", TEXT_PLAN), position=state, **change)


def test_an_invalid_position_raises(text: Path, opened: Callable[..., Batches]) -> None:
    reader = opened(text, TEXT_PLAN)
    for state in ({}, {"next_index": -1}, {"next_index": "3"}, {"next_index": 3, "skipped": [{}]}, None, 7):
        with pytest.raises(DataError, match="this is not a position in data"):
            reader.restore(state)
    with pytest.raises(DataError, match="this is not a position in data"):
        reader.restore(reader.state() | {"mark": 3})


# ---- the thread


def failing(index: int) -> Iterator[dict[str, Any]]:
    for k in range(index):
        yield image_batch(k)
    raise OSError("the disk is gone")


@pytest.mark.parametrize("prefetch", [0, 1, 4])
def test_an_error_is_raised_at_its_position(prefetch: int, opened: Callable[..., Batches]) -> None:
    reader = opened(lambda: failing(2), IMAGE_PLAN, prefetch=prefetch)
    assert len([next(reader), next(reader)]) == 2
    for _ in range(2):  # and is not taken for the end the next time
        with pytest.raises(OSError, match="the disk is gone"):
            next(reader)
    assert reader.state()["next_index"] == 2
    reader.restore({**reader.state(), "next_index": 1})
    assert values(next(reader)) == values(image_batch(1))


def test_waiting_is_measured(opened: Callable[..., Batches]) -> None:
    def slow() -> Iterator[dict[str, Any]]:
        for k in range(3):
            time.sleep(0.05)
            yield image_batch(k)

    reader = opened(slow, IMAGE_PLAN, prefetch=0)
    assert reader.wait_seconds == 0
    take(reader, 3)
    assert reader.wait_seconds >= 2 * 0.05, "the first batch may have been read before"


def test_the_thread_ends_with_its_batches(text: Path) -> None:
    gc.collect()
    before, reader = data_threads(), batches(text, TEXT_PLAN)
    next(reader)
    assert len(data_threads() - before) == 1
    del reader
    gc.collect()
    assert data_threads() <= before


def test_closed_batches_raise(text: Path, opened: Callable[..., Batches]) -> None:
    reader = opened(text, TEXT_PLAN)
    state = reader.state()
    reader.close()
    reader.close()
    with pytest.raises(SpanaxError, match="these batches are closed"):
        next(reader)
    reader.restore(state)
    next(reader)


class Threaded:
    """A loader whose iterators own a thread; it ends when they are closed."""

    threads: list[threading.Thread]

    def __init__(self) -> None:
        self.threads = []

    def __iter__(self) -> Iterator[dict[str, Any]]:
        stop = threading.Event()
        self.threads.append(threading.Thread(target=stop.wait, daemon=True))
        self.threads[-1].start()
        try:
            for k in range(6):
                yield image_batch(k)
        finally:
            stop.set()
            self.threads[-1].join()

    def num_alive(self) -> int:
        return sum(thread.is_alive() for thread in self.threads)


@pytest.mark.parametrize("prefetch", [0, 2])
def test_closing_closes_the_loader(prefetch: int) -> None:
    loader = Threaded()
    reader = batches(loader, IMAGE_PLAN, prefetch=prefetch)
    take(reader, 3)
    state = reader.state()
    reader.close()
    assert loader.num_alive() == 0
    reader.restore(state)  # it is read again, up to where it was
    assert values(next(reader)) == values(image_batch(3)) and loader.num_alive() == 1
    reader.restore(state)
    assert values(next(reader)) == values(image_batch(3)) and loader.num_alive() == 1
    del reader
    gc.collect()
    assert loader.num_alive() == 0


def test_a_passed_iterator_is_not_closed(opened: Callable[..., Batches]) -> None:
    loader = Threaded()
    elements = iter(loader)
    reader = opened(elements, IMAGE_PLAN, prefetch=0)
    next(reader)
    reader.close()
    assert loader.num_alive() == 1 and next(elements)["label"] == image_batch(1)["label"]
    elements.close()  # type: ignore[attr-defined]


def test_closing_does_not_wait_for_a_loader_that_is_stuck(monkeypatch: pytest.MonkeyPatch) -> None:
    go_on = threading.Event()

    def stuck() -> Iterator[dict[str, Any]]:
        yield image_batch(0)
        go_on.wait()
        yield image_batch(1)

    monkeypatch.setattr("spanax.train.data.batches.CLOSE_SECONDS", 0.01)
    reader = batches(stuck, IMAGE_PLAN, prefetch=2)
    next(reader)
    reader.close()
    go_on.set()


# ---- what does not fit, reported in at most four lines


def refused(source: Any, plan: Any = IMAGE_PLAN, **options: Any) -> str:
    with pytest.raises(SpanaxError) as error:
        take(batches(source, plan, prefetch=0, **options), 1)
    assert error.value.args[0].count("\n") <= 3
    return error.value.args[0]


def test_other_leaves_raise() -> None:
    assert refused([{"label": np.zeros(B, np.int32)}]) == (
        "the data has no leaf 'image.pixels'.\n"
        "  where: list has label int32[8]\n"
        "  fix: the plan expects image.pixels float32[8,3], label int32[8]"
    )
    assert refused([{**image_batch(0), "mask": np.zeros(B, bool)}]) == (
        "the plan has no leaf 'mask'.\n"
        "  where: list has image.pixels float32[8,3], label int64[8], mask bool[8]\n"
        "  fix: the plan expects image.pixels float32[8,3], label int32[8]"
    )


HOLES = grain.MapDataset.range(16).map(example).filter(lambda item: item["label"] % 2)
MISFITS: list[tuple[Any, str]] = [
    ([{**image_batch(0), "label": np.zeros(7, np.int32)}], "'label' has shape (7,); expected (8,)."),
    ([{**image_batch(0), "label": np.zeros(B, np.float32)}], "'label' has dtype float32; expected int32."),
    ([{**image_batch(0), "label": np.full(B, 1 << 40)}], "'label' has values that do not fit int32."),
    ([{**image_batch(0), "label": np.full(B, "a")}], "'label' is text; expected int32."),
    (
        [{**example(0), "image": {"pixels": np.full(3, (1 << 24) + 1)}}] * B,
        "'image.pixels' has values that do not fit float32.",
    ),
    (
        [{**example(0), "image": {"pixels": np.zeros(4, np.float32)}}] * B,
        "'image.pixels' has shape (4,); expected (3,).",
    ),
    ([example(0)] * 5, "list has 5 examples, and one batch needs 8."),
    ([], "list is empty."),
    (lambda: iter(()), "function is empty."),
    (HOLES, f"{type(HOLES).__name__} has None for an example."),
    (7, "cannot read batches from a int."),
    ({"label": np.zeros(9)}, "cannot read batches from a dict."),
]


@pytest.mark.parametrize("source, message", MISFITS, ids=[message[:24] for _, message in MISFITS])
def test_a_source_that_does_not_fit_raises(source: Any, message: str) -> None:
    assert refused(source).splitlines()[0] == message


def test_text_and_tokens_that_do_not_fit_raise(text: Path, tmp_path: Path) -> None:
    (tmp_path / "short.txt").write_text("x" * 30)
    np.full(100, 300, np.uint16).tofile(tmp_path / "tokens.bin")
    assert refused(tmp_path / "short.txt", TEXT_PLAN) == (
        "the data has 29 tokens, and one batch needs 33.\n"
        "  where: short.txt train bytes b1e57d86be8f; a batch of 8 x 4 tokens\n"
        "  fix: more data, a smaller batch (--global-batch-size) or shorter sequences (--seq-len)"
    )
    assert refused(text).splitlines()[0] == (
        "text and tokens provide 'inputs' and 'targets', integers of one shape [B, T], not the leaves of the plan."
    )
    narrow = plan_of(leaf("inputs", (B, T), "uint8"), leaf("targets", (B, T), "uint8"))
    assert "token 300 does not fit the plan's uint8" in refused(tmp_path / "tokens.bin", narrow)
    assert refused([example(0)] * B, split="validation").startswith("a list has no split 'validation'.")
    assert refused(text, TEXT_PLAN, split="valid") == (
        "unknown split 'valid'.\n  fix: did you mean 'validation'? known: train, validation"
    )


def test_a_later_batch_of_another_shape_raises(opened: Callable[..., Batches]) -> None:
    bad = {**image_batch(1), "label": np.zeros(3, np.int32)}
    reader = opened(lambda: iter([image_batch(0), bad]), IMAGE_PLAN)
    next(reader)
    with pytest.raises(DataError, match="'label' has shape"):
        next(reader)
