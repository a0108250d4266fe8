"""Cost of a user-supplied plan, computed as the search would."""

import numpy as np

from spanax.hardware.cluster import Cluster
from spanax.plan.candidate import Candidate
from spanax.plan.cost.calibration import Assumptions
from spanax.plan.cost.peak_memory import MemoryUse, memory_per_device, state_of, walk
from spanax.plan.cost.step_time import Grid, price
from spanax.plan.pipeline.stages import inside_stage
from spanax.plan.plan import Plan
from spanax.plan.sharding.place import in_forms, resolver_of
from spanax.plan.spmd.count_terms import count_terms
from spanax.plan.spmd.deferred_reductions import deferred_reductions
from spanax.plan.spmd.sharded_program import ShardedProgram
from spanax.trace.program import Program


def candidate_of(program: Program, plan: Plan, cluster: Cluster, given: Assumptions | None = None) -> Candidate:
    """A plan with its price, whatever its axes are called.

    Raises:
      SpanaxError: the plan was made for another program.

    Example:
      >>> import jax, optax, spanax
      >>> from flax import nnx
      >>> program = spanax.trace(
      ...     build=lambda rngs: nnx.Linear(1024, 1024, rngs=rngs),
      ...     optimizer=optax.sgd(0.1),
      ...     batch=jax.ShapeDtypeStruct((4096, 1024), "float32"),
      ...     loss=lambda model, x: (model(x) ** 2).mean(),
      ...     compute_dtype="bfloat16",
      ... )
      >>> machine = spanax.cluster("a100:8")
      >>> found = spanax.search(program, machine, remat=("none",), microbatches=1)
      >>> own = candidate_of(program.with_remat("none"), spanax.plan(program, machine), machine)
      >>> own.step_seconds == found.best.step_seconds, own.memory == found.best.memory
      (True, True)
    """
    laid, grid = _laid(program, plan), _grid(program, plan)
    memory = _held(laid, grid, cluster, given or Assumptions())
    costs = price(
        count_terms(laid, adds_first=cluster.adds_first, late=deferred_reductions(laid)), cluster, grid, given
    )
    stored = {kind for kind in ("param", "gradient", "optimizer") if plan.layout.stored(kind)}
    storing = "fsdp" if "param" in stored else "zero2" if "gradient" in stored else "zero1" if stored else "fsdp"
    return Candidate.of(plan.layout, storing, inside_stage(plan).mesh, laid.resolver.program, grid, costs, memory)


def memory_of(program: Program, plan: Plan, cluster: Cluster) -> MemoryUse:
    """What one device holds under a plan at the fullest moment, by group; arrays of one entry.

    Raises:
      SpanaxError: the plan was made for another program.
    """
    return _held(_laid(program, plan), _grid(program, plan), cluster, Assumptions())


def _held(laid: ShardedProgram, grid: Grid, cluster: Cluster, given: Assumptions) -> MemoryUse:
    return memory_per_device(
        state_of(laid.resolver), walk(laid, is_tpu=cluster.is_torus), grid, fused_attention=given.fused_attention
    )


def _laid(program: Program, plan: Plan) -> ShardedProgram:
    """One microbatch of the step that would run, laid out."""
    variant, remat = in_forms(program, plan), plan.schedule.remat
    variant = variant if remat in (None, variant.remat) else variant.with_remat(remat)
    variant = variant if variant.microbatches == 1 else variant.with_microbatches(1)
    return ShardedProgram(resolver_of(program, inside_stage(plan)).of(variant), variant.step)


def _grid(program: Program, plan: Plan) -> Grid:
    schedule, one = plan.schedule, np.ones(1, int)
    count = max(schedule.microbatches, program.microbatches)
    sizes = np.asarray([[size] for _, size in inside_stage(plan).mesh.axes])
    stages, num_layers = one * schedule.num_stages, program.step.layer_carry[1]
    return Grid(sizes, stages, one * count, one / count, schedule.pipeline, schedule.num_chunks, num_layers)
