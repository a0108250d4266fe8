"""Alternatives: rows that state one measurement with different guesses of what the source leaves open."""

from collections import defaultdict
from collections.abc import Sequence

import numpy as np

from published.cases import Case

OPEN = ("id", "remat", "microbatch_seqs", "grad_accum")
"""What a source may leave open; rows with equal cells in all other columns are alternatives of one measurement."""


def measurements(cases: Sequence[Case]) -> list[list[int]]:
    """Returns the indices of the cases of each measurement."""
    together: dict[tuple[object, ...], list[int]] = defaultdict(list)
    for index, case in enumerate(cases):
        cells = tuple(sorted((key, value) for key, value in case.row.text.items() if key not in OPEN and value))
        together[case.row.file, cells].append(index)
    return list(together.values())


def nearest(measurements: Sequence[Sequence[int]], distances: np.ndarray) -> np.ndarray:
    """Returns a mask of cases: of each measurement the one with the least distance."""
    result = np.zeros(len(distances), bool)
    for indices in measurements:
        result[min(indices, key=lambda index: distances[index])] = True
    return result
