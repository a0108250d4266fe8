"""Computes the cost of a user-supplied plan with the model of the search."""

from dataclasses import replace

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
    """Returns a plan as a priced candidate, whatever the names of its axes.

    Raises:
      SpanaxError: the plan belongs to another program.

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
      >>> best = spanax.search(program, machine, remat=("none",), microbatches=1).best
      >>> candidate = candidate_of(program.with_remat("none"), spanax.plan(program, machine), machine)
      >>> candidate.step_seconds == best.step_seconds, candidate.memory == best.memory
      (True, True)
    """
    sharded, grid = _laid(program, plan), _grid(program, plan)
    memory = _held(sharded, grid, cluster, given or Assumptions())
    costs = price(
        count_terms(sharded, adds_first=cluster.adds_first, late=deferred_reductions(sharded)), cluster, grid, given
    )
    stored = {kind for kind in ("param", "gradient", "optimizer") if plan.layout.stored(kind)}
    storing = "fsdp" if "param" in stored else "zero2" if "gradient" in stored else "zero1" if stored else "fsdp"
    return Candidate.of(plan.layout, storing, inside_stage(plan).mesh, sharded.resolver.program, grid, costs, memory)


def memory_of(program: Program, plan: Plan, cluster: Cluster) -> MemoryUse:
    """Returns the peak memory per device under a plan, by group; arrays of shape (1,).

    Raises:
      SpanaxError: the plan belongs to another program.
    """
    return _held(_laid(program, plan), _grid(program, plan), cluster, Assumptions())


def _held(sharded: ShardedProgram, grid: Grid, cluster: Cluster, assumptions: Assumptions) -> MemoryUse:
    return memory_per_device(
        state_of(sharded.resolver),
        walk(sharded, is_tpu=cluster.is_torus),
        grid,
        fused_attention=assumptions.fused_attention,
    )


def _laid(program: Program, plan: Plan) -> ShardedProgram:
    """Returns one microbatch of the step of a plan, sharded."""
    variant, remat = in_forms(program, plan), plan.schedule.remat
    policy = variant.form.remat if remat in (None, variant.remat) else remat
    variant = variant.variant(replace(variant.form, remat=policy, microbatches=1))
    return ShardedProgram(resolver_of(program, inside_stage(plan)).of(variant), variant.step)


def _grid(program: Program, plan: Plan) -> Grid:
    schedule, ones = plan.schedule, np.ones(1, int)
    count = max(schedule.microbatches, program.microbatches)
    sizes = np.asarray([[size] for _, size in inside_stage(plan).mesh.axes])
    stages, num_layers = ones * schedule.num_stages, program.step.layer_carry[1]
    return Grid(sizes, stages, ones * count, ones / count, schedule.pipeline, schedule.num_chunks, num_layers)
