"""Search: every layout of a program on a cluster, priced; the best one, and why the others are not."""

import math
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from spanax.errors import SpanaxError
from spanax.hardware.cluster import Cluster
from spanax.hardware.mesh import MeshShape
from spanax.plan.bubble import num_in_flight
from spanax.plan.cost import Assumptions, Costs, Grid, Links, price
from spanax.plan.memory import Held, held, state_of, walk
from spanax.plan.space import AXES, Family, families, layout_on, mesh_of
from spanax.plan.terms import Terms, tally
from spanax.trace.program import Program
from spanax.units import bytes_text

REMAT = ("none", "dots", "full")
SCHEDULES = ("1f1b", "interleaved")
RESERVE = 0.05
"""Share of the memory left free, for fragments and what a compiler adds. Source: compiled steps, docs/planning.md."""


@dataclass(frozen=True)
class Candidate:
    """One layout with its price. Bytes and seconds are of one device and one step."""

    layout: str
    storing: str
    sequence: bool
    mesh: MeshShape
    num_stages: int
    schedule: str
    num_chunks: int
    remat: str
    microbatches: int
    step_seconds: float
    seconds: dict[str, float]
    memory: dict[str, int]
    flops: float

    @property
    def peak_bytes(self) -> int:
        """Bytes at the fullest moment."""
        return sum(self.memory.values())

    @property
    def bottleneck(self) -> str:
        """What most of the step goes to, in a sentence."""
        name, seconds = max(self.seconds.items(), key=lambda item: item[1])
        return f"{name} take {100 * seconds / self.step_seconds:.0f} % of the step"


@dataclass(frozen=True)
class Search:
    """What a search found: candidates by time, the first of them the best; and what was left out, by reason.

    `nearest` are the cheapest in memory where none fits.
    """

    cluster: Cluster
    batch_size: int
    candidates: tuple[Candidate, ...]
    nearest: tuple[Candidate, ...]
    rejected: dict[str, int]
    layouts_priced: int
    model_flops: float
    search_seconds: float
    programs: dict[str, Program] = field(repr=False, compare=False)

    @property
    def best(self) -> Candidate | None:
        """The fastest candidate that fits, if any does."""
        return self.candidates[0] if self.candidates else None


def search(
    program: Program,
    cluster: Cluster,
    *,
    batch_size: int | None = None,
    remat: Sequence[str] = REMAT,
    top: int = 20,
    assumptions: Assumptions | None = None,
    pipeline: bool = True,
) -> Search:
    """Price every layout of a program on all devices of a cluster. No device is touched.

    Args:
      program: what `spanax.trace` returned.
      cluster: what `spanax.cluster` or `spanax.local` returned.
      batch_size: examples in a step; the traced batch if left out.
      remat: what the backward pass may keep; only what is written where the program has a train step of its own.
      top: how many candidates are kept.
      assumptions: what no data sheet says.
      pipeline: whether layers may be divided into stages.

    Raises:
      SpanaxError: no rates are known of the cluster's chip, or the batch is no whole number.
    """
    began = time.perf_counter()
    traced_batch = program.batch[0].shape[0]
    batch_size = traced_batch if batch_size is None else batch_size
    if batch_size < 1:
        raise SpanaxError(f"the batch is {batch_size}; it takes a whole number from 1.")
    given = assumptions or Assumptions()
    programs = _programs(program, remat)
    rejected: Counter[str] = Counter()
    found: list[_Priced] = []
    space = families(program, cluster, batch_size, rejected)
    meshes = [np.vstack([one.num_stages[None], one.sizes]) for one in space]
    links = Links(cluster, AXES, np.hstack([np.ones((1 + len(AXES), 0), int), *meshes]))
    for family in space:
        if not pipeline and (family.num_stages > 1).all():
            continue
        state = state_of(family.resolver)
        for name, variant in programs.items():
            resolver = family.resolver.of(variant)
            constraints = resolver.constraints(variant.step)
            terms = tally(resolver, variant.step, constraints)
            level = walk(resolver, variant.step, constraints)
            for schedule in SCHEDULES:
                grid = _grid(family, schedule, batch_size, traced_batch, terms.num_layers, pipeline)
                if grid is None:
                    continue
                in_flight = np.where(
                    grid.num_stages > 1,
                    num_in_flight(schedule, grid.num_stages, grid.num_microbatches, grid.num_chunks),
                    1,
                )
                memory = held(
                    state, level, grid.sizes, num_stages=grid.num_stages, num_microbatches=grid.num_microbatches,
                    in_flight=in_flight, scale=grid.scale, fused_attention=given.fused_attention,
                )  # fmt: skip
                found.append(_Priced(family, name, terms, grid, memory, price(terms, cluster, grid, given, links)))
    limit = cluster.memory_bytes
    priced = sum(one.costs.step_seconds.size for one in found)
    best, nearest = _ranked(found, limit, top, rejected)
    flops = _model_flops(programs, batch_size / traced_batch)
    reasons = {reason: count for reason, count in rejected.items() if count}
    return Search(cluster, batch_size, best, nearest, reasons, priced, flops, time.perf_counter() - began, programs)


@dataclass(frozen=True, eq=False)
class _Priced:
    family: Family
    remat: str
    terms: Terms
    grid: Grid
    memory: Held
    costs: Costs


def _programs(program: Program, remat: Sequence[str]) -> dict[str, Program]:
    found = {}
    for name in remat:
        try:
            found[name] = program.with_remat(name)
        except SpanaxError:
            continue
    return found or {program.remat: program}


def _grid(
    family: Family, schedule: str, batch_size: int, traced_batch: int, num_layers: int, pipeline: bool
) -> Grid | None:
    """Every mesh of a family with every number of microbatches it may take."""
    at = {axis: position for position, axis in enumerate(AXES)}
    ways = family.sizes[at["data"]] * family.sizes[at["fsdp"]] * family.sizes[at["expert"]]
    columns, counts = [], []
    num_chunks = 2 if schedule == "interleaved" else 1
    for column, (stages, way) in enumerate(zip(family.num_stages, ways, strict=True)):
        if stages == 1 and schedule != "1f1b" or stages > 1 and not pipeline:
            continue
        if num_chunks > 1 and num_layers % (stages * num_chunks):
            continue
        for count in _microbatches(batch_size // int(way), int(stages), schedule):
            columns.append(column)
            counts.append(count)
    if not columns:
        return None
    picked = np.asarray(columns)
    per_step = np.asarray(counts)
    scale = batch_size / per_step / traced_batch
    return Grid(family.sizes[:, picked], family.num_stages[picked], per_step, scale, schedule, num_chunks)


def _microbatches(per_device: int, stages: int, schedule: str) -> list[int]:
    """Powers of two, and all of the batch one by one; a pipeline wants at least as many as it has stages."""
    counts = {1 << power for power in range(per_device.bit_length()) if per_device % (1 << power) == 0} | {per_device}
    return sorted(c for c in counts if stages == 1 or (c >= stages and (schedule != "interleaved" or c % stages == 0)))


def _ranked(
    found: Sequence[_Priced], limit: int | None, top: int, rejected: Counter[str]
) -> tuple[tuple[Candidate, ...], tuple[Candidate, ...]]:
    """The fastest of those that fit; or, if none does, those that need least."""
    rows = []
    for which, one in enumerate(found):
        peak = one.memory.peak_bytes / (1 - RESERVE)
        fits = np.full(peak.shape, True) if limit is None else peak <= limit
        rejected["it does not fit into memory"] += int((~fits).sum())
        rows.append(np.stack([np.full(peak.shape, which), np.arange(peak.size), one.costs.step_seconds, peak, fits]))
    if not rows:
        return (), ()
    table = np.concatenate(rows, axis=1)
    fitting, others = table[:, table[4] > 0], table[:, table[4] == 0]
    # Equal times: what needs less memory first; then in the order in which they were made.
    order = np.lexsort((fitting[1], fitting[0], fitting[3], fitting[2].round(9)))[:top]
    if order.size:
        return tuple(_candidate(found, fitting[:, at]) for at in order), ()
    order = np.lexsort((others[1], others[0], others[2], others[3]))[:3]
    return (), tuple(_candidate(found, others[:, at]) for at in order)


def _candidate(found: Sequence[_Priced], row: np.ndarray) -> Candidate:
    one, at = found[int(row[0])], int(row[1])
    family, grid = one.family, one.grid
    sizes = [int(size) for size in grid.sizes[:, at]]
    mesh = mesh_of(sizes)
    return Candidate(
        layout=layout_on(family.storing, family.sequence, mesh).name,
        storing=family.storing,
        sequence=family.sequence,
        mesh=mesh,
        num_stages=int(grid.num_stages[at]),
        schedule=grid.schedule,
        num_chunks=grid.num_chunks,
        remat=one.remat,
        microbatches=int(grid.num_microbatches[at]),
        step_seconds=float(one.costs.step_seconds[at]),
        seconds={name: float(values[at]) for name, values in one.costs.terms.items()},
        memory={name: math.ceil(values[at]) for name, values in one.memory.groups.items()},
        flops=float(one.costs.flops[at]),
    )


def _model_flops(programs: dict[str, Program], scale: float) -> float:
    """FLOPs of the matmuls of a step without recomputation, attention scores counted in full.

    Source: the forward pass, and twice that on the way back: to the inputs and to the weights (PaLM, appendix B).
    """
    from spanax.trace.axes import CONTRACTIONS
    from spanax.trace.census import Phase, contraction_flops

    program = next(iter(programs.values()))
    graph = program.step.graph
    kinds = [kind for kind in program.step.census if kind.op.name in CONTRACTIONS and kind.phase == Phase.FORWARD]
    return 3.0 * scale * sum(kind.runs * contraction_flops(graph, kind.op) for kind in kinds)


def shortfall(found: Search) -> str:
    """Why nothing fits, in a sentence: how much the leanest layout needs, and how much there is."""
    if not found.nearest or found.cluster.memory_bytes is None:
        return "no layout divides these devices and this batch"
    needed = found.nearest[0].peak_bytes / (1 - RESERVE)
    there = bytes_text(found.cluster.memory_bytes)
    return f"the leanest layout needs {bytes_text(needed)} a device, and there are {there}"
