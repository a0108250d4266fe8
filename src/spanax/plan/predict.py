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
"""Of so many kinds of parameters, the largest, it is worked out what moves of each."""


def with_prediction(program: Program, plan: Plan, cluster: Cluster, own: Candidate | None = None) -> Plan:
    """The plan with its price on a cluster; as it is where nobody knows how fast the chip is.

    Args:
      program: what the plan was made for.
      plan: the plan.
      cluster: the devices.
      own: the price that a search gave it already.

    Raises:
      SpanaxError: the plan was made for another program, or cannot be run.

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
      >>> found = with_prediction(program, spanax.plan(program, machine, layout="fsdp"), machine)
      >>> found.price.moved_of["kernel"]["fsdp"]["all-gather"] == 2 * 1024 * 1024
      True
    """
    if not cluster.chip.peak_flops:
        return plan
    own, laid = own or candidate_of(program, plan, cluster), laid_as_planned(program, plan)
    terms = count_terms(laid, adds_first=cluster.adds_first, late=unreduced(laid, plan.schedule))
    peak = cluster.num_devices * cluster.chip.peak_flops.get(main_dtype(terms), 0.0) * own.step_seconds
    price = Prediction(
        cluster=str(cluster),
        step_seconds=own.step_seconds,
        seconds=own.seconds,
        memory=own.memory,
        limit_bytes=cluster.memory_bytes,
        flops=own.flops,
        mfu=model_flops(laid.resolver.program) / peak if peak else None,
        moved=moved_bytes(laid, plan, terms),
        moved_of={path: moved_of(laid, plan, path) for path in _one_of_each(plan)},
    )
    return replace(plan, price=price)


def pattern(path: str) -> str:
    """A path with the numbers of equal blocks left out.

    Example:
      >>> pattern("blocks.11.mlp.up.kernel")
      'blocks.*.mlp.up.kernel'
    """
    return re.sub(r"(?<![^.])\d+(?![^.])", "*", path)


def _one_of_each(plan: Plan) -> list[str]:
    """The first parameter of each kind, the largest first."""
    kinds = {
        (pattern(leaf.path), leaf.shape, leaf.spec): leaf for leaf in reversed(plan.leaves) if leaf.kind == "param"
    }
    return [leaf.path for leaf in sorted(kinds.values(), key=lambda leaf: -leaf.local_bytes)[:MOST]]
