"""Predicted: what the plan says of a step, in the numbers that a compiled program has as well."""

import numpy as np

from spanax.check.report import Figures
from spanax.hardware.cluster import Cluster
from spanax.plan.cost import ways_table
from spanax.plan.hops import hop_bytes
from spanax.plan.laid import Laid
from spanax.plan.own import memory_of
from spanax.plan.parts import shares
from spanax.plan.place import as_planned, resolver_of
from spanax.plan.plan import Plan
from spanax.plan.stages import AXIS, inside_stage
from spanax.plan.tally import tally
from spanax.plan.ticks import ticks_of
from spanax.plan.unreduced import unreduced
from spanax.trace.cut import cut
from spanax.trace.program import Program
from spanax.trace.versions import versions


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
    laid = _laid(program, plan)
    terms = tally(laid, adds_first=adds_first, late=unreduced(laid, plan.schedule))
    stage, num_stages = inside_stage(plan).mesh, _shares(laid, plan)
    sizes = np.asarray([[size] for _, size in stage.axes], float)
    works = terms.works
    stages = np.where(works.in_layers, num_stages, 1)
    flops = float((works.flops * works.runs / ways_table(sizes)[works.work, 0] / stages).sum())
    collectives: dict[str, dict[str, int]] = {}
    for (kind, axes), num_bytes in sorted(terms.moved_bytes(stage, num_stages=num_stages).items()):
        collectives.setdefault(axes, {})[kind] = round(num_bytes)
    if plan.schedule.num_stages > 1:
        pieces = cut(laid.traced, plan.schedule.microbatches)
        collectives[AXIS] = {"collective-permute": hop_bytes(laid.resolver, pieces, ticks_of(plan.schedule))}
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
    laid = _laid(program, plan)
    only = versions(laid.traced, [leaf.path for leaf in laid.resolver.program.leaves].index(path))
    moved = tally(laid, only).moved_bytes(inside_stage(plan).mesh, num_stages=_shares(laid, plan))
    return {axes: round(num_bytes) for (kind, axes), num_bytes in sorted(moved.items()) if kind == "all-gather"}


def _laid(program: Program, plan: Plan) -> Laid:
    """The step as it would run, laid out."""
    planned = as_planned(program, plan)
    return Laid(resolver_of(program, inside_stage(plan)).of(planned), planned.step)


def _shares(laid: Laid, plan: Plan) -> float:
    """Into how many parts the layers count as divided, padding included."""
    schedule = plan.schedule
    return float(shares(laid.traced.layer_carry[1], schedule.num_stages, schedule.num_chunks))
