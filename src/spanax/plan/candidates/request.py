"""What a user requires of a plan."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from spanax.hardware.mesh import MeshShape
from spanax.plan.layout import Layout
from spanax.plan.plan import Schedule
from spanax.plan.sharding.assign import Pins
from spanax.trace.rewrites.remat_policies import RING


@dataclass(frozen=True)
class Request:
    """Requirements of a plan; None leaves a choice to the defaults of the cluster and to the search.

    The fields are the arguments of `spanax.plan`; `pins` joins `pin` and `forbid`, and `pipeline` is whether layers
    may be partitioned into stages.
    """

    layout: str | Layout | None = None
    mesh: Mapping[str, int] | str | MeshShape | None = None
    sequence_parallel: bool = False
    schedule: Schedule | None = None
    attention: str | None = None
    loss_chunks: int | str | None = None
    pins: Pins = field(default_factory=dict)
    pipeline: bool | None = None
    pad: str | Sequence[str] | None = None
    offload: tuple[str, ...] | None = None

    @property
    def padded(self) -> tuple[str, ...]:
        """The names of the axes to pad."""
        names = self.pad.split(",") if isinstance(self.pad, str) else self.pad or ()
        names = () if self.pad == "none" else names
        return tuple(dict.fromkeys(name.strip() for name in names))

    @property
    def is_placed(self) -> bool:
        """Whether a layout, or a mesh that implies one, is requested."""
        return self.layout is not None or self.mesh is not None

    @property
    def chunks(self) -> int | str | None:
        """The requested number of chunks of the logits, from the schedule by default."""
        if self.loss_chunks is None and self.schedule is not None and self.schedule.loss_chunks > 1:
            return self.schedule.loss_chunks
        return self.loss_chunks

    @property
    def is_ring(self) -> bool:
        """Whether ring attention is requested."""
        named = isinstance(self.layout, str) and RING in self.layout.split("+")
        return named or (self.schedule is not None and self.schedule.context == RING)
