"""The cost that a plan predicted, stored with it for comparison with measurements."""

from collections.abc import Mapping
from dataclasses import dataclass, field

Moved = Mapping[str, Mapping[str, int]]
"""Bytes by mesh axes and kind of collective."""


@dataclass(frozen=True)
class Prediction:
    """What one device was expected to take for one step; bytes that move count as results of collectives.

    Attributes:
      cluster: the devices, as `spanax.cluster` reads them.
      step_seconds: how long a step takes.
      seconds: what the step's time goes to.
      memory: bytes at the fullest moment, by group.
      limit_bytes: what one device may hold; None: not known.
      flops: what is computed, recomputation included.
      mfu: useful FLOPs over the chip's peak, as a share of 1; None where the peak is not known.
      moved: bytes that it receives of collectives.
      moved_of: those of one parameter, its gradient and its update; by path. Parameters of equal blocks are told of by
        the first of them.

    Example:
      >>> told = Prediction("h100:8", 2.0, {"matmuls": 1.5, "update": 0.5}, {"parameters": 6, "activations": 2})
      >>> told.peak_bytes
      8
    """

    cluster: str
    step_seconds: float
    seconds: Mapping[str, float]
    memory: Mapping[str, int]
    limit_bytes: int | None = None
    flops: float = 0.0
    mfu: float | None = None
    moved: Moved = field(default_factory=dict)
    moved_of: Mapping[str, Moved] = field(default_factory=dict)

    @property
    def peak_bytes(self) -> int:
        """Bytes at the fullest moment."""
        return sum(self.memory.values())
