"""Hub: Hugging Face datasets that a program has loaded, as tables."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from spanax.run.data.elements import digest
from spanax.run.data.formats.table import Table

NUM_SAMPLES, ROWS_AT_ONCE = 16, 256


@dataclass(frozen=True)
class DatasetRows:
    """The rows of a `datasets.Dataset`, in numpy's types unless it has a format of its own.

    Attributes:
      dataset: the dataset.
    """

    dataset: Any

    @property
    def fields(self) -> tuple[str, ...]:
        """The columns."""
        return tuple(self.dataset.column_names)

    @property
    def num_rows(self) -> int:
        """How many rows there are."""
        return len(self.dataset)

    def rows(self, indices: Sequence[int], fields: Sequence[str]) -> list[dict[str, Any]]:
        """Some rows."""
        dataset = self.dataset if self.dataset.format["type"] else self.dataset.with_format("numpy")
        found = dataset[[int(index) for index in indices]]
        return [{field: found[field][i] for field in fields} for i in range(len(indices))]

    def values(self, field: str) -> Iterator[Any]:
        """One field of all rows."""
        for batch in self.dataset.select_columns([field]).with_format(None).iter(ROWS_AT_ONCE):
            yield from batch[field]


def dataset_table(dataset: Any, split: str) -> Table:
    """A table of all rows of a dataset."""
    places = np.linspace(0, len(dataset), NUM_SAMPLES, endpoint=False, dtype=np.int64).tolist() if len(dataset) else []
    stored = dataset.with_format("arrow")
    told = digest(f"{len(dataset)} {dataset.column_names}", *(repr(stored[place].to_pydict()) for place in places))
    return Table("Dataset", (DatasetRows(dataset),), told, dataset.data.nbytes, split, holds_out=False)
