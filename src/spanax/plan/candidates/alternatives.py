"""Variants that a search prices without a request: uneven axes padded, and state or activations in host memory."""

from collections import Counter
from collections.abc import Callable
from dataclasses import replace

from spanax.errors import NoLayoutError, first_line
from spanax.plan.candidate import Search
from spanax.plan.candidates.padding import is_used, padded_variants
from spanax.plan.cost.overlap import TERMS
from spanax.plan.cost.step_time import IDLE
from spanax.plan.defaults import ASSIGNMENT_MARGIN
from spanax.plan.reason import Code, Reason
from spanax.trace.jaxpr.remat_policies import ON_HOST, OPTIMIZER_STATE
from spanax.trace.program import Program
from spanax.trace.rewrites.padding import Multiples

UNREQUESTED = ("heads", "vocab")
"""The axes that are padded without a request: model authors choose their sizes for reasons other than sharding."""

MOST_GROUPS = 6_000
"""The most groups of operations, over all padded variants, that a search walks without a request."""

BETWEEN_DEVICES = (*dict.fromkeys(TERMS.values()), "weights between devices", *IDLE)
"""The terms of the step time that another sharding of the same matmuls may save."""


def with_padding(
    result: Search,
    find: Callable[[Program, int], Search],
    least: Callable[[Multiples], float],
    program: Program,
    stage_margin: float,
) -> Search:
    """Returns a search with uneven axes padded, if its best candidate is faster by `ASSIGNMENT_MARGIN`.

    Without padding, XLA runs an uneven axis replicated over the mesh axis that does not divide it; its cost is that of
    `result`. Padded variants are priced only where they may gain so much: where nothing fits, or where the best
    candidate shards more than the batch, and replicates an uneven axis over `model` or spends the margin in
    communication.

    Args:
      result: a search without padded axes.
      find: searches the layouts of a padded program on the meshes with a size of `model`.
      least: returns a lower bound of the step time with padded axes, without tracing them.
      program: without padded axes.
      stage_margin: as in `search`.
    """
    best = result
    rejected = Counter(result.rejected)
    for padded in _variants(result):
        chunks = next(iter(result.programs.values())).loss_chunks
        options = replace(program.options, padded=padded, loss_chunks=chunks)
        try:
            if least(padded) * (1 + ASSIGNMENT_MARGIN) > _seconds(result, stage_margin):
                continue
            other = find(program.variant(options), padded[0][1])
        except NoLayoutError as error:
            names = ", ".join(name for name, _ in padded)
            rejected[Reason(Code.NOT_PLACED, f"{names} padded", detail=first_line(error))] += 1
            continue
        if is_used(other, padded) and _seconds(other, stage_margin) < _seconds(best, stage_margin):
            best = other
    if best is result or _seconds(best, stage_margin) * (1 + ASSIGNMENT_MARGIN) > _seconds(result, stage_margin):
        return replace(result, rejected=dict(rejected))
    assert best.best is not None
    names = ", ".join(name for name, _ in next(iter(best.programs.values())).options.padded)
    reason = Reason(Code.PADDED_FITS, names)
    if result.best is not None:
        reason = Reason(Code.PADDED, names, detail=f"{1 - best.best.step_seconds / result.best.step_seconds:.0%}")
    return replace(
        best,
        alternative=reason,
        layouts_priced=result.layouts_priced + best.layouts_priced,
        search_seconds=result.search_seconds + best.search_seconds,
        trace_seconds=result.trace_seconds + best.trace_seconds,
    )


def _variants(result: Search) -> list[Multiples]:
    """Returns the padded variants that can be faster than a search without padding; none beyond a budget."""
    program = next(iter(result.programs.values()))
    known = {*program.step.axes.names.values()}.difference(result.pins)
    names = [name for name in UNREQUESTED if name in known]
    variants = list(padded_variants(program, result.cluster, names, None))
    best = result.best
    if best is not None:
        seconds = sum(best.seconds.get(name, 0.0) for name in BETWEEN_DEVICES)
        is_repeated = any(best.mesh.ways(["model"]) == padded[0][1] for padded in variants)
        is_only_batch = best.num_stages == 1 and best.mesh.ways(["data", "fsdp", "expert"]) == best.mesh.size
        is_short = seconds * (1 + ASSIGNMENT_MARGIN) < ASSIGNMENT_MARGIN * best.step_seconds
        if is_only_batch or (is_short and not is_repeated):
            return []
    return variants[: MOST_GROUPS // max(1, len(program.step.op_groups))]


def _seconds(result: Search, stage_margin: float) -> float:
    """Returns the step time of the best candidate, with the margin of stages; infinity where nothing fits."""
    if result.best is None:
        return float("inf")
    return result.best.step_seconds * (1 + stage_margin * (result.best.num_stages > 1))


def with_host_memory(result: Search, find: Callable[[], Search]) -> Search:
    """Returns the search with the optimizer's state in host memory, if it fits and nothing else does.

    Simulated devices, and those whose link to host memory has no known bandwidth, have none.

    Args:
      result: a search without offload.
      find: searches with the optimizer's state in host memory.
    """
    chip = result.cluster.chip
    leaves = next(iter(result.programs.values())).leaves
    has_optimizer = any(leaf.kind == OPTIMIZER_STATE and leaf.shape for leaf in leaves)
    if result.best is not None or not result.nearest or chip.shared or chip.host_bytes_per_second is None:
        return result
    other = find() if has_optimizer else result
    if other.best is None:
        return result
    name = "the optimizer's state" + " and activations" * (ON_HOST in other.best.remat)
    return replace(other, alternative=Reason(Code.IN_HOST_MEMORY, name))
