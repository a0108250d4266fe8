"""Searches assignments of named axes to mesh axes that no preset has, by local changes of the best presets."""

import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from spanax.errors import IdleAxisError, SpanaxError, first_line
from spanax.plan.candidate import Candidate, Search, plan_of
from spanax.plan.candidates.moves import assignment_text, moves
from spanax.plan.cost.calibration import Assumptions
from spanax.plan.cost.memory.state import state_of
from spanax.plan.cost.step_time import Grid
from spanax.plan.defaults import ASSIGNMENT_MARGIN, REPEATED_MARGIN
from spanax.plan.evaluate import LayoutCosts
from spanax.plan.layout import Layout
from spanax.plan.presets import context_word, in_words
from spanax.plan.reason import Code, Reason
from spanax.plan.sharding.resolve import Resolver, resolve
from spanax.plan.space import Rejections, layout_on
from spanax.plan.spmd.sharded_program import ShardedProgram, ShardingCache

SEEDS = 3
POOL = 12
"""The number of presets that a local search starts from, each with other mesh axes, of the fastest `POOL`."""

WIDTH = 4
"""The most changes of one layout that are priced before the best of them is changed again."""

MOST_PRICED = 12
MOST_GROUPS = 6_000
"""The most assignments that a local search prices, and the most groups of operations that it walks in all."""

LEAST_GAIN = 1e-3
"""The smallest share of the step time, or of the memory, that a change has to save."""


@dataclass(frozen=True, eq=False)
class _Point:
    """An assignment with its cost; `seed` is the candidate of the preset that it changes."""

    seed: Candidate
    candidate: Candidate
    layout: Layout
    sharded: ShardedProgram

    def cost(self, limit: int | None) -> tuple[bool, float]:
        """Returns a sort key: the step time where the layout fits, and the memory where it does not."""
        fits = self.fits(limit)
        return not fits, self.candidate.step_seconds if fits else self.candidate.upper_bytes

    def fits(self, limit: int | None) -> bool:
        """Returns whether the upper estimate of the memory fits into `limit` bytes."""
        return limit is None or self.candidate.upper_bytes <= limit


def with_assignments(
    result: Search, assumptions: Assumptions, top: int | None = None, stage_margin: float = 0.0
) -> Search:
    """Returns a search with the assignments that a local search adds to its candidates.

    Starts from the fastest presets, prices layouts that differ in one assignment, and continues from the best while
    that saves time, or memory where nothing fits. An assignment ranks as if it were slower by `ASSIGNMENT_MARGIN`.
    Simulated devices share the cores of one chip, so that no assignment saves time there: their search is unchanged.

    Args:
      result: a search over all presets.
      assumptions: constants that are not in data sheets.
      top: the number of candidates to return; None returns all.
      stage_margin: as in `search`.
    """
    if result.cluster.chip.shared:
        return replace(result, candidates=result.candidates[:top], too_large=result.too_large[:top])
    start = time.perf_counter()
    rejected = Counter(result.rejected)
    walked = _Walked(result, assumptions, rejected)
    limit = result.cluster.memory_bytes
    seeds = _seeds(result.candidates[:POOL]) or _seeds((*result.too_large[:1], *result.nearest))
    best_cost = (False, result.best.step_seconds * (1 - LEAST_GAIN) if result.best else np.inf)
    accepted = list[_Point]()
    for seed in seeds:
        first = point = walked.seed(seed)
        while neighbors := walked.neighbors(point):
            best = min(neighbors, key=lambda each: each.cost(limit))
            if best.cost(limit) >= _less(point.cost(limit)):
                break
            point = best
        if point is not first and point.cost(limit) < best_cost and walked.is_possible(point):
            accepted.append(point)
    rejected[Reason(Code.NOT_ASSIGNED)] += walked.num_priced - len(accepted)
    candidates = _merged(result.candidates, [point.candidate for point in accepted], stage_margin)
    is_first = bool(candidates) and candidates[0].assigned is not None
    return replace(
        result,
        candidates=candidates[:top],
        too_large=result.too_large[:top],
        nearest=() if candidates else result.nearest,
        rejected={reason: count for reason, count in rejected.items() if count},
        layouts_priced=result.layouts_priced + walked.num_priced,
        search_seconds=result.search_seconds + time.perf_counter() - start,
        assignment=_reason(candidates[0], result.best) if is_first else None,
    )


def _seeds(candidates: Sequence[Candidate]) -> list[Candidate]:
    """Returns the first candidates without stages whose meshes have other axes."""
    first = dict[object, Candidate]()
    for candidate in candidates:
        if candidate.num_stages == 1:
            first.setdefault(candidate.mesh.names, candidate)
    return [*first.values()][:SEEDS]


def _less(cost: tuple[bool, float]) -> tuple[bool, float]:
    return cost[0], cost[1] * (1 - LEAST_GAIN)


class _Walked:
    """The assignments that a local search has priced, each once, within its budget."""

    def __init__(self, result: Search, assumptions: Assumptions, rejected: Rejections):
        self._result = result
        self._assumptions = assumptions
        self._rejected = rejected
        num_groups = len(next(iter(result.programs.values())).step.op_groups)
        self._num_left = min(MOST_PRICED, MOST_GROUPS // max(1, num_groups))
        self._known = set[object]()
        self._caches: dict[object, ShardingCache] = defaultdict(ShardingCache)
        self.num_priced = 0

    def seed(self, candidate: Candidate) -> _Point:
        """Returns the starting point of a candidate of a preset."""
        layout = layout_on(candidate.storing, candidate.sequence, candidate.mesh)
        sharded = self._sharded(layout, candidate)
        self._known.add(_key(sharded.resolver, candidate))
        return _Point(candidate, candidate, layout, sharded)

    def neighbors(self, point: _Point) -> list[_Point]:
        """Returns assignments that differ from a point in one change, priced; none beyond the budget."""
        result = list[_Point]()
        most = self.num_priced + WIDTH
        for move in moves(point.sharded, point.layout, self._result.pins) if self._num_left else ():
            if self.num_priced == most or not self._num_left:
                break
            try:
                sharded = self._sharded(move.layout, point.seed)
            except IdleAxisError:
                self._rejected[Reason(Code.IDLE_AXIS)] += 1
                continue
            except SpanaxError:
                self._rejected[Reason(Code.SIZE_NOT_DIVISIBLE)] += 1  # all other errors of resolve()
                continue
            key = _key(sharded.resolver, point.seed)
            if key not in self._known:
                self._known.add(key)
                self._num_left, self.num_priced = self._num_left - 1, self.num_priced + 1
                priced = self._priced(point, move.layout, sharded)
                result += [] if priced is None else [priced]
        return result

    def is_possible(self, point: _Point) -> bool:
        """Returns whether a plan can be made of a point; counts the reason in `rejected` if not."""
        try:
            plan_of(self._result, point.candidate)
        except SpanaxError as error:
            self._rejected[Reason(Code.NOT_PLACED, point.candidate.layout, detail=first_line(error))] += 1
            return False
        return True

    def _sharded(self, layout: Layout, candidate: Candidate) -> ShardedProgram:
        program = self._result.program_of(candidate)
        cache = self._caches[candidate.remat, candidate.context, candidate.mesh]
        return ShardedProgram(resolve(program, layout, candidate.mesh, self._result.pins), program.step, cache)

    def _priced(self, point: _Point, layout: Layout, sharded: ShardedProgram) -> _Point | None:
        """Returns a changed point with its cost; None where the point fits and the change saves no time."""
        result = self._result
        program = sharded.resolver.program
        seed = point.seed
        preset = layout_on(seed.storing, seed.sequence, seed.mesh)
        name = in_words(preset.name, context_word(program))
        layout = replace(layout, name=f"{name} ({assignment_text(layout, preset)})")
        ones = np.ones(1, int)
        grid = Grid(
            sizes=np.asarray([[size] for _, size in seed.mesh.axes]),
            num_stages=ones * seed.num_stages,
            num_microbatches=ones * seed.microbatches,
            scale=ones * result.batch_size / seed.microbatches / program.batch_size,
            schedule=seed.schedule,
            num_chunks=seed.num_chunks,
            num_layers=program.step.layer_carry[1],
        )
        layout_costs = LayoutCosts(sharded, state_of(sharded.resolver), result.cluster, self._assumptions)
        costs = layout_costs.costs(grid)
        if point.fits(result.cluster.memory_bytes) and costs.step_seconds[0] >= point.candidate.step_seconds:
            return None
        memory = layout_costs.memory([grid])[0]
        candidate = Candidate.of(layout, seed.storing, seed.mesh, program, grid, costs, memory)
        return _Point(seed, replace(candidate, assigned=layout), layout, sharded)


def _key(resolver: Resolver, seed: Candidate) -> object:
    """Returns what two names of one assignment have in common."""
    ranks = frozenset((axis, frozenset(classes.items())) for axis, classes in resolver.assignment.ranks.items())
    return ranks, seed.mesh, seed.storing, seed.num_stages, seed.remat, seed.microbatches, seed.context


def _merged(presets: Sequence[Candidate], assigned: Sequence[Candidate], stage_margin: float) -> tuple[Candidate, ...]:
    """Returns all candidates by step time, with margins for those whose differences have to be worth it."""

    def rank(candidate: Candidate) -> float:
        margin = (1 + stage_margin * (candidate.num_stages > 1)) * (1 + ASSIGNMENT_MARGIN * bool(candidate.assigned))
        return candidate.step_seconds * margin * (1 + REPEATED_MARGIN * candidate.repeats_most)

    result = list(presets)
    for candidate in sorted(assigned, key=rank):
        position = next((index for index, each in enumerate(result) if rank(each) > rank(candidate)), len(result))
        result.insert(position, candidate)
    return tuple(result)


def _reason(best: Candidate, preset: Candidate | None) -> Reason:
    """Returns why an assignment is better than every preset."""
    if preset is None:
        return Reason(Code.ASSIGNED_FITS, best.layout)
    return Reason(Code.ASSIGNED, best.layout, detail=f"{1 - best.step_seconds / preset.step_seconds:.0%}")
