"""Chooses whether logits are materialized at once or in chunks of tokens, and the number of chunks."""

from collections.abc import Callable
from dataclasses import replace

from spanax.errors import SpanaxError, first_line
from spanax.hardware.cluster import Cluster
from spanax.plan.candidate import Candidate, Search, plan_of
from spanax.plan.evaluate import Evaluation, evaluate
from spanax.plan.plan import Plan
from spanax.plan.reason import Code, Reason
from spanax.trace.program import Program
from spanax.units import bytes_text

SMALL = 0.05
"""Fraction of the peak that doubling the chunks must save."""

SLOWER = 0.05
"""Largest slowdown over one chunk where the step already fits: each chunk accumulates into the gradient of the
head, and its matmuls have fewer rows."""

MOST = 64
"""The largest number of chunks to try."""


def in_chunks(program: Program, cluster: Cluster, make: Callable[[Program], Plan]) -> Plan:
    """Returns the plan of a program; if it does not fit, with the best number of chunks of the logits.

    Args:
      program: with its logits in one chunk.
      cluster: the devices.
      make: returns the plan of a program.

    Raises:
      SpanaxError: `make` returns no plan.
    """
    unchunked = make(program)
    if evaluate(program, unchunked, cluster).fits:
        return replace(unchunked, why=f"{unchunked.why}; {Reason(Code.LOGITS_NO_FASTER)}")
    count, reason = suiting_chunks(program, unchunked, cluster)
    plan = unchunked if count == 1 else make(program.variant(loss_chunks=count))
    return replace(plan, why=f"{plan.why}; {reason}")


def search_in_chunks(find: Callable[[Program], Search], program: Program, cluster: Cluster) -> Search:
    """Returns the search of a program; where memory is short, with the best number of chunks if that is faster."""
    result = find(program)
    candidate = _limited(result)
    if candidate is None:
        return result if result.best is None else replace(result, logits=Reason(Code.LOGITS_NO_FASTER))
    count, reason = suiting_chunks(program, plan_of(result, candidate), cluster)
    if count == 1:
        return replace(result, logits=reason)
    chunked = find(program.variant(loss_chunks=count))
    if result.best is None or (chunked.best and chunked.best.step_seconds < result.best.step_seconds):
        return replace(chunked, logits=reason)
    return replace(result, logits=Reason(Code.LOGITS_NO_FASTER))


def _limited(result: Search) -> Candidate | None:
    """Returns the candidate of the lowest peak memory among those that would be best, and much faster, if they fit."""
    if result.best is None:
        return next(iter(result.nearest), None)
    most = result.best.step_seconds / (1 + SLOWER)
    faster = [candidate for candidate in result.too_large if candidate.step_seconds < most]
    return min(faster, key=lambda candidate: candidate.upper_bytes, default=None)


def suiting_chunks(program: Program, plan: Plan, cluster: Cluster, scale: float = 1.0) -> tuple[int, Reason]:
    """Returns the best number of chunks of tokens for the logits of a plan, and why; `scale` as in `Evaluation`.

    The number is the smallest power of two where doubling saves little memory or costs much time.
    """
    now = replace(evaluate(program, _with_chunks(plan, 1), cluster), scale=scale)
    before = now.peak_bytes
    seconds = _step_seconds(now)
    count = 1
    reason = Reason(Code.LOGITS_SAVE_LITTLE)
    while count < MOST:
        twice = replace(evaluate(program, _with_chunks(plan, 2 * count), cluster), scale=scale)
        try:
            saved = now.peak_bytes - twice.peak_bytes
        except SpanaxError as error:
            reason = Reason(Code.LOGITS_UNSUPPORTED, detail=first_line(error))
            break
        if saved < SMALL * before:
            break
        slower = _step_seconds(twice) / seconds - 1
        if now.fits and slower > SLOWER:
            reason = Reason(Code.LOGITS_SLOWER, detail=f"{slower:.0%}")
            break
        count = 2 * count
        now = twice
    if count > 1:
        reason = Reason(Code.LOGITS_IN_CHUNKS, size=count, detail=bytes_text(before - now.peak_bytes))
    return count, reason


def saved_bytes(program: Program, plan: Plan, cluster: Cluster) -> int:
    """Returns the bytes per device by which the chunks of the logits of a plan lower the peak memory."""
    counts = (1, plan.schedule.loss_chunks)
    before, after = (evaluate(program, _with_chunks(plan, count), cluster).peak_bytes for count in counts)
    return round(before - after)


def _step_seconds(evaluation: Evaluation) -> float:
    """Returns the predicted step time; 1 on a chip of unknown speed."""
    return evaluation.candidate.step_seconds if evaluation.cluster.chip.peak_flops else 1.0


def _with_chunks(plan: Plan, count: int) -> Plan:
    return replace(plan, schedule=replace(plan.schedule, loss_chunks=count))
