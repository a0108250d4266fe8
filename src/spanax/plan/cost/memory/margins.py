"""How much memory a layout may need at most: the prediction and a margin that depends on the kind of program.

An under-prediction is an out-of-memory error, an over-prediction only costs speed. A layout fits if its upper estimate
does.
"""

from dataclasses import dataclass
from enum import StrEnum

import numpy as np

from spanax.trace.program import Program

RESERVE = 0.05
"""Fraction of the memory that no layout may use: fragmentation and compiler overhead. Source: compiled steps,
docs/planning.md."""


class Kind(StrEnum):
    """The kinds of programs whose predictions differ from compilers by different amounts."""

    MATMULS = "programs of matmuls"
    CONVOLUTIONS = "programs with convolutions"
    SMALL = "programs of a few MiB"


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


EXCESS_BYTES = 16 << 20
"""What compilers allocate at most, independent of a program's size: on TPUs for tuples of buffers and scalars
(`tables.py`), on GPUs for the parts of sums and for combined collectives. Source: 1,024 slots of 16 KiB; the
programs in tests/data/memory_cells.json have at most 800."""

CELLS = "tests/data/memory_cells.json: libtpu 0.0.52 for v5e:2x4"

MARGINS = {
    Kind.MATMULS: Margin(Kind.MATMULS, 0.12, 0.1, 6, CELLS),
    Kind.CONVOLUTIONS: Margin(Kind.CONVOLUTIONS, 0.15, 0.06, 3, CELLS),
    Kind.SMALL: Margin(Kind.SMALL, 0.95, 0.71, 72, f"{CELLS}, and XLA of jax 0.10.2 for h100:8"),
}
"""The margins. Source: the compiled programs of each, all of which they cover. All include fragmentation, that of
convolutions also the choice of layouts (docs/planning.md)."""


def margin_of(program: Program, peak_bytes: float) -> Margin:
    """Returns the margin of a program with a predicted peak."""
    is_small = MARGINS[Kind.SMALL].share * peak_bytes < MARGINS[_kind(program)].share * peak_bytes + EXCESS_BYTES
    return MARGINS[Kind.SMALL if is_small else _kind(program)]


def upper_bytes(program: Program, peak_bytes: np.ndarray) -> np.ndarray:
    """Returns the upper estimates of predicted peaks, which grow with the peak.

    The margin of small programs counts until it exceeds that of the program's kind and `EXCESS_BYTES`.
    """
    small = peak_bytes * (1 + MARGINS[Kind.SMALL].share)
    return np.minimum(small, peak_bytes * (1 + MARGINS[_kind(program)].share) + EXCESS_BYTES)


def _kind(program: Program) -> Kind:
    return Kind.CONVOLUTIONS if program.step.has_convolutions else Kind.MATMULS
