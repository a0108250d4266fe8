"""Predicted: what the plan says of a step, in the numbers that a compiled program has as well."""

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
    laid = laid_as_planned(program, plan)
    terms = count_terms(laid, adds_first=adds_first, late=unreduced(laid, plan.schedule))
    sizes = np.asarray([[size] for _, size in inside_stage(plan).mesh.axes], float)
    works = terms.matmuls
    stages = np.where(works.in_layers, num_shares(laid, plan), 1)
    flops = float((works.flops * works.runs / ways_table(sizes)[works.work, 0] / stages).sum())
    collectives = moved_bytes(laid, plan, terms)
    peak_bytes = round(float(memory_of(program, plan, cluster).peak_bytes[0]))
    return Figures(plan.state_bytes(), peak_bytes, flops, collectives)


def gathered_bytes(program: Program, plan: Plan, path: str) -> dict[str, int]:
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
      >>> gathered_bytes(program, spanax.plan(program, spanax.cluster("cpu:8"), layout="fsdp"), "kernel")
      {'fsdp': 2048}
    """
    of_one = moved_of(laid_as_planned(program, plan), plan, path)
    return {axes: kinds["all-gather"] for axes, kinds in of_one.items() if "all-gather" in kinds}
