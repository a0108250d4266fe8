"""Ranks priced layouts by step time; leaves out layouts of the same cost, and repeated attention kernels."""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from spanax.plan.candidate import Candidate
from spanax.plan.cost.peak_memory import MemoryUse
from spanax.plan.cost.step_time import Costs, Grid
from spanax.plan.defaults import REPEATED_MARGIN
from spanax.plan.reason import Code, Reason
from spanax.plan.space import AXES, STORING, Family, Rejections, layout_on, mesh_of
from spanax.plan.spmd.terms import Terms
from spanax.trace.jaxpr.remat_policies import RING
from spanax.trace.program import Program


@dataclass(frozen=True, eq=False)
class Priced:
    """Every mesh of a family under one variant of the program and one schedule, with its cost."""

    family: Family
    program: Program
    terms: Terms
    grid: Grid
    memory: MemoryUse
    costs: Costs
    repeats: tuple[int, ...] = ()

    def fits(self, limit: int | None) -> np.ndarray:
        """Returns for each mesh whether its upper estimate fits into `limit` bytes."""
        return self.memory.upper_bytes <= (np.inf if limit is None else limit)

    @property
    def is_repeated(self) -> np.ndarray:
        """For each mesh, whether devices repeat the work of an attention kernel."""
        return np.asarray((self.grid.sizes[list(self.repeats)] > 1).any(0))

    def ranks(self, stage_margin: float) -> np.ndarray:
        """Returns the step time of each mesh, with margins for stages and repeated FLOPs, which it is ranked by."""
        in_stages = np.where(self.grid.num_stages > 1, 1 + stage_margin, 1)
        return self.costs.step_seconds * in_stages * np.where(self.costs.repeats_most, 1 + REPEATED_MARGIN, 1)

    def select(self, columns: np.ndarray) -> "Priced":
        """Returns the priced meshes of some columns."""
        grid = self.grid.select(columns)
        return replace(self, grid=grid, memory=self.memory.select(columns), costs=self.costs.select(columns))


def without_repeated_kernels(priced: Sequence[Priced], limit: int | None, rejected: Rejections) -> list[Priced]:
    """Returns the layouts without those that repeat the work of an attention kernel; all, where no other fits."""
    if not any((entry.fits(limit) & ~entry.is_repeated).any() for entry in priced):
        return list(priced)
    rejected[Reason(Code.KERNEL_REPEATED)] += sum(int(np.count_nonzero(entry.is_repeated)) for entry in priced)
    return [entry.select(np.flatnonzero(~entry.is_repeated)) if entry.repeats else entry for entry in priced]


def slowest_rank(priced: Sequence[Priced], limit: int | None, top: int | None, stage_margin: float) -> float:
    """Returns a rank that `top` distinct layouts do not exceed; infinity where fewer fit, or where `top` is None."""
    rows = []
    for entry in priced if top is not None else ():
        fits = entry.fits(limit)
        ranks = entry.ranks(stage_margin).round(9)
        meshes = np.stack([entry.grid.num_stages, *entry.grid.sizes, ranks])[:, fits]
        rows.append(meshes[:, np.argsort(meshes[-1], kind="stable")])
    if top is None or not rows:
        return np.inf
    table = np.concatenate(rows, axis=1)
    _, first = np.unique(table[:-1, np.argsort(table[-1], kind="stable")], axis=1, return_index=True)
    ranks = np.unique(np.sort(table[-1])[first])
    return float(ranks[top - 1]) if ranks.size >= top else np.inf


def ranked(
    priced: Sequence[Priced],
    limit: int | None,
    top: int,
    each: bool,
    distinct: bool,
    rejected: Rejections,
    stage_margin: float = 0.0,
) -> tuple[tuple[Candidate, ...], tuple[Candidate, ...], tuple[Candidate, ...]]:
    """Returns the fastest that fit, the fastest that do not fit and, if none fits, those of the lowest peak memory.

    Layouts with stages rank as if they were slower by `stage_margin`, a fraction.
    """
    rows = []
    for index, entry in enumerate(priced):
        peak = entry.memory.upper_bytes
        fits = entry.fits(limit)
        rejected[Reason(Code.TOO_LARGE)] += int(np.count_nonzero(~fits))
        columns = np.arange(peak.size)
        ranks = entry.ranks(stage_margin)
        rows.append(
            np.stack([np.full(peak.shape, index), columns, entry.costs.step_seconds, peak, fits, _kinds(entry), ranks])
        )
    if not rows:
        return (), (), ()
    table = np.concatenate(rows, axis=1)
    repeated = _repeated(priced, table)
    rejected[Reason(Code.SAME_COST)] += len(repeated)
    table = np.delete(table, repeated, axis=1)
    fitting = table[:, table[4] > 0]
    too_large = table[:, table[4] == 0]

    def candidates(rows: np.ndarray, order: np.ndarray) -> tuple[Candidate, ...]:
        return tuple(_candidate(priced, rows[:, column]) for column in order)

    # Ties in time are ordered by memory, then by enumeration.
    fastest = []
    for part in (fitting, too_large):
        order = np.lexsort((part[1], part[0], part[3], part[6].round(9)))
        if distinct:
            same, order = order, _distinct(priced, part, order)
            rejected[Reason(Code.SAME_SHARDING)] += (same.size - order.size) * (part is fitting)
        firsts = np.unique(part[5, order], return_index=True)[1] if each else np.arange(0)
        fastest.append(candidates(part, order[np.union1d(np.arange(min(top, order.size)), firsts)]))
    leanest = np.lexsort((too_large[1], too_large[0], too_large[2], too_large[3]))[:3]
    return fastest[0], fastest[1], () if fastest[0] else candidates(too_large, leanest)


def _repeated(priced: Sequence[Priced], table: np.ndarray) -> list[int]:
    """Returns the columns of `_ranked` whose cost is the same without sequence parallelism: the same layout."""
    is_sequence = np.asarray([entry.family.sequence for entry in priced])[table[0].astype(int)]
    plain = np.flatnonzero(~is_sequence)
    sequence = np.flatnonzero(is_sequence)
    sequence = sequence[np.isin(table[2, sequence], table[2, plain])]
    plain = plain[np.isin(table[2, plain], table[2, sequence])]

    def key(column: int) -> tuple[object, ...]:
        which, index, seconds, peak = table[:4, column]
        entry, index = priced[int(which)], int(index)
        grid = entry.grid
        costs = entry.costs
        return (
            entry.program.remat,
            entry.family.storing,
            grid.schedule,
            *grid.sizes[:, index],
            grid.num_stages[index],
            grid.num_microbatches[index],
            seconds,
            peak,
            costs.flops[index],
        )

    known = {key(int(column)) for column in plain}
    return [int(column) for column in sequence if key(int(column)) in known]


def _distinct(priced: Sequence[Priced], table: np.ndarray, order: np.ndarray) -> np.ndarray:
    """Returns the order without all but the first column of each sharding.

    A sharding is a family's storage, the mesh of a stage and the number of stages. Layouts of equal seconds, FLOPs and
    bytes in each group of memory, under the same remat policy and schedule, have the same sharding under two names.
    """
    kinds = [(entry.family.storing, entry.family.sequence, entry.program.context == RING) for entry in priced]
    numbers = {kind: number for number, kind in enumerate(dict.fromkeys(kinds))}
    which, index = table[:2].astype(int)  # `which` is sorted: the table has one entry after the other
    rows = np.empty((len(AXES) + 2, table.shape[1]), int)
    for number, start, end in _ranges(which, len(priced)):
        grid = priced[number].grid
        columns = index[start:end]
        rows[0, start:end] = numbers[kinds[number]]
        rows[1:, start:end] = [grid.num_stages[columns], *grid.sizes[:, columns]]
    codes = np.zeros(table.shape[1], int)
    for row in rows:
        values, inverse = np.unique(row, return_inverse=True)
        codes = codes * len(values) + inverse.reshape(-1)
    firsts = order[np.sort(np.unique(codes[order], return_index=True)[1])]
    texts = np.empty(firsts.size, object)
    by_entry = np.argsort(which[firsts], kind="stable")
    for number, start, end in _ranges(which[firsts[by_entry]], len(priced)):
        places = by_entry[start:end]
        texts[places] = _cost_texts(priced[number], index[firsts[places]])
    known = dict[str, int]()
    for text, column in zip(texts.tolist(), firsts.tolist(), strict=True):
        known.setdefault(text, column)
    return np.asarray([*known.values()], int)


def _ranges(which: np.ndarray, count: int) -> Iterator[tuple[int, int, int]]:
    """Yields each number of a sorted array, with the start and the end of its range."""
    bounds = np.searchsorted(which, np.arange(count + 1)).tolist()
    return ((number, *pair) for number, pair in enumerate(itertools.pairwise(bounds)) if pair[0] < pair[1])


def _cost_texts(entry: Priced, columns: np.ndarray) -> list[str]:
    """Returns a text for each of some meshes: equal for layouts of the same cost, up to rounding."""
    grid = entry.grid
    prefix = f"{entry.program.remat} {entry.grid.schedule} "
    values = [*entry.costs.terms.values(), *entry.memory.groups.values()]
    # Adding zero makes a negative zero positive.
    rows = np.stack([grid.num_stages, grid.num_microbatches, *values])[:, columns] + 0.0
    numbers = "%d %d" + " %.9g" * len(values)
    return [prefix + numbers % tuple(row) for row in rows.T.tolist()]


def _kinds(priced: Priced) -> np.ndarray:
    """Returns an integer for the kind of layout of each mesh: its axes, its storage and whether it has stages."""
    family = 2 * list(STORING).index(priced.family.storing) + priced.family.sequence
    bits = np.append(priced.grid.sizes > 1, [priced.grid.num_stages > 1], axis=0)
    return (family << len(bits)) + (1 << np.arange(len(bits))) @ bits


def _candidate(priced: Sequence[Priced], row: np.ndarray) -> Candidate:
    entry = priced[int(row[0])]
    column = int(row[1])
    mesh = mesh_of(entry.grid.sizes[:, column].tolist())
    layout = layout_on(entry.family.storing, entry.family.sequence, mesh)
    return Candidate.of(
        layout, entry.family.storing, mesh, entry.program, entry.grid, entry.costs, entry.memory, column
    )
