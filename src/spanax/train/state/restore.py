"""Restores a run from a checkpoint, sharded by any plan of the same program."""

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import jax

from spanax.errors import CheckpointError
from spanax.plan.place import as_planned
from spanax.plan.plan import Plan
from spanax.printable import to_stderr
from spanax.processes.processes import is_first
from spanax.schema import Count, SchemaError, Within, parsed
from spanax.step.guard import Guard, History
from spanax.step.pipeline.layer_order import layer_order
from spanax.step.placement import assert_placed, build_mesh
from spanax.trace.program import Program
from spanax.trace.user_mesh import outside_meshes
from spanax.train.program_digest import compared
from spanax.train.run import Run
from spanax.train.store import checkpoint
from spanax.train.store.loaded import Loaded


@dataclass(frozen=True)
class Meta:
    """The schema of meta.json, as written by `spanax.Run.save`."""

    build_seed: Annotated[int, Within(0, (1 << 64) - 1)] | None = None
    position: Mapping[str, Any] | None = None
    history: tuple[tuple[Count, Mapping[str, float]], ...] | None = None


@outside_meshes
def restore(
    program: Program,
    plan: Plan,
    directory: str | os.PathLike[str],
    *,
    step: int | None = None,
    devices: Sequence[Any] | None = None,
    warn: Callable[[str], None] | None = None,
    guard: Guard | None = None,
) -> Run:
    """Restores a saved run, sharded by `plan`: parameters, optimizer state, random state, statistics and step.

    Every file is verified against its checksum. If the newest checkpoint is damaged, the next older intact one is
    restored with a warning. Another warning lists how the program differs from the one that was saved. The data
    position is `run.position`; pass it to `spanax.batches(..., position=run.position)`.

    Args:
      program: the saved program; paths, shapes and dtypes must match. A list of blocks in one program may be a stack in
        the other (`spanax.stack`): `blocks.0.up` to `blocks.11.up` are the layers of `blocks.up`.
      plan: the shardings to restore to, for any mesh and number of devices.
      directory: the directory passed to `run.save`.
      step: the step to restore; the newest intact one by default.
      devices: the devices to use; all devices of this process by default.
      warn: called with each warning; prints to standard error by default.
      guard: as in `spanax.start`; its history is restored.

    Raises:
      DataError: there is no intact checkpoint, or it is of another program.
      SpanaxError: the plan is for another program.

    Example:
      >>> import optax, spanax, tempfile
      >>> from flax import nnx
      >>> program = spanax.trace(
      ...     build=lambda rngs: nnx.Linear(16, 32, rngs=rngs),
      ...     optimizer=optax.sgd(0.1),
      ...     batch=jax.ShapeDtypeStruct((8, 16), "float32"),
      ...     loss=lambda model, x: (model(x) ** 2).mean(),
      ... )
      >>> folder, devices = tempfile.mkdtemp(), spanax.cluster("cpu:8")
      >>> run = spanax.start(program, spanax.plan(program, devices, layout="fsdp"))
      >>> run.save(folder).wait()
      >>> resumed = restore(program, spanax.plan(program, devices, mesh="data=4,model=2"), folder)
      >>> bool((resumed.params()["kernel"] == run.params()["kernel"]).all())
      True
    """
    program = as_planned(program, plan)
    mesh = build_mesh(plan, devices)
    rows = layer_order(program, plan)
    places = plan.leaves if rows is None else rows.layer_placements
    targets = {
        leaf.path: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=placement.sharding(mesh))
        for leaf, placement in zip(program.leaves, places, strict=True)
    }
    saved = checkpoint.restore(directory, targets, step=step, warn=warn, fix=_advice)
    meta = _meta(saved.meta, directory)
    differences = compared(program, saved.leaves, saved.meta).differences
    if differences and is_first():
        message = f"step {saved.step} was saved by another program: {'; '.join(differences)}"
        (warn or to_stderr)(f"WARNING: {message}")
    program = program.variant(seed=meta.build_seed if meta.build_seed is not None else program.init.seed or 0)
    state = [saved.arrays[leaf.path] for leaf in program.leaves]
    state = state if rows is None else rows.to_rows(state)
    assert_placed(plan, state, mesh)
    history = History.of(meta.history, saved.step)
    position = None if meta.position is None else dict(meta.position)
    return Run(program, plan, mesh, state, num_steps=saved.step, position=position, guard=guard, history=history)


def _advice(loaded: Loaded) -> str:
    has_optimizer = any(path.startswith("optimizer.") for path in (*loaded.loaded, *loaded.unexpected))
    if loaded.loaded and not has_optimizer:
        return "the checkpoint contains weights only; use spanax.start(program, plan, init=...) or spanax train --init"
    return checkpoint.SAME


def _meta(values: Mapping[str, Any], directory: str | os.PathLike[str]) -> Meta:
    """Parses the meta values of a checkpoint.

    Raises:
      DataError: they do not match the schema.
    """
    try:
        return parsed(Meta, values, is_open=True, is_strict=False)
    except SchemaError as error:
        raise CheckpointError("the checkpoint was not saved by a run.", where=f"{directory}: {error}") from None
