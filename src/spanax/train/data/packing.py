"""Batches of conversations and documents: several in a row, which a model keeps apart by `segments`, or one.

It is not Grain's packing, whose rows have no random access, and which takes 20 times as long
(`benchmarks/data_formats.py`).

Shapes: R rows read by this process, T tokens in a row, C conversations of these rows (or pieces of documents), N tokens
of these.
"""

import warnings
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from spanax.errors import BatchError, DataError
from spanax.train.data.destination import Destination, Leaves
from spanax.train.data.source import Examples, Options, check_enough
from spanax.train.data.text.conversations import COUNTS, IDS, Conversations, Documents

SEGMENTS = "segments"
WEIGHTED = frozenset({"inputs", "targets", "weights"})
PACKED = WEIGHTED | {SEGMENTS, "positions"}
"""The leaves of batches of conversations, and those of packed ones; documents are always packed."""


def conversation_rows(part: Conversations, destination: Destination, options: Options) -> Examples:
    """Returns rows of conversations as examples: packed if the batch has `segments`, else one conversation in each.

    A conversation longer than a row is cut at its end, with a warning; a document is cut in pieces.

    Raises:
      SpanaxError: the batch has no `weights`, or other leaves.
      DataError: nothing that counts remains of a conversation, or there are too few.
    """
    length = _check_batch(part.name, destination)
    starts, lengths = _pieces(part, length) if isinstance(part, Documents) else (part.starts[:-1], _cut(part, length))
    is_packed = any(leaf.path == SEGMENTS for leaf in destination.leaves)
    rows = _Rows(part, starts, lengths, *(packed(lengths, length) if is_packed else one_each(len(lengths))))
    num_rows = len(rows.begins) - 1
    check_enough(part.name, num_rows, destination, options)
    paths = [leaf.path for leaf in destination.leaves]

    def read(indices_R: np.ndarray) -> Leaves:
        arrays = rows.read(indices_R, length)
        return {leaf.path: arrays[leaf.path].astype(leaf.dtype, copy=False) for leaf in destination.leaves}

    return Examples(part.name, dict.fromkeys(paths), num_rows, read, part)


def _check_batch(name: str, destination: Destination) -> int:
    """Returns the number of tokens in a row of a batch that fits conversations."""
    leaves = {leaf.path: leaf for leaf in destination.leaves}
    where = f"{name}; the batch has {destination.planned}"
    if "weights" not in leaves:
        raise BatchError(
            "conversations need `weights` in the batch: the loss counts only what the assistant writes.",
            where=where,
            fix="weights, float32 of the shape of targets; segments and positions, int32, for packed rows",
        )
    shapes = {leaf.shape for leaf in leaves.values()}
    kinds = {path: "f" if path == "weights" else "iu" for path in leaves}
    is_typed = all(np.dtype(leaf.dtype).kind in kinds[path] for path, leaf in leaves.items())
    if not WEIGHTED <= leaves.keys() <= PACKED or len(shapes) > 1 or len(min(shapes)) != 2 or not is_typed:
        raise BatchError(
            "conversations provide inputs, targets, weights, segments and positions of one shape [B, T].",
            where=where,
            fix="these leaves, float32 for weights and int32 for the others",
        )
    return int(destination.leaves[0].shape[1 - (destination.dims[0] or 0)])


def _pieces(part: Documents, length: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns where pieces of documents begin, and their numbers of targets, at most `length`.

    A piece begins with the last target of the one before it, so that each token but the first is a target once.
    """
    totals = np.diff(part.starts) - 1
    counts = -(-totals // length)
    firsts = _counted_up(counts) * length
    return np.repeat(part.starts[:-1], counts) + firsts, np.minimum(np.repeat(totals, counts) - firsts, length)


def _cut(part: Conversations, length: int) -> np.ndarray:
    """Returns the number of targets of each conversation, at most `length`."""
    lengths = np.diff(part.starts) - 1
    long = np.flatnonzero(lengths > length)
    for index in long:
        start = part.starts[index]
        if not (part.ids[start + 1 : start + 1 + length] & COUNTS).any():
            raise DataError(
                f"{part.place(int(index))}: the assistant writes nothing in the first {length:,} tokens of a row.",
                where=f"the conversation has {lengths[index] + 1:,} tokens",
                fix="longer sequences (--seq-len), or remove the row",
            )
    if len(long):
        warnings.warn(
            f"{len(long):,} of {len(lengths):,} conversations of {part.name} are longer than {length:,} tokens, "
            "and are cut at the end",
            stacklevel=2,
        )
    return np.minimum(lengths, length)


@dataclass(frozen=True, eq=False)
class _Rows:
    """The conversations of each row: row r has `order[begins[r] : begins[r + 1]]`, in this order."""

    part: Conversations
    starts: np.ndarray
    lengths: np.ndarray
    order: np.ndarray
    begins: np.ndarray

    def read(self, indices_R: np.ndarray, length: int) -> Leaves:
        """Returns the leaves of rows, of shape [R, T]."""
        counts_R = self.begins[indices_R + 1] - self.begins[indices_R]
        which_C = _counted_up(counts_R)
        conversations_C = self.order[np.repeat(self.begins[indices_R], counts_R) + which_C]
        lengths_C = self.lengths[conversations_C]
        positions_N = _counted_up(lengths_C)
        sources_N = np.repeat(self.starts[conversations_C], lengths_C) + positions_N
        # The first conversation of a row begins where the row does; each of the others where the one before it ends.
        ends_C = np.cumsum(lengths_C)
        firsts_R = np.cumsum(counts_R) - counts_R
        before_R = (ends_C - lengths_C)[firsts_R]
        places_N = np.arange(len(sources_N)) + np.repeat(
            np.repeat(np.arange(len(indices_R)) * length - before_R, counts_R), lengths_C
        )
        targets_N = self.part.ids[sources_N + 1]
        values = {
            "inputs": self.part.ids[sources_N] & IDS,
            "targets": targets_N & IDS,
            "weights": ((targets_N & COUNTS) != 0).astype(np.float32),
            SEGMENTS: np.repeat(which_C + 1, lengths_C),
            "positions": positions_N,
        }
        arrays = {}
        for path, values_N in values.items():
            flat = np.zeros(len(indices_R) * length, np.float32 if path == "weights" else np.int32)
            flat[places_N] = values_N
            arrays[path] = flat.reshape(len(indices_R), length)
        return arrays


def _counted_up(counts: np.ndarray) -> np.ndarray:
    """Returns 0, 1, ... up to each count, one after the other.

    Example:
      >>> _counted_up(np.array([3, 1, 2])).tolist()
      [0, 1, 2, 0, 0, 1]
    """
    return np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)


def one_each(count: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns the conversations in the order of their rows, one in each, and where each row begins in that order."""
    return np.arange(count), np.arange(count + 1)


def packed(lengths: Sequence[int] | np.ndarray, capacity: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns conversations in the order of their rows, and where each row begins in that order.

    From the longest to the shortest, each goes to the row with the least space that suffices (best fit decreasing),
    so that little is padded. The rows depend on the lengths alone; the seed orders the rows.

    Example:
      >>> [array.tolist() for array in packed([2, 5, 3, 4, 1], 6)]
      [[1, 4, 3, 0, 2], [0, 2, 4, 5]]
    """
    lengths = np.asarray(lengths)
    by_length = np.argsort(-lengths, kind="stable")
    row_of = np.empty(len(lengths), np.int64)
    with_space: list[list[int]] = [[] for _ in range(capacity + 1)]
    spaces = 0  # bit s: whether a row has s tokens of space
    num_rows = 0
    for index, length in zip(by_length.tolist(), lengths[by_length].tolist(), strict=True):
        enough = spaces >> length
        if enough:
            space = length + (enough & -enough).bit_length() - 1
            row = with_space[space].pop()
            if not with_space[space]:
                spaces ^= 1 << space
        else:
            space = capacity
            row = num_rows
            num_rows += 1
        row_of[index] = row
        left = space - length
        if left:
            with_space[left].append(row)
            spaces |= 1 << left
    order = by_length[np.argsort(row_of[by_length], kind="stable")]
    return order, np.append(0, np.cumsum(np.bincount(row_of, minlength=num_rows)))
