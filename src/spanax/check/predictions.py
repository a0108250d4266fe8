"""A plan's predictions for a step, in the same figures that are read from a compiled program."""

from spanax.check.report import Figures
from spanax.hardware.cluster import Cluster
from spanax.plan.evaluate import evaluate
from spanax.plan.plan import Plan
from spanax.trace.program import Program


def predictions(program: Program, plan: Plan, cluster: Cluster, *, adds_first: bool = False) -> Figures:
    """Returns the predicted state, peak memory, FLOPs and collectives per device and step, without layout padding.

    With `adds_first`, all-reduces whose results are added to each other count as one, as in the final programs of
    compilers that combine them (`Cluster.adds_first`).

    Raises:
      SpanaxError: the plan was made for another program, or cannot be run.

    Example:
      >>> import jax, optax, spanax
      >>> from flax import nnx
      >>> program = spanax.trace(
      ...     build=lambda rngs: nnx.Linear(16, 32, use_bias=False, rngs=rngs),
      ...     optimizer=optax.sgd(0.1),
      ...     batch=jax.ShapeDtypeStruct((8, 16), "float32"),
      ...     loss=lambda model, x: (model(x) ** 2).mean(),
      ... )
      >>> machine = spanax.cluster("cpu:8")
      >>> figures = predictions(program, spanax.plan(program, machine, layout="data"), machine)
      >>> figures.state_bytes == 16 * 32 * 4 + 4, figures.flops == 2 * 2 * 1 * 16 * 32
      (True, True)
      >>> figures.collectives["data"]["all-reduce"] >= 16 * 32 * 4
      True
    """
    cost = evaluate(program, plan, cluster, adds_first=adds_first)
    return Figures(plan.state_bytes(), round(cost.peak_bytes), cost.matmul_flops, cost.collectives)
