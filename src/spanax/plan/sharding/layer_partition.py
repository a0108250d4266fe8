"""Partitions the layers of a pipeline into stages, including counts that do not divide evenly."""

from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Parts:
    """A partition of consecutive layers into parts: stages times chunks, each of `num_rows` rows.

    Where the parts do not divide the layers, the last parts have one layer fewer and a row of padding, since the last
    part also computes everything after the layers.

    Example:
      >>> parts = Parts(num_layers=6, num_stages=4)
      >>> parts.num_rows, parts.num_short, [parts.first_layer(part) for part in range(4)]
      (2, 2, [0, 2, 4, 5])
    """

    num_layers: int
    num_stages: int
    num_chunks: int = 1

    @property
    def num_parts(self) -> int:
        """The number of parts."""
        return self.num_stages * self.num_chunks

    @property
    def num_rows(self) -> int:
        """Rows of one part: its layers and the padding."""
        return -(-self.num_layers // self.num_parts)

    @property
    def num_padded(self) -> int:
        """Rows of all parts."""
        return self.num_rows * self.num_parts

    @property
    def num_short(self) -> int:
        """The number of parts with a row of padding."""
        return self.num_padded - self.num_layers

    def first_layer(self, part: Any) -> Any:
        """Returns the first layer of a part, which may be traced."""
        num_before = part - (self.num_parts - self.num_short)
        return part * self.num_rows - num_before * (num_before > 0)

    def is_full(self, part: Any) -> Any:
        """Whether a part, which may be traced, has no padding."""
        return part < self.num_parts - self.num_short


def shares(num_layers: int, num_stages: Any, num_chunks: int = 1) -> Any:
    """Returns the number of layers over the rows of a stage with its padding; broadcasts over `num_stages`.

    Example:
      >>> float(shares(6, 2)), float(shares(6, 4)), float(shares(0, 4))
      (2.0, 3.0, 4.0)
    """
    stages = np.asarray(num_stages, float)
    rows = np.ceil(num_layers / (stages * num_chunks)) * num_chunks
    return stages if not num_layers else num_layers / rows
