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
from spanax.plan.defaults import HOST_MARGIN, SAVED_VALUES_MARGIN
from spanax.plan.evaluate import Evaluation, evaluate
from spanax.plan.reason import Code, Reason
from spanax.plan.sharding.partition import union
from spanax.plan.space import Rejections
from spanax.plan.spmd.compiler import Compiler
from spanax.plan.spmd.count_terms import matmuls_by_group
from spanax.trace.analysis.fusion import FUSED
from spanax.trace.analysis.recomputation import Recomputation, recomputation, values_around
from spanax.trace.jaxpr.graph import Op
from spanax.trace.jaxpr.remat_policies import NAMED, ON_HOST, PartialPolicy, saving
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

    @property
    def rank(self) -> float:
        """The step time by which it is chosen: on the host only if faster by `HOST_MARGIN`."""
        return self.seconds * (1 + HOST_MARGIN * (ON_HOST in self.policy))


@dataclass(frozen=True)
class _Host:
    """The link to the memory of the host, for the values of all layers.

    Attributes:
      per_byte: seconds to copy a byte there, or back.
      computing: seconds of the forward pass and of the backward pass of the layers, which copies do not add to.
    """

    per_byte: float
    computing: tuple[float, ...]

    @property
    def hidden_bytes(self) -> float:
        """The bytes that are copied while layers compute."""
        return min(self.computing) / self.per_byte

    def exposed(self, num_bytes: float) -> float:
        """Returns the seconds that copies of some bytes, there and back, add to a step."""
        return sum(max(0.0, self.per_byte * num_bytes - seconds) for seconds in self.computing)


@dataclass(frozen=True)
class _Values:
    """The values that layers may save under one layout.

    Attributes:
      seed: the candidate with the layout.
      choices: the operations of the layers, and the values.
      op_seconds: seconds of every operation in a step.
      num_bytes: the bytes of every value on one device, over all layers.
      inputs: the same of what a layer takes from the one before it.
      all_bytes: the bytes that a step saves which recomputes nothing.
      stored: seconds of such a step.
      full: seconds of a step that saves none of the values.
      per_byte: seconds to write a byte of a value, and to read it.
      num_layers: the number of layers.
      host: the link to the host; None where values are not saved there.
    """

    seed: Candidate
    choices: Recomputation
    op_seconds: dict[Op, float]
    num_bytes: dict[int, float]
    inputs: dict[int, float]
    all_bytes: float
    stored: float
    full: float
    per_byte: float
    num_layers: int
    host: _Host | None

    def within(self, limit: float) -> _Choice | None:
        """Returns the fastest choice in a number of bytes; None where every choice is larger."""
        on_device = self._fastest(self._around(limit, None), None, limit)
        if self.host is None:
            return on_device
        on_host = self._fastest(self._around(limit + self.host.hidden_bytes, self.host), self.host, limit)
        if on_host is None or on_device is None:
            return on_host or on_device
        return min(on_device, on_host, key=lambda each: each.rank)

    def _around(self, limit: float, host: _Host | None) -> list[frozenset[int]]:
        """Returns the best values to save in a few more than a number of bytes, and within it.

        A byte costs at most what its copies to the host and back do.
        """
        most = None if host is None else self.per_byte + len(host.computing) * host.per_byte
        found = values_around(self.choices, self.op_seconds, self.num_bytes, limit, self.per_byte, most)
        return [self._worthwhile(saved) for saved in dict.fromkeys(reversed(found))]

    def _fastest(self, sets: list[frozenset[int]], host: _Host | None, limit: float) -> _Choice | None:
        """Returns the fastest choice that saves one of some sets: some for the first layers, others for the rest."""
        choices = [choice for saved in sets for choice in self._choices(saved, host)]
        others = [*choices, _Choice("none", self.all_bytes, self.stored)]
        mixed = (self._mixed(a, b, limit) for a in choices if a.num_bytes <= limit for b in others)
        return min(mixed, key=lambda each: each.seconds, default=None)

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

    def _worthwhile(self, saved: frozenset[int]) -> frozenset[int]:
        """Returns some values without those that save almost no time."""
        kept = set(saved)
        seconds = self._seconds(kept)
        for value in sorted(saved, key=lambda value: (self.num_bytes[value], value)):
            if self._seconds(kept - {value}) < seconds + LEAST_GAIN * self.stored:
                kept.discard(value)
                seconds = self._seconds(kept)
        return frozenset(kept)

    def _choices(self, saved: frozenset[int], host: _Host | None) -> Iterator[_Choice]:
        """Yields the choices that save some values: on the device, or one more on the host, by size up and down."""
        num_bytes = self.num_bytes | self.inputs
        names = self.choices.names | self.choices.inputs
        largest = {names[value]: value for value in sorted(saved, key=lambda value: num_bytes[value])}  # of a name
        by_size = sorted((*largest.values(), *self.inputs), key=lambda value: (num_bytes[value], value)) if host else []
        seconds = self._seconds(saved)
        left = sum(num_bytes[value] for value in saved)
        moves = [by_size[:count] for count in range(len(by_size))] + [by_size[start:] for start in range(len(by_size))]
        for values in moves or [[]]:
            moved = sum(num_bytes[value] for value in values)
            on_host = {names[value] for value in values}
            policy = saving({names[value] for value in saved}.difference(on_host), on_host)
            yield _Choice(policy, left - moved, seconds + (host.exposed(moved) if host else 0.0))

    def _seconds(self, saved: Collection[int]) -> float:
        repeated = self.choices.repeated(saved)
        less = sum(self.op_seconds[op] for op in self.choices.repeated(()) - repeated)
        return self.full - less + self.per_byte * sum(self.num_bytes[value] for value in saved)


def with_saved_values(result: Search, stage_margin: float, uses_host: bool = False) -> Search:
    """Returns a search with selected values to save, if its best candidate is faster by `SAVED_VALUES_MARGIN`.

    If nothing fits, it is one with values in host memory that fits, if any. Selects values for the fastest layouts
    under the estimated times of single operations; traces and prices the fastest selection, and others of more or fewer
    bytes, by how much memory is left.

    Args:
      result: a search under policies of all layers.
      stage_margin: as in `search`.
      uses_host: whether values may be in host memory.
    """
    start = time.perf_counter()
    best = result.best
    chip = result.cluster.chip
    limit = result.cluster.memory_bytes
    has_host = uses_host and not chip.shared and chip.host_bytes_per_second is not None
    if limit is None or (best is None and not has_host):
        return result
    most = math.inf
    if best is not None:
        most = best.step_seconds * (1 + stage_margin * (best.num_stages > 1)) / (1 + SAVED_VALUES_MARGIN)
    seeds = _seeds(result, most)
    rejected = Counter(result.rejected)
    points = list(_traced(result, seeds, limit, most, rejected, has_host)) if seeds else []
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
    programs = {**result.programs, policy: chosen.program}
    if best is None:
        why = Reason(Code.IN_HOST_MEMORY, "activations")
        return replace(searched, candidates=(chosen.candidate,), programs=programs, nearest=(), alternative=why)
    others = [each for each in result.candidates if _sharding(each) != _sharding(chosen.candidate)]
    return replace(
        searched,
        candidates=(chosen.candidate, *others),
        programs=programs,
        saved_values=Reason(Code.SAVED_VALUES, policy, detail=f"{1 - chosen.seconds / best.step_seconds:.0%}"),
    )


def _seeds(result: Search, most: float) -> list[Candidate]:
    """Returns the fastest candidates without stages that recompute, and those that do not fit."""
    recomputing = [each for each in result.candidates if each.num_stages == 1 and each.remat != REMAT[0]]
    too_large = [*result.too_large, *result.nearest]
    too_large = [each for each in too_large if each.num_stages == 1 and each.step_seconds < most]
    return recomputing[:MOST_SEEDS] + too_large[:MOST_SEEDS]


def _traced(
    result: Search, seeds: list[Candidate], limit: int, most: float, rejected: Rejections, has_host: bool
) -> Iterator[_Point]:
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
        if left > 0 or has_host:
            values = _values(result, heaviest, named, has_host)
            choice = values.within(left / (1 + MARGIN))
            options += [] if choice is None else [(choice, left, values)]
    if not options:
        return
    choice, left, values = min(options, key=lambda option: option[0].rank)
    tried = set(result.programs)
    if choice.rank > most:
        return
    for _ in range(MOST_TRACED):
        if choice is None or choice.policy in tried:
            return
        tried.add(choice.policy)
        try:
            point = _priced(result, values.seed, full.variant(remat=choice.policy))
        except SpanaxError as error:
            rejected[Reason(Code.NO_REMAT, choice.policy, detail=first_line(error))] += 1
            return
        yield point
        stored = point.upper_bytes - (limit - left)
        scale = choice.num_bytes / stored if min(choice.num_bytes, stored) > 0 else 1.0
        choice = values.within(choice.num_bytes + scale * (left - stored))


def _values(result: Search, heaviest: _Point, named: Program, has_host: bool) -> _Values:
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

    chip = result.cluster.chip
    count = float(grid.num_microbatches[0])
    per_byte = 2 * count / memory_rate(chip)
    for op in seconds:
        if op.family not in FUSED:
            seconds[op] += per_byte * sum(map(local_bytes, op.outputs))
    kept = {value for plan in traced.memory_plans.values() for value in plan.kept}
    num_bytes = {value: local_bytes(value) for value in choices.names}
    all_bytes = sum(local_bytes(value) for value in choices.needed & kept)
    stored = evaluation.candidate.step_seconds
    num_layers = traced.layer_carry[1]
    inputs = {value: local_bytes(value) for value in choices.inputs}
    host = None
    if has_host:
        forward = sum(seconds.values())
        host = _Host(count * float(chip.host_seconds(1.0)), (forward, 2 * forward))
    return _Values(
        seed, choices, seconds, num_bytes, inputs, all_bytes, stored, heaviest.seconds, per_byte, num_layers, host
    )


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
