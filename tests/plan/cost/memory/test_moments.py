"""The moments at which live bytes may be the largest: the largest sum of columns is among them, for all weights."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from spanax.plan.cost.memory.moments import fullest

SMALL = st.integers(-3, 9)


@given(st.data(), st.integers(1, 9), st.integers(1, 5), st.integers(1, 4))
def test_largest_weighted_sum_is_at_a_chosen_moment(
    data: st.DataObject, num_blocks: int, period: int, num_columns: int
) -> None:
    def integers(rows: int) -> np.ndarray:
        values = data.draw(st.lists(SMALL, min_size=rows * num_columns, max_size=rows * num_columns))
        return np.reshape(values, (rows, num_columns))

    block = integers(period)
    step = integers(1)
    edges = integers(3)
    blocks = np.concatenate([block + index * step for index in range(num_blocks)])
    live_bytes = np.concatenate([edges[:1], blocks, edges[1:]])
    weights = np.abs(integers(1)[0])
    chosen = fullest(live_bytes, np.arange(len(live_bytes)))
    assert (live_bytes[chosen] @ weights).max() == (live_bytes @ weights).max()


@pytest.mark.parametrize("num_blocks", [8, 64])
def test_equal_blocks_add_no_moments(num_blocks: int) -> None:
    block = np.array([[0, 5], [9, 1], [4, 4]])
    live_bytes = np.concatenate([block + index * np.array([-3, 2]) for index in range(num_blocks)])
    assert len(fullest(live_bytes, np.arange(len(live_bytes)))) <= 2 * len(block)
