"""What a user requires of a plan, and what a search prices."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from jax.sharding import Mesh

from spanax.errors import ArgumentError, ConflictError, MissingError, check_type
from spanax.hardware.cluster import Cluster
from spanax.hardware.mesh import MeshShape
from spanax.plan.candidates.grids import PLAIN, SCHEDULES
from spanax.plan.cost.calibration import Assumptions
from spanax.plan.layout import PIPE, Layout
from spanax.plan.pipeline.stages import ANY, mesh_of_stage
from spanax.plan.plan import Schedule
from spanax.plan.presets import axes_named, check_word, default_mesh, form_of, grouped, layout_for, layout_named
from spanax.plan.reason import Code, Reason
from spanax.plan.sharding.assign import Pins, pinned_to
from spanax.plan.space import AXES, is_standard, num_groups
from spanax.trace.jaxpr.remat_policies import RING, ULYSSES
from spanax.trace.program import Program
from spanax.units import bytes_text

_PIN = 'pin={"AXIS": "MESH_AXIS"}, with an axis of `program.axes` and one of the mesh, or None to replicate the axis'


STATE_FRACTION = 0.5
"""Fraction of a device's memory available to the state under `data`; the rest is for gradients and activations."""


@dataclass(frozen=True)
class Request:
    """Requirements of a plan; None leaves a choice to the defaults of the cluster and to the search.

    The fields are the arguments of `spanax.plan`; `pins` joins `pin` and `forbid` as `pins_of` does, and `pipeline` is
    whether layers may be partitioned into stages.

    Raises:
      SpanaxError: an argument has an unsupported type, the mesh is invalid, or arguments contradict each other.
    """

    layout: str | Layout | None = None
    mesh: Mapping[str, int] | str | MeshShape | Mesh | None = None
    sequence_parallel: bool = False
    schedule: Schedule | None = None
    attention: str | None = None
    loss_chunks: int | str | None = None
    pins: Pins = field(default_factory=dict)
    pipeline: bool | None = None
    pad: str | Sequence[str] | None = None
    offload: tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        check_type("layout", self.layout, (str, Layout), 'layout="fsdp", or a spanax.Layout')
        check_type("schedule", self.schedule, Schedule, "schedule=Schedule(microbatches=4), of spanax.plan.plan")
        check_type("attention", self.attention, str, 'attention="auto"')
        check_type("loss_chunks", self.loss_chunks, (int, str), 'loss_chunks=8, or loss_chunks="auto"')
        if not isinstance(self.pad, str):
            _check_names("pad", self.pad, 'pad="AXIS,AXIS", or pad=["AXIS"], of `program.axes`')
        if self.mesh is not None:
            object.__setattr__(self, "mesh", MeshShape.of(self.mesh))
        if self.schedule is not None and self.offload is None:
            object.__setattr__(self, "offload", self.schedule.offload or None)
        if self.sequence_parallel and not self.is_placed:
            raise ConflictError("sequence_parallel needs a layout with a model axis.", fix="layout='fsdp+tensor+seq'")
        if self.form == RING and self.attention == "flash":
            message = "attention 'flash' gathers keys, and layout 'ring' does not."
            raise ConflictError(message, fix="layout 'context', or attention 'plain'")
        if self.form == ULYSSES and self.attention == "plain":
            message = "attention 'plain' is not fused, and layout 'ulysses' shards fused attention along heads."
            raise ConflictError(message, fix="layout 'context', or attention 'flash'")

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
    def has_stages(self) -> bool:
        """Whether the requested mesh or, without one, the layout has stages."""
        if self.mesh is not None:
            return MeshShape.of(self.mesh).ways([PIPE]) > 1
        return isinstance(self.layout, str) and PIPE in axes_named(self.layout)

    @property
    def chunks(self) -> int | str | None:
        """The requested number of chunks of the logits, from the schedule by default."""
        if self.loss_chunks is None and self.schedule is not None and self.schedule.loss_chunks > 1:
            return self.schedule.loss_chunks
        return self.loss_chunks

    @property
    def form(self) -> str | None:
        """Which of the `FORMS` of attention on a sharded sequence is requested, if any."""
        is_ring = self.schedule is not None and self.schedule.context == RING
        return RING if is_ring else form_of(self.layout)

    def scheduled(self, **changes: Any) -> "Request":
        """Returns the request with other fields of its schedule."""
        return replace(self, schedule=replace(self.schedule or Schedule(microbatches=0, pipeline=ANY), **changes))


@dataclass(frozen=True, kw_only=True)
class Scope:
    """What a search prices, and how it ranks.

    Attributes:
      batch_size: examples per step.
      remat: policies to price; None for all.
      top: the number of candidates to return.
      each: also returns the fastest of every kind of layout, however slow.
      assumptions: calibration constants that are not in data sheets.
      pipeline: whether layers may be partitioned into stages.
      layout: prices only this layout.
      mesh: prices only this mesh of one stage.
      microbatches: prices only this number of microbatches.
      pins: axis name -> mesh axes, in every layout.
      ring: whether meshes that shard sequences are also priced with ring attention.
      distinct: returns each sharding once, with its fastest remat policy, schedule and number of microbatches.
      offload: kinds of state in host memory.
      stage_margin: layouts with stages rank as if they were slower by this fraction.
      always: a schedule of stages that is always priced, and its chunks per stage.
      schedules: the other schedules of stages to price.
      fits_first: prices the policies after the first, which the program must support, only if some layout does not fit.
      counts_stages: whether layouts with stages count for this.
      model: prices only meshes with this size of `model`.
      stages: prices only this number of stages; None for any.
    """

    batch_size: int
    remat: Sequence[str] | None = None
    top: int = 20
    each: bool = False
    assumptions: Assumptions = field(default_factory=Assumptions)
    pipeline: bool = True
    layout: str | None = None
    mesh: MeshShape | None = None
    microbatches: int | None = None
    pins: Pins = field(default_factory=dict)
    ring: bool = False
    distinct: bool = False
    offload: tuple[str, ...] = ()
    stage_margin: float = 0.0
    always: tuple[str, int] = (PLAIN, 1)
    schedules: Collection[str] = SCHEDULES
    fits_first: bool = False
    counts_stages: bool = True
    model: int | None = None
    stages: int | None = None


def is_searchable(cluster: Cluster, request: Request) -> bool:
    """Returns whether a search can price a request: its layouts have names and standard mesh axes."""
    schedule = request.schedule
    if not cluster.chip.peak_flops or isinstance(request.layout, Layout):
        return False
    plain = Schedule()
    if schedule is not None:
        is_default = schedule.pipeline in (plain.pipeline, ANY) and schedule.num_chunks == plain.num_chunks
        if not (request.has_stages or is_default):
            return False
        if (schedule.num_stages, schedule.context) != (plain.num_stages, plain.context):
            return False
    if request.mesh is not None:
        mesh = MeshShape.of(request.mesh)
        is_ordered = mesh.ways([PIPE]) == 1 or mesh.names[0] == PIPE
        if not (is_ordered and is_standard(mesh_of_stage(mesh))):
            return False
    pinned = {axis for pin in request.pins.values() for axis in pinned_to(pin)}
    named = default_mesh(request.layout, cluster.num_devices).names if request.layout is not None else ()
    return {*named, *pinned} <= {*AXES, PIPE}


def requested_layout(program: Program, cluster: Cluster, request: Request) -> tuple[str, Layout, MeshShape]:
    """Returns the layout and the mesh of a request, and why."""
    layout = request.layout
    mesh = request.mesh
    if isinstance(layout, Layout):
        if mesh is None:
            raise MissingError("a custom Layout needs a mesh.", fix=f"mesh={{'data': {cluster.num_devices}}}")
        return str(Reason(Code.LAYOUT_REQUESTED)), layout, MeshShape.of(mesh)
    if layout is not None:
        shape = MeshShape.of(mesh) if mesh is not None else default_mesh(layout, cluster.num_devices)
        if mesh is None and (groups := num_groups(program, shape.ways(["model"]))):
            shape = grouped(shape, groups)
        named = layout_named(layout, shape, sequence_parallel=request.sequence_parallel)
        check_word(program, layout)
        return str(Reason(Code.LAYOUT_REQUESTED)), named, shape
    if mesh is not None:
        shape = MeshShape.of(mesh)
        named = layout_for(shape)
        if request.sequence_parallel:
            named = layout_named(named.name, shape, sequence_parallel=True)
        return str(Reason(Code.MESH_NAMES)), named, shape
    state = sum(leaf.num_bytes for leaf in program.leaves)
    memory_bytes = cluster.memory_bytes
    fits = memory_bytes is None or state <= STATE_FRACTION * memory_bytes
    name = "data" if fits else "fsdp"
    shape = default_mesh(name, cluster.num_devices)
    limit = "unknown" if memory_bytes is None else bytes_text(memory_bytes)
    verdict = "fits" if fits else "does not fit"
    why = f"the state ({bytes_text(state)}) {verdict} on one device ({limit})"
    return why, layout_named(name, shape), shape


def pins_of(pin: Pins | None, forbid: Iterable[str] = ()) -> Pins:
    """Returns the `pins` of a request from the arguments of `spanax.plan`: forbidden axes are replicated.

    Raises:
      SpanaxError: an argument has an unsupported type.

    Example:
      >>> pins_of({"vocab": "model"}, forbid=["heads"])
      {'vocab': 'model', 'heads': None}
    """
    check_type("pin", pin, Mapping, _PIN)
    for axis, mesh_axes in (pin or {}).items():
        if not isinstance(mesh_axes, str):
            _check_names(f"pin[{axis!r}]", mesh_axes, _PIN)
    if isinstance(forbid, str):
        raise ArgumentError.of("forbid", forbid, f"forbid=[{forbid!r}]")
    _check_names("forbid", forbid, 'forbid=["AXIS"], of `program.axes`')
    return dict(pin or {}) | dict.fromkeys(forbid)


def _check_names(argument: str, names: Any, fix: str) -> None:
    is_valid = isinstance(names, Iterable) and all(isinstance(name, str) for name in names)
    if names is not None and not is_valid:
        raise ArgumentError.of(argument, names, fix)
