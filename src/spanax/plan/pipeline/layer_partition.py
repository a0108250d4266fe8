"""Which layers each stage of a pipeline gets, including counts that do not divide evenly."""

from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Parts:
    """Layers one after another in parts: stages times chunks, each of `num_rows` rows.

    Where the parts do not divide the layers, the last of them have one layer fewer, and a row of padding in its place:
    the very last also has what comes behind the layers.

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
        """How many parts there are."""
        return self.num_stages * self.num_chunks

    @property
    def num_rows(self) -> int:
        """Rows of one part: its layers, and the padding."""
        return -(-self.num_layers // self.num_parts)

    @property
    def num_kept(self) -> int:
        """Rows of all parts."""
        return self.num_rows * self.num_parts

    @property
    def num_short(self) -> int:
        """How many parts have one layer fewer than they have rows."""
        return self.num_kept - self.num_layers

    def first_layer(self, part: Any) -> Any:
        """The first layer of a part, which may be traced."""
        behind = part - (self.num_parts - self.num_short)
        return part * self.num_rows - behind * (behind > 0)

    def is_full(self, part: Any) -> Any:
        """Whether a part, which may be traced, has no padding."""
        return part < self.num_parts - self.num_short


def shares(num_layers: int, num_stages: Any, num_chunks: int = 1) -> Any:
    """Into how many equal parts layers would be divided, each as long as a stage with its padding; stages may be many.

    Example:
      >>> float(shares(6, 2)), float(shares(6, 4)), float(shares(0, 4))
      (2.0, 3.0, 4.0)
    """
    stages = np.asarray(num_stages, float)
    rows = np.ceil(num_layers / (stages * num_chunks)) * num_chunks
    return stages if not num_layers else num_layers / rows
