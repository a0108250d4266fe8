"""The memory on a TPU that its compiler manages: what stays in it takes no main memory."""

from dataclasses import dataclass

import numpy as np

from spanax.hardware.chip import Chip

RESERVED_BYTES = 16 << 20
"""On-chip memory that kernels use themselves. Source: 112 of the 128 MiB of a v5e are allocated to values at most, in
the buffer assignments of libtpu 0.0.52 in tests/data/memory_cells.json."""


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

    def most_in_main_memory(self, total: np.ndarray) -> np.ndarray:
        """Returns the most live bytes that main memory stores: a tenth of those that take much less than the chip's."""
        return np.clip(4 * total - 3 * self.num_bytes, total / 10, total)

    def free_share(self, total: np.ndarray) -> np.ndarray:
        """Returns the share of the memory on the chip that the live values of each candidate leave free."""
        return 1 - np.minimum(total / max(self.num_bytes, 1), 1.0)
