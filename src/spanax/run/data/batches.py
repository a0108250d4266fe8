"""Batches: the next global batch, placed on the devices as the plan says, from text, tokens, datasets or a loader.

The order is a pure function of the seed and the global position, and each process reads the rows its own devices
hold: the same global batches, row for row, on any number of devices and processes and under any layout.

Shapes: B examples of the global batch, R of them read by this process.
"""

import os
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import count
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, final

import numpy as np

from spanax.errors import DataError, SpanaxError
from spanax.run.data.elements import Leaves, described, nested
from spanax.run.data.examples import Remainder, Source, in_order, same_kind
from spanax.run.data.open_source import Reading, examples, opened
from spanax.run.data.source import batch_size, element_source, local_rows
from spanax.run.distributed.processes import join_group

if TYPE_CHECKING:
    import jax

    from spanax.plan.plan import Placement, Plan


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
    epochs: int | None = 1,
    drop_remainder: bool = True,
    prefetch: int = 2,
    cache_dir: str | os.PathLike[str] | None = None,
    field: str | Mapping[str, str] | None = None,
) -> "Batches":
    """The batches of a source on the devices, in an order that the seed alone decides.

    Args:
      source: `"python"` (its standard library), a text file or a folder of them, a `.bin` of tokens; a JSONL,
        Parquet, Arrow or ArrayRecord file, a folder of them or a pattern such as `shards/*.parquet`; a Hugging Face
        Dataset or DatasetDict, or the folder one was saved to; a `grain.MapDataset` or any sequence of examples;
        a `spanax.mixture` of these, or its text `a.jsonl=0.7,b.parquet=0.3`; a `grain.IterDataset`, any iterable
        of examples or batches, or a function that returns one. Shapes tell an example from a batch. An iterable
        gives every process the whole global batch, or only the rows of the process's own devices.
      plan: what places the batch; text and tokens need its leaves to be `inputs` and `targets` of shape [B, T].
      mesh: the plan's own by default.
      tokenizer: `"bytes"`, `"bpe"`, `"bpe:8192"` or the path of a tokenizer.json; for text.
      split: `"train"` or `"validation"`, the twentieth held out; for text and tokens.
      seed: of the order; every epoch has another one.
      position: a `Batches.state()` to go on from.
      shuffle: whether examples change places; whatever comes in batches, or in an iterable, keeps its own order.
      epochs: how many times the source is read; a mixture ends with the first part that has been read so often. None
        reads without end, and an iterator to its end.
      drop_remainder: leave out the examples that do not fill a last batch; if false, they come as a last, smaller batch
        of NumPy arrays, which `run.evaluate` takes.
      prefetch: how many batches are made ready ahead, each on the devices; 0 for none and no thread.
      cache_dir: where a trained tokenizer and encoded text are kept; `~/.cache/spanax` by default.
      field: which field of a table holds the text or the token ids, of several (`content,text`) the first that a
        table has; `text,input_ids` by default. For other batches the field of each leaf, as a mapping or
        `images=pixels,labels=label`: those of the same name by default.

    Raises:
      DataError: the source is missing, damaged, too short for one batch, or not what the plan takes.
      SpanaxError: `epochs` is neither a positive integer nor None.

    Example:
      >>> from types import SimpleNamespace as Plan
      >>> from spanax.hardware.mesh import MeshShape
      >>> from spanax.plan.plan import Placement
      >>> x = Placement("x", (4,), "int32", "batch", ("batch",), (("data",),), (4,), 16, "")
      >>> plan = Plan(mesh=MeshShape.of("data=1"), batch=(x,))
      >>> [batch["x"].tolist() for batch in batches([{"x": i} for i in range(8)], plan, shuffle=False)]
      [[0, 1, 2, 3], [4, 5, 6, 7]]
    """

    if epochs is not None and (isinstance(epochs, bool) or not isinstance(epochs, int) or epochs < 1):
        raise SpanaxError(f"epochs must be a positive integer or None, not {epochs!r}.", fix="epochs=1")
    join_group()
    mesh = plan.mesh.build() if mesh is None else mesh
    shardings = {leaf.path: leaf.sharding(mesh) for leaf in plan.batch}
    rows_R = local_rows(plan.batch, shardings, mesh.local_devices)
    reading = Reading(tokenizer, split, field, cache_dir)
    if epochs is None and not drop_remainder:
        raise SpanaxError("drop_remainder=False needs a number of epochs.", fix="epochs=1, drop_remainder=False")
    made = open_source(
        source, plan.batch, rows_R, reading, seed=seed, shuffle=shuffle, epochs=epochs, drop_remainder=drop_remainder
    )
    order = f"seed {seed}, shuffle {shuffle}, {described({leaf.path: leaf for leaf in plan.batch})}"
    return Batches(made, order, partial(_place, plan.batch, shardings, rows_R), position, prefetch)


def open_source(
    source: Any,
    placements: Sequence["Placement"],
    rows_R: np.ndarray,
    reading: Reading,
    *,
    seed: int,
    shuffle: bool,
    epochs: int | None,
    drop_remainder: bool = True,
) -> Source:
    """What gives the leaves of one batch after the other, of the rows that a process reads."""
    parts = opened(source, [leaf.path for leaf in placements], reading)
    if len(parts) == 1 and parts[0][0] is source:
        return element_source(
            source, placements, rows_R, seed=seed, shuffle=shuffle, epochs=epochs, drop_remainder=drop_remainder
        )
    size = batch_size(placements)
    found = [(examples(part, placements, rows_R, size if drop_remainder else 1), weight) for part, weight in parts]
    same_kind([part for part, _ in found])
    return in_order(found, size, rows_R, seed=seed, shuffle=shuffle, epochs=epochs, drop_remainder=drop_remainder)


@final
class Batches:
    """An iterator over global batches on the devices; made by `batches`.

    Attributes:
      source: what is read, with a hash of its content.
      skipped: the indices of batches that are left out.
      tokens: the token ids of a text or token source; else None.
      num_batches: in all epochs; None without an end, and for iterables, whose length is unknown.
      shares: the sources of a mixture, or the only one: name, share of all examples, number of examples, epochs; none
        of an iterable.
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
        self.shares, self.wait_seconds = source.shares, 0.0
        self._source, self._order, self._place, self._prefetch = source, order, place, prefetch
        self._next_index, self.skipped = 0, frozenset[int]()
        self._mark: Any = None
        self._error: Exception | None = None
        if position is not None:
            self._go_to(self._checked(position), position)
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
            made = self._take()
            # One that is left out is read all the same: an iterable knows no other way past it.
            while made is not None and self.last_index in self.skipped:
                made = self._take()
            if made is None:
                raise StopIteration
        except Exception as error:  # the thread has ended: what it said holds until restore()
            self._error = error
            raise
        finally:
            self.wait_seconds += time.perf_counter() - started
        batch, self._mark = made
        return batch

    def _take(self) -> Any:
        made = self._feed.take()
        self._next_index += made is not None
        return made

    def state(self) -> dict[str, Any]:
        """Where the user is, as JSON: what was made ready ahead does not count."""
        state = {"next_index": self._next_index, "source": self.source, "order": self._order}
        if self.skipped:
            state["skipped"] = sorted(self.skipped)
        return state if self._mark is None else {**state, "mark": self._mark}

    @property
    def last_index(self) -> int:
        """The index of the batch that came last, -1 before the first: its place in the order that the seed decides."""
        return self._next_index - 1

    def skip(self, *indices: int) -> None:
        """Leaves batches out when their turn comes; `state()` keeps their indices."""
        self.skipped |= {*indices}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Goes on from a `state()` of the same source, seed and batch.

        Raises:
          DataError: it is no state, or one of other data.
        """
        index = self._checked(state)
        if index == self._next_index and self._error is None:
            self.skipped = frozenset(state.get("skipped", ()))
            return
        self._finalizer.detach()
        self._feed.close()
        self._go_to(index, state)
        self._error = None
        self._open_feed()

    def close(self) -> None:
        """Stops reading ahead, lets go of the batches made ready, and closes the iterator of a loader."""
        self._finalizer()
        self._error = self._error or SpanaxError("these batches are closed.", where=self.source, fix="restore(state)")

    def _checked(self, state: Mapping[str, Any]) -> int:
        index = state.get("next_index") if isinstance(state, Mapping) else None
        skipped = state.get("skipped", []) if isinstance(state, Mapping) else []
        are_numbers = isinstance(skipped, list) and all(isinstance(one, int) for one in skipped)
        if not isinstance(index, int) or index < 0 or not are_numbers:
            raise DataError("this is no position in data.", where=repr(state)[:120], fix="what Batches.state() gave")
        for key, now in (("source", self.source), ("order", self._order)):
            if state.get(key) != now:
                raise DataError(
                    f"the saved position is not of this data: its {key} is another.",
                    where=f"saved with {state.get(key)}; now {now}",
                    fix="the data, tokenizer, split, seed and batch it was saved with; or start without a position",
                )
        return index

    def _go_to(self, index: int, state: Mapping[str, Any]) -> None:
        mark = state.get("mark")
        self._source.seek(index, mark)
        self._next_index, self._mark, self.skipped = index, mark, frozenset(state.get("skipped", ()))

    def _open_feed(self) -> None:
        # The feed does not know this object: dropping the last name for it ends the thread as well.
        self._feed = _Feed(partial(_produce, self._source, self._place), self._next_index, self._prefetch)
        self._finalizer = weakref.finalize(self, _close, self._feed, self._source)

    def __repr__(self) -> str:
        return f"Batches({self.source}, {self._order}, next {self._next_index})"


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

    def close(self) -> bool:
        """Ends the thread; whether nothing is being made any more."""
        self._stop.set()
        self._slots.release()
        if self._thread and self._thread is not threading.current_thread():
            self._thread.join(CLOSE_SECONDS)
        self._ready = SimpleQueue()
        return not (self._thread and self._thread.is_alive())

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


def _close(feed: _Feed, source: Source) -> None:
    if feed.close():  # a loader that does not return cannot be closed
        source.close()


def _produce(source: Source, place: Callable[[Leaves], Any], index: int) -> tuple[Any, Any] | None:
    leaves = source.read(index)
    if isinstance(leaves, Remainder):
        return nested(source.like, leaves.content), source.mark()
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
