"""Prices families of meshes under variants of a program, without those that can neither fit nor be chosen."""

from collections import Counter
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from spanax.displays import doing
from spanax.hardware.cluster import Cluster
from spanax.hardware.mesh import MeshShape
from spanax.plan.candidates.attention_kernel import repeating_axes, ring_axes
from spanax.plan.candidates.grids import PLAIN, ZERO_BUBBLE, Grids
from spanax.plan.candidates.ranking import Priced, slowest_rank
from spanax.plan.candidates.variants import MOST_IN_RING, REMAT, Variants
from spanax.plan.cost.calibration import Assumptions
from spanax.plan.cost.memory.state import State
from spanax.plan.cost.roofline import shard_counts
from spanax.plan.cost.step_time import IDLE, Grid, GridTable, Table, price
from spanax.plan.evaluate import LayoutCosts
from spanax.plan.reason import Code, Reason
from spanax.plan.sharding.assign import Assignment
from spanax.plan.sharding.resolve import Resolver
from spanax.plan.space import AXES, Family, Rejections
from spanax.plan.spmd.compiler import Compiler
from spanax.plan.spmd.count_terms import count_terms
from spanax.plan.spmd.deferred_reductions import deferred_reductions
from spanax.plan.spmd.sharded_program import ShardedProgram, ShardingCache, joined_step
from spanax.trace.program import Program


@dataclass(frozen=True, eq=False)
class Pricer:
    """Families with their meshes and schedules, to be priced under any variants of the program.

    Attributes:
      space: the families.
      grids: the meshes and schedules of each family; None where none is priced.
      states: the state of each family.
      tables: the part of a table of links and matmuls of each family.
      cluster: the devices.
      assumptions: constants that are not in data sheets.
      left_out: the candidates that are not priced, under each variant of the program.
      known: the costs of layouts that were priced, for other candidates of the same families.
    """

    space: Sequence[Family]
    grids: Sequence[Grids | None]
    states: Sequence[State]
    tables: Sequence[GridTable | None]
    cluster: Cluster
    assumptions: Assumptions
    left_out: Rejections
    known: dict[tuple[Program, Assignment, MeshShape], LayoutCosts] = field(default_factory=dict)

    @staticmethod
    def of(
        space: Sequence[Family],
        cluster: Cluster,
        assumptions: Assumptions,
        grids: Sequence[Grids | None],
        states: Sequence[State],
    ) -> "Pricer":
        """Returns the pricer of some families; its table is filled with the first price."""
        return Pricer(space, grids, states, [None] * len(space), cluster, assumptions, Counter())._with_table()

    def _with_table(self) -> "Pricer":
        grids = [each.plain for each in self.grids if each]
        table = Table(self.cluster, AXES, grids, self.assumptions)
        return replace(self, tables=[None if each is None else table.select(each.plain) for each in self.grids])

    def select(self, chosen: Sequence[np.ndarray]) -> "Pricer":
        """Returns the pricer of some candidates: a mask over `Grids.plain` for each family with grids."""
        masks = iter(chosen)
        grids = [None if each is None else each.select(next(masks)) for each in self.grids]
        return replace(self, grids=grids)._with_table()

    def possible(self, *, repeats: bool) -> "Pricer":
        """Returns the pricer of the candidates whose state fits, and that repeat no attention kernel unless `repeats`.

        No other candidate is chosen where one of these fits; `left_out` counts them.
        """
        chosen = list[np.ndarray]()
        left_out = Counter(self.left_out)
        limit = self.cluster.memory_bytes
        for family, grids, state in zip(self.space, self.grids, self.states, strict=True):
            if grids is None:
                continue
            grid = grids.plain
            least = state.least_bytes(shard_counts(grid.sizes), grid.shares, grid.num_microbatches, grid.scale)
            fits = least <= (np.inf if limit is None else limit)
            if not repeats and repeating_axes(family.resolver, AXES):
                left_out[Reason(Code.KERNEL_REPEATED)] += grids.size
                fits = np.zeros_like(fits)
            else:
                few = grids.select(fits)
                left_out[Reason(Code.TOO_LARGE)] += grids.size - (0 if few is None else few.size)
            chosen.append(fits)
        return replace(self.select(chosen), left_out=left_out)

    def unfit(self, priced: Sequence[Priced], bound: "Bound", slowest: float) -> "Pricer":
        """Returns the pricer of the candidates that do not fit, as priced, and would rank before `slowest` if they did.

        With more recomputation they may fit, and are slower.
        """
        by_schedule = {(id(entry.family), entry.grid.schedule, entry.grid.num_chunks): entry for entry in priced}
        chosen = []
        for family, grids in zip(self.space, self.grids, strict=True):
            if grids is None:
                continue
            needed = np.zeros(grids.plain.scale.size, bool)
            for grid, columns in ((grids.plain, np.arange(needed.size)), *grids.others):
                entry = by_schedule.get((id(family), grid.schedule, grid.num_chunks))
                if entry is not None:
                    needed[columns] |= ~entry.fits(bound.limit) & (entry.ranks(bound.stage_margin) < slowest)
            chosen.append(needed)
        return self.select(chosen)

    def in_rings(self, priced: Sequence[Priced], bound: "Bound", slowest: float) -> "Pricer":
        """Returns the pricer of the candidates that may rank before `slowest` with ring attention.

        Args:
          priced: the same candidates, and others, with the attention of the program.
          bound: what the search returns.
          slowest: a rank.
        """
        least = dict[tuple[object, ...], float]()
        for entry in priced:
            grid = entry.grid
            margin = np.where(entry.grid.num_stages > 1, 1 + bound.stage_margin, 1)
            if grid.schedule == PLAIN:
                seconds = (entry.costs.without_attention() * margin).tolist()
                for key, bound_seconds in zip(_keys(entry.family, grid), seconds, strict=True):
                    least[key] = min(bound_seconds, least.get(key, np.inf))
        chosen = [
            np.asarray([least.get(key, 0.0) < slowest for key in _keys(family, grids.plain)], bool)
            for family, grids in zip(self.space, self.grids, strict=True)
            if grids is not None
        ]
        return self.select(chosen)

    def by_ring(self, program: Program, rejected: Rejections, most: int = MOST_IN_RING) -> "Pricer":
        """Returns the pricer with a family for each number of devices of a ring: which blocks are masked depends on it.

        Rings of more than `most` devices are left out.
        """
        space = list[Family]()
        every = list[Grids | None]()
        states = list[State]()
        for family, grids, state in zip(self.space, self.grids, self.states, strict=True):
            axes = [AXES.index(axis) for axis in ring_axes(family.resolver.of(program))] if grids else []
            sizes = grids.plain.sizes[axes].prod(0) if grids else np.zeros(0, int)
            for size in np.unique(sizes).tolist():
                few = grids.select(sizes == size) if grids else None
                if few is not None and size > most:
                    rejected[Reason(Code.RING_TOO_LONG, size=most)] += few.size
                elif few is not None:
                    mesh = MeshShape(tuple(zip(AXES, few.plain.sizes[:, 0].tolist(), strict=True)))
                    space.append(replace(family, resolver=replace(family.resolver, mesh=mesh)))
                    every.append(few)
                    states.append(state)
        return replace(self, space=space, grids=every, states=states)._with_table()

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to price."""
        return not any(self.grids)

    def price(self, programs: Iterable[Program], rejected: Rejections) -> list[Priced]:
        """Prices every mesh of every family under every policy and schedule."""
        result = list[Priced]()
        num_families = sum(1 for grids in self.grids if grids)
        for program in programs:
            num_priced = 0
            rejected.update(self.left_out)
            for family, grids, table, layout in self.layouts(program):
                num_priced += 1
                doing(f"pricing shardings: {num_priced} of {num_families}, {program.options}")
                repeats = tuple(AXES.index(axis) for axis in repeating_axes(layout.sharded.resolver, AXES))
                plain = layout.costs(grids.plain, table)
                costs = [(grids.plain, plain)]
                for grid, columns in grids.others:
                    if grid.schedule == ZERO_BUBBLE and program.remat != REMAT[0]:
                        rejected[Reason(Code.STORES_RECOMPUTED)] += columns.size
                    else:
                        costs.append((grid, plain.select(columns).scheduled(grid)))
                uses = layout.memory([grid for grid, _ in costs])
                for (grid, seconds), memory in zip(costs, uses, strict=True):
                    result.append(Priced(family, program, layout.terms, grid, memory, seconds, repeats))
        return result

    def layouts(self, program: Program) -> Iterator[tuple[Family, Grids, GridTable | None, LayoutCosts]]:
        """Yields every family with grids, and its costs under a variant of the program, computed on first access."""
        cache = ShardingCache()
        equal = dict[object, LayoutCosts]()
        layout: LayoutCosts | None = None
        assignment: Assignment | None = None
        resolvers = dict[Assignment, Resolver]()
        for family, grids in zip(self.space, self.grids, strict=True):
            resolver = family.resolver
            is_known = (program, resolver.assignment, resolver.mesh) in self.known
            if grids is not None and not is_known and resolver.assignment not in resolvers:
                resolvers[resolver.assignment] = resolver.of(program)
        step = joined_step(program, resolvers.values())
        for family, state, grids, table in zip(self.space, self.states, self.grids, self.tables, strict=True):
            if grids is None:
                continue
            resolver = family.resolver
            last = layout if assignment is resolver.assignment else None
            assignment = resolver.assignment
            layout = self.known.get((program, assignment, resolver.mesh))
            if layout is None:
                if last is None:
                    sharded = ShardedProgram(resolvers[assignment], step, cache)
                else:  # of one family, as in `by_ring`
                    sharded = last.sharded.on(resolver.mesh)
                signature = sharded.cache, sharded.signature  # `last` may have the cache of other candidates
                layout = LayoutCosts(sharded, state, self.cluster, self.assumptions, equal.get(signature), last)
                equal.setdefault(signature, layout)
                self.known[program, assignment, resolver.mesh] = layout
            yield family, grids, table, layout


def least_seconds(pricer: Pricer, program: Program, labels: Container[int | None]) -> float:
    """Returns a lower bound of the step time of every candidate, however attention is computed and under any policy.

    Operations with some classes are not counted, so that the bound holds where these are sharded in another way.
    """
    compiler = Compiler.of(pricer.cluster)
    classes = program.step.axes.classes
    left_out = {
        group.op
        for group in program.step.op_groups
        if any(label in labels for value in (*group.op.inputs, *group.op.outputs) for label in classes[value])
    }
    least = np.inf
    for _, grids, table, layout in pricer.layouts(program):
        sharded = layout.sharded
        terms = count_terms(sharded, compiler=compiler, late=deferred_reductions(sharded), left_out=left_out)
        costs = price(terms, pricer.cluster, grids.plain, pricer.assumptions, table)
        in_rings = grids.plain.sizes[AXES.index("context")] > 1
        seconds = costs.step_seconds - sum(costs.terms[name] for name in IDLE)
        least = min(least, float(np.where(in_rings, costs.without_attention(), seconds).min()))
    return least


def _keys(family: Family, grid: Grid) -> list[tuple[object, ...]]:
    """Returns what identifies each candidate of a grid under any variant of the program."""
    rows = np.stack([grid.num_stages, grid.num_microbatches, *grid.sizes]).T.tolist()
    return [(family.storing, family.sequence, *row) for row in rows]


@dataclass(frozen=True)
class Bound:
    """What a search returns: the candidates that need not be priced follow from it.

    Attributes:
      limit: the memory of a device, if known.
      top: the number of candidates; None for the fastest of every kind.
      stage_margin: as in `search`.
      counts_stages: as in `search`.
      ring_saves: whether ring attention may be faster where some layout fits without it.
    """

    limit: int | None
    top: int | None
    stage_margin: float
    counts_stages: bool
    ring_saves: bool

    def slowest(self, priced: Sequence[Priced]) -> float:
        """Returns a rank that the search need not exceed."""
        return slowest_rank(priced, self.limit, self.top, self.stage_margin)

    def needs_ring(self, priced: Sequence[Priced]) -> bool:
        """Returns whether ring attention may be faster than every layout that fits; those in stages do not count."""
        fits = any((entry.fits(self.limit) & (entry.grid.num_stages == 1)).any() for entry in priced)
        return self.ring_saves or not fits

    def is_too_large(self, priced: Sequence[Priced]) -> bool:
        """Returns whether some layout does not fit; those in stages count only if `counts_stages` is set."""
        return any(
            (~entry.fits(self.limit) & (self.counts_stages | (entry.grid.num_stages == 1))).any() for entry in priced
        )


def priced_variants(plain: Pricer, rings: Pricer, variants: Variants, bound: Bound) -> tuple[list[Priced], Rejections]:
    """Returns the candidates under all variants of a program, and the number of those that are not priced, by reason.

    If the variants are lazy, prices candidates under a policy that recomputes more only where they do not fit without,
    and ring attention only where it may be fast enough.

    Args:
      plain: the pricer of layouts with the attention of the program.
      rings: that of layouts with ring attention.
      variants: the variants of the program.
      bound: what the search returns.
    """
    rejected = Counter[Reason]()
    priced = _under_policies(plain, variants, variants.under, bound, [], rejected)
    least = variants.policies[0]
    if variants.is_lazy:
        if not bound.needs_ring([entry for entry in priced if entry.program.remat == least]):
            rejected[Reason(Code.RING_SLOWER)] += sum(each.size for each in rings.grids if each)
            return priced, rejected
        rings = rings.in_rings(priced, bound, bound.slowest(priced))
    ring = None if rings.is_empty else variants.in_ring(least)
    rings = rings if ring is None else rings.by_ring(ring, rejected)
    in_rings = [] if ring is None else _under_policies(rings, variants, variants.in_ring, bound, priced, rejected)
    policies = {entry.program.remat for entry in priced}
    has_all = variants.is_lazy or {entry.program.remat for entry in in_rings} == policies
    return [*priced, *(in_rings if has_all else [])], rejected


def _under_policies(
    pricer: Pricer,
    variants: Variants,
    variant: Callable[[str], Program | None],
    bound: Bound,
    others: Sequence[Priced],
    rejected: Rejections,
) -> list[Priced]:
    """Returns the candidates of a pricer under every policy; `others` are candidates that they compete with."""
    priced = list[Priced]()
    last = list[Priced]()
    for policy in variants.policies:
        if variants.is_lazy and policy != variants.policies[0]:
            if not bound.is_too_large(priced):
                break
            pricer = pricer.unfit(last, bound, bound.slowest([*others, *priced]))
            if pricer.is_empty:
                break
        program = variant(policy)
        if program is not None:
            last = pricer.price([program], rejected)
            priced += last
    return priced
