"""Reads Hugging Face datasets in memory as tables."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from spanax.train.data.elements import digest
from spanax.train.data.formats.table import Table

NUM_SAMPLES, ROWS_AT_ONCE = 16, 256


@dataclass(frozen=True)
class DatasetRows:
    """The rows of a `datasets.Dataset`, in NumPy types unless the dataset has a format.

    Attributes:
      dataset: the dataset.
    """

    dataset: Any

    @property
    def fields(self) -> tuple[str, ...]:
        """The names of the columns."""
        return tuple(self.dataset.column_names)

    @property
    def num_rows(self) -> int:
        """The number of rows."""
        return len(self.dataset)

    def rows(self, indices: Sequence[int], fields: Sequence[str]) -> list[dict[str, Any]]:
        """Returns fields of the rows at the given indices."""
        dataset = self.dataset if self.dataset.format["type"] else self.dataset.with_format("numpy")
        columns = dataset[[int(index) for index in indices]]
        return [{field: columns[field][i] for field in fields} for i in range(len(indices))]

    def values(self, field: str) -> Iterator[Any]:
        """Yields a field of every row in order."""
        for batch in self.dataset.select_columns([field]).with_format(None).iter(ROWS_AT_ONCE):
            yield from batch[field]


def dataset_table(dataset: Any, split: str) -> Table:
    """Returns a table of all rows of a dataset."""
    places = np.linspace(0, len(dataset), NUM_SAMPLES, endpoint=False, dtype=np.int64).tolist() if len(dataset) else []
    stored = dataset.with_format("arrow")
    key = digest(f"{len(dataset)} {dataset.column_names}", *(repr(stored[place].to_pydict()) for place in places))
    return Table("Dataset", (DatasetRows(dataset),), key, dataset.data.nbytes, split, holds_out=False)
