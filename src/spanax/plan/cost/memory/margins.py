"""How much memory a layout may need at most: the prediction and a margin that depends on the kind of program.

An under-prediction is an out-of-memory error, an over-prediction only costs speed. A layout fits if its upper estimate
does.
"""

from dataclasses import dataclass
from enum import StrEnum

import numpy as np

from spanax.hardware.chip import Chip
from spanax.trace.program import Program

RESERVE = 0.05
"""Fraction of the memory that no layout may use: fragmentation and compiler overhead. Source: compiled steps,
docs/planning.md."""


class Kind(StrEnum):
    """The kinds of programs whose predictions differ from compilers by different amounts."""

    MATMULS = "programs of matmuls"
    CONVOLUTIONS = "programs with convolutions"
    SMALL = "programs with less than 0.25 GiB on a TPU"


@dataclass(frozen=True)
class Margin:
    """By how much compilers have exceeded predictions.

    Attributes:
      kind: the kind of program.
      share: what is added to a prediction, as a share of it.
      observed: the largest excess of a compiled program over its prediction, as a share of the prediction.
      num_cells: the number of compiled programs.
      source: the compiled programs.
    """

    kind: Kind
    share: float
    observed: float
    num_cells: int
    source: str

    @property
    def reserve(self) -> float:
        """The share of a device's memory that no layout may use."""
        return self.share / (1 + self.share)


SMALL_BYTES = 1 << 28
"""Predictions below this are of `Kind.SMALL`: they depend on the compiler's tables more than on arrays."""

CELLS = "tests/data/memory_cells.json: libtpu 0.0.52 for v5e:2x4"

MARGINS = {
    Kind.MATMULS: Margin(Kind.MATMULS, 0.12, 0.1, 6, CELLS),
    Kind.CONVOLUTIONS: Margin(Kind.CONVOLUTIONS, 0.15, 0.0, 3, CELLS),
    Kind.SMALL: Margin(Kind.SMALL, 0.3, 0.8, 62, CELLS),
}
"""The margins. Source: the compiled programs of each, all of which they cover. All include fragmentation, that of
convolutions also the choice of layouts (docs/planning.md). To that of small programs is added the memory on the chip:
values assumed to be there may be in main memory instead."""


def margin_of(program: Program, chip: Chip, peak_bytes: float) -> Margin:
    """Returns the margin of a program with a predicted peak."""
    is_small = chip.on_chip_bytes is not None and peak_bytes < SMALL_BYTES
    return MARGINS[Kind.SMALL] if is_small else MARGINS[_kind(program)]


def upper_bytes(program: Program, chip: Chip, peak_bytes: np.ndarray) -> np.ndarray:
    """Returns the upper estimates of predicted peaks.

    They never decrease with the peak: just above `SMALL_BYTES` the estimate is that of `SMALL_BYTES`.
    """
    if chip.on_chip_bytes is None:
        return peak_bytes * (1 + MARGINS[_kind(program)].share)
    small = np.minimum(peak_bytes, SMALL_BYTES) * (1 + MARGINS[Kind.SMALL].share) + chip.on_chip_bytes
    return np.where(
        peak_bytes < SMALL_BYTES, small, np.maximum(peak_bytes * (1 + MARGINS[_kind(program)].share), small)
    )


def _kind(program: Program) -> Kind:
    return Kind.CONVOLUTIONS if program.step.has_convolutions else Kind.MATMULS
