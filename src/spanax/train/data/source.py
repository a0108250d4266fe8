"""Sources of batches: examples with random access in the order of a seed, and sequences and iterables of a program.

Shape suffix: R rows of the global batch that this process reads.
"""

import json
import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from spanax.errors import ArgumentError, BatchError, ConflictError, DataError, TooFewExamplesError
from spanax.sealed import digest
from spanax.train.data.destination import Destination, Leaves, Remainder, flat, nested
from spanax.train.data.mixture import picked, places_until
from spanax.train.data.order import shuffled
from spanax.train.data.text.chat_template import ChatTemplate
from spanax.train.data.text.tokenizer import TrainedTokenizer
from spanax.train.data.text.tokens import Tokens

NUM_READERS = 16

END = object()
"""The sentinel after the last element of a loader."""


@dataclass(frozen=True)
class Options:
    """Options of `batches`: what is read of named data, in which order, and how often."""

    tokenizer: str | TrainedTokenizer = "bytes"
    split: str = "train"
    field: str | Mapping[str, str] | None = None
    cache_dir: str | os.PathLike[str] | None = None
    seed: int = 0
    shuffle: bool = True
    epochs: int | None = 1
    drop_remainder: bool = True
    chat_template: str | ChatTemplate | None = None
    pack: bool = False

    def least(self, destination: Destination) -> int:
        """Returns the number of examples that a source needs."""
        return destination.batch_size if self.drop_remainder else 1


@dataclass(frozen=True)
class Examples:
    """Examples with random access: `read` maps indices of shape [R] to arrays whose first dim has these examples.

    The name has a hash of the content, and `like` is a pytree with the structure of an example.
    """

    name: str
    like: Any
    num_examples: int
    read: Callable[[np.ndarray], Leaves]
    tokens: Tokens | None = None


@dataclass(frozen=True)
class Share:
    """A source of a mixture, or the single source, and the fraction of all examples that come from it."""

    source: str
    share: float
    num_examples: int
    batch_size: int

    def epochs(self, num_batches: int) -> float:
        """Returns the number of epochs of this source in `num_batches` batches."""
        return num_batches * self.batch_size * self.share / self.num_examples


@dataclass(frozen=True)
class Source:
    """A source of batches: `read(index)` returns the leaves of a batch, or None after the last batch.

    `like` is a pytree with the structure of a batch. `mark()` returns the state of the source after the last read;
    `seek(index, mark)` restores it, also after `close()`. `shares` is empty if the number of examples is unknown.
    """

    name: str
    like: Any
    read: Callable[[int], Leaves | None]
    num_batches: int | None = None
    tokens: Tokens | None = None
    mark: Callable[[], Any] = lambda: None
    seek: Callable[[int, Any], None] = lambda index, mark: None
    close: Callable[[], None] = lambda: None
    shares: tuple[Share, ...] = ()


def check_enough(name: str, num_examples: int, destination: Destination, options: Options) -> None:
    """Raises TooFewExamplesError if a source has too few examples."""
    if num_examples < options.least(destination):
        message = f"{name} has {num_examples:,} examples, and one batch needs {destination.batch_size:,}."
        raise TooFewExamplesError(message, fix="more data, or a smaller batch (--global-batch-size)")


def in_order(parts: Sequence[tuple[Examples, int]], destination: Destination, options: Options) -> Source:
    """Returns a source of examples in the order of the seed, of several parts in proportion to their weights."""
    weights = [weight for _, weight in parts]
    sizes = [part.num_examples for part, _ in parts]
    batch_size = destination.batch_size
    num_full = 0
    num_rest = 0
    num_batches = None
    if options.epochs is not None:
        num_full, num_rest = divmod(places_until([size * options.epochs for size in sizes], weights), batch_size)
        num_batches = num_full + (num_rest > 0 and not options.drop_remainder)

    def read(index: int) -> Leaves | None:
        if num_batches is None or index < num_full:
            return read_rows(index, destination.rows_R)
        return Remainder(read_rows(index, np.arange(num_rest))) if index < num_batches else None

    def read_rows(index: int, rows_R: np.ndarray) -> Leaves:
        part_R, inner_R = picked(index * batch_size + rows_R.astype(np.int64), weights)
        mixed: Leaves = {}
        for number in np.unique(part_R):
            mask_R = part_R == number
            part = parts[number][0]
            places_R = inner_R[mask_R]
            # Each part has its own seed: with a common seed, parts of equal size would have the same order.
            seed = options.seed + int(number)
            size = part.num_examples
            examples_R = shuffled(places_R, size, seed) if options.shuffle else places_R % size
            for path, rows in part.read(examples_R).items():
                mixed.setdefault(path, np.empty((len(rows_R), *rows.shape[1:]), rows.dtype))[mask_R] = rows
        return destination.from_rows(mixed)

    shares = tuple(Share(part.name, weight / sum(weights), part.num_examples, batch_size) for part, weight in parts)
    first = parts[0][0]
    if len(parts) == 1:
        return Source(first.name, first.like, read, num_batches, first.tokens, shares=shares)
    named = " + ".join(f"{weight} x {part.name}" for part, weight in parts)
    for part, _ in parts[1:]:
        if part.like != first.like:
            raise BatchError(
                "the examples of a mixture have different structures.",
                where=f"{first.name}: {first.like}; {part.name}: {part.like}"[:200],
                fix="sources whose examples have the same leaves",
            )
    return Source(f"mixture {digest(named)} of {named}", first.like, read, num_batches, shares=shares)


def element_source(source: Any, destination: Destination, options: Options) -> Source:
    """Returns the source of a dataset, a sequence, an iterable or a function that returns one."""
    name = type(source).__name__
    if isinstance(source, Mapping) or not (_is_sequence(source) or callable(source) or isinstance(source, Iterable)):
        raise ArgumentError(f"cannot read batches from a {name}.", fix="a path, 'python', a dataset or an iterable")
    loader = None if _is_sequence(source) else Loader(source, options)
    if loader.peeked is END if loader else not len(source):
        raise DataError(f"{name} is empty.", fix="a source with at least one batch in it")
    if loader:
        return _loaded(loader, destination, options, name)
    if destination.holds(source[0]):
        return _batch_sequence(source, destination, options)
    examples = sequence_examples(source, destination, options)
    if _is_grain(source):
        return _grain_source(source, examples, destination, options)
    return in_order([(examples, 1)], destination, options)


def _grain_source(dataset: Any, examples: Examples, destination: Destination, options: Options) -> Source:
    """Returns the source of a MapDataset: Grain shuffles and repeats it, and reseeds random transformations."""
    name = type(dataset).__name__
    shares: tuple[Share, ...] = ()
    if (size := len(dataset)) < sys.maxsize:
        shares = (Share(examples.name, 1.0, size, destination.batch_size),)
        dataset = dataset.shuffle(seed=options.seed % 2**32) if options.shuffle else dataset
        dataset = dataset if options.epochs == 1 else dataset.repeat(options.epochs)
    read_all = ThreadPoolExecutor(NUM_READERS, "spanax-read").map

    def read(indices_R: np.ndarray) -> Leaves:
        return destination.stacked(list(read_all(dataset.__getitem__, indices_R.tolist())), name)

    examples = replace(examples, num_examples=len(dataset), read=read)
    once = replace(options, shuffle=False, epochs=None if len(dataset) >= sys.maxsize else 1)
    return replace(in_order([(examples, 1)], destination, once), shares=shares)


def sequence_examples(source: Any, destination: Destination, options: Options) -> Examples:
    """Returns the examples of a sequence; raises TooFewExamplesError if there are too few."""
    name = type(source).__name__
    check_enough(name, len(source), destination, options)
    first = source[0]
    named = _named(name, len(source), first, destination, options)

    def read(indices_R: np.ndarray) -> Leaves:
        return destination.stacked([source[index] for index in indices_R.tolist()], name)

    return Examples(named, _structure(first), len(source), read)


def check_mixable(source: Any, destination: Destination) -> None:
    """Raises SpanaxError if an object cannot be part of a mixture."""
    name = type(source).__name__
    if isinstance(source, Mapping) or not _is_sequence(source):
        raise ArgumentError(f"a {name} cannot be part of a mixture.", fix="paths, datasets or sequences of examples")
    if _is_grain(source):
        raise ArgumentError(f"a {name} cannot be part of a mixture.", fix="grain.MapDataset.mix for Grain's datasets")
    if len(source) and destination.holds(source[0]):
        raise ArgumentError(f"a {name} of batches cannot be part of a mixture.", fix="a sequence of examples")


def _is_sequence(source: Any) -> bool:
    return hasattr(source, "__len__") and hasattr(source, "__getitem__")


def _is_grain(source: Any) -> bool:
    grain = sys.modules.get("grain")  # without an import, the source is not one of its datasets
    return bool(grain and isinstance(source, grain.MapDataset))


def _structure(item: Any) -> Any:
    return nested(item, dict.fromkeys(flat(item)))


def _named(name: str, size: int, first: Any, destination: Destination, options: Options) -> str:
    """Returns the name of a source with a hash of its first element, which is conformed to the plan."""
    in_batches = destination.holds(first)
    if not in_batches:
        destination.check_examples(name)
    leaves = destination.conform(first, name, is_last=not options.drop_remainder)
    leaf = destination.leaves[0]
    if in_batches and leaves[leaf.path].shape != leaf.shape:
        return name  # the rows of one process, whose hash would differ between processes
    return f"{name} {digest(str(size), *(part for path, array in leaves.items() for part in (path, array)))}"


def _batch_sequence(source: Any, destination: Destination, options: Options) -> Source:
    """Returns the source of a sequence of batches, which are not shuffled."""
    name = type(source).__name__
    size = len(source)
    epochs = options.epochs
    num_batches = None if epochs is None or size >= sys.maxsize else epochs * size
    named = _named(name, size, source[0], destination, options)
    repeated = source.repeat(epochs) if _is_grain(source) and epochs != 1 and size < sys.maxsize else source
    size_B = destination.batch_size
    shares = () if size >= sys.maxsize else (Share(named, 1.0, size * size_B, size_B),)

    def read(index: int) -> Leaves | None:
        if num_batches is not None and index >= num_batches:
            return None
        return destination.conform(repeated[index % len(repeated)], name, is_last=not options.drop_remainder)

    return Source(named, _structure(source[0]), read, num_batches, shares=shares)


def _loaded(loader: "Loader", destination: Destination, options: Options, name: str) -> Source:
    """Returns the source of an iterable of examples or batches."""
    first = loader.peeked
    in_batches = destination.holds(first)
    named = _named(name, 0, first, destination, options)

    def read(index: int) -> Leaves | None:
        items = loader.read(1 if in_batches else destination.batch_size, index)
        if not items:
            return None
        if in_batches:
            return destination.conform(items[0], name, is_last=not options.drop_remainder)
        if len(items) < destination.batch_size:
            return Remainder(destination.from_rows(destination.stacked(items, name)))
        return destination.from_rows(destination.stacked([items[row] for row in destination.rows_R], name))

    return Source(named, _structure(first), read, mark=loader.mark, seek=loader.seek, close=loader.close)


class Loader:
    """Reads an iterable, or a function that returns one, and restarts it for each epoch.

    Attributes:
      peeked: an element that was read ahead, first to inspect its structure; `END` if there is none.
    """

    def __init__(self, source: Any, options: Options):
        self._open = partial(iter, source) if isinstance(source, Iterable) else source
        self._items: Any = iter(self._open())
        self._once = self._items is source
        self._epochs = options.epochs
        self._drop_remainder = options.drop_remainder
        self._epoch = 0
        self._index = 0
        if self._once and self._epochs is not None and self._epochs > 1:
            raise ConflictError(
                f"an iterator is read only once; epochs={self._epochs} reads it again.",
                where=type(source).__name__,
                fix="a function that returns a new iterator",
            )
        self.peeked = next(self._items, END)

    def read(self, num_elements: int, index: int) -> list[Any]:
        """Returns the elements of a batch after skipping earlier batches; fewer after the last full batch."""
        elements: list[Any] = []
        while self._index <= index:
            elements = [self._element() for _ in range(num_elements)]
            if elements[-1] is END:
                is_rest = not self._drop_remainder and self._index == index
                return [element for element in elements if element is not END] if is_rest else []
            self._index += 1
        return elements

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
        if self._items is None:
            self._start(0)
        if mark is not None and hasattr(self._items, "set_state"):
            self._items.set_state(mark["iterator"])
            self._epoch = mark["epoch"]
            self._index = index
            self.peeked = END
        elif index < self._index:
            if self._once:
                raise DataError(
                    f"cannot go back to batch {index}: an iterator is read only once, and is at batch {self._index}.",
                    fix="a function that returns a new iterator",
                )
            self._start(0)

    def close(self) -> None:
        """Ends the iterator with its threads and processes, a generator in its `finally`; not one of the user."""
        if not self._once:
            if hasattr(self._items, "close"):
                self._items.close()
            self._items = None

    def _start(self, epoch: int) -> None:
        """Restarts the iterator."""
        self.close()
        self._items = iter(self._open())
        self.peeked = END
        self._epoch = epoch
        self._index = self._index if epoch else 0

    def _element(self) -> Any:
        element, self.peeked = self.peeked, END
        element = next(self._items, END) if element is END else element
        is_last = self._epochs is not None and self._epoch + 1 >= self._epochs
        if element is END and not self._once and not is_last:
            self._start(self._epoch + 1)
            element = next(self._items, END)
        return element
