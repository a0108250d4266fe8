"""Moments of a step at which live bytes may be the largest, however they are sharded."""

import numpy as np

Array = np.ndarray

LONGEST_BLOCK = 256
"""The largest number of moments in a block of a model, of which only the first and the last ones are compared."""


def fullest(live_bytes: Array, rows: Array) -> list[int]:
    """Returns the rows among which is the largest weighted sum of columns, for all weights that are not negative.

    Args:
      live_bytes: an array (moment, column).
      rows: the moments to choose from, in their order.

    Example:
      >>> fullest(np.array([[1, 9], [2, 8], [3, 7], [4, 6], [2, 2]]), np.arange(5))
      [0, 3]
    """
    rows = _ends(live_bytes, rows)
    rows = rows[np.argsort(-live_bytes[rows].sum(1), kind="stable")]
    result = list[int]()
    while rows.size:
        result.append(int(rows[0]))
        rows = rows[~(live_bytes[rows] <= live_bytes[rows[0]]).all(1)]
    return result


def _ends(live_bytes: Array, rows: Array) -> Array:
    """Returns the rows without those that the mean of two others, a period before and after, exceeds in every column.

    However columns are weighted, the largest sum is in one of these rows: along equal blocks, sums change evenly.
    """
    moments = live_bytes[rows]
    inner = np.zeros(rows.size, bool)
    for period in range(1, min((rows.size - 1) // 2, LONGEST_BLOCK) + 1):
        is_between = (2 * moments[period:-period] <= moments[: -2 * period] + moments[2 * period :]).all(1)
        if np.count_nonzero(is_between) > np.count_nonzero(inner):
            inner = np.pad(is_between, period)
    return rows[~inner]
