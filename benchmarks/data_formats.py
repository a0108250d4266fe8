"""Random rows, all rows, packed conversations and orders: Spanax next to readers of pyarrow and Grain.

    python benchmarks/data_formats.py --folder /tmp/data_formats

Each row runs in a process of its own: seconds for the work, and peak resident memory above that after the imports. The
files have 160,000 images of 3 KiB (Parquet in two row groups, Arrow in batches of 1,000), 60,000 lines of JSON,
160,000 rows of CSV and 100,000 conversations of 20 to 2,000 bytes, which are packed into batches of 32 rows of 1,024.
"""

import argparse
import json
import re
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np

NUM_IMAGES, IMAGE_BYTES, NUM_LINES, BATCH_SIZE, NUM_BATCHES = 160_000, 3072, 60_000, 32, 10
NUM_CHATS, CHAT_LENGTH = 100_000, 1024
PLACES = np.random.default_rng(0).integers(0, NUM_IMAGES, (NUM_BATCHES, BATCH_SIZE))


def write(folder: Path) -> None:
    """Writes the files that the readers read, once."""
    import pyarrow
    from pyarrow import parquet

    folder.mkdir(parents=True, exist_ok=True)
    if (folder / "chat.jsonl").exists():
        return
    pixels = np.random.default_rng(1).integers(0, 256, NUM_IMAGES * IMAGE_BYTES, dtype=np.uint8)
    images = pyarrow.ListArray.from_arrays(np.arange(NUM_IMAGES + 1, dtype=np.int32) * IMAGE_BYTES, pixels)
    table = pyarrow.table({"pixels": images, "label": np.arange(NUM_IMAGES, dtype=np.int32)})
    parquet.write_table(table, folder / "a.parquet", row_group_size=NUM_IMAGES // 2)
    with pyarrow.ipc.new_file(str(folder / "a.arrow"), table.schema) as sink:
        for batch in table.to_batches(max_chunksize=1000):
            sink.write_batch(batch)
    text = "to be or not to be " * 40
    rows = ({"text": f"{number} {text}", "number": number} for number in range(NUM_LINES))
    (folder / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    lengths = np.random.default_rng(2).lognormal(5, 1, NUM_CHATS).clip(20, 2000).astype(int)
    answers = ("to be or not to be " * (length // 19 + 1) for length in lengths)
    chats = ({"prompt": f"{number}?", "completion": answer} for number, answer in enumerate(answers))
    (folder / "chat.jsonl").write_text("".join(json.dumps(row) + "\n" for row in chats))
    numbers = (",".join(map(str, [i, *pixels[i : i + 8]])) for i in range(NUM_IMAGES))
    (folder / "a.csv").write_text("\n".join(["label,a,b,c,d,e,f,g,h", *numbers]) + "\n")


def spanax_rows(path: Path) -> list[Any]:
    """Random rows with Spanax; the conversion of the first use counts."""
    from spanax.train.data.batches import batches

    leaves = ("a", "label") if path.suffix == ".csv" else ("pixels", "label")
    shapes = {"a": ((), "int32"), "pixels": ((IMAGE_BYTES,), "uint8"), "label": ((), "int32")}
    example = {leaf: np.zeros((BATCH_SIZE, *shapes[leaf][0]), shapes[leaf][1]) for leaf in leaves}
    rows = batches(path, example, prefetch=0, cache_dir=path.parent / "cache")
    return [next(rows) for _ in range(NUM_BATCHES)]


def dataset_take(path: Path) -> list[Any]:
    """Random rows with `pyarrow.dataset`."""
    import pyarrow.dataset

    dataset = pyarrow.dataset.dataset(path, format=path.suffix[1:])
    return [dataset.take(places) for places in PLACES]


def grain_parquet(path: Path) -> None:
    """The first batches in the order of the file with Grain."""
    import grain

    rows = iter(grain.experimental.ParquetIterDataset(str(path)))
    for _ in range(BATCH_SIZE * NUM_BATCHES):
        next(rows)


def table_values(path: Path) -> None:
    """A field of all rows with Spanax."""
    from spanax.train.data.formats.table import open_table

    _drain(open_table(path).read({".jsonl": "text", ".csv": "label"}.get(path.suffix, "pixels")))


def dataset_batches(path: Path) -> None:
    """A field of all rows with `pyarrow.dataset`, in batches as small as ours, without reading ahead."""
    import pyarrow.dataset

    dataset = pyarrow.dataset.dataset(path, format=path.suffix[1:])
    _drain(dataset.to_batches(columns=["pixels"], batch_size=256, batch_readahead=0, fragment_readahead=0))


def pyarrow_json(path: Path) -> None:
    """A field of all rows with pyarrow's reader of JSON lines, which has no random access and names no row."""
    from pyarrow import json as arrow_json

    reader = arrow_json.open_json(str(path)) if hasattr(arrow_json, "open_json") else arrow_json.read_json(str(path))
    _drain(reader if hasattr(reader, "read_next_batch") else reader.to_batches())


def spanax_packed(path: Path) -> None:
    """All conversations with Spanax, packed; the first use also encodes and stores them."""
    from spanax.models.gpt import example_batch
    from spanax.train.data.batches import batches

    example = {leaf: np.zeros(each.shape, each.dtype) for leaf, each in example_batch(32, CHAT_LENGTH, True).items()}
    with warnings.catch_warnings(action="ignore"):
        data = batches(path, example, prefetch=0, cache_dir=path.parent / "cache")
    _drain(data)
    print(f"{len(data) * 32:,} rows")


def grain_packed(path: Path) -> None:
    """The same conversations, already encoded, with Grain's first-fit packing, shuffled and batched."""
    import grain

    from spanax.train.data.open_source import WINDOWS, opened
    from spanax.train.data.source import Options
    from spanax.train.data.text.conversations import COUNTS, IDS

    ((part, _),) = opened(path, WINDOWS, Options(cache_dir=path.parent / "cache"))
    starts = part.starts.tolist()

    def example(index: int) -> dict[str, np.ndarray]:
        ids = part.ids[starts[index] : starts[index + 1]][: CHAT_LENGTH + 1]
        counted = (ids[1:] & COUNTS) != 0
        return {"inputs": ids[:-1] & IDS, "targets": ids[1:] & IDS, "weights": counted.astype(np.float32)}

    started = time.perf_counter()
    rows = grain.MapDataset.range(len(starts) - 1).shuffle(seed=0).map(example).to_iter_dataset()
    lengths = dict.fromkeys(("inputs", "targets", "weights"), CHAT_LENGTH)
    packed = grain.experimental.FirstFitPackIterDataset(rows, length_struct=lengths, num_packing_bins=64)
    count = sum(1 for _ in packed.batch(32, drop_remainder=True)) * 32
    print(f"{count:,} rows, {time.perf_counter() - started:.2f} s")


def spanax_order(path: Path) -> None:
    """A million places of a shuffled order with Spanax, 1,024 at a time."""
    from spanax.train.data.order import shuffled

    for index in range(10**6 // 1024):
        shuffled(index * 1024 + np.arange(1024), 10**6, seed=0)


def grain_order(path: Path) -> None:
    """A million places of a shuffled order with Grain, which takes one index per call and 32 bits of it."""
    import grain

    for index in range(10**6):
        grain.experimental.index_shuffle(index, max_index=10**6 - 1, seed=0, rounds=4)


READERS: dict[str, tuple[Callable[[Path], Any], tuple[str, ...]]] = {
    "random rows": (spanax_rows, ("a.arrow", "a.parquet", "a.csv")),
    "random rows, second start": (spanax_rows, ("a.parquet",)),
    "random rows, pyarrow.dataset.take": (dataset_take, ("a.arrow", "a.parquet")),
    "first rows, grain ParquetIterDataset": (grain_parquet, ("a.parquet",)),
    "all rows": (table_values, ("a.arrow", "a.parquet", "a.jsonl", "a.csv")),
    "all rows, pyarrow.dataset.to_batches": (dataset_batches, ("a.arrow", "a.parquet")),
    "all rows, pyarrow.json": (pyarrow_json, ("a.jsonl",)),
    "packed conversations": (spanax_packed, ("chat.jsonl",)),
    "packed conversations, second start": (spanax_packed, ("chat.jsonl",)),
    "packed conversations, grain FirstFitPack": (grain_packed, ("chat.jsonl",)),
    "order": (spanax_order, ("",)),
    "order, grain index_shuffle": (grain_order, ("",)),
}


def _drain(items: Iterable[Any]) -> None:
    for _ in items:
        pass


def _peak_kib() -> int:
    return int(re.search(r"VmHWM:\s+(\d+)", Path("/proc/self/status").read_text())[1])  # type: ignore[index]


def measure(name: str, path: Path) -> None:
    """Runs one reader, and prints its seconds and memory."""
    import grain  # noqa: F401 - what imports take is counted for no reader

    import spanax.train.data.batches  # noqa: F401

    before, started = _peak_kib(), time.perf_counter()
    READERS[name][0](path)
    seconds = time.perf_counter() - started
    print(f"{name:40} {path.name:10} {seconds:8.2f} s {(_peak_kib() - before) / 1024:8.0f} MiB")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, default=Path("/tmp/data_formats"))
    parser.add_argument("--measure", nargs=2, metavar=("READER", "FILE"))
    arguments = parser.parse_args()
    if arguments.measure:
        measure(arguments.measure[0], arguments.folder / arguments.measure[1])
        return
    write(arguments.folder)
    for name, (_, files) in READERS.items():
        for file in files:
            command = [sys.executable, __file__, "--folder", str(arguments.folder), "--measure", name, file]
            subprocess.run(command, check=True)


if __name__ == "__main__":
    main()
