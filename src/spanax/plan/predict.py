"""Attaches predicted memory, communication and step time to a plan, array by array."""

import re
from dataclasses import replace

from spanax.hardware.cluster import Cluster
from spanax.plan.candidate import Candidate
from spanax.plan.cost.collective_bytes import laid_as_planned, moved_bytes, moved_of
from spanax.plan.cost.prediction import Prediction
from spanax.plan.evaluate import candidate_of
from spanax.plan.plan import Plan
from spanax.plan.search import main_dtype, model_flops
from spanax.plan.spmd.count_terms import count_terms
from spanax.plan.spmd.deferred_reductions import unreduced
from spanax.trace.program import Program

MOST = 64
"""The largest number of groups of equal parameters whose collectives are counted, by size."""


def with_prediction(program: Program, plan: Plan, cluster: Cluster, own: Candidate | None = None) -> Plan:
    """Returns the plan with its predicted cost on a cluster; unchanged on a chip of unknown speed.

    Args:
      program: the program of the plan.
      plan: the plan.
      cluster: the devices.
      own: the candidate of the plan, if a search has priced it.

    Raises:
      SpanaxError: the plan belongs to another program, or cannot run.

    Example:
      >>> import jax, optax, spanax
      >>> from flax import nnx
      >>> program = spanax.trace(
      ...     build=lambda rngs: nnx.Linear(1024, 1024, rngs=rngs),
      ...     optimizer=optax.sgd(0.1),
      ...     batch=jax.ShapeDtypeStruct((4096, 1024), "float32"),
      ...     loss=lambda model, x: (model(x) ** 2).mean(),
      ... )
      >>> machine = spanax.cluster("a100:8")
      >>> plan = with_prediction(program, spanax.plan(program, machine, layout="fsdp"), machine)
      >>> plan.price.moved_of["kernel"]["fsdp"]["all-gather"] == 2 * 1024 * 1024
      True
    """
    if not cluster.chip.peak_flops:
        return plan
    own, sharded = own or candidate_of(program, plan, cluster), laid_as_planned(program, plan)
    terms = count_terms(sharded, adds_first=cluster.adds_first, late=unreduced(sharded, plan.schedule))
    peak = cluster.num_devices * cluster.chip.peak_flops.get(main_dtype(terms), 0.0) * own.step_seconds
    price = Prediction(
        cluster=str(cluster),
        step_seconds=own.step_seconds,
        seconds=own.seconds,
        memory=own.memory,
        limit_bytes=cluster.memory_bytes,
        flops=own.flops,
        mfu=model_flops(sharded.resolver.program) / peak if peak else None,
        moved=moved_bytes(sharded, plan, terms),
        moved_of={path: moved_of(sharded, plan, path) for path in _one_of_each(plan)},
    )
    return replace(plan, price=price)


def pattern(path: str) -> str:
    """Returns a path with the numbers of repeated blocks replaced by `*`.

    Example:
      >>> pattern("blocks.11.mlp.up.kernel")
      'blocks.*.mlp.up.kernel'
    """
    return re.sub(r"(?<![^.])\d+(?![^.])", "*", path)


def _one_of_each(plan: Plan) -> list[str]:
    """Returns the path of the first of each group of equal parameters, largest first."""
    groups = {
        (pattern(leaf.path), leaf.shape, leaf.spec): leaf for leaf in reversed(plan.leaves) if leaf.kind == "param"
    }
    return [leaf.path for leaf in sorted(groups.values(), key=lambda leaf: -leaf.local_bytes)[:MOST]]
