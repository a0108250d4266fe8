"""Searches every layout of a program on a cluster; ranks the candidates by cost and counts rejected layouts."""

import functools
import time
from collections import Counter
from collections.abc import Callable, Container, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace

import numpy as np

from spanax.errors import (
    CapacityError,
    DeviceCountError,
    MeshError,
    NoLayoutError,
    RangeError,
    UnknownNameError,
    VariantError,
    nearest,
)
from spanax.hardware.cluster import Cluster, cluster_of
from spanax.hardware.mesh import MeshShape
from spanax.hardware.torus import divisors
from spanax.plan.candidate import Candidate, Search, plan_of
from spanax.plan.candidates.attention_kernel import by_heads, can_ring, saves_with_ring, with_attention
from spanax.plan.candidates.grids import grids_of
from spanax.plan.candidates.local_search import POOL, with_assignments
from spanax.plan.candidates.loss_chunks import suiting_chunks
from spanax.plan.candidates.pricer import Bound, Pricer, least_seconds, priced_variants
from spanax.plan.candidates.ranking import ranked, without_repeated_kernels
from spanax.plan.candidates.request import Scope
from spanax.plan.candidates.variants import MOST_IN_RING, Variants, in_context
from spanax.plan.cost.calibration import Assumptions
from spanax.plan.cost.memory.state import state_of
from spanax.plan.cost.step_time import Grid
from spanax.plan.defaults import defaults
from spanax.plan.evaluate import LayoutCosts, main_dtype, model_flops, priced_offload
from spanax.plan.presets import CONTEXT_WORDS, axes_named, check_word, form_of, in_words, name_in_stages
from spanax.plan.reason import Code, Reason
from spanax.plan.sharding.assign import Pins, check_pinned
from spanax.plan.space import AXES, Family, Rejections, families, is_standard, layout_on, mesh_of
from spanax.trace.jaxpr.remat_policies import ULYSSES, known_offload, partial_policy
from spanax.trace.program import Program


def search(  # noqa: PLR0913
    program: Program,
    cluster: Cluster | str,
    *,
    batch_size: int | None = None,
    remat: Sequence[str] | None = None,
    top: int = 20,
    each: bool = False,
    assumptions: Assumptions | None = None,
    pipeline: bool = True,
    layout: str | None = None,
    mesh: Mapping[str, int] | str | MeshShape | None = None,
    microbatches: int | None = None,
    pins: Pins | None = None,
    attention: str | None = None,
    ring: bool | None = None,
    distinct: bool = False,
    assign: bool = True,
    offload: Sequence[str] = (),
) -> Search:
    """Prices every layout of a program on all devices of a cluster. Uses no devices.

    Args:
      program: what `spanax.trace` returned.
      cluster: what `spanax.cluster` or `spanax.local` returned, or the name of one.
      batch_size: examples per step. Default: the traced batch.
      remat: policies to price. Default: `none`, `dots` and `full`. A policy that the program does not support counts
        in `rejected` with its reason; raises if the program supports none.
      top: the number of candidates to return.
      each: also returns the fastest of every kind of layout, however slow.
      assumptions: calibration constants that are not in data sheets.
      pipeline: whether layers may be partitioned into stages.
      layout: prices only this layout, by name.
      mesh: prices only this mesh, the mesh of one stage, as in `spanax.plan`.
      microbatches: prices only this number of microbatches.
      pins: axis name -> mesh axis (or several, or None to replicate the axis), in every layout.
      attention: as in `spanax.plan`, with the same default.
      ring: whether meshes that shard sequences are also priced with ring attention. Default: unless a layout, `flash`
        or an attention of the program is requested; not on CPUs.
      distinct: returns each sharding once, with its fastest remat policy, schedule and number of microbatches.
      assign: whether a local search changes the assignments of the best presets, if neither layout nor mesh is set.
      offload: as in `spanax.plan`.

    Raises:
      SpanaxError: the rates of the cluster's chip are unknown, no layout divides the batch, the layout or mesh is
        unknown, or the program supports none of the requested remat policies.

    Example:
      >>> import jax, optax, spanax
      >>> from flax import nnx
      >>> program = spanax.trace(
      ...     build=lambda rngs: nnx.Linear(64, 64, rngs=rngs),
      ...     optimizer=optax.adam(0.1),
      ...     batch=jax.ShapeDtypeStruct((64, 64), "float32"),
      ...     loss=lambda model, x: (model(x) ** 2).mean(),
      ... )
      >>> result = search(program, spanax.cluster("v5p:2x2x1"), layout="fsdp", mesh="fsdp=4")
      >>> result.best.mesh, result.layouts_priced > 0
      (fsdp=4, True)
    """
    cluster = cluster_of(cluster)
    attention = attention or defaults(cluster).attention
    if ring is None:
        ring = layout is None and can_ring(program, cluster, attention)
    assigns = assign and layout is None and mesh is None and not offload
    scope = Scope(
        batch_size=program.batch_size if batch_size is None else batch_size,
        remat=remat,
        top=max(top, POOL) if assigns else top,
        each=each,
        assumptions=assumptions or Assumptions(),
        pipeline=pipeline,
        layout=layout,
        mesh=None if mesh is None else MeshShape.of(mesh),
        microbatches=microbatches,
        pins=pins or {},
        ring=ring,
        distinct=distinct,
        offload=known_offload(offload),
    )
    result = search_in(program, cluster, scope, attention)
    return with_assignments(result, scope.assumptions, None if each else top) if assigns else result


def search_in(program: Program, cluster: Cluster, scope: Scope, attention: str = "plain") -> Search:
    """Prices the layouts of a scope, with an attention as in `spanax.plan`; without a local search.

    Raises:
      SpanaxError: as `search`.
    """
    if scope.batch_size < 1:
        raise RangeError(f"the batch size is {scope.batch_size}; it must be at least 1.")
    check_request(cluster, scope.layout, scope.mesh)
    check_word(program, scope.layout)
    check_pinned(program, scope.pins)
    if scope.microbatches not in (None, 1) and program.accumulates.error is not None:
        raise program.accumulates.error
    program = with_attention(program, cluster, form_of(scope.layout) or attention)
    result = _priced(program, cluster, scope)
    if scope.microbatches is None and _is_inexact(program, result):
        one_batch = _priced(program, cluster, replace(scope, microbatches=1, pipeline=False))
        num_left_out = result.layouts_priced - one_batch.layouts_priced
        return replace(one_batch, rejected={**one_batch.rejected, Reason(Code.INEXACT): num_left_out})
    return result


def _priced(program: Program, cluster: Cluster, scope: Scope) -> Search:
    """Prices a scope without checking whether microbatches change the loss."""
    start = time.perf_counter()
    traced_batch = program.batch_size
    rejected: Rejections = Counter()
    variants = Variants(program, scope.remat, rejected, is_lazy=scope.fits_first)
    first = next(iter(variants.programs.values()))
    pricers = _pricers(first, cluster, scope, rejected)
    limit = cluster.memory_bytes
    repeats = (scope.layout is not None, True)
    possible = [pricer.possible(repeats=each) for pricer, each in zip(pricers, repeats, strict=True)]
    only_fastest = scope.mesh is None and not scope.pins and not scope.each
    ring_saves = not only_fastest or saves_with_ring(first, scope.batch_size, cluster.num_devices)
    bound = Bound(limit, None if scope.each else scope.top, scope.stage_margin, scope.counts_stages, ring_saves)
    priced, left_out = priced_variants(possible[0], possible[1], variants, bound)
    if not any(entry.fits(limit).any() for entry in priced):
        priced, left_out = priced_variants(pricers[0], pricers[1], variants, bound)
    rejected.update(left_out)
    priced = priced if scope.layout else without_repeated_kernels(priced, limit, rejected)
    ranks = ranked(priced, limit, scope.top, scope.each, scope.distinct, rejected, scope.stage_margin)
    form = form_of(scope.layout) or "context"
    best, too_large, nearest = (
        tuple(replace(each, layout=in_words(each.layout, form)) for each in some) for some in ranks
    )
    return Search(
        cluster=cluster,
        batch_size=scope.batch_size,
        candidates=best,
        too_large=too_large,
        nearest=nearest,
        rejected={reason: count for reason, count in rejected.items() if count},
        layouts_priced=sum(entry.costs.step_seconds.size for entry in priced) + left_out[Reason(Code.TOO_LARGE)],
        model_flops=model_flops(first) * scope.batch_size / traced_batch,
        dtype=main_dtype(priced[0].terms) if priced else "fp32",
        trace_seconds=variants.trace_seconds,
        search_seconds=time.perf_counter() - start - variants.trace_seconds,
        programs=variants.programs,
        pins=scope.pins,
        attention=program.attention,
        offload=scope.offload,
    )


def _pricers(
    program: Program, cluster: Cluster, scope: Scope, rejected: Rejections, left_out: Container[int | None] = ()
) -> tuple[Pricer, Pricer]:
    """Returns the pricer of a scope's layouts with the attention of the program, and that of those with a ring.

    Leaves of the state with a class in `left_out` are not counted.
    """
    is_open = scope.layout is None and scope.mesh is None
    groups = 1 if scope.mesh is None else scope.mesh.ways(["groups"])
    space = families(
        program, cluster, scope.batch_size, rejected, scope.pins, scope.model, groups=groups, is_open=is_open
    )
    if not space:
        raise _no_layout(scope.batch_size, cluster.num_devices, rejected)
    pipeline = scope.pipeline and not any(map(partial_policy, scope.remat or ()))
    space = [_requested(family, replace(scope, pipeline=pipeline), rejected) for family in space]
    if form_of(scope.layout) == ULYSSES:
        space = [by_heads(program, family, rejected) for family in space]
    sequences = [in_context(family, rejected) for family in space] if scope.ring else []
    offload = priced_offload(cluster, scope.offload)
    states = [state_of(family.resolver, offload, left_out) for family in space]
    grids = functools.partial(
        grids_of,
        batch_size=scope.batch_size,
        traced_batch=program.batch_size,
        microbatches=scope.microbatches,
        num_layers=program.step.layer_carry[1],
        schedules=scope.schedules,
        always=scope.always,
    )
    plain, rings = (
        Pricer.of(some, cluster, scope.assumptions, list(map(grids, some)), states[: len(some)])
        for some in (space, sequences)
    )
    most = MOST_IN_RING if scope.layout is None and scope.mesh is None else cluster.num_devices
    return plain.by_ring(program, rejected, most), rings


UNSHARDED = (Code.BATCH_NOT_DIVISIBLE, Code.NOTHING_STORED, Code.NOT_REQUESTED, Code.RING_TOO_LONG)
"""Why a mesh is rejected however the classes without a batch are sharded."""


def least_in(program: Program, cluster: Cluster, scope: Scope, labels: Container[int | None]) -> float:
    """Returns a lower bound of the step time of every layout of a scope whose state fits, for any variant.

    0 where a mesh is rejected that may have a layout if some classes are sharded in another way.

    Args:
      program: the program under the policy that recomputes least.
      cluster: the devices.
      scope: the layouts.
      labels: the classes that may be sharded in another way; all others are sharded as in the program.
    """
    rejected: Rejections = Counter()
    try:
        plain, _ = _pricers(program, cluster, scope, rejected, labels)
    except NoLayoutError:
        return 0.0
    if any(reason.code not in UNSHARDED for reason in rejected):
        return 0.0
    return least_seconds(plain.possible(repeats=True), program, labels)


MOST_EXAMPLES = 1 << 40
"""The largest batch that is looked for: a larger one fits only where memory does not depend on it."""


MOST_CHUNKINGS = 4
"""How often the number of chunks of the logits is adapted to the largest batch."""


def largest_in_chunks(
    program: Program, policies: Sequence[str], cluster: Cluster, scope: Scope, *, is_chunked: bool
) -> Search | None:
    """Returns `largest_batch_in` under the policy with the largest batch, with the best chunks of the logits.

    Args:
      program: with the attention and the compute dtype of the search.
      policies: the remat policies, the one that stores least first; where it applies, the others are not compared.
      cluster: the devices.
      scope: what the search prices.
      is_chunked: whether the number of chunks of the logits is set.
    """
    result = None
    variant = program
    for _ in range(1 if is_chunked else MOST_CHUNKINGS):
        found = []
        for policy in policies:
            with suppress(VariantError):
                found.append(largest_batch_in(variant, cluster, replace(scope, remat=(policy,))))
                if policy == policies[0]:
                    break
        result = max(filter(None, found), key=lambda each: each.batch_size, default=None)
        if result is None or result.best is None or is_chunked:
            break
        scale = result.batch_size / program.batch_size
        count, _ = suiting_chunks(program, plan_of(result, result.best), cluster, scale)
        if count == variant.loss_chunks:
            break
        variant = program.variant(loss_chunks=count)
    return result


def largest_batch_in(program: Program, cluster: Cluster, scope: Scope) -> Search | None:
    """Returns a search at the largest batch that fits, with a layout in which it fits; None where no batch fits.

    The batch is a multiple of the number of devices and microbatches, or else divides it. Estimates only memory: no
    other batch is traced, and only the result is priced.

    Raises:
      SpanaxError: as `search`, or every batch fits.
    """
    rejected: Rejections = Counter()
    count = scope.microbatches or 1
    step = cluster.num_devices * count
    scope = replace(scope, batch_size=step, microbatches=count)
    variants = Variants(program, scope.remat, rejected, is_lazy=False)
    (policy, variant), *_ = variants.programs.items()
    plain, rings = _pricers(variant, cluster, scope, rejected)
    ring = None if rings.is_empty else variants.in_ring(policy)
    pairs = [(plain, variant)] if ring is None else [(plain, variant), (rings.by_ring(ring, rejected), ring)]
    best: Search | None = None
    for pricer, variant in pairs:
        for family, grids, _, layout in pricer.layouts(variant):
            fitting = functools.partial(_fitting, layout, grids.plain, variant.batch_size)
            size = _largest(fitting, step, 0 if best is None else best.batch_size)
            if size is not None:
                best = _search_of(family, fitting(size), layout, size, scope)
    return best


def _search_of(family: Family, grid: Grid, layout: LayoutCosts, batch_size: int, scope: Scope) -> Search:
    """Returns a search with the first candidate of a grid."""
    program = layout.sharded.resolver.program
    one = grid.select(np.zeros(1, int))
    mesh = mesh_of(one.sizes[:, 0].tolist())
    name = layout_on(family.storing, family.sequence, mesh)
    costs = layout.costs(one)
    return Search(
        cluster=layout.cluster,
        batch_size=batch_size,
        candidates=(Candidate.of(name, family.storing, mesh, program, one, costs, layout.memory([one])[0]),),
        nearest=(),
        rejected={},
        layouts_priced=1,
        model_flops=model_flops(program) * batch_size / program.batch_size,
        dtype=main_dtype(layout.terms),
        trace_seconds=0.0,
        search_seconds=0.0,
        programs={program.remat: program},
        pins=scope.pins,
        attention=program.attention,
        offload=scope.offload,
    )


def _fitting(layout: LayoutCosts, grid: Grid, traced_batch: int, batch_size: int) -> Grid:
    """Returns the candidates of a grid in which a batch fits that their meshes divide."""
    grid = replace(grid, scale=batch_size / grid.num_microbatches / traced_batch)
    shards = grid.sizes[[AXES.index(axis) for axis in ("data", "fsdp", "expert")]].prod(0) * grid.num_microbatches
    limit = np.inf if layout.cluster.memory_bytes is None else layout.cluster.memory_bytes
    fits = layout.memory([grid])[0].upper_bytes <= limit
    return grid.select(np.flatnonzero(fits & (batch_size % shards == 0)))


def _largest(fitting: Callable[[int], Grid], step: int, known: int) -> int | None:
    """Returns the largest batch that fits and is larger than a known one: a multiple of `step`, or else a divisor.

    Raises:
      SpanaxError: every batch fits.
    """
    low = known // step + 1
    if not fitting(low * step).scale.size:
        smaller = (size for size in reversed(divisors(step)) if known < size < step)
        return next((size for size in smaller if fitting(size).scale.size), None)
    high = 2 * low
    while fitting(high * step).scale.size:
        low = high
        high *= 2
        if high > MOST_EXAMPLES:
            raise CapacityError("every batch fits: the memory of a device is unknown, or does not limit the batch.")
    while high - low > 1:
        middle = (low + high) // 2
        if fitting(middle * step).scale.size:
            low = middle
        else:
            high = middle
    return low * step


def _no_layout(batch_size: int, num_devices: int, rejected: Rejections) -> NoLayoutError:
    return NoLayoutError(
        f"no layout shards a batch of {batch_size} over {num_devices} devices.",
        where="; ".join(f"{count} meshes: {reason}" for reason, count in rejected.items()),
        fix=f"a batch of {-(-batch_size // num_devices) * num_devices}",
    )


def _is_inexact(program: Program, result: Search) -> bool:
    """Whether a search ranks microbatches that the planner does not choose by default."""
    ranked = (*result.candidates, *result.too_large, *result.nearest)
    if all(candidate.microbatches == 1 for candidate in ranked):
        return False
    return program.accumulates.error is not None or program.accumulates.num_passes > 1


def check_request(cluster: Cluster, layout: str | None, mesh: MeshShape | None) -> None:
    """Checks that a search can price a layout and a mesh.

    Raises:
      SpanaxError: the layout or mesh is unknown or does not fit the cluster.
    """
    if layout is not None:
        axes_named(layout)
    if mesh is None:
        return
    for axis in mesh.names:
        if axis not in AXES:
            raise UnknownNameError(f"unknown mesh axis '{axis}'.", where=f"mesh {mesh}", fix=nearest(axis, AXES))
    if not is_standard(mesh):
        ordered = ",".join(f"{axis}={size}" for axis, size in sorted(mesh.axes, key=lambda pair: AXES.index(pair[0])))
        raise MeshError(
            f"a search prices mesh axes in the order {', '.join(AXES)} only.", where=f"mesh {mesh}", fix=ordered
        )
    if cluster.num_devices % mesh.size:
        raise DeviceCountError(
            f"mesh {mesh} needs {mesh.size} devices, and the cluster has {cluster.num_devices}.",
            fix=f"a mesh whose product divides {cluster.num_devices}",
        )


def _requested(family: Family, scope: Scope, rejected: Rejections) -> Family:
    """Returns the family with the requested meshes only."""
    layout = scope.layout
    if layout is None and scope.mesh is None and scope.stages is None and scope.pipeline:
        return family
    requested = None if scope.mesh is None else {(axis, size) for axis, size in scope.mesh.axes if size > 1}
    columns = []
    for column, (sizes, stages) in enumerate(zip(family.sizes.T.tolist(), family.num_stages, strict=True)):
        shape = mesh_of(sizes)
        if stages > 1 and not scope.pipeline:
            continue
        if requested in (None, set(shape.axes) - {("data", 1)}) and scope.stages in (None, stages):
            name = layout_on(family.storing, family.sequence, shape).name
            names = [name, *(in_words(name, word) for word in CONTEXT_WORDS)]
            if layout in (None, *names) or (stages > 1 and layout in [*map(name_in_stages, names)]):
                columns.append(column)
                continue
        rejected[Reason(Code.NOT_REQUESTED)] += 1
    return family.select(columns)
