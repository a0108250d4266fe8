"""Searches every layout of a program on a cluster; ranks the candidates by cost and counts rejected layouts."""

import functools
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from spanax.errors import NoLayoutError, SpanaxError, first_line, nearest
from spanax.hardware.cluster import Cluster, cluster_of
from spanax.hardware.mesh import MeshShape
from spanax.plan.attention_kernel import with_attention
from spanax.plan.candidate import Candidate, Search
from spanax.plan.cost.calibration import Assumptions
from spanax.plan.cost.memory.margins import upper_bytes
from spanax.plan.cost.memory.state import state_of
from spanax.plan.cost.peak_memory import MemoryUse
from spanax.plan.cost.step_time import Costs, Grid, Table
from spanax.plan.cost.terms import Terms
from spanax.plan.evaluate import LayoutCosts, main_dtype, model_flops
from spanax.plan.presets import PRESETS, as_ring
from spanax.plan.reason import Code, Reason
from spanax.plan.sharding.assign import Pins, check_pinned
from spanax.plan.space import AXES, STORING, Family, Rejections, families, is_standard, layout_on, mesh_of
from spanax.plan.spmd.sharded_program import ShardedProgram, ShardingCache
from spanax.trace.program import Program
from spanax.trace.rewrites.remat_policies import RING

REMAT = ("none", "dots", "full")
SCHEDULES = ("1f1b", "interleaved")


def search(
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
) -> Search:
    """Prices every layout of a program on all devices of a cluster. Uses no device.

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
      attention: as in `spanax.plan`.

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
    batch_size = program.batch_size if batch_size is None else batch_size
    if batch_size < 1:
        raise SpanaxError(f"the batch size is {batch_size}; it must be at least 1.")
    mesh = None if mesh is None else MeshShape.of(mesh)
    cluster = cluster_of(cluster)
    check_request(cluster, layout, mesh)
    check_pinned(program, pins or ())
    if microbatches not in (None, 1) and program.accumulates.error is not None:
        raise program.accumulates.error
    program = _attending(program, cluster, layout, attention)
    find = functools.partial(
        _search, program, cluster, batch_size=batch_size, remat=remat, top=top, each=each, layout=layout, mesh=mesh,
        assumptions=assumptions or Assumptions(), pins=pins,
    )  # fmt: skip
    result = find(microbatches=microbatches, pipeline=pipeline)
    if microbatches is not None or not _is_inexact(program, result):
        return result
    one_batch = find(microbatches=1, pipeline=False)
    num_left_out = result.layouts_priced - one_batch.layouts_priced
    return replace(one_batch, rejected={**one_batch.rejected, Reason(Code.INEXACT): num_left_out})


def _search(
    program: Program, cluster: Cluster, *, batch_size: int, remat: Sequence[str] | None, top: int, each: bool,
    layout: str | None, mesh: MeshShape | None, assumptions: Assumptions, pins: Pins | None, microbatches: int | None,
    pipeline: bool,
) -> Search:  # fmt: skip
    """Searches with validated arguments, without checking whether microbatches change the loss."""
    start, traced_batch = time.perf_counter(), program.batch_size
    rejected: Rejections = Counter()
    tracing_start = time.perf_counter()
    programs = _programs(program, remat, rejected)
    trace_seconds = time.perf_counter() - tracing_start
    first = next(iter(programs.values()))
    space = families(first, cluster, batch_size, rejected, pins)
    if not space:
        raise NoLayoutError(
            f"no layout shards a batch of {batch_size} over {cluster.num_devices} devices.",
            where="; ".join(f"{count} meshes: {reason}" for reason, count in rejected.items()),
            fix=f"a batch of {-(-batch_size // cluster.num_devices) * cluster.num_devices}",
        )
    space = [_requested(family, layout, mesh, pipeline, rejected) for family in space]
    num_layers = first.step.layer_carry[1]
    grids = [_grids(family, batch_size, traced_batch, microbatches, num_layers) for family in space]
    priced = _price(programs.values(), space, grids, cluster, assumptions)
    best, too_large, nearest = _ranked(priced, cluster, top, each, rejected)
    return Search(
        cluster=cluster,
        batch_size=batch_size,
        candidates=best,
        too_large=too_large,
        nearest=nearest,
        rejected={reason: count for reason, count in rejected.items() if count},
        layouts_priced=sum(entry.costs.step_seconds.size for entry in priced),
        model_flops=model_flops(first) * batch_size / traced_batch,
        dtype=main_dtype(priced[0].terms) if priced else "fp32",
        trace_seconds=trace_seconds,
        search_seconds=time.perf_counter() - start - trace_seconds,
        programs=programs,
        pins=pins or {},
        attention=program.attention,
    )


def _is_inexact(program: Program, result: Search) -> bool:
    """Whether a search ranks microbatches that the planner does not choose by default."""
    ranked = (*result.candidates, *result.too_large, *result.nearest)
    if all(candidate.microbatches == 1 for candidate in ranked):
        return False
    return program.accumulates.error is not None or program.accumulates.num_passes > 1


def _attending(program: Program, cluster: Cluster, layout: str | None, attention: str | None) -> Program:
    is_ring = layout is not None and RING in layout.split("+")
    if is_ring:
        return program.variant(replace(program.form, context=RING))
    return with_attention(program, cluster, attention)


def check_request(cluster: Cluster, layout: str | None, mesh: MeshShape | None) -> None:
    """Checks that a search can price a layout and a mesh.

    Raises:
      SpanaxError: the layout or mesh is unknown or does not fit the cluster.
    """
    if layout is not None:
        for part in layout.removesuffix("+seq").split("+"):
            if part not in {*PRESETS, *STORING}:
                raise SpanaxError(f"unknown layout '{layout}'.", fix=nearest(layout, PRESETS))
    if mesh is None:
        return
    for axis in mesh.names:
        if axis not in AXES:
            raise SpanaxError(f"unknown mesh axis '{axis}'.", where=f"mesh {mesh}", fix=nearest(axis, AXES))
    if not is_standard(mesh):
        ordered = ",".join(f"{axis}={size}" for axis, size in sorted(mesh.axes, key=lambda pair: AXES.index(pair[0])))
        raise SpanaxError(
            f"a search prices mesh axes in the order {', '.join(AXES)} only.", where=f"mesh {mesh}", fix=ordered
        )
    if cluster.num_devices % mesh.size:
        raise SpanaxError(
            f"mesh {mesh} needs {mesh.size} devices, and the cluster has {cluster.num_devices}.",
            fix=f"a mesh whose product divides {cluster.num_devices}",
        )


@dataclass(frozen=True, eq=False)
class _Priced:
    family: Family
    program: Program
    terms: Terms
    grid: Grid
    memory: MemoryUse
    costs: Costs


def _programs(program: Program, remat: Sequence[str] | None, rejected: Rejections) -> dict[str, Program]:
    """Returns the program under each policy, in one microbatch; counts unsupported policies in `rejected`.

    Raises:
      SpanaxError: the program supports none of the requested policies.
    """
    programs, errors = dict[str, Program](), list[SpanaxError]()
    for name in REMAT if remat is None else remat:
        try:
            policy = program.form.remat if name == program.remat else name
            programs[name] = program.variant(replace(program.form, remat=policy, microbatches=1))
        except SpanaxError as error:
            rejected[Reason(Code.NO_REMAT, name, detail=first_line(error))] += 1
            errors.append(error)
    if remat and not programs:
        raise errors[0]
    return programs or {program.remat: program}


def _requested(
    family: Family, layout: str | None, mesh: MeshShape | None, pipeline: bool, rejected: Rejections
) -> Family:
    """Returns the family with the requested meshes only."""
    if layout is None and mesh is None and pipeline:
        return family
    requested = None if mesh is None else {(axis, size) for axis, size in mesh.axes if size > 1}
    columns = []
    for column, (sizes, stages) in enumerate(zip(family.sizes.T.tolist(), family.num_stages, strict=True)):
        shape = mesh_of(sizes)
        if stages > 1 and not pipeline:
            continue
        if requested in (None, set(shape.axes) - {("data", 1)}):
            name = layout_on(family.storing, family.sequence, shape).name
            if layout in (None, name) or (layout == as_ring(name) and layout != name):
                columns.append(column)
                continue
        rejected[Reason(Code.NOT_REQUESTED)] += 1
    return replace(family, sizes=family.sizes[:, columns], num_stages=family.num_stages[columns])


def _price(
    programs: Iterable[Program],
    space: Sequence[Family],
    grids: Sequence[list[Grid]],
    cluster: Cluster,
    assumptions: Assumptions,
) -> list[_Priced]:
    """Prices every mesh of every family under every policy and schedule."""
    table, result = Table(cluster, AXES, sum(grids, []), assumptions), list[_Priced]()
    indices = [[(grid, table.select(grid)) for grid in family_grids] for family_grids in grids]
    states = [state_of(family.resolver) for family in space]
    for program in programs:
        cache = ShardingCache()
        for family, state, family_grids in zip(space, states, indices, strict=True):
            if not family_grids:
                continue
            sharded = ShardedProgram(family.resolver.of(program), program.step, cache)
            layout = LayoutCosts(sharded, state, cluster, assumptions)
            for grid, grid_table in family_grids:
                memory, costs = layout.memory(grid), layout.costs(grid, grid_table)
                result.append(_Priced(family, program, layout.terms, grid, memory, costs))
    return result


def _grids(family: Family, batch_size: int, traced_batch: int, microbatches: int | None, num_layers: int) -> list[Grid]:
    """Returns a grid per schedule: every mesh of a family with every possible number of microbatches."""
    num_shards = family.sizes[[AXES.index(axis) for axis in ("data", "fsdp", "expert")]].prod(0)
    grids = []
    for schedule in SCHEDULES:
        num_chunks = 2 if schedule == "interleaved" else 1
        pairs = [
            (column, count)
            for column, (stages, shards) in enumerate(zip(family.num_stages, num_shards, strict=True))
            if (stages > 1 or schedule == "1f1b") and (num_chunks == 1 or num_layers >= stages * num_chunks)
            for count in _microbatches(batch_size // int(shards), int(stages), schedule)
            if microbatches in (None, count)
        ]
        if pairs:
            columns, counts = np.asarray(pairs).T
            scale = batch_size / counts / traced_batch
            sizes, stages = family.sizes[:, columns], family.num_stages[columns]
            grids.append(Grid(sizes, stages, counts, scale, schedule, num_chunks, num_layers))
    return grids


@functools.cache
def _microbatches(per_device: int, stages: int, schedule: str) -> list[int]:
    """Returns powers of two and one example per microbatch; a pipeline needs at least one microbatch per stage."""
    counts = {1 << power for power in range(per_device.bit_length()) if per_device % (1 << power) == 0} | {per_device}
    return sorted(c for c in counts if stages == 1 or (c >= stages and (schedule != "interleaved" or c % stages == 0)))


def _ranked(
    priced: Sequence[_Priced], cluster: Cluster, top: int, each: bool, rejected: Rejections
) -> tuple[tuple[Candidate, ...], tuple[Candidate, ...], tuple[Candidate, ...]]:
    """Returns the fastest that fit, the fastest that do not fit and, if none fits, those of the lowest peak memory."""
    rows = []
    for index, entry in enumerate(priced):
        peak, limit = upper_bytes(entry.program, cluster.chip, entry.memory.peak_bytes), cluster.memory_bytes
        fits = np.full(peak.shape, True) if limit is None else peak <= limit
        rejected[Reason(Code.TOO_LARGE)] += int(np.count_nonzero(~fits))
        columns = np.arange(peak.size)
        rows.append(
            np.stack([np.full(peak.shape, index), columns, entry.costs.step_seconds, peak, fits, _kinds(entry)])
        )
    if not rows:
        return (), (), ()
    table = np.concatenate(rows, axis=1)
    repeated = _repeated(priced, table)
    rejected[Reason(Code.SAME_COST)] += len(repeated)
    table = np.delete(table, repeated, axis=1)
    fitting, too_large = table[:, table[4] > 0], table[:, table[4] == 0]

    def candidates(rows: np.ndarray, order: np.ndarray) -> tuple[Candidate, ...]:
        return tuple(_candidate(priced, rows[:, column]) for column in order)

    # Ties in time are ordered by memory, then by enumeration.
    fastest = []
    for part in (fitting, too_large):
        order = np.lexsort((part[1], part[0], part[3], part[2].round(9)))
        firsts = np.unique(part[5, order], return_index=True)[1] if each else np.arange(0)
        fastest.append(candidates(part, order[np.union1d(np.arange(min(top, order.size)), firsts)]))
    leanest = np.lexsort((too_large[1], too_large[0], too_large[2], too_large[3]))[:3]
    return fastest[0], fastest[1], () if fastest[0] else candidates(too_large, leanest)


def _repeated(priced: Sequence[_Priced], table: np.ndarray) -> list[int]:
    """Returns the columns of `_ranked` whose cost is the same without sequence parallelism: the same layout."""
    is_sequence = np.asarray([entry.family.sequence for entry in priced])[table[0].astype(int)]
    plain, sequence = np.flatnonzero(~is_sequence), np.flatnonzero(is_sequence)
    sequence = sequence[np.isin(table[2, sequence], table[2, plain])]
    plain = plain[np.isin(table[2, plain], table[2, sequence])]

    def key(column: int) -> tuple[object, ...]:
        which, index, seconds, peak = table[:4, column]
        entry, index = priced[int(which)], int(index)
        grid, costs = entry.grid, entry.costs
        return (
            entry.program.remat, entry.family.storing, grid.schedule, *grid.sizes[:, index], grid.num_stages[index],
            grid.num_microbatches[index], seconds, peak, costs.flops[index],
        )  # fmt: skip

    known = {key(int(column)) for column in plain}
    return [int(column) for column in sequence if key(int(column)) in known]


def _kinds(priced: _Priced) -> np.ndarray:
    """Returns an integer for the kind of layout of each mesh: its axes, its storage and whether it has stages."""
    family = 2 * list(STORING).index(priced.family.storing) + priced.family.sequence
    bits = np.append(priced.grid.sizes > 1, [priced.grid.num_stages > 1], axis=0)
    return (family << len(bits)) + (1 << np.arange(len(bits))) @ bits


def _candidate(priced: Sequence[_Priced], row: np.ndarray) -> Candidate:
    entry, column = priced[int(row[0])], int(row[1])
    mesh = mesh_of(entry.grid.sizes[:, column].tolist())
    layout = layout_on(entry.family.storing, entry.family.sequence, mesh)
    return Candidate.of(
        layout, entry.family.storing, mesh, entry.program, entry.grid, entry.costs, entry.memory, column
    )
