"""Predicted: what the plan says of a step, in the numbers that a compiled program has as well."""

from spanax.check.report import Figures
from spanax.hardware.cluster import Cluster
from spanax.plan.evaluate import evaluate
from spanax.plan.plan import Plan
from spanax.trace.program import Program


def predicted(program: Program, plan: Plan, cluster: Cluster, *, adds_first: bool = False) -> Figures:
    """State, peak, FLOPs and collectives of one device in one step, as the plan has them. No layout is padded.

    `adds_first`: sums over devices that are added to each other are one, as in a final program for chips that have such
    a compiler (`Cluster.adds_first`).

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
      >>> told = predicted(program, spanax.plan(program, machine, layout="data"), machine)
      >>> told.state_bytes == 16 * 32 * 4 + 4, told.flops == 2 * 2 * 1 * 16 * 32
      (True, True)
      >>> told.collectives["data"]["all-reduce"] >= 16 * 32 * 4
      True
    """
    cost = evaluate(program, plan, cluster, adds_first=adds_first)
    return Figures(plan.state_bytes(), round(cost.peak_bytes), cost.matmul_flops, cost.collectives)


def gathered_bytes(program: Program, plan: Plan, cluster: Cluster, path: str) -> dict[str, int]:
    """Bytes of one device and step that the plan gathers of one parameter, by mesh axes.

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
      >>> gathered_bytes(program, spanax.plan(program, machine, layout="fsdp"), machine, "kernel")
      {'fsdp': 2048}
    """
    collectives = evaluate(program, plan, cluster).collectives_of(path)
    return {axes: kinds["all-gather"] for axes, kinds in collectives.items() if "all-gather" in kinds}
