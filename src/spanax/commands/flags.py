"""Flags that several commands share: sizes of a workload, precision, and the requested layout."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal

from tyro.conf import arg

from spanax.errors import SpanaxError

if TYPE_CHECKING:
    from spanax.trace.program import Program
    from spanax.trace.workload import Workload

Load = Callable[..., Any]
"""Builds a workload, given `batch_size`, `seq_len`, `num_layers` and `embed_dim`."""


@dataclass(frozen=True)
class BatchSizes:
    """Sizes of the batch.

    Attributes:
      batch: number of examples per step.
      seq: sequence length in tokens.
    """

    batch: int | None = None
    seq: int | None = None

    def load(self, load: Load) -> Any:
        """Returns the workload at the requested sizes."""
        return load(**self._arguments())

    def _arguments(self) -> dict[str, int]:
        sizes = {"batch_size": self.batch, "seq_len": self.seq}
        return {name: size for name, size in sizes.items() if size is not None}


@dataclass(frozen=True)
class Sizes(BatchSizes):
    """Sizes of the batch and the model.

    Attributes:
      layers: number of layers, instead of the workload's.
      embed: model width, instead of the workload's.
    """

    layers: int | None = None
    embed: int | None = None

    def _arguments(self) -> dict[str, int]:
        sizes = {"num_layers": self.layers, "embed_dim": self.embed}
        return super()._arguments() | {name: size for name, size in sizes.items() if size is not None}


@dataclass(frozen=True)
class Precision:
    """Dtypes of computation and optimizer state.

    Attributes:
      dtype: compute dtype: float32, bfloat16 or float16. Default: bfloat16 on accelerators, unless the model sets its
        own dtypes.
      optimizer_state: dtype of the optimizer's moments, float32 or bfloat16.
    """

    dtype: str | None = None
    optimizer_state: Literal["float32", "bfloat16"] = "float32"

    def check(self) -> None:
        """Raises SpanaxError if the dtype is unknown."""
        from spanax.trace.rewrites.remat_policies import known_dtype

        known_dtype(self.dtype)


@dataclass(frozen=True)
class LayoutRequest:
    """The requested layout; the planner chooses what is not requested.

    Attributes:
      layout: name of the layout. Default: what the mesh axes imply; without both, the fastest that fits.
      mesh: sizes of the mesh axes, slowest first, such as fsdp=4,model=2.
      remat: what the backward pass recomputes: none, dots, full, offload. Default: the fastest that fits; on CPUs,
        with a layout or mesh, as written.
      attention: plain, as written; flash, the platform's kernel; auto, the kernel where it applies.
        Default: auto on accelerators, plain on CPUs.
      loss_chunks: number of chunks of tokens in which logits are computed, or auto: where that saves much memory.
        Default: auto on accelerators, 1 on CPUs.
      accumulate: gradient of microbatches: exact, equal to that of the batch, or mean, the mean of theirs.
    """

    layout: str | None = None
    mesh: str | None = None
    remat: str | None = None
    attention: str | None = None
    loss_chunks: str | None = None
    accumulate: Literal["exact", "mean"] | None = None

    def check(self) -> None:
        """Raises SpanaxError if the remat policy, attention or number of loss chunks is unknown."""
        from spanax.trace.rewrites.remat_policies import known_attention, known_chunks, known_policy

        known_policy(self.remat)
        known_attention(self.attention)
        known_chunks(self.loss_chunks or 1)

    def trace(self, workload: "Workload", precision: Precision, *, dtype: str | None) -> "Program":
        """Returns the training step of a workload, traced with the requested rematerialization and precision."""
        return workload.trace(
            learning_rate=1e-3,
            num_steps=100,
            compute_dtype=dtype,
            remat=self.remat,
            optimizer_state=precision.optimizer_state,
            accumulate=self.accumulate,
        )


BatchSizeFlags = Annotated[BatchSizes, arg(name="")]
SizeFlags = Annotated[Sizes, arg(name="")]
PrecisionFlags = Annotated[Precision, arg(name="")]
LayoutFlags = Annotated[LayoutRequest, arg(name="")]


def flag(name: str) -> str:
    """Returns the flag of a field.

    Example:
      >>> flag("target_mfu")
      '--target-mfu'
    """
    return f"--{name.replace('_', '-')}"


def require(command: str, workload: str, on: str, devices: str) -> None:
    """Raises SpanaxError if the workload or the devices are missing; `devices` are those of the suggested command."""
    if not workload:
        raise SpanaxError(f"spanax {command} needs a workload.", fix=f"spanax {command} gpt2 --on {devices}")
    if not on:
        raise SpanaxError(f"spanax {command} needs the devices.", fix=f"spanax {command} {workload} --on {devices}")


def check_positive(command: object, *names: str) -> None:
    """Raises SpanaxError if a number of a command is not positive."""
    for name in names:
        value = getattr(command, name)
        if value is not None and not value > 0:
            raise SpanaxError(f"{flag(name)} is {value}; expects a number > 0.", fix=f"{flag(name)} 1")
