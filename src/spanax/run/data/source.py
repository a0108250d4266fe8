"""Source: what batches are read from, whatever it is: a dataset, a sequence, an iterable, a function.

Shape suffix: R rows of the global batch that this process reads.
"""

import json
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from statistics import mode
from typing import TYPE_CHECKING, Any

import numpy as np

from spanax.errors import DataError, SpanaxError
from spanax.run.data.elements import Leaves, described, digest, flat, nested
from spanax.run.data.examples import Examples, Remainder, Share, Source, TooFew
from spanax.run.data.order import Order

if TYPE_CHECKING:
    from spanax.plan.plan import Placement

NUM_READERS = 16

END = object()
"""What a loader holds behind its last element."""

Fetch = Callable[[int, np.ndarray], Any]
"""From the index of a batch and the rows to read to a list of elements, or a Remainder; None after the last batch."""


def local_rows(placements: Sequence["Placement"], shardings: Mapping[str, Any], devices: Sequence[Any]) -> np.ndarray:
    """The rows of the global batch that some devices hold, sorted, of shape [R].

    Not one stripe a process: where the batch is split over fewer parts than there are processes (one model over
    several hosts), processes hold the same rows.
    """
    rows: set[int] = set()
    for leaf in placements:
        if leaf.shape[:1] == (batch_size(placements),):
            held = shardings[leaf.path].devices_indices_map(leaf.shape)
            for device in devices:
                rows.update(range(*held[device][0].indices(leaf.shape[0])))
    return np.array(sorted(rows), np.int64)


def element_source(
    source: Any,
    placements: Sequence["Placement"],
    rows_R: np.ndarray,
    *,
    seed: int,
    shuffle: bool,
    epochs: int | None,
    drop_remainder: bool = True,
) -> Source:
    """A dataset, a sequence, an iterable or a function that returns one, of examples or of batches."""
    name = type(source).__name__
    is_sequence = hasattr(source, "__len__") and hasattr(source, "__getitem__")
    if isinstance(source, Mapping) or not (is_sequence or callable(source) or isinstance(source, Iterable)):
        raise SpanaxError(f"cannot read batches from a {name}.", fix="a path, 'python', a dataset, or an iterable")
    loader = None if is_sequence else Loader(source, epochs, drop_remainder)
    size = len(source) if is_sequence else 0
    first = loader.held if loader else source[0] if size else END
    if first is END:
        raise DataError(f"{name} is empty.", fix="a source with at least one batch in it")
    in_batches = _is_batch(flat(first), placements)
    num_elements, rows = (1, np.zeros(1, np.int64)) if in_batches else (batch_size(placements), rows_R)
    if not in_batches and any(leaf.shape[0] != num_elements for leaf in placements):
        wanted = described({leaf.path: leaf for leaf in placements})
        raise DataError(f"examples cannot make {wanted}.", where=name, fix="a source of whole batches")
    num_fewer = partial(_num_fewer, placements, rows_R) if in_batches and not drop_remainder else lambda item: 0

    def conform(item: Any) -> Leaves:
        count = num_fewer(item)
        return _conform(item, _of_size(placements, count) if count else placements, rows_R, name)

    if is_sequence and size < num_elements and drop_remainder:
        raise TooFew(f"{name} has {size:,} examples, and one batch takes {num_elements:,}.", fix="a smaller batch")
    leaves = conform(first)
    if not in_batches or leaves[placements[0].path].shape == placements[0].shape:
        # One process's own rows would tell the other processes nothing.
        name = f"{name} {digest(str(size), *(part for leaf in placements for part in (leaf.path, leaves[leaf.path])))}"
    order = Order(size, num_elements, seed, shuffle and not in_batches)
    size_B = batch_size(placements)
    shares = () if loader or size >= sys.maxsize else (Share(name, 1.0, size * size_B // num_elements, size_B),)
    fetch: Fetch
    fetch, num_batches = (
        (partial(loader.read, num_elements), None) if loader else sequence_fetch(source, order, epochs, drop_remainder)
    )

    def read(index: int) -> Leaves | Remainder | None:
        items = fetch(index, rows)
        if items is None:
            return None
        is_smaller = isinstance(items, Remainder)
        items = items.content if isinstance(items, Remainder) else items
        found = [conform(item) for item in items]
        is_smaller |= in_batches and num_fewer(items[0]) > 0
        leaves = found[0] if in_batches else {leaf.path: _stacked(found, leaf) for leaf in placements}
        return Remainder(leaves) if is_smaller else leaves

    like = nested(first, dict.fromkeys(flat(first)))
    if not loader:
        return Source(name, like, read, num_batches, shares=shares)
    return Source(name, like, read, mark=loader.mark, seek=loader.seek, close=loader.close)


def sequence_examples(source: Any, placements: Sequence["Placement"], rows_R: np.ndarray, least: int) -> Examples:
    """A sequence of examples, as a part of a mixture.

    Raises:
      SpanaxError: it cannot be read in any order, or holds batches.
    """
    name, grain = type(source).__name__, sys.modules.get("grain")
    if isinstance(source, Mapping) or not (hasattr(source, "__len__") and hasattr(source, "__getitem__")):
        raise SpanaxError(f"a {name} cannot be part of a mixture.", fix="paths, datasets or sequences of examples")
    if grain and isinstance(source, grain.MapDataset):
        raise SpanaxError(f"a {name} cannot be part of a mixture.", fix="grain.MapDataset.mix, of Grain's own datasets")
    if len(source) and _is_batch(flat(source[0]), placements):
        raise SpanaxError(f"a {name} of batches cannot be part of a mixture.", fix="a sequence of examples")
    if len(source) < least:
        raise TooFew(f"{name} has {len(source):,} examples, and one batch takes {batch_size(placements):,}.")
    first = source[0]
    leaves = _conform(first, placements, rows_R, name)
    name = f"{name} {digest(str(len(source)), *(part for path in sorted(leaves) for part in (path, leaves[path])))}"

    def read(indices_R: np.ndarray) -> Leaves:
        return conformed([source[index] for index in indices_R.tolist()], placements, name)

    return Examples(name, nested(first, dict.fromkeys(flat(first))), len(source), read)


def conformed(items: Sequence[Any], placements: Sequence["Placement"], name: str) -> Leaves:
    """The leaves of some examples, stacked, in the plan's shapes and dtypes.

    Raises:
      DataError: an example does not fit.
    """
    found = [_conform(item, placements, np.zeros(0, np.int64), name) for item in items]
    return {leaf.path: _stacked(found, leaf) for leaf in placements}


def sequence_fetch(
    source: Any, order: Order, epochs: int | None, drop_remainder: bool = True
) -> tuple[Fetch, int | None]:
    """Random access to a sequence in an order, and how many batches there are; None for no end."""
    endless = order.num_examples >= sys.maxsize
    num_full, num_rest = divmod((epochs or 1) * order.num_examples, order.batch_size)
    num_batches = None if epochs is None or endless else num_full + (num_rest > 0 and not drop_remainder)
    read: Callable[[list[int]], Any] = partial(map, source.__getitem__)
    grain = sys.modules.get("grain")  # if it was never imported, this is none of its datasets
    if grain and isinstance(source, grain.MapDataset):
        # Grain shuffles and repeats itself: it seeds random transformations anew in every epoch.
        source = source.shuffle(seed=order.seed % 2**32) if order.shuffle and not endless else source
        source = source.repeat(epochs) if epochs != 1 and not endless else source
        order = Order(len(source), order.batch_size, shuffle=False)
        read = partial(ThreadPoolExecutor(NUM_READERS, "spanax-read").map, source.__getitem__)

    def fetch(index: int, rows_R: np.ndarray) -> list[Any] | Remainder | None:
        if num_batches is not None and index >= num_batches:
            return None
        if num_batches is not None and index == num_full:
            return Remainder(list(read(order.examples(index, np.arange(num_rest)).tolist())))
        return list(read(order.examples(index, rows_R).tolist()))

    return fetch, num_batches


class Loader:
    """An iterable, or a function that returns one: how far it was read, and how to start it again.

    Attributes:
      held: the first element, read ahead to see what it is; `END` if there is none.
    """

    def __init__(self, source: Any, epochs: int | None, drop_remainder: bool = True):
        self._open = partial(iter, source) if isinstance(source, Iterable) else source
        self._items: Any = iter(self._open())
        self._is_closed, self._once = False, self._items is source
        if self._once and epochs is not None and epochs > 1:
            raise SpanaxError(
                f"an iterator is read only once; epochs={epochs} reads it again.",
                where=type(source).__name__,
                fix="a function that returns a new iterator",
            )
        self._epochs, self._epoch, self._index, self._drop_remainder = epochs, 0, 0, drop_remainder
        self.held = next(self._items, END)

    def read(self, num_elements: int, index: int, rows_R: np.ndarray) -> list[Any] | Remainder | None:
        """Rows of one batch, after reading past the batches before it; None after the last batch."""
        elements: list[Any] = []
        while self._index <= index:
            elements = [self._element() for _ in range(num_elements)]
            if elements[-1] is END:
                rest = [element for element in elements if element is not END]
                return Remainder(rest) if rest and not self._drop_remainder and self._index == index else None
            self._index += 1
        return [elements[row] for row in rows_R]

    def mark(self) -> Any:
        """The epoch and the iterator's own state, if it has one in JSON, as Grain's do: it jumps there."""
        try:
            return {"epoch": self._epoch, "iterator": json.loads(json.dumps(self._items.get_state()))}
        except (AttributeError, TypeError, ValueError):
            return None

    def seek(self, index: int, mark: Any) -> None:
        """Makes batch `index` the next one.

        Raises:
          DataError: it is behind, and the iterator cannot be started again.
        """
        if self._is_closed:
            self._start(0)
        if mark is not None and hasattr(self._items, "set_state"):
            if not isinstance(mark, dict) or mark.keys() != {"epoch", "iterator"}:
                mark = {"epoch": 0, "iterator": mark}  # saved before positions counted epochs
            self._items.set_state(mark["iterator"])
            self._epoch, self._index, self.held = mark["epoch"], index, END
        elif index < self._index:
            if self._once:
                raise DataError(
                    f"batch {index} is gone: an iterator is read only once, and was read to batch {self._index}.",
                    fix="a function that returns a new iterator",
                )
            self._start(0)

    def close(self) -> None:
        """Closes the iterator, and with it the threads and processes that it started; one that was passed stays open.

        A generator runs its `finally`. Without a `close` it ends when it is garbage collected.
        """
        if not self._once and hasattr(self._items, "close"):
            self._items.close()
            self._is_closed = True

    def _start(self, epoch: int) -> None:
        """Reads from the start once more."""
        self.close()
        self._items, self._is_closed, self.held = iter(self._open()), False, END
        self._epoch, self._index = epoch, self._index if epoch else 0

    def _element(self) -> Any:
        element, self.held = self.held, END
        element = next(self._items, END) if element is END else element
        if element is END and not self._once and (self._epochs is None or self._epoch + 1 < self._epochs):
            self._start(self._epoch + 1)
            element = next(self._items, END)
        return element


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


def _num_fewer(placements: Sequence["Placement"], rows_R: np.ndarray, item: Any) -> int:
    """How many examples a batch has that is smaller than planned, read by the only process; 0 for other batches."""
    size = batch_size(placements)
    counts = {np.shape(value)[0] for value in flat(item).values() if np.ndim(value)}
    is_smaller = len(rows_R) == size and len(counts) == 1 and 0 < min(counts) < size
    return min(counts) if is_smaller and all(leaf.shape[0] == size for leaf in placements) else 0


def _of_size(placements: Sequence["Placement"], count: int) -> list["Placement"]:
    return [replace(leaf, shape=(count, *leaf.shape[1:])) for leaf in placements]


def batch_size(placements: Sequence["Placement"]) -> int:
    """How many examples a batch has: what most leaves have along their first dim."""
    return mode([leaf.shape[0] for leaf in placements if leaf.shape] or [1])


def _is_batch(found: Mapping[str, Any], placements: Sequence["Placement"]) -> bool:
    """Whether an element is a whole batch: an example has a dim less."""
    return any(np.ndim(found[leaf.path]) == len(leaf.shape) for leaf in placements if leaf.path in found)


def _stacked(found: list[Leaves], leaf: "Placement") -> np.ndarray:
    return np.array([leaves[leaf.path] for leaves in found], leaf.dtype).reshape(-1, *leaf.shape[1:])
