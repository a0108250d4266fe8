"""Sources of examples with random access, and the source of batches that reads one or several of them in order.

Shape suffix: R rows of the global batch that this process reads.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from spanax.errors import BatchError, TooFewExamplesError
from spanax.train.data.elements import Leaves, digest
from spanax.train.data.mixture import picked, places_until
from spanax.train.data.order import Order
from spanax.train.data.text.tokens import Tokens


def check_enough(name: str, num_examples: int, least: int, batch_size: int) -> None:
    """Raises TooFewExamplesError if a source has fewer than `least` examples."""
    if num_examples < least:
        message = f"{name} has {num_examples:,} examples, and one batch needs {batch_size:,}."
        raise TooFewExamplesError(message, fix="more data, or a smaller batch")


@dataclass(frozen=True)
class Remainder:
    """The examples after the last full batch, all of them in every process: a list of elements, or leaves by path."""

    content: Any


@dataclass(frozen=True)
class Examples:
    """Examples with random access by index.

    Attributes:
      name: the name of the source, with a hash of its content.
      like: a pytree with the structure of an example.
      num_examples: the number of examples.
      read: maps indices of shape [R] to the stacked leaves of these examples.
      tokens: the tokens, if the examples are windows of tokens.

    Example:
      >>> squares = Examples("squares", {"x": None}, 9, lambda indices_R: {"x": indices_R**2})
      >>> squares.read(np.array([2, 3]))["x"].tolist()
      [4, 9]
    """

    name: str
    like: Any
    num_examples: int
    read: Callable[[np.ndarray], Leaves]
    tokens: Tokens | None = None


@dataclass(frozen=True)
class Share:
    """A source of a mixture, or the single source.

    Attributes:
      source: the name of the source.
      share: the fraction of all examples that come from the source.
      num_examples: the number of examples in the source.
      batch_size: the number of examples in a global batch.

    Example:
      >>> Share("a.jsonl", 0.7, num_examples=1400, batch_size=8).epochs(num_batches=500)
      2.0
    """

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
    read: Callable[[int], Leaves | Remainder | None]
    num_batches: int | None = None
    tokens: Tokens | None = None
    mark: Callable[[], Any] = lambda: None
    seek: Callable[[int, Any], None] = lambda index, mark: None
    close: Callable[[], None] = lambda: None
    shares: tuple[Share, ...] = ()


def in_order(
    parts: Sequence[tuple[Examples, int]],
    batch_size: int,
    rows_R: np.ndarray,
    *,
    seed: int,
    shuffle: bool,
    epochs: int | None,
    drop_remainder: bool = True,
) -> Source:
    """Returns a source that reads examples in the order of the seed, and several parts in proportion to their weights.

    Example:
      >>> parts = [(Examples(str(k), None, 6, lambda indices_R, k=k: {"x": indices_R + 10 * k}), 3 - k) for k in (1, 2)]
      >>> source = in_order(parts, 3, np.arange(3), seed=0, shuffle=False, epochs=None)
      >>> [source.read(index)["x"].tolist() for index in (0, 1, 2)]
      [[10, 11, 20], [12, 13, 21], [14, 15, 22]]
    """
    weights = [weight for _, weight in parts]
    sizes = [part.num_examples for part, _ in parts]
    # Each part has its own seed: with a common seed, parts of equal size would have the same order.
    orders = [Order(size, batch_size, seed + number, shuffle) for number, size in enumerate(sizes)]
    num_full, num_rest = divmod(
        0 if epochs is None else places_until([size * epochs for size in sizes], weights), batch_size
    )
    num_batches = None if epochs is None else num_full + (num_rest > 0 and not drop_remainder)

    def read(index: int) -> Leaves | Remainder | None:
        if num_batches is not None and index >= num_batches:
            return None
        is_last = num_batches is not None and index == num_full
        leaves = read_rows(index, np.arange(num_rest) if is_last else rows_R)
        return Remainder(leaves) if is_last else leaves

    def read_rows(index: int, rows_R: np.ndarray) -> Leaves:
        part_R, inner_R = picked(index * batch_size + rows_R.astype(np.int64), weights)
        leaves: Leaves = {}
        for number in np.unique(part_R):
            mask_R = part_R == number
            for path, array in parts[number][0].read(orders[number].examples_at(inner_R[mask_R])).items():
                leaves.setdefault(path, np.empty((len(rows_R), *array.shape[1:]), array.dtype))[mask_R] = array
        return leaves

    shares = [Share(part.name, weight / sum(weights), part.num_examples, batch_size) for part, weight in parts]
    first = parts[0][0]
    if len(parts) == 1:
        return Source(first.name, first.like, read, num_batches, first.tokens, shares=tuple(shares))
    named = " + ".join(f"{weight} x {part.name}" for part, weight in parts)
    return Source(f"mixture {digest(named)} of {named}", first.like, read, num_batches, shares=tuple(shares))


def same_kind(parts: Sequence[Examples]) -> None:
    """Checks that the examples of all parts of a mixture have the same structure.

    Raises:
      SpanaxError: the structures differ.
    """
    for part in parts[1:]:
        if part.like != parts[0].like:
            raise BatchError(
                "the examples of a mixture have different structures.",
                where=f"{parts[0].name}: {parts[0].like}; {part.name}: {part.like}"[:200],
                fix="sources whose examples have the same leaves",
            )
