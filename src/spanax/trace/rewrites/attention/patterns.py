"""Masks computed from positions alone: which family one belongs to, with a key that tells it apart if none.

A mask is compared with a family on successively smaller blocks of positions, by intervals, so that no array with both
dims is computed.
"""

import functools
import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

MOST_BLOCKS = 1 << 22
"""Most blocks to evaluate; a mask that needs more counts as unsupported."""

MOST_POSITIONS = 1 << 22
"""Most positions whose chunk `Pattern.sees` computes exactly in float32."""

Blocks = np.ndarray
"""First and last query, first and last key of blocks: (4, blocks)."""

Known = Callable[[Blocks], tuple[np.ndarray, np.ndarray]]
"""Returns which blocks of a mask have no visible key, and which no hidden one."""


@dataclass(frozen=True)
class Pattern:
    """The keys that a query sees: those near enough in its own chunk, and the first ones.

    Attributes:
      before: how many of the keys before its own position it sees; None for all.
      after: how many of the keys after its own position it sees: 0 if causal; None for all.
      prefix: number of first keys that every query sees.
      chunk: size of the chunks, of which each query sees its own alone; 0 without chunks.
    """

    before: int | None = None
    after: int | None = None
    prefix: int = 0
    chunk: int = 0

    @property
    def is_full(self) -> bool:
        """Whether every query sees all keys."""
        return self == Pattern()

    @property
    def is_causal(self) -> bool:
        """Whether every query sees exactly the keys up to its own."""
        return self == CAUSAL

    def __str__(self) -> str:
        """Returns the name of its family: empty if all keys are seen.

        Example:
          >>> [str(each) for each in (Pattern(), CAUSAL, Pattern(15, 0), Pattern(8, 8), Pattern(after=0, chunk=64))]
          ['', 'causal', 'causal, window of 16', 'window of 8 before and 8 after', 'causal, chunks of 64']
        """
        words = ["causal"] if self.after == 0 else []
        if self.prefix:
            words.append(f"prefix of {self.prefix:,}")
        if self.after and self.before is not None:
            words.append(f"window of {self.before:,} before and {self.after:,} after")
        elif self.before is not None:
            words.append(f"window of {self.before + 1:,}" if self.after == 0 else f"window of {self.before:,} before")
        elif self.after:
            words.append(f"window of {self.after:,} after")
        return ", ".join([*words, f"chunks of {self.chunk:,}"] if self.chunk else words)

    def sees(self, queries: Any, keys: Any) -> Any:
        """Returns whether queries see keys, for arrays of their positions."""
        seen = []
        if self.before is not None:
            seen.append(queries - keys <= self.before)
        if self.after is not None:
            seen.append(keys - queries <= self.after)
        if self.prefix and seen:
            seen = [functools.reduce(operator.and_, seen) | (keys < self.prefix)]
        if self.chunk:
            seen.append(self._chunk_of(queries) == self._chunk_of(keys))
        return functools.reduce(operator.and_, seen) if seen else queries + keys >= 0

    def _chunk_of(self, positions: Any) -> Any:
        """Returns the number of the chunk of positions, without a division: lowering one for a TPU asks for the device.

        The product is at least 1/2 / chunk from a whole number, more than its rounding for fewer than 2^22 positions.
        """
        if self.chunk & (self.chunk - 1) == 0:
            return positions >> (self.chunk.bit_length() - 1)
        return ((positions.astype(np.float32) + np.float32(0.5)) * np.float32(1 / self.chunk)).astype(np.int32)

    def known(self, blocks: Blocks) -> tuple[np.ndarray, np.ndarray]:
        """Returns which blocks are hidden in full and which are visible in full; some may be neither."""
        q_first, q_last, k_first, k_last = blocks
        before = np.inf if self.before is None else self.before
        after = np.inf if self.after is None else self.after
        is_hidden = ((q_first - k_last > before) | (k_first - q_last > after)) & (k_first >= self.prefix)
        is_clear = ((q_last - k_first <= before) & (k_last - q_first <= after)) | (k_last < self.prefix)
        if self.chunk:
            q_chunks, k_chunks = ((first // self.chunk, last // self.chunk) for first, last in (blocks[:2], blocks[2:]))
            is_hidden = is_hidden | (q_chunks[1] < k_chunks[0]) | (k_chunks[1] < q_chunks[0])
            one = [*q_chunks, *k_chunks]
            is_clear = is_clear & np.logical_and.reduce([each == one[0] for each in one])
        return is_hidden, is_clear

    def share(self, queries: int, keys: int, block: int) -> float:
        """Returns the share of the blocks of queries and keys that have a visible key.

        Example:
          >>> CAUSAL.share(1024, 1024, 256), Pattern(255, 0).share(1024, 1024, 256)
          (0.625, 0.4375)
        """
        starts = [np.arange(0, size, block) for size in (queries, keys)]
        ends = [np.minimum(start + block, size) - 1 for start, size in zip(starts, (queries, keys), strict=True)]
        q_first, k_first = (each.ravel() for each in np.meshgrid(*starts, indexing="ij"))
        q_last, k_last = (each.ravel() for each in np.meshgrid(*ends, indexing="ij"))
        is_hidden, _ = self.known(np.stack([q_first, q_last, k_first, k_last]))
        return float(1 - is_hidden.mean())


CAUSAL = Pattern(after=0)


@dataclass(frozen=True)
class Counterexample:
    """A query and a key at which a mask differs from the nearest family."""

    query: int
    key: int
    is_seen: bool
    nearest: Pattern

    def __str__(self) -> str:
        """Returns what it says about the mask, as the end of a sentence."""
        verb, other = ("sees", "hides") if self.is_seen else ("does not see", "shows")
        name = str(self.nearest) or "full"
        return f"query {self.query:,} {verb} key {self.key:,}, which a mask '{name}' {other}"


def pattern_of(queries: int, keys: int, known: Known) -> Pattern | Counterexample | None:
    """Returns the pattern of a mask; or where it differs from the nearest, or None if too many blocks are undecided.

    Example:
      >>> def known(blocks):  # of 8 queries, each of which sees the keys up to its own, and query 2 also key 3
      ...     is_seen = (blocks[2] <= blocks[0]) | ((blocks[0] == 2) & (blocks[2] == 3))
      ...     is_one = (blocks[0] == blocks[1]) & (blocks[2] == blocks[3])
      ...     return ~is_seen & is_one, is_seen & is_one
      >>> str(pattern_of(8, 8, known))
      "query 2 sees key 3, which a mask 'causal' hides"
    """
    nearest: Counterexample | None = None
    for candidate in _candidates(queries, keys, known):
        difference = _difference(candidate, queries, keys, known)
        if difference is None:
            return candidate
        if isinstance(difference, Counterexample) and nearest is None:
            nearest = difference
    return nearest


def _candidates(queries: int, keys: int, known: Known) -> list[Pattern]:
    """Returns the patterns that a mask may have, from what its first and last query and its first key show."""
    first = _seen(known, [0], range(keys))
    last = _seen(known, [queries - 1], range(keys))
    of_first_key = _seen(known, range(queries), [0])
    found = [Pattern()]
    if queries != keys or not first.size or not last.size:
        return found
    after = None if first[-1] == keys - 1 else int(first[-1])
    before = None if last[0] == 0 else int(queries - 1 - last[0])
    found.insert(0, Pattern(before, after))
    if first.size > 1 and before is None:
        found.append(Pattern(after=0, prefix=int(first.size)))
    chunk = of_first_key.size
    if 0 < chunk < queries and (chunk & (chunk - 1) == 0 or queries <= MOST_POSITIONS):
        found.append(Pattern(after=0 if first.size == 1 else None, chunk=chunk))
    return found


def _seen(known: Known, queries: Any, keys: Any) -> np.ndarray:
    """Returns the positions of the keys that one query sees, or of the queries that see one key."""
    pairs = [each.ravel() for each in np.meshgrid(np.asarray(queries), np.asarray(keys), indexing="ij")]
    _, is_clear = known(np.stack([pairs[0], pairs[0], pairs[1], pairs[1]]))
    return np.flatnonzero(is_clear)


def _difference(pattern: Pattern, queries: int, keys: int, known: Known) -> Counterexample | bool | None:
    """Returns where a mask differs from a pattern; None if nowhere, True if that is undecided."""
    blocks = np.asarray([[0], [queries - 1], [0], [keys - 1]])
    num_evaluated = 0
    while blocks.size and num_evaluated < MOST_BLOCKS:
        num_evaluated += blocks.shape[1]
        is_hidden, is_clear = known(blocks)
        should_hide, should_clear = pattern.known(blocks)
        differs = (is_hidden & should_clear) | (is_clear & should_hide)
        if differs.any():
            q_first, _, k_first, _ = blocks[:, differs][:, 0]
            return Counterexample(int(q_first), int(k_first), bool(is_clear[differs][0]), pattern)
        undecided = blocks[:, ~((is_hidden & should_hide) | (is_clear & should_clear))]
        if ((undecided[0] == undecided[1]) & (undecided[2] == undecided[3])).any():
            return True
        blocks = _quartered(undecided)
    return True if blocks.size else None


def _quartered(blocks: Blocks) -> Blocks:
    """Returns the quarters of blocks; halves for blocks of one query or key."""
    halves = []
    for first, last in (blocks[:2], blocks[2:]):
        middle = (first + last) // 2
        halves.append(((first, middle), (middle + 1, last)))
    quarters = np.concatenate([np.stack([*q, *k]) for q in halves[0] for k in halves[1]], axis=1)
    return quarters[:, (quarters[0] <= quarters[1]) & (quarters[2] <= quarters[3])]
