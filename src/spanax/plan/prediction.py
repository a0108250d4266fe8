"""The cost that a plan predicted, stored with it for comparison with measurements."""

from collections.abc import Mapping
from dataclasses import dataclass, field

Moved = Mapping[str, Mapping[str, int]]
"""Bytes by mesh axes and kind of collective."""


@dataclass(frozen=True)
class Prediction:
    """The predicted cost of one step per device; moved bytes count the results of collectives.

    Attributes:
      cluster: the devices, as `spanax.cluster` parses them.
      step_seconds: the time of a step.
      seconds: the step's time by term.
      memory: bytes at the peak, by group.
      limit_bytes: the memory of one device; None: unknown.
      flops: executed FLOPs, recomputation included.
      mfu: useful FLOPs over the chip's peak, as a share of 1; None where the peak is unknown.
      moved: bytes that it receives from collectives.
      moved_of: those of one parameter, its gradient and its update; by path. Of the parameters of equal blocks, only
      the first is listed.
      host_bytes: bytes of offloaded state in host memory.

    Example:
      >>> cost = Prediction("h100:8", 2.0, {"matmuls": 1.5, "update": 0.5}, {"parameters": 6, "activations": 2})
      >>> cost.peak_bytes
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
    host_bytes: int = 0

    @property
    def peak_bytes(self) -> int:
        """Bytes at the peak."""
        return sum(self.memory.values())
