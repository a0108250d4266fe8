"""Returns a Plan for a program, a cluster and a request: validates the request, searches open choices, resolves."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, overload

from jax.sharding import Mesh

from spanax.errors import CapacityError, ConflictError, DeviceCountError, VariantError
from spanax.hardware.cluster import Cluster, cluster_of
from spanax.hardware.flags import default_flags
from spanax.hardware.mesh import MeshShape, simulated
from spanax.plan.advice.quotes import Quotes, quoted
from spanax.plan.advice.remedies import remedies
from spanax.plan.advice.rules_of_thumb import rule
from spanax.plan.candidate import Search, plan_of, refused_stages, shortfall
from spanax.plan.candidates.alternatives import with_host_memory, with_padding
from spanax.plan.candidates.attention_kernel import can_ring, in_attention, named_ulysses
from spanax.plan.candidates.grids import CONTIGUOUS, PLAIN, SCHEDULES
from spanax.plan.candidates.local_search import POOL, with_assignments
from spanax.plan.candidates.loss_chunks import in_chunks, search_in_chunks
from spanax.plan.candidates.padding import padded_axes, search_in_padding
from spanax.plan.candidates.request import Request, Scope, is_searchable, pins_of, requested_layout
from spanax.plan.candidates.saved_values import with_saved_values
from spanax.plan.candidates.variants import REMAT
from spanax.plan.defaults import (
    STAGE_MARGIN,
    array_dtype,
    computed_in,
    default_chunks,
    default_dtype,
    defaults,
    options_in,
    prices_stages,
    untraceable_in,
)
from spanax.plan.layout import Layout
from spanax.plan.pipeline.stages import ANY, AXIS, mesh_of_stage
from spanax.plan.place import padding_text, placed
from spanax.plan.plan import Plan, Schedule
from spanax.plan.presets import PRESETS, axes_named, check_ring, default_mesh, layout_for
from spanax.plan.reason import Code, Reason
from spanax.plan.search import check_request, largest_in_chunks, least_in, search_in
from spanax.plan.sharding.assign import Pins
from spanax.plan.space import layout_on, storing_of
from spanax.trace.jaxpr.remat_policies import AS_WRITTEN, OPTIMIZER_STATE, RING, ULYSSES, known_offload, known_policy
from spanax.trace.program import Program
from spanax.trace.rewrites.microbatches.accumulation import check_divides
from spanax.trace.rewrites.padding import Multiples
from spanax.trace.variant import Variant


@overload
def plan(program: Program, cluster: Cluster | str, **options: Any) -> Plan: ...


@overload
def plan(program: Program, *, on: Sequence[Cluster | str], **options: Any) -> Quotes: ...


def plan(  # type: ignore[misc]  # noqa: PLR0913  the overloads abbreviate the keywords
    program: Program,
    cluster: Cluster | str | None = None,
    *,
    on: Sequence[Cluster | str] | None = None,
    layout: str | Layout | None = None,
    mesh: Mapping[str, int] | str | MeshShape | Mesh | None = None,
    sequence_parallel: bool = False,
    pin: Pins | None = None,
    forbid: Sequence[str] = (),
    schedule: Schedule | None = None,
    attention: str | None = None,
    loss_chunks: int | str | None = None,
    pipeline: bool | None = None,
    pad: str | Sequence[str] | None = None,
    offload: str | Sequence[str] | None = None,
) -> Plan | Quotes:
    """Returns the sharding of every array of a program on a cluster. Uses no devices.

    With `on`, returns `Quotes`: an entry per cluster with its plan, which prints as a table.

    Args:
      program: what `spanax.trace` returned.
      cluster: what `spanax.cluster` or `spanax.local` returned, or the name of one.
      on: several clusters, or their names, instead of `cluster`.
      layout: a preset's name (`data`, `zero1`, `zero2`, `fsdp`, `hsdp`, `tensor`, `data+tensor`, `fsdp+tensor`,
        `context`, `ring`, `ulysses`, `spatial`, `expert`, `pipeline`, `pipeline+tensor`, `3d`; `+seq` after a tensor
        one), or a Layout. Default: the layout that the names of the mesh axes imply; without a mesh, the fastest one
        that fits, as `spanax.search` ranks them. On chips of unknown speed: `data` if the state fits, or `fsdp`.
      mesh: axis sizes, slowest axis first: `"data=4,model=2"`, a dict, or a `jax.sharding.Mesh` of the devices of
        `MeshShape.build`. Default: a mesh that suits the layout.
      sequence_parallel: also shards the sequence over the model axis wherever that axis shards no other dim.
      pin: axis name -> mesh axis (or several, or None to replicate the axis); overrides the layout.
      forbid: names of axes that must not be sharded.
      schedule: remat, microbatches and stages. Default: on accelerators the fastest that fit; on CPUs as traced if a
        layout or mesh is set, with a number of microbatches that suits the stages. A mesh without `pipe` is the mesh of
        one stage.
      attention: `plain`, as the model defines it; `flash`, by the platform's kernel (splash on TPUs, cuDNN on NVIDIA
        GPUs), else in blocks of keys; `auto`, the same or plain. Default: `auto` on accelerators, `plain` on CPUs.
      loss_chunks: the number of chunks of tokens over which the logits are computed sequentially; `auto` uses chunks if
        that saves a large part of the memory. Default: as traced, or `auto` on accelerators.
      pipeline: whether layers may be partitioned into stages if neither layout nor mesh is set. Default: on several
        nodes of accelerators if that is at least 5 % faster (`STAGE_MARGIN`), on one node if nothing fits otherwise.
      offload: the state to store in host memory: `optimizer`, its arrays, or `none`. Default: that of `schedule`; an
        open search offloads it if nothing fits otherwise. Only by default may a search save activations there.
      pad: names of axes to pad in computations if a mesh axis that shards them does not divide them:
        `"heads,vocab"`, or a sequence. The arrays of the state keep their shapes. `none` pads nothing.
        Default: in an open search, if a step is at least 10 % faster (`ASSIGNMENT_MARGIN`).

    The loss is computed in bfloat16 on accelerators and in float32 on CPUs, unless the program was traced with a
    `compute_dtype`, chooses a dtype for its layers, has a custom `train_step`, or cannot be traced in bfloat16.

    Raises:
      SpanaxError: the program cannot be sharded as requested on this cluster.

    Example:
      >>> import jax, optax, spanax
      >>> from flax import nnx
      >>> program = spanax.trace(
      ...     build=lambda rngs: nnx.Linear(16, 32, rngs=rngs),
      ...     optimizer=optax.sgd(0.1),
      ...     batch=jax.ShapeDtypeStruct((8, 16), "float32"),
      ...     loss=lambda model, x: (model(x) ** 2).mean(),
      ... )
      >>> plan(program, spanax.cluster("cpu:8"), layout="fsdp")["kernel"].spec
      ((), ('fsdp',))
    """
    pins = pins_of(pin, forbid)
    kinds = None if offload is None else known_offload(offload)
    request = Request(layout, mesh, sequence_parallel, schedule, attention, loss_chunks, pins, pipeline, pad, kinds)
    if (cluster is None) == (on is None) or isinstance(on, str):
        raise ConflictError("pass either `cluster`, or a list of clusters as `on`.", fix='on=["h100:8", "v5e:4x4"]')
    if on is not None:
        return quoted(
            on,
            lambda machine: searched(program, machine, request),
            lambda machine, found: decided(program, machine, request, found),
            lambda machine: largest_batch(program, machine, request),
            lambda found: fits_with(found, program, request),
        )
    assert cluster is not None
    return decided(program, cluster_of(cluster), request)


def decided(program: Program, cluster: Cluster, request: Request, priced: Search | None = None) -> Plan:
    """Returns the plan of a request; `spanax.plan` and every command call it.

    Args:
      program: what `spanax.trace` returned.
      cluster: the devices.
      request: the requirements of the plan.
      priced: what `searched` returned for the same request; by default, searches again.

    Raises:
      SpanaxError: the request cannot be carried out, or no layout fits into the memory.
    """
    plan = _decided(program, cluster, request, priced)
    return named_ulysses(program, plan) if request.form == ULYSSES else plan


def _decided(program: Program, cluster: Cluster, request: Request, priced: Search | None) -> Plan:
    if is_searchable(cluster, request) and (defaults(cluster).is_searched or not request.is_placed):
        if request.mesh is not None:
            dtype = None if request.schedule is None else request.schedule.compute_dtype
            first = computed_in(program, dtype or program.compute_dtype)
            _placed(in_attention(first, cluster, request, first.options), cluster, request, program.loss_chunks)
        priced = priced or searched(program, cluster, request)
        if priced.best is not None:
            return chosen(priced)
        if not request.is_placed:
            raise nothing_fits("no layout fits into the memory.", priced, program, request)
    dtype, reason = _dtype(program, cluster, request)
    program = computed_in(program, dtype)
    count = default_chunks(program, cluster, request.chunks)

    def make(program: Program) -> Plan:
        plan = _placed(in_attention(program, cluster, request, program.options), cluster, request, program.loss_chunks)
        return plan if reason is None else replace(plan, why=f"{plan.why}; {reason}")

    program = program.variant(loss_chunks=count or 1)
    return make(program) if count else in_chunks(program, cluster, make)


def _dtype(
    program: Program, cluster: Cluster, request: Request, policy: str | None = AS_WRITTEN
) -> tuple[str | None, Reason | None]:
    """Returns the compute dtype of a plan, and why the program keeps its own instead of the default.

    Args:
      program: what `spanax.trace` returned.
      cluster: the devices.
      request: the requirements of the plan.
      policy: the remat policy; None for the fastest.
    """
    if request.schedule is not None and request.schedule.compute_dtype is not None:
        return request.schedule.compute_dtype, None
    dtype = default_dtype(program, cluster)
    try:  # the variant that a search traces first
        in_attention(program, cluster, request, _first_options(program, dtype, policy))
    except VariantError:
        reason = untraceable_in(program, dtype)
        if reason is None:
            raise
        return array_dtype(program), reason
    return dtype, None


def _first_options(program: Program, dtype: str | None, policy: str | None) -> Variant:
    """Returns the options that a search traces first: in a dtype, under a remat policy or the fastest."""
    first = REMAT[0] if policy is None else policy
    return replace(options_in(program, dtype), remat=None if first == AS_WRITTEN else first)


def searched(
    program: Program,
    cluster: Cluster,
    request: Request,
    *,
    top: int = 1,
    each: bool = False,
) -> Search:
    """Returns the priced layouts of a request, fastest first.

    Prices policies that recompute activations only where some layout does not fit without them. By default, prices
    stages on several nodes, and elsewhere where no layout fits; they must be faster by `STAGE_MARGIN`.

    Args:
      program: what `spanax.trace` returned; its remat policy and microbatches, if set, are fixed.
      cluster: the devices.
      request: the requirements of every layout.
      top: the number of candidates to return.
      each: also returns the fastest of every kind of layout.

    Raises:
      SpanaxError: as `search`.
    """
    requested, program, reason = _requested(program, cluster, request, top, each)
    scope = requested.scope
    result = requested.chunked(program)
    if not result.layouts_priced and request.layout is not None:
        _placed(program, cluster, request, program.loss_chunks)  # raises why this layout is none of the program
    limit = None if each else top
    if not (request.is_placed or request.offload or request.padded):
        result = with_assignments(result, scope.assumptions, limit, scope.stage_margin)
    if not request.is_placed:
        if request.pad is None:
            least = partial(requested.least_padded, next(iter(result.programs.values())))
            result = with_padding(result, requested.in_model, least, program, scope.stage_margin)
        if request.offload is None:
            result = with_host_memory(result, partial(requested.in_host_memory, program))
        result = replace(result, candidates=result.candidates[:limit], too_large=result.too_large[:limit])
    has_chunks = result.best is not None and result.program_of(result.best).loss_chunks > 1
    is_reported = not requested.is_chunked and (request.chunks is not None or has_chunks)
    logits = result.logits if is_reported else None
    return replace(result, requested=reason, logits=logits, dtype_reason=requested.dtype_reason)


def largest_batch(program: Program, cluster: Cluster, request: Request) -> Search | None:
    """Returns a search at the largest batch for which a preset fits, in one microbatch by default; None for none.

    Offloads and pads on request only. Estimates only memory, as `largest_batch_in`.

    Raises:
      SpanaxError: as `search`, or every batch fits.
    """
    count = max(1, request.schedule.microbatches) if request.schedule is not None else 1
    request = request.scheduled(microbatches=count)
    step = cluster.num_devices * count
    if program.batch_size % step:
        program = program.with_batch(step)  # the traced batch divides by the shards of every mesh
    requested, program, _ = _requested(program, cluster, request, 1, False)
    return requested.largest(program)


def _requested(
    program: Program, cluster: Cluster, request: Request, top: int, each: bool
) -> "tuple[_Requested, Program, Reason | None]":
    """Returns the searches of a request, as `searched`, with their program, and why only some layouts are searched."""
    schedule = request.schedule
    usual = defaults(cluster)
    request, staged = _in_stages(program, cluster, request)
    fixed = None if staged is None or staged.pipeline == ANY else staged
    reason, layout, mesh = _named(cluster, request)
    if request.mesh is not None and not request.pipeline:  # with stages, it may be the mesh of one
        _check_devices(cluster, request, *requested_layout(program, cluster, request)[1:])
    is_fixed = request.is_placed and not usual.is_searched
    as_traced = not program.rewrites_loss or is_fixed
    counts = [each.microbatches for each in (schedule, staged) if each is not None and each.microbatches]
    if not counts and (as_traced or program.microbatches > 1):
        counts = [program.microbatches]
    check_divides(program.batch_size, counts[0] if counts else 1)
    remat = known_policy(schedule.remat) if schedule is not None else None
    if remat is None and (as_traced or program.remat != AS_WRITTEN):
        remat = program.remat
    count = default_chunks(program, cluster, request.chunks)
    program = program.variant(loss_chunks=count or 1)
    dtype, dtype_reason = _dtype(program, cluster, request, remat)
    attention = request.attention or usual.attention
    scope = Scope(
        batch_size=program.batch_size,
        layout=layout,
        mesh=mesh,
        microbatches=counts[0] if counts else None,
        pins=request.pins,
        top=top if request.is_placed else max(top, POOL),
        each=each,
        ring=request.layout is None and can_ring(program, cluster, attention),
        distinct=True,
        offload=request.offload or (),
        stages=(staged and staged.num_stages) or None,
        always=(PLAIN, 1) if fixed is None else (fixed.pipeline, fixed.num_chunks),
        schedules=SCHEDULES if fixed is None else (),
        stage_margin=STAGE_MARGIN if request.pipeline is None else 0.0,
    )
    requested = _Requested(cluster, request, scope, dtype, dtype_reason, remat, is_chunked=bool(count))
    return requested, program, reason


@dataclass(frozen=True)
class _Requested:
    """The searches of a request, for variants of its program.

    Attributes:
      cluster: the devices.
      request: the requirements of every layout.
      scope: what each search prices.
      dtype: the compute dtype.
      dtype_reason: why it is not the default of the cluster; None if it is.
      policy: the remat policy; None for the fastest.
      is_chunked: whether the number of chunks of the logits is set.
    """

    cluster: Cluster
    request: Request
    scope: Scope
    dtype: str | None
    dtype_reason: Reason | None
    policy: str | None
    is_chunked: bool

    def chunked(self, program: Program) -> Search:
        """Returns the search with the best number of chunks of the logits, and values to save, if none are set."""
        result = self.padded(program) if self.is_chunked else search_in_chunks(self.padded, program, self.cluster)
        uses_host = self.request.offload is None
        return with_saved_values(result, self.scope.stage_margin, uses_host) if self.policy is None else result

    def padded(self, program: Program) -> Search:
        """Returns the search with the requested axes padded."""
        return search_in_padding(self.fastest, program, self.cluster, self.request.padded, self.scope.mesh)

    def in_model(self, program: Program, model: int) -> Search:
        """Returns the search of the meshes with a size of `model`."""
        return replace(self, scope=replace(self.scope, model=model)).fastest(program)

    def least_padded(self, program: Program, padded: Multiples) -> float:
        """Returns a lower bound of the step time of the meshes with a size of `model` that padded axes are for."""
        names = program.step.labels_by_name
        labels = {label for name, _ in padded for label in names.get(name, ())}
        scope = replace(self.scope, model=padded[0][1], pipeline=self.request.pipeline is not False)
        return least_in(program, self.cluster, scope, labels)

    def in_host_memory(self, program: Program) -> Search:
        """Returns the search with the optimizer's state in host memory."""
        return replace(self, scope=replace(self.scope, offload=(OPTIMIZER_STATE,))).chunked(program)

    def largest(self, program: Program) -> Search | None:
        """Returns a search at the largest batch that fits, under the policy that stores least and the best chunks."""
        variant = in_attention(program, self.cluster, self.request, options_in(program, self.dtype))
        policies = (*reversed(REMAT),) if self.policy is None else (self.policy,)
        return largest_in_chunks(variant, policies, self.cluster, self.scope, is_chunked=self.is_chunked)

    def fastest(self, program: Program) -> Search:
        """Returns the search under the remat policy, or any, in stages where they may be faster or fit."""
        request = self.request
        program = in_attention(program, self.cluster, request, _first_options(program, self.dtype, self.policy))
        scope = replace(self.scope, remat=REMAT if self.policy is None else (self.policy,))
        is_open = request.pipeline is None and defaults(self.cluster).pipeline and not request.is_placed
        in_stages = is_open and prices_stages(program, self.cluster)
        first = replace(
            scope,
            fits_first=True,
            counts_stages=not in_stages,
            pipeline=in_stages or bool(request.pipeline or scope.stages),
        )
        result = search_in(program, self.cluster, first)
        if result.best is None and is_open and not in_stages and program.has_evaluation:
            result = search_in(program, self.cluster, replace(scope, pipeline=True))
        refused = refused_stages(result)
        if refused is None or (refused.code is Code.NO_STAGES and not is_open):
            return result
        again = replace(first, pipeline=refused.code is Code.NO_CHUNKS, schedules=CONTIGUOUS)
        other = search_in(program, self.cluster, again)
        return replace(other, rejected={**other.rejected, refused: result.layouts_priced - other.layouts_priced})


fits_with = partial(remedies, find=searched)
"""Returns the remedies of what `searched` returned."""


def nothing_fits(what: str, result: Search, program: Program, request: Request) -> CapacityError:
    """Returns the error of a search where no layout fits; the message lists options that would make one fit."""
    return CapacityError(what, where=shortfall(result), fix="; or ".join(fits_with(result, program, request)))


def chosen(result: Search) -> Plan:
    """Returns the plan of the fastest layout that fits; some layout must."""
    assert result.best is not None
    plan = plan_of(result, result.best)
    attention = [f"attention {outcome}" for outcome in result.attention]
    padding = padding_text(result.program_of(result.best), plan.mesh, plan.layout)
    reasons = (
        result.requested,
        result.assignment,
        result.alternative,
        result.saved_values,
        result.dtype_reason,
        rule(result, result.best, plan),
        padding,
        *attention,
        result.logits,
    )
    return replace(plan, why="; ".join(str(reason) for reason in reasons if reason))


def _in_stages(program: Program, cluster: Cluster, request: Request) -> tuple[Request, Schedule | None]:
    """Returns the request of one stage, and the schedule of all, if stages are requested; else the request and None.

    A search chooses what the request leaves open of the schedule; otherwise it is that of the only plan.
    """
    is_named = isinstance(request.layout, str) and AXIS in axes_named(request.layout)
    if not request.has_stages and not is_named:
        return request, None
    plan = _placed(program, cluster, request, program.loss_chunks)
    mesh = mesh_of_stage(plan.mesh)
    layout = request.layout or plan.layout.name
    if not request.has_stages:
        layout = layout_on(storing_of(plan.layout), plan.layout.sequence_axis is not None, mesh).name
    placed_request = replace(request, layout=layout, mesh=mesh, pipeline=True)
    if not (defaults(cluster).is_searched and is_searchable(cluster, request)):
        return placed_request, plan.schedule
    schedule = request.schedule or Schedule(microbatches=0, pipeline=ANY)
    if request.mesh is None:
        return replace(placed_request, mesh=None), replace(schedule, num_stages=0)
    return placed_request, replace(schedule, num_stages=plan.schedule.num_stages)


def _named(cluster: Cluster, request: Request) -> tuple[Reason | None, str | None, MeshShape | None]:
    """Returns the reason for the requested layout, its name and its mesh, as arguments of `search`."""
    layout = request.layout.name if isinstance(request.layout, Layout) else request.layout
    mesh = None if request.mesh is None else MeshShape.of(request.mesh)
    code = None if mesh is None else Code.MESH_NAMES
    if layout is not None:
        code = Code.LAYOUT_REQUESTED
    check_request(cluster, layout, mesh)
    if layout is None and mesh is not None:
        layout = layout_for(mesh).name
    if layout is not None and mesh is None and not defaults(cluster).is_searched:
        mesh = default_mesh(layout, cluster.num_devices)
    if layout is not None and request.sequence_parallel and "+seq" not in layout:
        layout += "+seq"
    return code and Reason(code), layout, mesh


def _check_devices(cluster: Cluster, request: Request, layout: Layout, shape: MeshShape) -> None:
    num_stages = request.schedule.num_stages if request.schedule else 1
    num_devices = shape.size * (num_stages if shape.ways([AXIS]) == 1 else 1)
    if num_devices != cluster.num_devices:
        near = layout.name if layout.name.removesuffix("+seq") in PRESETS and layout != request.layout else "fsdp"
        raise DeviceCountError(
            f"mesh {shape} needs {num_devices} devices, and the cluster has {cluster.num_devices}.",
            where=" x ".join(f"{name} {size}" for name, size in shape.axes) + f" = {shape.size}",
            fix=f"mesh {default_mesh(near, cluster.num_devices)}, or "
            + (simulated(num_devices) if cluster.chip.shared else f"a cluster of {num_devices} devices"),
        )


def _placed(program: Program, cluster: Cluster, request: Request, count: int) -> Plan:
    """Returns the plan of a requested layout or mesh, or of the default layout on a chip of unknown speed."""
    schedule = request.schedule
    why, layout, shape = requested_layout(program, cluster, request)
    _check_devices(cluster, request, layout, shape)
    if schedule is None and shape.ways([AXIS]) > 1:
        schedule = Schedule(microbatches=0)
    offload = request.offload or ()
    schedule = replace(schedule or Schedule(), loss_chunks=count, offload=offload)
    if request.padded:
        padded = padded_axes(program.unpadded, layout, shape, request.pins, request.padded)
        schedule = replace(schedule, padded=padded)
    if request.form == RING:
        schedule = replace(schedule, context=RING)
        check_ring(layout, shape)
    plan = placed(program, layout, shape, pins=request.pins, why=why, schedule=schedule)
    plan = replace(plan, xla_flags=default_flags(cluster, plan.param_axes))
    if schedule.microbatches == 0:
        return replace(plan, why=f"{why}; {plan.schedule.microbatches} microbatches, as suits the stages")
    return plan
