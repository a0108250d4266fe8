"""An iterator over global batches, sharded over the devices according to the plan.

It reads text, tokens, datasets and loaders. The order is a pure function of the seed and the global position, and each
process reads only the rows of its own devices. The global batches are therefore equal, row for row, for any number of
devices and processes and any layout.

Shapes: B examples in the global batch, R of them read by this process.
"""

import os
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from functools import partial
from itertools import count
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, final

from spanax.errors import ArgumentError, DataError, MissingError, RangeError
from spanax.processes.processes import join_group
from spanax.train.data.destination import Destination, Leaves, nested
from spanax.train.data.open_source import open_source
from spanax.train.data.source import Options, Source

if TYPE_CHECKING:
    import jax

    from spanax.plan.plan import Plan
    from spanax.train.data.text.chat_template import ChatTemplate
    from spanax.train.data.text.tokenizer import TrainedTokenizer


CLOSE_SECONDS = 5.0
"""The timeout for stopping a loader that does not return."""


def batches(  # noqa: PLR0913
    source: Any,
    plan: "Plan | Any",
    *,
    mesh: "jax.sharding.Mesh | None" = None,
    tokenizer: "str | TrainedTokenizer" = "bytes",
    split: str = "train",
    seed: int = 0,
    position: Mapping[str, Any] | None = None,
    shuffle: bool = True,
    epochs: int | None = 1,
    drop_remainder: bool = True,
    prefetch: int = 2,
    cache_dir: str | os.PathLike[str] | None = None,
    field: str | Mapping[str, str] | None = None,
    chat_template: "str | ChatTemplate | None" = None,
    pack: bool = False,
) -> "Batches":
    """Returns an iterator over the batches of a source on the devices, in an order determined by the seed alone.

    Args:
      source: `"python"` (its standard library), a text file or a folder of them, a `.bin` of tokens; a JSONL, CSV,
        Parquet, Arrow or ArrayRecord file, a folder of them or a pattern such as `shards/*.parquet`; a Hugging Face
        Dataset or DatasetDict, or the folder one was saved to; a `grain.MapDataset` or any sequence of examples;
        a `spanax.mixture` of these, or its text `a.jsonl=0.7,b.parquet=0.3`; a `grain.IterDataset`, any iterable
        of examples or batches, or a function that returns one. Shapes distinguish an example from a batch. An iterable
        yields the full global batch in every process, or only the rows of the process's own devices.
      plan: the plan that shards the batch; or, without a plan, an example batch of arrays or `jax.ShapeDtypeStruct`s:
        its batches have the `NamedSharding`s of these, or are NumPy arrays if they have none. For text and tokens its
        leaves are `inputs` and `targets` of shape [B, T]; for conversations also `weights`, and with `segments` and
        `positions` several are packed in a row, as are the documents of a table of texts or tokens.
      mesh: the device mesh; defaults to the mesh of the plan.
      tokenizer: `"bytes"`, `"bpe"`, `"bpe:8192"` or the path of a tokenizer.json; for text only. A run is resumed with
        a `TrainedTokenizer`.
      split: `"train"` or `"validation"`, which is a twentieth of the data; for text and tokens.
      seed: the seed of the order, which differs between epochs.
      position: a `Batches.state()` to resume from.
      shuffle: whether to shuffle the examples; sources of batches and iterables are never shuffled.
      epochs: the number of passes over the source; a mixture ends when any part completes them. None repeats
        the source forever, and reads an iterator to its end.
      drop_remainder: whether to drop the examples that do not fill a last batch; if false, they are returned as a
        last, smaller batch of NumPy arrays, which `run.evaluate` accepts.
      prefetch: the number of batches to prefetch to the devices; 0 disables prefetching and its thread.
      cache_dir: the directory for trained tokenizers and encoded text; defaults to `~/.cache/spanax`.
      field: the field of a table with the text or the token ids, or several (`content,text`), of which the first that
        a table has is read; defaults to `text,input_ids`. For other batches the field of each leaf, as a mapping or
        `images=pixels,labels=label`; defaults to the field of the same name. For conversations their field, or those
        of the table in place of the usual ones: `prompt=question,completion=answer`.
      chat_template: `chatml`, or the file of a Jinja template; defaults to that of the tokenizer. A run is resumed with
        a `ChatTemplate`.
      pack: whether each row must have whole documents or conversations, several where they fit, with `segments` from 1
        and `positions` from 0; a document longer than a row is cut in pieces. The batch needs the leaves of it.

    Raises:
      DataError: the source is missing, damaged, too short for one batch, or does not match the batch of the plan.
      SpanaxError: `epochs` is neither a positive integer nor None, or `plan` is neither a plan nor a batch.

    Example:
      >>> import numpy as np
      >>> example = {"x": np.zeros(4, "int32")}
      >>> data = batches([{"x": i} for i in range(8)], example, shuffle=False, epochs=2)
      >>> len(data), [batch["x"].tolist() for batch in data]
      (4, [[0, 1, 2, 3], [4, 5, 6, 7], [0, 1, 2, 3], [4, 5, 6, 7]])
    """

    if epochs is not None and (isinstance(epochs, bool) or not isinstance(epochs, int) or epochs < 1):
        raise RangeError(f"epochs must be a positive integer or None, not {epochs!r}.", fix="epochs=1")
    join_group()
    if epochs is None and not drop_remainder:
        raise MissingError("drop_remainder=False needs a number of epochs.", fix="epochs=1, drop_remainder=False")
    destination = Destination.of(plan, mesh)
    options = Options(tokenizer, split, field, cache_dir, seed, shuffle, epochs, drop_remainder, chat_template, pack)
    opened = open_source(source, destination, options)
    order = f"seed {seed}, shuffle {shuffle}, {destination.planned}"
    return Batches(opened, order, destination.place, position, prefetch)


@final
class Batches:
    """An iterator over global batches on the devices, created by `batches`.

    Attributes:
      source: the name of the source, with a hash of its content.
      skipped: the indices of batches to skip.
      tokens: the token ids of a text or token source; None for other sources.
      num_batches: the number of batches in all epochs; None if the source repeats forever or is an iterable, whose
        length is unknown.
      shares: the name, the share of all examples, the number of examples and the epochs of each source of a mixture,
        or of the single source; empty for an iterable.
      wait_seconds: the total time that `next` has waited for data.

    Example:
      >>> import numpy as np
      >>> read = lambda index: {"x": np.full(4, index)} if index < 2 else None
      >>> data = Batches(Source("two batches", {"x": None}, read, 2), "in order", lambda leaves: leaves, None, 0)
      >>> [int(batch["x"][0]) for batch in data], data.state()["next_index"]
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
        self.source = source.name
        self.tokens = source.tokens
        self.num_batches = source.num_batches
        self.shares = source.shares
        self.wait_seconds = 0.0
        self._source = source
        self._order = order
        self._place = place
        self._prefetch = prefetch
        self._next_index = 0
        self.skipped = frozenset[int]()
        self._mark: Any = None
        self._error: Exception | None = None
        if position is not None:
            self._go_to(self._checked(position), position)
        self._open_feed()

    @property
    def vocab_size(self) -> int | None:
        """The size of the smallest vocabulary with every token, or None without tokens; reads all of a `.bin` once."""
        return self.tokens.vocab_size if self.tokens else None

    def __len__(self) -> int:
        """The number of batches in all epochs, those that were returned included; a TypeError if it is not known."""
        if self.num_batches is None:
            raise TypeError(f"the number of batches of {self.source} is unknown: it has no end, or is an iterable")
        return self.num_batches

    def __bool__(self) -> bool:
        return True  # also without a length

    def __iter__(self) -> "Batches":
        return self

    def __next__(self) -> Any:
        """Returns the next batch, a pytree with the structure of the source's batches."""
        if self._error is not None:
            raise self._error
        started = time.perf_counter()
        try:
            item = self._take()
            # A skipped batch is read as well: an iterable cannot advance without reading.
            while item is not None and self.last_index in self.skipped:
                item = self._take()
            if item is None:
                raise StopIteration
        except Exception as error:  # the thread has ended: the error is raised again until restore()
            self._error = error
            raise
        finally:
            self.wait_seconds += time.perf_counter() - started
        batch, self._mark = item
        return batch

    def _take(self) -> Any:
        item = self._feed.take()
        self._next_index += item is not None
        return item

    def state(self) -> dict[str, Any]:
        """Returns the position after the last batch returned, as JSON; prefetched batches do not count."""
        state = {"next_index": self._next_index, "source": self.source, "order": self._order}
        if self.skipped:
            state["skipped"] = sorted(self.skipped)
        return state if self._mark is None else {**state, "mark": self._mark}

    @property
    def last_index(self) -> int:
        """The index, in the order of the seed, of the last batch returned; -1 before the first."""
        return self._next_index - 1

    def skip(self, *indices: int) -> None:
        """Skips the batches of these indices; `state()` includes the indices."""
        self.skipped |= {*indices}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Resumes from a `state()` of the same source, seed and batch.

        Raises:
          DataError: the state is malformed, or belongs to other data.
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
        """Stops prefetching, releases the prefetched batches, and closes the iterator of a loader."""
        self._finalizer()
        self._error = self._error or ArgumentError("these batches are closed.", where=self.source, fix="restore(state)")

    def _checked(self, state: Mapping[str, Any]) -> int:
        saved = state if isinstance(state, Mapping) else {}
        index = saved.get("next_index")
        skipped = saved.get("skipped", [])
        mark = saved.get("mark")
        are_numbers = isinstance(skipped, list) and all(isinstance(number, int) for number in skipped)
        is_mark = mark is None or (isinstance(mark, dict) and mark.keys() == {"epoch", "iterator"})
        if not isinstance(index, int) or index < 0 or not are_numbers or not is_mark:
            raise DataError("this is not a position in data.", where=repr(state)[:120], fix="a Batches.state()")
        for key, now in (("source", self.source), ("order", self._order)):
            if state.get(key) != now:
                raise DataError(
                    f"the saved position belongs to other data: its {key} differs.",
                    where=f"saved: {state.get(key)}; now: {now}",
                    fix="the same data, tokenizer, split, seed and batch; or start without a position",
                )
        return index

    def _go_to(self, index: int, state: Mapping[str, Any]) -> None:
        mark = state.get("mark")
        self._source.seek(index, mark)
        self._next_index = index
        self._mark = mark
        self.skipped = frozenset(state.get("skipped", ()))

    def _open_feed(self) -> None:
        # The feed does not reference this object: deleting the last reference to it also ends the thread.
        self._feed = _Feed(partial(_produce, self._source, self._place), self._next_index, self._prefetch)
        self._finalizer = weakref.finalize(self, _close, self._feed, self._source)

    def __repr__(self) -> str:
        return f"Batches({self.source}, {self._order}, next {self._next_index})"


class _Feed:
    """Prefetches up to `depth` items in a thread; a depth of 0 produces each item on request.

    Grain's `ThreadPrefetchDatasetIterator` joins its thread without a timeout when it is closed: 8 s for a loader that
    takes 8 s, forever for one that never returns. Its import adds a second of CPU time to runs without Grain.
    """

    def __init__(self, produce: Callable[[int], Any], first: int, depth: int):
        self._produce = produce
        self._indices = count(first)
        self._stop = threading.Event()
        self._slots = threading.Semaphore(depth)
        self._ready = SimpleQueue[tuple[Any, Exception | None]]()
        # A daemon: a loader that never returns must not prevent the process from exiting.
        self._thread = threading.Thread(target=self._work, name="spanax-data", daemon=True) if depth else None
        if self._thread:
            self._thread.start()

    def take(self) -> Any:
        """Returns the next item, or raises the error of producing it."""
        if not self._thread:
            return self._produce(next(self._indices))
        item, error = self._ready.get()
        self._slots.release()
        if error is not None:
            raise error
        return item

    def close(self) -> bool:
        """Stops the thread, and returns whether it has ended."""
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
            item = None
            error = None
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
    return None if leaves is None else (nested(source.like, place(leaves)), source.mark())
