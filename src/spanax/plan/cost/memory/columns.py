"""Columns of values that are divided equally, and their bytes on one device."""

from typing import NamedTuple

import numpy as np

from spanax.plan.cost.memory.tiles import OnChip, Tiled

Array = np.ndarray


class Column(NamedTuple):
    """Values that are divided equally.

    Attributes:
      axes: the mesh axes that shard them, as a mask.
      is_batched: they grow with the batch.
      is_stacked: they are stacked by layer.
      is_score: they are attention scores.
      group: the index of their group of memory.
      tiled: what their padding depends on; None where they are not padded.
      is_on_host: they are in host memory.
      is_upper: they may be live, which only the upper estimate assumes.
    """

    axes: int
    is_batched: bool
    is_stacked: bool
    is_score: bool
    group: int
    tiled: Tiled | None = None
    is_on_host: bool = False
    is_upper: bool = False


class Columns:
    """The share of a column's global bytes on one device."""

    def __init__(
        self,
        num_shards: Array,
        scale: Array,
        num_stages: Array,
        in_flight: Array,
        fused_attention: bool,
        on_chip: OnChip | None,
    ):
        self._num_shards = num_shards
        self._scale = scale
        self._stages = num_stages
        self._in_flight = in_flight
        self._fused = fused_attention
        self._on_chip = on_chip
        self.count = scale.shape[0]
        self._known: dict[tuple[Column, bool], Array] = {}
        self._padded: dict[Tiled, tuple[Array, Array]] = {}

    def share(self, column: Column, *, is_upper: bool = False) -> Array:
        """Returns one number per candidate; with `is_upper` of the largest form of the values."""
        known = column, is_upper
        if known not in self._known:
            share = (0.0 if column.is_on_host or column.is_upper > is_upper else 1.0) / self._num_shards[column.axes]
            if column.is_batched:
                share = share * self._scale * (self._in_flight if column.is_stacked else 1.0)
            if column.is_stacked:
                share = share / self._stages
            if column.tiled is not None and self._on_chip is not None:
                padded, unpadded = self._bytes(column.tiled)
                if is_upper:
                    padded = column.tiled.most_bytes(self._num_shards, self._scale, self._stages)
                share = share * padded / unpadded
            self._known[known] = share * (0.0 if column.is_score and self._fused else 1.0)
        return self._known[known]

    def is_small(self, column: Column) -> Array:
        """Returns, per candidate, whether a value of the column may be in the memory on the chip.

        Values stacked by layer are not: a loop reads and writes them slice by slice.
        """
        if column.is_stacked:
            return np.zeros(self.count, bool)
        if column.tiled is None or self._on_chip is None:
            return np.ones(self.count, bool)
        return self._bytes(column.tiled)[0] <= self._on_chip.num_bytes

    def _bytes(self, tiled: Tiled) -> tuple[Array, Array]:
        if tiled not in self._padded:
            self._padded[tiled] = tiled.padded(self._num_shards, self._scale, self._stages)
        return self._padded[tiled]
