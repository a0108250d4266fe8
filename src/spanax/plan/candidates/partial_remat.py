"""Recomputation in the first layers only, where in all layers it frees more memory than a plan needs."""

import math
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import combinations

from spanax.errors import SpanaxError, first_line
from spanax.plan.candidate import Candidate, Search, plan_of
from spanax.plan.candidates.variants import REMAT
from spanax.plan.defaults import PARTIAL_REMAT_MARGIN
from spanax.plan.evaluate import evaluate
from spanax.plan.reason import Code, Reason
from spanax.plan.space import Rejections
from spanax.trace.jaxpr.remat_policies import PartialPolicy
from spanax.trace.program import Program

MOST_SEEDS = 2
"""The most candidates that fit, and that do not fit, whose partial policies are estimated: the fastest."""

MOST_TRACED = 2
"""The most partial policies that a search traces and prices."""

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


@dataclass(frozen=True)
class _Estimate:
    """The step time under a partial policy, between that of two policies of all layers; `lighter` does not fit."""

    seconds: float
    policy: PartialPolicy
    lighter: _Point


def with_partial_remat(result: Search, stage_margin: float) -> Search:
    """Returns a search with a partial remat policy, if its best candidate is faster by `PARTIAL_REMAT_MARGIN`.

    Memory and time of a step change linearly with the number of layers under a policy. They are interpolated for the
    fastest shardings that do not fit, and only the fastest partial policy is traced and priced.

    Args:
      result: a search under policies of all layers.
      stage_margin: as in `search`.
    """
    start = time.perf_counter()
    best = result.best
    limit = result.cluster.memory_bytes
    num_layers = next(iter(result.programs.values())).step.layer_carry[1]
    if best is None or limit is None or num_layers < 2:
        return result
    most = best.step_seconds * (1 + stage_margin * (best.num_stages > 1)) / (1 + PARTIAL_REMAT_MARGIN)
    estimates = [each for seed in _seeds(result, most) for each in _estimates(result, seed, limit, num_layers)]
    estimate = min(estimates, key=lambda each: each.seconds, default=None)
    if estimate is None or estimate.seconds > most:
        return result
    rejected = Counter(result.rejected)
    points = list(_traced(result, estimate, limit, rejected))
    chosen = min((p for p in points if p.upper_bytes <= limit), key=lambda p: p.seconds, default=None)
    is_faster = chosen is not None and chosen.seconds <= most
    rejected[Reason(Code.NOT_PARTIAL)] += len(points) - is_faster
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
        partial_remat=Reason(Code.PARTIAL_REMAT, policy, detail=f"{1 - chosen.seconds / best.step_seconds:.0%}"),
    )


def _seeds(result: Search, most: float) -> list[Candidate]:
    """Returns the fastest candidates without stages that recompute, and those that do not fit."""
    recomputing = [each for each in result.candidates if each.num_stages == 1 and each.remat != REMAT[0]]
    too_large = [each for each in result.too_large if each.num_stages == 1 and each.step_seconds < most]
    return recomputing[:MOST_SEEDS] + too_large[:MOST_SEEDS]


def _estimates(result: Search, seed: Candidate, limit: int, num_layers: int) -> Iterator[_Estimate]:
    """Yields for each pair of policies of which only the second fits the smallest number of layers that fits."""
    seeded = REMAT.index(seed.remat)
    names = REMAT[: seeded + 1] if seed in result.candidates else REMAT[seeded:]
    points = {name: _priced(result, seed, result.programs[name]) for name in names if name in result.programs}
    for first, second in combinations(points, 2):
        lighter = points[first]
        heavier = points[second]
        if heavier.upper_bytes <= limit < lighter.upper_bytes:
            share = (lighter.upper_bytes - limit) / (lighter.upper_bytes - heavier.upper_bytes)
            count = math.ceil(share * num_layers)
            if count < num_layers:
                seconds = lighter.seconds + count / num_layers * (heavier.seconds - lighter.seconds)
                yield _Estimate(seconds, PartialPolicy(second, count, first), lighter)


def _traced(result: Search, estimate: _Estimate, limit: int, rejected: Rejections) -> Iterator[_Point]:
    """Yields the price of an estimated policy, then that with the number of layers that this price implies."""
    policy = estimate.policy
    lighter = estimate.lighter
    excess = lighter.upper_bytes - limit
    for _ in range(MOST_TRACED):
        try:
            program = lighter.program.variant(remat=str(policy))
            point = _priced(result, lighter.candidate, program)
        except SpanaxError as error:
            rejected[Reason(Code.NO_REMAT, str(policy), detail=first_line(error))] += 1
            return
        yield point
        saved = lighter.upper_bytes - point.upper_bytes
        count = math.ceil(excess * policy.num_layers / saved) if saved > 0 else policy.num_layers
        if count == policy.num_layers:
            return
        policy = replace(policy, num_layers=count)


def _priced(result: Search, seed: Candidate, program: Program) -> _Point:
    """Returns the price of a candidate with the remat policy of a program in place of its own.

    A plan is evaluated on its own mesh, and candidates of a search by families of meshes: all points are evaluated.
    """
    candidate = replace(seed, remat=program.remat)
    plan = plan_of(replace(result, programs={program.remat: program}), candidate)
    priced = evaluate(program, plan, result.cluster).candidate
    costs = {name: getattr(priced, name) for name in COSTS}
    return _Point(replace(candidate, **costs), program)


def _sharding(candidate: Candidate) -> tuple[object, ...]:
    return candidate.assignment, candidate.mesh, candidate.num_stages
