"""Whether the stages of a search's best layout can run the program."""

from spanax.errors import SpanaxError, first_line
from spanax.plan.candidate import Search, plan_of
from spanax.plan.place import as_planned
from spanax.plan.reason import Code, Reason
from spanax.trace.pipeline.order_invariance import check_order_invariant
from spanax.trace.pipeline.partition import pipeline_partition


def refused_stages(result: Search) -> Reason | None:
    """Returns why the best layout of a search cannot run in its stages; None if it can, or has none."""
    if result.best is None or result.best.num_stages == 1:
        return None
    plan, code = plan_of(result, result.best), Code.NO_STAGES
    try:
        step = as_planned(result.program_of(result.best), plan).step
        partition = pipeline_partition(step, plan.schedule.microbatches)
        code = Code.NO_CHUNKS
        if plan.schedule.num_chunks > 1:
            check_order_invariant(step, partition)
    except SpanaxError as error:
        return Reason(code, detail=first_line(error))
    return None
