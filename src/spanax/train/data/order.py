"""The order of examples as a pure function of the seed and the position, and the splits of a source.

It is not Grain's `index_shuffle`, because saved positions depend on the order. Grain's takes one index per call (a
million places in 7.7 s, here 0.4 s: `benchmarks/data_formats.py`) and at most 32 bits of it.

Shape suffix: R rows of one batch.
"""

import numpy as np

SPLITS = ("train", "validation")

HELD_OUT = 20
"""One in this many parts is held out for validation."""

FEISTEL_ROUNDS = 8


def shuffled(places_R: np.ndarray, size: int, seed: int) -> np.ndarray:
    """Returns the examples, out of `size`, at positions of an infinite sequence of epochs, of shape [R].

    Each example occurs once per epoch. No table is needed, and the order is the same in every version of NumPy.
    A Feistel network permutes the next power of four; values out of range are permuted again until they are in range.
    """
    epochs_R, places_R = np.divmod(places_R, size)
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
