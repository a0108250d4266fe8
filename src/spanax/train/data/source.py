"""Sources of batches from datasets, sequences, iterables, and functions that return iterables.

Shape suffix: R rows of the global batch that this process reads.
"""

import json
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import numpy as np

from spanax.batch_dims import dims_by_name, num_examples
from spanax.errors import ArgumentError, ConflictError, DataError
from spanax.train.data.elements import BatchLeaf, ExampleLeaf, Leaves, described, digest, flat, nested
from spanax.train.data.examples import Examples, Remainder, Share, Source, check_enough
from spanax.train.data.order import Order

NUM_READERS = 16

END = object()
"""The sentinel after the last element of a loader."""

Fetch = Callable[[int, np.ndarray], Any]
"""Maps the index of a batch and the rows to read to a list of elements, or a Remainder; None after the last batch."""


def local_rows(placements: Sequence[BatchLeaf], shardings: Mapping[str, Any], devices: Sequence[Any]) -> np.ndarray:
    """Returns the sorted rows of the global batch on the given devices, of shape [R].

    Processes read the same rows if the batch has fewer shards than there are processes (a model sharded over several
    hosts).
    """
    rows: set[int] = set()
    for leaf, dim in zip(placements, dims_by_name(placements), strict=True):
        if dim is not None:
            indices = shardings[leaf.path].devices_indices_map(leaf.shape)
            for device in devices:
                rows.update(range(*indices[device][dim].indices(leaf.shape[dim])))
    return np.array(sorted(rows), np.int64)


def element_source(
    source: Any,
    placements: Sequence[BatchLeaf],
    rows_R: np.ndarray,
    *,
    seed: int,
    shuffle: bool,
    epochs: int | None,
    drop_remainder: bool = True,
) -> Source:
    """Returns the source of a dataset, a sequence, an iterable or a function that returns one."""
    name = type(source).__name__
    is_sequence = hasattr(source, "__len__") and hasattr(source, "__getitem__")
    if isinstance(source, Mapping) or not (is_sequence or callable(source) or isinstance(source, Iterable)):
        raise ArgumentError(f"cannot read batches from a {name}.", fix="a path, 'python', a dataset or an iterable")
    loader = None if is_sequence else Loader(source, epochs, drop_remainder)
    size = len(source) if is_sequence else 0
    first = loader.peeked if loader else source[0] if size else END
    if first is END:
        raise DataError(f"{name} is empty.", fix="a source with at least one batch in it")
    in_batches = _is_batch(flat(first), placements)
    num_elements, rows = (1, np.zeros(1, np.int64)) if in_batches else (batch_size(placements), rows_R)
    if not in_batches:
        check_examples(name, placements)
    num_fewer = partial(_num_fewer, placements, rows_R) if in_batches and not drop_remainder else lambda item: 0

    def conform(item: Any) -> Leaves:
        count = num_fewer(item)
        return _conform(item, _resized(placements, count) if count else placements, rows_R, name)

    if is_sequence and drop_remainder:
        check_enough(name, size, num_elements, num_elements)
    leaves = conform(first)
    if not in_batches or leaves[placements[0].path].shape == placements[0].shape:
        # A hash of one process's rows would differ between processes.
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
        elements = [conform(item) for item in items]
        is_smaller |= in_batches and num_fewer(items[0]) > 0
        leaves = elements[0] if in_batches else _stacked(elements, placements)
        return Remainder(leaves) if is_smaller else leaves

    like = nested(first, dict.fromkeys(flat(first)))
    if not loader:
        return Source(name, like, read, num_batches, shares=shares)
    return Source(name, like, read, mark=loader.mark, seek=loader.seek, close=loader.close)


def sequence_examples(source: Any, placements: Sequence[BatchLeaf], rows_R: np.ndarray, least: int) -> Examples:
    """Returns the examples of a sequence, for a part of a mixture.

    Raises:
      SpanaxError: the source has no random access, or its elements are batches.
    """
    name, grain = type(source).__name__, sys.modules.get("grain")
    if isinstance(source, Mapping) or not (hasattr(source, "__len__") and hasattr(source, "__getitem__")):
        raise ArgumentError(f"a {name} cannot be part of a mixture.", fix="paths, datasets or sequences of examples")
    if grain and isinstance(source, grain.MapDataset):
        raise ArgumentError(f"a {name} cannot be part of a mixture.", fix="grain.MapDataset.mix for Grain's datasets")
    if len(source) and _is_batch(flat(source[0]), placements):
        raise ArgumentError(f"a {name} of batches cannot be part of a mixture.", fix="a sequence of examples")
    check_enough(name, len(source), least, batch_size(placements))
    first = source[0]
    leaves = _conform(first, placements, rows_R, name)
    name = f"{name} {digest(str(len(source)), *(part for path in sorted(leaves) for part in (path, leaves[path])))}"

    def read(indices_R: np.ndarray) -> Leaves:
        return conformed([source[index] for index in indices_R.tolist()], placements, name)

    return Examples(name, nested(first, dict.fromkeys(flat(first))), len(source), read)


def conformed(items: Sequence[Any], placements: Sequence[BatchLeaf], name: str) -> Leaves:
    """Returns the stacked leaves of examples in the shapes and dtypes of the plan.

    Raises:
      DataError: an example does not match the plan.
    """
    examples = [_conform(item, placements, np.zeros(0, np.int64), name) for item in items]
    return _stacked(examples, placements)


def sequence_fetch(
    source: Any, order: Order, epochs: int | None, drop_remainder: bool = True
) -> tuple[Fetch, int | None]:
    """Returns the function that fetches a batch of a sequence, and the number of batches; None if it is infinite."""
    endless = order.num_examples >= sys.maxsize
    num_full, num_rest = divmod((epochs or 1) * order.num_examples, order.batch_size)
    num_batches = None if epochs is None or endless else num_full + (num_rest > 0 and not drop_remainder)
    read: Callable[[list[int]], Any] = partial(map, source.__getitem__)
    grain = sys.modules.get("grain")  # without an import, the source is not one of its datasets
    if grain and isinstance(source, grain.MapDataset):
        # Grain shuffles and repeats the dataset: it reseeds random transformations for each epoch.
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
    """Reads an iterable, or a function that returns one, and restarts it for each epoch.

    Attributes:
      peeked: an element that was read ahead, first to inspect its structure; `END` if there is none.
    """

    def __init__(self, source: Any, epochs: int | None, drop_remainder: bool = True):
        self._open = partial(iter, source) if isinstance(source, Iterable) else source
        self._items: Any = iter(self._open())
        self._is_closed, self._once = False, self._items is source
        if self._once and epochs is not None and epochs > 1:
            raise ConflictError(
                f"an iterator is read only once; epochs={epochs} reads it again.",
                where=type(source).__name__,
                fix="a function that returns a new iterator",
            )
        self._epochs, self._epoch, self._index, self._drop_remainder = epochs, 0, 0, drop_remainder
        self.peeked = next(self._items, END)

    def read(self, num_elements: int, index: int, rows_R: np.ndarray) -> list[Any] | Remainder | None:
        """Returns rows of a batch after skipping earlier batches; None after the last batch."""
        elements: list[Any] = []
        while self._index <= index:
            elements = [self._element() for _ in range(num_elements)]
            if elements[-1] is END:
                last = [element for element in elements if element is not END]
                return Remainder(last) if last and not self._drop_remainder and self._index == index else None
            self._index += 1
        return [elements[row] for row in rows_R]

    def mark(self) -> Any:
        """Returns the epoch and the state of the iterator, if it has one in JSON as Grain's have; else None."""
        try:
            return {"epoch": self._epoch, "iterator": json.loads(json.dumps(self._items.get_state()))}
        except (AttributeError, TypeError, ValueError):
            return None

    def seek(self, index: int, mark: Any) -> None:
        """Moves to batch `index`.

        Raises:
          DataError: the batch has been read already, and the iterator cannot be restarted.
        """
        if self._is_closed:
            self._start(0)
        if mark is not None and hasattr(self._items, "set_state"):
            if not isinstance(mark, dict) or mark.keys() != {"epoch", "iterator"}:
                mark = {"epoch": 0, "iterator": mark}  # saved before positions counted epochs
            self._items.set_state(mark["iterator"])
            self._epoch, self._index, self.peeked = mark["epoch"], index, END
        elif index < self._index:
            if self._once:
                raise DataError(
                    f"cannot go back to batch {index}: an iterator is read only once, and is at batch {self._index}.",
                    fix="a function that returns a new iterator",
                )
            self._start(0)

    def close(self) -> None:
        """Closes the iterator with its threads and processes; an iterator passed by the user stays open.

        A generator runs its `finally`. An iterator without `close` ends when it is garbage collected.
        """
        if not self._once and hasattr(self._items, "close"):
            self._items.close()
            self._is_closed = True

    def _start(self, epoch: int) -> None:
        """Restarts the iterator."""
        self.close()
        self._items, self._is_closed, self.peeked = iter(self._open()), False, END
        self._epoch, self._index = epoch, self._index if epoch else 0

    def _element(self) -> Any:
        element, self.peeked = self.peeked, END
        element = next(self._items, END) if element is END else element
        if element is END and not self._once and (self._epochs is None or self._epoch + 1 < self._epochs):
            self._start(self._epoch + 1)
            element = next(self._items, END)
        return element


def _conform(item: Any, placements: Sequence[BatchLeaf], rows_R: np.ndarray, name: str) -> Leaves:
    """Returns copies of the leaves in the dtypes of the plan; loaders may reuse their buffers."""
    values, planned = flat(item), {leaf.path: leaf for leaf in placements}
    in_batches = _is_batch(values, placements)

    def refuse(message: str) -> DataError:
        actual = described({path: np.asarray(value) for path, value in values.items()})
        return DataError(message, where=f"{name} has {actual}", fix=f"the plan expects {described(planned)}")

    if item is None:  # a filtered MapDataset has None for an excluded example
        raise DataError(f"{name} has None for an example.", fix="dataset.to_iter_dataset(), which skips them")
    if values.keys() != planned.keys():
        extra, missing = sorted(values.keys() - planned.keys()), sorted(planned.keys() - values.keys())
        raise refuse(f"the data has no leaf '{missing[0]}'." if missing else f"the plan has no leaf '{extra[0]}'.")
    leaves = {}
    for (path, leaf), dim in zip(planned.items(), dims_by_name(placements), strict=True):
        array, dtype = np.asarray(values[path]), np.dtype(leaf.dtype)
        shapes = (leaf.shape, with_rows(leaf.shape, dim, len(rows_R))) if in_batches else (example_shape(leaf, dim),)
        if array.shape not in shapes:
            raise refuse(f"'{path}' has shape {array.shape}; expected {shapes[0]}.")
        # As in JAX, NumPy's default 64-bit types become 32-bit; nothing else is cast implicitly.
        narrowed = array.dtype.kind == dtype.kind and (array.dtype.itemsize, dtype.itemsize) == (8, 4)
        if array.dtype != dtype and not narrowed:
            raise refuse(f"'{path}' has dtype {array.dtype}; expected {dtype}.")
        leaves[path] = array.astype(dtype)
        if narrowed and dtype.kind in "iu" and not np.array_equal(leaves[path], array):
            raise refuse(f"'{path}' has values that do not fit {dtype}.")
    return leaves


def _resized(placements: Sequence[BatchLeaf], num_examples: int) -> list[BatchLeaf]:
    pairs = zip(placements, dims_by_name(placements), strict=True)
    return [
        ExampleLeaf(leaf.path, with_rows(leaf.shape, dim, num_examples), leaf.dtype, getattr(leaf, "axes", ()))
        for leaf, dim in pairs
    ]


def _num_fewer(placements: Sequence[BatchLeaf], rows_R: np.ndarray, item: Any) -> int:
    """Returns the number of examples in a smaller last batch, read by a single process; 0 for other batches."""
    size, values, dims = batch_size(placements), flat(item), dims_by_name(placements)
    pairs = [(np.shape(values.get(leaf.path, ())), dim) for leaf, dim in zip(placements, dims, strict=True)]
    if None in dims or any(len(shape) <= dim for shape, dim in pairs if dim is not None):
        return 0
    counts = {shape[dim] for shape, dim in pairs if dim is not None}
    return min(counts) if len(rows_R) == size and len(counts) == 1 and 0 < min(counts) < size else 0


def batch_size(placements: Sequence[BatchLeaf]) -> int:
    """Returns the number of examples in a global batch."""
    return num_examples([leaf.shape for leaf in placements], dims_by_name(placements))


def check_examples(name: str, placements: Sequence[BatchLeaf]) -> None:
    """Checks that every array of a batch has examples, so that a source of examples can fill it.

    Raises:
      DataError: an array has none.
    """
    if None in dims_by_name(placements):
        planned = described({leaf.path: leaf for leaf in placements})
        raise DataError(f"{name} has examples, and {planned} differ in their number.", fix="a source of batches")


def with_rows(shape: tuple[int, ...], dim: int | None, count: int) -> tuple[int, ...]:
    """Returns the shape of an array of a batch with another number of examples along a dim."""
    return shape if dim is None else (*shape[:dim], count, *shape[dim + 1 :])


def example_shape(leaf: BatchLeaf, dim: int | None) -> tuple[int, ...]:
    """Returns the shape of one example of an array of a batch."""
    return leaf.shape if dim is None else (*leaf.shape[:dim], *leaf.shape[dim + 1 :])


def _is_batch(values: Mapping[str, Any], placements: Sequence[BatchLeaf]) -> bool:
    """Returns whether an element is a batch; an example has one dim less."""
    return any(np.ndim(values[leaf.path]) == len(leaf.shape) for leaf in placements if leaf.path in values)


def _stacked(examples: list[Leaves], placements: Sequence[BatchLeaf]) -> Leaves:
    stacked = {}
    for leaf, dim in zip(placements, dims_by_name(placements), strict=True):
        rows = np.array([leaves[leaf.path] for leaves in examples], leaf.dtype)
        stacked[leaf.path] = np.ascontiguousarray(np.moveaxis(rows.reshape(-1, *example_shape(leaf, dim)), 0, dim or 0))
    return stacked
