"""A plan's predictions for a step, in the same figures that are read from a compiled program."""

import numpy as np

from spanax.check.report import Figures
from spanax.hardware.cluster import Cluster
from spanax.plan.cost.collective_bytes import laid_as_planned, moved_bytes, moved_of, num_shares
from spanax.plan.cost.step_time import ways_table
from spanax.plan.evaluate import memory_of
from spanax.plan.pipeline.stages import inside_stage
from spanax.plan.plan import Plan
from spanax.plan.spmd.count_terms import count_terms
from spanax.plan.spmd.deferred_reductions import unreduced
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
    sharded = laid_as_planned(program, plan)
    terms = count_terms(sharded, adds_first=adds_first, late=unreduced(sharded, plan.schedule))
    sizes = np.asarray([[size] for _, size in inside_stage(plan).mesh.axes], float)
    matmuls = terms.matmuls
    stages = np.where(matmuls.in_layers, num_shares(sharded, plan), 1)
    flops = float((matmuls.flops * matmuls.runs / ways_table(sizes)[matmuls.work, 0] / stages).sum())
    collectives = moved_bytes(sharded, plan, terms)
    peak_bytes = round(float(memory_of(program, plan, cluster).peak_bytes[0]))
    return Figures(plan.state_bytes(), peak_bytes, flops, collectives)


def gathered_bytes(program: Program, plan: Plan, path: str) -> dict[str, int]:
    """Returns the bytes per device and step of the planned all-gathers of one parameter, by mesh axes.

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
      >>> gathered_bytes(program, spanax.plan(program, spanax.cluster("cpu:8"), layout="fsdp"), "kernel")
      {'fsdp': 2048}
    """
    moved = moved_of(laid_as_planned(program, plan), plan, path)
    return {axes: kinds["all-gather"] for axes, kinds in moved.items() if "all-gather" in kinds}
