"""Setting: batch, sequence, dtype and attention of a step, apart from its layout."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from spanax.trace.jaxpr.remat_policies import GATHERED

HEAD_AXES = ("heads", "head_dim")
"""Axes that only attention has."""


class _Dims(Protocol):
    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def axes(self) -> tuple[str | None, ...]: ...


@dataclass(frozen=True)
class Setting:
    """The batch, sequence, dtype and attention of a step.

    Attributes:
      batch_size: examples in a step.
      sequence_lengths: the distinct sizes of the batch's dims of the axis `seq`; none without sequences.
      dtypes: dtypes of matmuls and convolutions.
      attention: `plain`, or the kernel or ring that computes attention; none without attention.

    Example:
      >>> str(Setting(512, (2048,), ("bfloat16",), ("cudnn",)))
      'batch 512, sequence 2,048, bfloat16, attention cudnn'
    """

    batch_size: int
    sequence_lengths: tuple[int, ...]
    dtypes: tuple[str, ...]
    attention: tuple[str, ...]

    def __str__(self) -> str:
        parts = [f"batch {self.batch_size:,}"]
        if self.sequence_lengths:
            parts.append("sequence " + " and ".join(f"{length:,}" for length in self.sequence_lengths))
        parts.append(" and ".join(self.dtypes))
        if self.attention:
            parts.append("attention " + " and ".join(self.attention))
        return ", ".join(filter(None, parts))


def sequence_lengths(batch: Iterable[_Dims]) -> tuple[int, ...]:
    """Returns the distinct sizes of the dims of the axis `seq`, in order."""
    pairs = [pair for leaf in batch for pair in zip(leaf.shape, leaf.axes, strict=True)]
    return tuple(dict.fromkeys(size for size, axis in pairs if axis == "seq"))


def attention_names(context: str, axes: Iterable[str | None], kernels: Sequence[str | None] = ()) -> tuple[str, ...]:
    """Returns the distinct names of the kernels or rings that compute attention.

    Args:
      context: of the schedule or program.
      axes: the names of the axes of the step or of its arrays.
      kernels: the kernel of each attention for which one was requested; None is the attention of the model.
    """
    names = tuple(dict.fromkeys(kernel or "plain" for kernel in kernels))
    if context != GATHERED:
        return names if context in names else (context,)
    return ("plain",) if not set(HEAD_AXES).isdisjoint(axes) else ()
