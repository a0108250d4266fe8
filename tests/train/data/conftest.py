"""Batches that are closed after a test."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from batched import data_threads
from spanax.train.data.batches import Batches, batches


@pytest.fixture
def opened() -> Iterator[Callable[..., Batches]]:
    # A loop that another test ended with an error goes with the next garbage collection.
    before, readers = data_threads(), []

    def open_(*args: Any, **options: Any) -> Batches:
        readers.append(batches(*args, **options))
        return readers[-1]

    yield open_
    for each in readers:
        each.close()
    assert data_threads() <= before
