"""Whether a step may compute the layers' updates with the layers in another order, as interleaved stages store them."""

from spanax.errors import PipelineError
from spanax.trace.analysis.step_analysis import StepAnalysis
from spanax.trace.jaxpr.dim_maps.relations import Family
from spanax.trace.jaxpr.graph import Op
from spanax.trace.pipeline.partition import PipelinePartition

ORDER_INVARIANT = frozenset({Family.ELEMENTWISE, Family.REDUCTION, Family.CONTRACTION, Family.VIEW})
"""Operations that treat all indices of a dim alike, whatever their order."""


def check_order_invariant(traced: StepAnalysis, partition: PipelinePartition) -> None:
    """Validates that no operation outside of the layer loop depends on the order of the layers.

    Raises:
      SpanaxError: an operation does.
    """
    labels = {traced.axes.classes[value][0] for value in partition.rows}
    for op in (*traced.graph.body.ops, *partition.prepared_ops):
        if op is partition.loop.op or not _has_label(traced, op, labels):
            continue
        constants = [
            v for v in op.inputs if v in traced.graph.constants and labels.intersection(traced.axes.classes[v])
        ]
        if op.family not in ORDER_INVARIANT or constants:
            raise PipelineError(
                f"`{op.name}` outside of the layer loop depends on the order of the layers.",
                where="schedule 'interleaved', whose stages have non-contiguous layers",
                fix="use schedule '1f1b' or 'zero-bubble'",
            )


def _has_label(traced: StepAnalysis, op: Op, labels: set[int | None]) -> bool:
    return any(labels.intersection(traced.axes.classes[value]) for value in (*op.inputs, *op.outputs))
