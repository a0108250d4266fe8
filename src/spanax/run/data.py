"""Batches: the next global batch, placed on the devices as the plan says, from text, tokens, datasets or a loader.

The order is a pure function of the seed and the global position, and each process reads the rows its own devices
hold: the same global batches, row for row, on any number of devices and processes and under any layout.

Shapes: B examples of the global batch, R of them read by this process.
"""

import os
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count
from queue import SimpleQueue
from statistics import mode
from typing import TYPE_CHECKING, Any, final

import numpy as np

from spanax.errors import DataError, SpanaxError
from spanax.run.corpus import END, Loader, Order, described, digest, flat, nested, sequence_fetch
from spanax.run.tokenizer import Tokens, load_tokens, window_reader

if TYPE_CHECKING:
    import jax

    from spanax.plan.plan import Placement, Plan

Leaves = dict[str, np.ndarray]
"""The arrays of one batch, or of one example, by path."""

CLOSE_SECONDS = 5.0
"""How long closing waits for a loader that does not return."""


def batches(
    source: Any,
    plan: "Plan",
    *,
    mesh: "jax.sharding.Mesh | None" = None,
    tokenizer: str = "bytes",
    split: str = "train",
    seed: int = 0,
    position: Mapping[str, Any] | None = None,
    shuffle: bool = True,
    repeat: bool = True,
    prefetch: int = 2,
    cache_dir: str | os.PathLike[str] | None = None,
) -> "Batches":
    """The batches of a source on the devices, in an order that the seed alone decides.

    Args:
      source: `"python"` (its standard library), a text file or a folder of them, a `.bin` of tokens; a
        `grain.MapDataset` or any sequence of examples; a `grain.IterDataset`, any iterable of examples or
        batches, or a function that returns one. Shapes tell an example from a batch. An iterable gives every
        process the whole global batch, or only the rows of the process's own devices.
      plan: what places the batch; text and tokens need its leaves to be `inputs` and `targets` of shape [B, T].
      mesh: the plan's own by default.
      tokenizer: `"bytes"`, `"bpe"`, `"bpe:8192"` or the path of a tokenizer.json; for text.
      split: `"train"` or `"validation"`, the twentieth held out; for text and tokens.
      seed: of the order; every epoch has another one.
      position: a `Batches.state()` to go on from.
      shuffle: whether examples change places; whatever comes in batches, or in an iterable, keeps its own order.
      repeat: start again at the end; otherwise what does not fill a last batch is left out.
      prefetch: how many batches are made ready ahead, each on the devices; 0 for none and no thread.
      cache_dir: where a trained tokenizer and encoded text are kept; `~/.cache/spanax` by default.

    Raises:
      DataError: the source is missing, damaged, too short for one batch, or not what the plan takes.

    Example:
      >>> from types import SimpleNamespace as Plan
      >>> from spanax.hardware.mesh import MeshShape
      >>> from spanax.plan.plan import Placement
      >>> x = Placement("x", (4,), "int32", "batch", ("batch",), (("data",),), (4,), 16, "")
      >>> plan = Plan(mesh=MeshShape.of("data=1"), batch=(x,))
      >>> [batch["x"].tolist() for batch in batches([{"x": i} for i in range(8)], plan, shuffle=False, repeat=False)]
      [[0, 1, 2, 3], [4, 5, 6, 7]]
    """

    mesh = plan.mesh.build() if mesh is None else mesh
    shardings = {leaf.path: leaf.sharding(mesh) for leaf in plan.batch}
    rows_R = local_rows(plan.batch, shardings, mesh.local_devices)
    if isinstance(source, str | os.PathLike):
        tokens = load_tokens(source, tokenizer, split, cache_dir)
        read, num_batches = window_reader(tokens, plan.batch, rows_R, seed=seed, shuffle=shuffle, repeat=repeat)
        opened = Source(tokens.name, {"inputs": None, "targets": None}, read, num_batches, tokens)
    elif split != "train":
        raise SpanaxError(f"a {type(source).__name__} has no split '{split}'.", fix="a source of its own")
    else:
        opened = element_source(source, plan.batch, rows_R, seed=seed, shuffle=shuffle, repeat=repeat)
    order = f"seed {seed}, shuffle {shuffle}, {described({leaf.path: leaf for leaf in plan.batch})}"
    return Batches(opened, order, partial(_place, plan.batch, shardings, rows_R), position, prefetch)


@final
class Batches:
    """An iterator over global batches on the devices; made by `batches`.

    Attributes:
      source: what is read, with a hash of its content.
      tokens: the token ids of a text or token source; else None.
      num_batches: how many there are; None when they start again at the end, or nobody knows.
      wait_seconds: how long `next` waited for data so far.

    Example:
      >>> import numpy as np
      >>> read = lambda index: {"x": np.full(4, index)} if index < 2 else None
      >>> found = Batches(Source("two batches", {"x": None}, read, 2), "in order", lambda leaves: leaves, None, 0)
      >>> [int(batch["x"][0]) for batch in found], found.state()["next_index"]
      ([0, 1], 2)
    """

    def __init__(
        self,
        source: "Source",
        order: str,
        place: Callable[[Leaves], Any],
        position: Mapping[str, Any] | None,
        prefetch: int,
    ):
        self.source, self.tokens, self.num_batches = source.name, source.tokens, source.num_batches
        self.wait_seconds = 0.0
        self._source, self._order, self._place, self._prefetch = source, order, place, prefetch
        self._next_index = 0
        self._mark: Any = None
        self._error: Exception | None = None
        if position is not None:
            self._go_to(self._checked(position), position.get("mark"))
        self._open_feed()

    @property
    def vocab_size(self) -> int | None:
        """The smallest vocabulary that holds every token, None where there are no tokens; reads a `.bin` once."""
        return self.tokens.vocab_size if self.tokens else None

    def __iter__(self) -> "Batches":
        return self

    def __next__(self) -> Any:
        """The next batch, nested as the source has it."""
        if self._error is not None:
            raise self._error
        started = time.perf_counter()
        try:
            made = self._feed.take()
            if made is None:
                raise StopIteration
        except Exception as error:  # the thread has ended: what it said holds until restore()
            self._error = error
            raise
        finally:
            self.wait_seconds += time.perf_counter() - started
        batch, self._mark = made
        self._next_index += 1
        return batch

    def state(self) -> dict[str, Any]:
        """Where the user is, as JSON: what was made ready ahead does not count."""
        state = {"next_index": self._next_index, "source": self.source, "order": self._order}
        return state if self._mark is None else {**state, "mark": self._mark}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Goes on from a `state()` of the same source, seed and batch.

        Raises:
          DataError: it is no state, or one of other data.
        """
        index = self._checked(state)
        if index == self._next_index and self._error is None:
            return
        self.close()
        self._go_to(index, state.get("mark"))
        self._error = None
        self._open_feed()

    def close(self) -> None:
        """Stops reading ahead and lets go of the batches made ready."""
        self._finalizer()
        self._error = self._error or SpanaxError("these batches are closed.", where=self.source, fix="restore(state)")

    def _checked(self, state: Mapping[str, Any]) -> int:
        index = state.get("next_index") if isinstance(state, Mapping) else None
        if not isinstance(index, int) or index < 0:
            raise DataError("this is no position in data.", where=repr(state)[:120], fix="what Batches.state() gave")
        for key, now in (("source", self.source), ("order", self._order)):
            if state.get(key) != now:
                raise DataError(
                    f"the saved position is not of this data: its {key} is another.",
                    where=f"saved with {state.get(key)}; now {now}",
                    fix="the data, tokenizer, split, seed and batch it was saved with; or start without a position",
                )
        return index

    def _go_to(self, index: int, mark: Any) -> None:
        self._source.seek(index, mark)
        self._next_index, self._mark = index, mark

    def _open_feed(self) -> None:
        # The feed does not know this object: dropping the last name for it ends the thread as well.
        self._feed = _Feed(partial(_produce, self._source, self._place), self._next_index, self._prefetch)
        self._finalizer = weakref.finalize(self, self._feed.close)

    def __repr__(self) -> str:
        return f"Batches({self.source}, {self._order}, next {self._next_index})"


@dataclass(frozen=True)
class Source:
    """What batches are read from: `read(index)` gives the leaves of a batch, None behind the last one.

    `like` is nested as a batch is. `mark()` is what the source itself needs to go on from where it was read to;
    `seek(index, mark)` goes there.
    """

    name: str
    like: Any
    read: Callable[[int], Leaves | None]
    num_batches: int | None = None
    tokens: Tokens | None = None
    mark: Callable[[], Any] = lambda: None
    seek: Callable[[int, Any], None] = lambda index, mark: None


def local_rows(placements: Sequence["Placement"], shardings: Mapping[str, Any], devices: Sequence[Any]) -> np.ndarray:
    """The rows of the global batch that some devices hold, sorted, of shape [R].

    Not one stripe a process: where the batch is split over fewer parts than there are processes (one model over
    several hosts), processes hold the same rows.
    """
    rows: set[int] = set()
    for leaf in placements:
        if leaf.shape[:1] == (_batch_size(placements),):
            held = shardings[leaf.path].devices_indices_map(leaf.shape)
            for device in devices:
                rows.update(range(*held[device][0].indices(leaf.shape[0])))
    return np.array(sorted(rows), np.int64)


def element_source(
    source: Any, placements: Sequence["Placement"], rows_R: np.ndarray, *, seed: int, shuffle: bool, repeat: bool
) -> Source:
    """A dataset, a sequence, an iterable or a function that returns one, of examples or of batches."""
    name = type(source).__name__
    is_sequence = hasattr(source, "__len__") and hasattr(source, "__getitem__")
    if isinstance(source, Mapping) or not (is_sequence or callable(source) or isinstance(source, Iterable)):
        raise SpanaxError(f"cannot read batches from a {name}.", fix="a path, 'python', a dataset, or an iterable")
    loader = None if is_sequence else Loader(source, repeat)
    size = len(source) if is_sequence else 0
    first = loader.held if loader else source[0] if size else END
    if first is END:
        raise DataError(f"{name} is empty.", fix="a source with at least one batch in it")
    in_batches = _is_batch(flat(first), placements)
    num_elements, rows = (1, np.zeros(1, np.int64)) if in_batches else (_batch_size(placements), rows_R)
    if not in_batches and any(leaf.shape[0] != num_elements for leaf in placements):
        wanted = described({leaf.path: leaf for leaf in placements})
        raise DataError(f"examples cannot make {wanted}.", where=name, fix="a source of whole batches")
    if is_sequence and size < num_elements:
        raise DataError(f"{name} has {size:,} examples, and one batch takes {num_elements:,}.", fix="a smaller batch")
    leaves = _conform(first, placements, rows_R, name)
    if not in_batches or leaves[placements[0].path].shape == placements[0].shape:
        # One process's own rows would tell the other processes nothing.
        name = f"{name} {digest(str(size), *(part for leaf in placements for part in (leaf.path, leaves[leaf.path])))}"
    order = Order(size, num_elements, seed, shuffle and not in_batches)
    fetch, num_batches = (partial(loader.read, num_elements), None) if loader else sequence_fetch(source, order, repeat)

    def read(index: int) -> Leaves | None:
        items = fetch(index, rows)
        if items is None:
            return None
        found = [_conform(item, placements, rows_R, name) for item in items]
        return found[0] if in_batches else {leaf.path: _stacked(found, leaf) for leaf in placements}

    like = nested(first, dict.fromkeys(flat(first)))
    if not loader:
        return Source(name, like, read, num_batches)
    return Source(name, like, read, mark=loader.mark, seek=loader.seek)


class _Feed:
    """Makes items ready in a thread, never more than `depth` ahead; depth 0 makes them when asked."""

    def __init__(self, produce: Callable[[int], Any], first: int, depth: int):
        self._produce, self._indices, self._stop = produce, count(first), threading.Event()
        self._slots, self._ready = threading.Semaphore(depth), SimpleQueue[tuple[Any, Exception | None]]()
        # A daemon: a loader that never returns must not keep the process from ending.
        self._thread = threading.Thread(target=self._work, name="spanax-data", daemon=True) if depth else None
        if self._thread:
            self._thread.start()

    def take(self) -> Any:
        """The next item; raises what its making raised."""
        if not self._thread:
            return self._produce(next(self._indices))
        item, error = self._ready.get()
        self._slots.release()
        if error is not None:
            raise error
        return item

    def close(self) -> None:
        self._stop.set()
        self._slots.release()
        if self._thread and self._thread is not threading.current_thread():
            self._thread.join(CLOSE_SECONDS)
        self._ready = SimpleQueue()

    def _work(self) -> None:
        for index in self._indices:
            self._slots.acquire()
            if self._stop.is_set():
                return
            item, error = None, None
            try:
                item = self._produce(index)
            except Exception as raised:
                error = raised
            self._ready.put((item, error))
            if item is None:
                return


def _produce(source: Source, place: Callable[[Leaves], Any], index: int) -> tuple[Any, Any] | None:
    leaves = source.read(index)
    return None if leaves is None else (nested(source.like, place(leaves)), source.mark())


def _place(placements: Sequence["Placement"], shardings: Mapping[str, Any], rows_R: np.ndarray, leaves: Leaves) -> Any:
    """Global arrays, by path, from this process's rows."""
    import jax

    def part(leaf: "Placement", index: tuple[slice, ...]) -> np.ndarray:
        array = leaves[leaf.path]
        if array.shape == leaf.shape:
            return array[index]
        start, stop, _ = index[0].indices(leaf.shape[0])
        first = int(np.searchsorted(rows_R, start))
        return array[(slice(first, first + stop - start), *index[1:])]

    # device_put would compare the whole batch across processes. On a CPU every way may keep the very numpy buffer.
    make = jax.make_array_from_callback
    return {
        leaf.path: make(leaf.shape, shardings[leaf.path], partial(part, leaf), dtype=np.dtype(leaf.dtype))
        for leaf in placements
    }


def _conform(item: Any, placements: Sequence["Placement"], rows_R: np.ndarray, name: str) -> Leaves:
    """Copies of the leaves in the plan's dtypes: a loader may use its buffers again."""
    found, wanted = flat(item), {leaf.path: leaf for leaf in placements}
    in_batches = _is_batch(found, placements)

    def refuse(what: str) -> DataError:
        gives = described({path: np.asarray(value) for path, value in found.items()})
        return DataError(what, where=f"{name} gives {gives}", fix=f"the plan takes {described(wanted)}")

    if item is None:  # what a filtered MapDataset holds in the place of an example
        raise DataError(f"{name} has None for an example.", fix="dataset.to_iter_dataset() leaves filtered ones out")
    if found.keys() != wanted.keys():
        extra, missing = sorted(found.keys() - wanted.keys()), sorted(wanted.keys() - found.keys())
        raise refuse(f"the data has no leaf '{missing[0]}'." if missing else f"the plan takes no leaf '{extra[0]}'.")
    leaves = {}
    for path, leaf in wanted.items():
        array, dtype = np.asarray(found[path]), np.dtype(leaf.dtype)
        shapes = (leaf.shape, (len(rows_R), *leaf.shape[1:])) if in_batches else (leaf.shape[1:],)
        if array.shape not in shapes:
            raise refuse(f"'{path}' has shape {array.shape}; wanted {shapes[0]}.")
        # JAX itself makes 32 bits of numpy's default 64; nothing else is cast unasked.
        narrowed = array.dtype.kind == dtype.kind and (array.dtype.itemsize, dtype.itemsize) == (8, 4)
        if array.dtype != dtype and not narrowed:
            raise refuse(f"'{path}' has dtype {array.dtype}; wanted {dtype}.")
        leaves[path] = array.astype(dtype)
        if narrowed and dtype.kind in "iu" and not np.array_equal(leaves[path], array):
            raise refuse(f"'{path}' has values that do not fit {dtype}.")
    return leaves


def _batch_size(placements: Sequence["Placement"]) -> int:
    return mode([leaf.shape[0] for leaf in placements if leaf.shape] or [1])


def _is_batch(found: Mapping[str, Any], placements: Sequence["Placement"]) -> bool:
    """Whether an element is a whole batch: an example has a dim less."""
    return any(np.ndim(found[leaf.path]) == len(leaf.shape) for leaf in placements if leaf.path in found)


def _stacked(found: list[Leaves], leaf: "Placement") -> np.ndarray:
    return np.array([leaves[leaf.path] for leaves in found], leaf.dtype).reshape(-1, *leaf.shape[1:])
