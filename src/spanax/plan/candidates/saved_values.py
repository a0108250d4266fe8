"""Values to save one by one, where the policies that fit recompute more than a plan needs."""

import math
import time
from collections import Counter
from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

from spanax.errors import SpanaxError, first_line
from spanax.plan.candidate import Candidate, Search, plan_of
from spanax.plan.candidates.variants import REMAT
from spanax.plan.cost.peak_memory import MARGIN
from spanax.plan.cost.roofline import memory_rate
from spanax.plan.cost.step_time import row_seconds
from spanax.plan.defaults import SAVED_VALUES_MARGIN
from spanax.plan.evaluate import Evaluation, evaluate
from spanax.plan.reason import Code, Reason
from spanax.plan.sharding.partition import union
from spanax.plan.space import Rejections
from spanax.plan.spmd.compiler import Compiler
from spanax.plan.spmd.count_terms import matmuls_by_group
from spanax.trace.analysis.fusion import FUSED
from spanax.trace.analysis.recomputation import Recomputation, recomputation, values_around
from spanax.trace.jaxpr.graph import Op
from spanax.trace.jaxpr.remat_policies import NAMED, PartialPolicy, saving
from spanax.trace.program import Program

MOST_SEEDS = 2
"""The most candidates that fit, and that do not fit, for which values are selected: the fastest."""

MOST_TRACED = 3
"""The most choices that a search traces and prices."""

LEAST_GAIN = 0.001
"""The least share of a step that a saved value takes less."""

COSTS = ("step_seconds", "seconds", "memory", "upper_bytes", "flops", "hidden", "host_bytes")
"""The costs of a candidate, which depend on the policy."""


@dataclass(frozen=True)
class _Point:
    """A candidate under a remat policy."""

    candidate: Candidate
    program: Program

    @property
    def upper_bytes(self) -> int:
        """The upper estimate of its peak memory."""
        return self.candidate.upper_bytes

    @property
    def seconds(self) -> float:
        """The step time."""
        return self.candidate.step_seconds


class _Choice(NamedTuple):
    """A remat policy, with its estimated bytes in addition to those of `full`, and its estimated step time."""

    policy: str
    num_bytes: float
    seconds: float


@dataclass(frozen=True)
class _Values:
    """The values that layers may save under one layout.

    Attributes:
      seed: the candidate with the layout.
      choices: the operations of the layers, and the values.
      op_seconds: seconds of every operation in a step.
      num_bytes: the bytes of every value on one device, over all layers.
      all_bytes: the bytes that a step saves which recomputes nothing.
      stored: seconds of such a step.
      full: seconds of a step that saves none of the values.
      per_byte: seconds to write a byte of a value, and to read it.
      num_layers: the number of layers.
    """

    seed: Candidate
    choices: Recomputation
    op_seconds: dict[Op, float]
    num_bytes: dict[int, float]
    all_bytes: float
    stored: float
    full: float
    per_byte: float
    num_layers: int

    def within(self, limit: float) -> _Choice:
        """Returns the fastest choice in a number of bytes: one for the first layers, and another for the others."""
        fitting, larger = values_around(self.choices, self.op_seconds, self.num_bytes, limit, self.per_byte)
        first = self._choice(fitting)
        others = (self._choice(larger), _Choice("none", self.all_bytes, self.stored))
        return min((self._mixed(first, other, limit) for other in others), key=lambda each: each.seconds)

    def _mixed(self, first: _Choice, other: _Choice, limit: float) -> _Choice:
        share = (other.num_bytes - limit) / max(1.0, other.num_bytes - first.num_bytes)
        count = min(max(math.ceil(share * self.num_layers), 0), self.num_layers)
        share = count / self.num_layers
        policies = {0: other.policy, self.num_layers: first.policy}
        policy = policies.get(count) or str(PartialPolicy(first.policy, count, other.policy))
        return _Choice(
            first.policy if first.policy == other.policy else policy,
            share * first.num_bytes + (1 - share) * other.num_bytes,
            share * first.seconds + (1 - share) * other.seconds,
        )

    def _choice(self, saved: frozenset[int]) -> _Choice:
        """Returns the choice of some values, without those that save almost no time."""
        kept = set(saved)
        seconds = self._seconds(kept)
        for value in sorted(saved, key=lambda value: (self.num_bytes[value], value)):
            if self._seconds(kept - {value}) < seconds + LEAST_GAIN * self.stored:
                kept.discard(value)
                seconds = self._seconds(kept)
        names = {self.choices.names[value] for value in kept}
        return _Choice(saving(names), sum(self.num_bytes[value] for value in kept), seconds)

    def _seconds(self, saved: Collection[int]) -> float:
        repeated = self.choices.repeated(saved)
        less = sum(self.op_seconds[op] for op in self.choices.repeated(()) - repeated)
        return self.full - less + self.per_byte * sum(self.num_bytes[value] for value in saved)


def with_saved_values(result: Search, stage_margin: float) -> Search:
    """Returns a search with selected values to save, if its best candidate is faster by `SAVED_VALUES_MARGIN`.

    Selects values for the fastest layouts under the estimated times of single operations; traces and prices the
    fastest selection, and others of more or fewer bytes, by how much memory is left.

    Args:
      result: a search under policies of all layers.
      stage_margin: as in `search`.
    """
    start = time.perf_counter()
    best = result.best
    limit = result.cluster.memory_bytes
    if best is None or limit is None:
        return result
    most = best.step_seconds * (1 + stage_margin * (best.num_stages > 1)) / (1 + SAVED_VALUES_MARGIN)
    seeds = _seeds(result, most)
    rejected = Counter(result.rejected)
    points = list(_traced(result, seeds, limit, most, rejected)) if seeds else []
    if not points:
        return result
    chosen = min((p for p in points if p.upper_bytes <= limit), key=lambda p: p.seconds, default=None)
    is_faster = chosen is not None and chosen.seconds <= most
    rejected[Reason(Code.NOT_SAVED)] += len(points) - is_faster
    searched = replace(
        result,
        rejected={reason: count for reason, count in rejected.items() if count},
        layouts_priced=result.layouts_priced + len(points),
        search_seconds=result.search_seconds + time.perf_counter() - start,
    )
    if chosen is None or not is_faster:
        return searched
    policy = chosen.candidate.remat
    others = [each for each in result.candidates if _sharding(each) != _sharding(chosen.candidate)]
    return replace(
        searched,
        candidates=(chosen.candidate, *others),
        programs={**result.programs, policy: chosen.program},
        saved_values=Reason(Code.SAVED_VALUES, policy, detail=f"{1 - chosen.seconds / best.step_seconds:.0%}"),
    )


def _seeds(result: Search, most: float) -> list[Candidate]:
    """Returns the fastest candidates without stages that recompute, and those that do not fit."""
    recomputing = [each for each in result.candidates if each.num_stages == 1 and each.remat != REMAT[0]]
    too_large = [each for each in result.too_large if each.num_stages == 1 and each.step_seconds < most]
    return recomputing[:MOST_SEEDS] + too_large[:MOST_SEEDS]


def _traced(result: Search, seeds: list[Candidate], limit: int, most: float, rejected: Rejections) -> Iterator[_Point]:
    """Yields the price of the fastest choice, then of those that use what it leaves of the memory, or exceeds."""
    try:
        full = next(iter(result.programs.values())).variant(remat="full")
        named = full.variant(remat=NAMED)
    except SpanaxError:  # it has no layers
        return
    options = list[tuple[_Choice, int, _Values]]()
    for seed in seeds:
        heaviest = _priced(result, seed, full)
        left = limit - heaviest.upper_bytes
        if left > 0:
            values = _values(result, heaviest, named)
            options.append((values.within(left / (1 + MARGIN)), left, values))
    if not options:
        return
    choice, left, values = min(options, key=lambda option: option[0].seconds)
    tried = set(result.programs)
    if choice.seconds > most:
        return
    for _ in range(MOST_TRACED):
        if choice.policy in tried:
            return
        tried.add(choice.policy)
        try:
            point = _priced(result, values.seed, full.variant(remat=choice.policy))
        except SpanaxError as error:
            rejected[Reason(Code.NO_REMAT, choice.policy, detail=first_line(error))] += 1
            return
        yield point
        stored = point.upper_bytes - (limit - left)
        choice = values.within(choice.num_bytes * left / stored if stored > 0 else math.inf)


def _values(result: Search, heaviest: _Point, named: Program) -> _Values:
    """Returns the values that the layers of a candidate may save, which is under `full`, with their costs."""
    seed = heaviest.candidate
    evaluation = _evaluated(result, seed, named)
    sharded = evaluation.layout.sharded
    traced = sharded.traced
    grid = evaluation.grid
    choices = recomputation(traced.traced)
    seconds = dict.fromkeys(choices.ops, 0.0)
    groups, matmuls = matmuls_by_group(sharded, compiler=Compiler.of(result.cluster))
    rows = row_seconds(replace(evaluation.layout.terms, matmuls=matmuls), result.cluster, grid).matmuls
    for group, (row,) in zip(groups, rows.tolist(), strict=True):
        for op, runs in group.ops:
            if op in seconds:
                seconds[op] += row * runs / group.runs

    def local_bytes(value: int) -> float:
        """Returns the bytes of a value on one device, in all layers."""
        scale = float(grid.scale[0]) if sharded.is_batched(value) else 1.0
        runs = choices.ops[choices.producers[value]]
        return runs * scale * sharded.num_bytes(value) / sharded.ways(union(sharded.masks(value)))

    per_byte = 2 * float(grid.num_microbatches[0]) / memory_rate(result.cluster.chip)
    for op in seconds:
        if op.family not in FUSED:
            seconds[op] += per_byte * sum(map(local_bytes, op.outputs))
    kept = {value for plan in traced.memory_plans.values() for value in plan.kept}
    num_bytes = {value: local_bytes(value) for value in choices.names}
    all_bytes = sum(local_bytes(value) for value in choices.needed & kept)
    stored = evaluation.candidate.step_seconds
    num_layers = traced.layer_carry[1]
    return _Values(seed, choices, seconds, num_bytes, all_bytes, stored, heaviest.seconds, per_byte, num_layers)


def _priced(result: Search, seed: Candidate, program: Program) -> _Point:
    """Returns the price of a candidate with the remat policy of a program in place of its own.

    A plan is evaluated on its own mesh, and candidates of a search by families of meshes: all points are evaluated.
    """
    priced = _evaluated(result, seed, program).candidate
    costs = {name: getattr(priced, name) for name in COSTS}
    return _Point(replace(seed, remat=program.remat, **costs), program)


def _evaluated(result: Search, seed: Candidate, program: Program) -> Evaluation:
    candidate = replace(seed, remat=program.remat)
    plan = plan_of(replace(result, programs={program.remat: program}), candidate)
    return evaluate(program, plan, result.cluster)


def _sharding(candidate: Candidate) -> tuple[object, ...]:
    return candidate.assignment, candidate.mesh, candidate.num_stages
