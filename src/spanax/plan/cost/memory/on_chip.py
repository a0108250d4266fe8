"""The memory on a TPU that its compiler manages: what stays in it takes no main memory."""

from dataclasses import dataclass

import numpy as np

from spanax.hardware.chip import Chip

RESERVED_BYTES = 16 << 20
"""On-chip memory that kernels use themselves. Source: 112 of the 128 MiB of a v5e are allocated to values at most, in
the buffer assignments of libtpu 0.0.52 in tests/data/memory_cells.json."""

TABLE_BYTES = 16 << 10
"""Main memory of a tuple of buffers: the result of a kernel with several outputs, of an asynchronous copy or of a
collective; it is not reused. Source: the offsets in the buffer assignments of libtpu 0.0.52."""

TABLES_PER_ARRAY, TABLES_PER_KERNEL = 2.2, 0.35
"""Tuples per array of the state and per kernel: an array is copied to the chip and back, and updated by a kernel with
several outputs. Source: fitted to the 62 cells below 0.25 GiB in tests/data/memory_cells.json."""


@dataclass(frozen=True)
class OnChip:
    """The bytes that a compiler can allocate in the memory on a chip."""

    num_bytes: int

    @staticmethod
    def of(chip: Chip) -> "OnChip | None":
        """Returns the memory of a chip; None for chips whose compiler does not manage it."""
        return None if chip.on_chip_bytes is None else OnChip(max(chip.on_chip_bytes - RESERVED_BYTES, 0))

    def share_in_main_memory(self, total: np.ndarray, small: np.ndarray) -> np.ndarray:
        """Returns the share of the live bytes that main memory stores.

        Parts of values that are too large pass through the memory on the chip, in proportion to their bytes.

        Args:
          total: the live bytes of each candidate.
          small: those of values that are small enough for the memory on the chip.
        """
        share = small / np.maximum(total, 1.0)
        return 1 - share * np.minimum(small, self.num_bytes) / np.maximum(total, 1.0)

    def table_bytes(self, num_arrays: int, num_kernels: int) -> float:
        """Returns the main memory of all tuples of a program."""
        return TABLE_BYTES * (TABLES_PER_ARRAY * num_arrays + TABLES_PER_KERNEL * num_kernels)
