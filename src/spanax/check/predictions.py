"""A plan's predictions for a step, in the same figures that are read from a compiled program."""

from spanax.check.report import Figures
from spanax.hardware.cluster import Cluster
from spanax.plan.evaluate import Evaluation, evaluate
from spanax.plan.plan import Plan
from spanax.trace.program import Program


def predictions(program: Program, plan: Plan, cluster: Cluster, *, adds_first: bool = False) -> Figures:
    """Returns the predicted state, peak memory, FLOPs and collectives per device and step, without layout padding.

    With `adds_first`, all-reduces whose results are added to each other count as one, as in the final programs of
    compilers that combine them (`Cluster.adds_first`).

    Raises:
      SpanaxError: the plan was made for another program, or cannot be run.
    """
    return figures(evaluate(program, plan, cluster, adds_first=adds_first))


def figures(cost: Evaluation) -> Figures:
    """Returns the figures of an evaluated plan."""
    plan = cost.plan
    return Figures(plan.state_bytes(), round(cost.peak_bytes), cost.matmul_flops, cost.collectives, plan.host_bytes)
