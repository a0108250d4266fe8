"""Initializes a run: the sharded state of a program at step 0."""

import os
from collections.abc import Sequence
from typing import Any

from spanax.errors import MissingError
from spanax.plan.place import as_planned
from spanax.plan.plan import Plan
from spanax.step.guard import Guard
from spanax.step.pipeline.layer_order import layer_order
from spanax.step.placement import assert_placed, build_mesh
from spanax.step.sharded_init import init_sharded_state
from spanax.trace.program import Program
from spanax.trace.user_mesh import outside_meshes
from spanax.train.run import Run
from spanax.train.state.weights import load


@outside_meshes
def start(
    program: Program,
    plan: Plan,
    *,
    seed: int = 0,
    devices: Sequence[Any] | None = None,
    guard: Guard | None = None,
    init: str | os.PathLike[str] | None = None,
    partial: bool = False,
) -> Run:
    """Initializes the state of a program, sharded as planned: each array is computed on the devices that store it.

    Args:
      program: the result of `spanax.trace`.
      plan: the result of `spanax.plan` for this program.
      seed: the seed of `nnx.Rngs`; the initial values do not depend on the mesh.
      devices: the devices to use; all devices of this process by default.
      guard: decides which steps are bad, and how to handle them; None by default.
      init: a run folder or checkpoint directory to load parameters and statistics from; the optimizer state, the step
        count and the random state are new.
      partial: load only the weights of `init` that match by path and shape, for a model with additional weights (LoRA
        adapters, a new head); `run.loaded` lists the loaded, missing and unexpected ones.

    Raises:
      DataError: `init` has no intact checkpoint, or one of another model.
      HostsError: this process belongs to a group (docs/hosts.md) and cannot join it.
      SpanaxError: the plan is for another program, or there are too few devices.

    Example:
      >>> import jax, optax, spanax
      >>> from flax import nnx
      >>> program = spanax.trace(
      ...     build=lambda rngs: nnx.Linear(16, 32, rngs=rngs),
      ...     optimizer=optax.sgd(0.1),
      ...     batch=jax.ShapeDtypeStruct((8, 16), "float32"),
      ...     loss=lambda model, x: (model(x) ** 2).mean(),
      ... )
      >>> run = start(program, spanax.plan(program, spanax.cluster("cpu:8"), layout="tensor"), seed=1)
      >>> tuple(run.params()["kernel"].sharding.spec)
      (None, 'model')
    """
    if partial and init is None:
        raise MissingError("`partial` requires `init`, the weights to load.", fix="init='runs/base', partial=True")
    program = as_planned(program, plan).variant(seed=seed)
    mesh = build_mesh(plan, devices)
    rows = layer_order(program, plan)
    places = plan.leaves if rows is None else rows.layer_placements
    weights, loaded = ({}, None) if init is None else load(program, places, mesh, init, partial=partial)
    state = init_sharded_state(program, places, mesh, seed, weights)
    state = state if rows is None else rows.to_rows(state)
    assert_placed(plan, state, mesh)
    return Run(program, plan, mesh, state, guard=guard, loaded=loaded)
