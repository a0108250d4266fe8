"""The order of examples as a pure function of the seed and the position, and the splits of a source.

It is not Grain's `index_shuffle`, because saved positions depend on the order. Grain's takes one index per call (a
million places in 7.7 s, here 0.4 s: `benchmarks/data_formats.py`) and at most 32 bits of it.

Shape suffix: R rows of one batch.
"""

import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from spanax.errors import FileError, UnknownNameError, nearest

SPLITS = ("train", "validation")

HELD_OUT = 20
"""One in this many parts is held out for validation."""

FEISTEL_ROUNDS = 8


@dataclass(frozen=True)
class Order:
    """The order of examples in an infinite sequence of epochs, computed without a table.

    Example:
      >>> order = Order(num_examples=6, seed=0)
      >>> np.sort(order.examples_at(np.arange(6))).tolist()
      [0, 1, 2, 3, 4, 5]
    """

    num_examples: int
    seed: int = 0
    shuffle: bool = True

    def examples_at(self, places_R: np.ndarray) -> np.ndarray:
        """Returns the examples at positions of the sequence, of shape [R]; each occurs once per epoch."""
        epochs_R, places_R = np.divmod(places_R, self.num_examples)
        return _permuted(places_R, epochs_R, self.num_examples, self.seed) if self.shuffle else places_R


def _permuted(places_R: np.ndarray, epochs_R: np.ndarray, size: int, seed: int) -> np.ndarray:
    """Applies a permutation of range(size) for each seed and epoch, equal in every version of NumPy.

    A Feistel network permutes the next power of four; values out of range are permuted again until they are in range.
    """
    half = np.uint64(max(1, ((size - 1).bit_length() + 1) // 2))
    mask = (np.uint64(1) << half) - np.uint64(1)
    keys_R = _mixed(_mixed(np.array([seed % 2**64], np.uint64)) + epochs_R.astype(np.uint64))
    values_R = places_R.astype(np.uint64)
    outside_R = np.ones(len(values_R), bool)
    while outside_R.any():
        left = values_R[outside_R] >> half
        right = values_R[outside_R] & mask
        keys = keys_R[outside_R]
        for turn in range(FEISTEL_ROUNDS):
            left, right = right, left ^ (_mixed(right + keys + np.uint64(turn)) & mask)
        values_R[outside_R] = left << half | right
        outside_R = values_R >= np.uint64(size)
    return values_R.astype(np.int64)


def _mixed(values: np.ndarray) -> np.ndarray:
    """Applies the finalizer of splitmix64: every bit of the input reaches every bit of the output."""
    values = (values ^ values >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ values >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
    return values ^ values >> np.uint64(31)


def check_inside(folder: Path, paths: Iterable[Path]) -> None:
    """Checks that no file is a link out of the folder, which could expose any file of this machine."""
    root = Path(os.path.realpath(folder))
    for path in paths:
        target = Path(os.path.realpath(path))
        if not target.is_relative_to(root):
            raise FileError(
                f"'{path}' is a link out of the data folder.",
                where=f"to {target}",
                fix="the folder that contains both, the files (--data 'folder/*.jsonl'), or a copy of the file",
            )


def check_split(split: str) -> str:
    """Returns `split`; raises SpanaxError if it is not in `SPLITS`."""
    if split not in SPLITS:
        raise UnknownNameError(f"unknown split '{split}'.", fix=nearest(split, SPLITS))
    return split
