"""Restore: a run goes on from a checkpoint, on this plan, whatever plan and devices it was saved from."""

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import jax

from spanax.errors import DataError
from spanax.plan.plan import Plan
from spanax.plan.sharding.place import as_planned
from spanax.printable import to_stderr
from spanax.run.distributed.processes import is_first
from spanax.run.run import Run
from spanax.run.state.placement import assert_placed, build_mesh
from spanax.run.state.program_digest import compared
from spanax.run.step.guard import Guard, History
from spanax.run.step.pipeline.layer_order import layer_order
from spanax.run.store import checkpoint
from spanax.schema import Count, SchemaError, Within, parsed
from spanax.trace.program import Program
from spanax.trace.user_mesh import outside_meshes


@dataclass(frozen=True)
class Meta:
    """What a run saves of itself with its arrays; see `spanax.run.run.Run.save`."""

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
    """The run that was saved in a folder, laid out by `plan`: parameters, optimizer, RNG, statistics, step.

    Every file is held against its checksum first. When the newest step is damaged, the next older good one is
    taken, with a loud line; another line lists what differs where the program computes something else. `run.position`
    is the data position: `spanax.batches(..., position=run.position)`.

    Args:
      program: the program that was saved; its paths, shapes and dtypes must match. A list of blocks in one of the two
        may be a stack in the other (`spanax.stack`): `blocks.0.up` to `blocks.11.up` are the layers of `blocks.up`.
      plan: where the arrays go now; any mesh, any number of devices.
      directory: what was given to `run.save`.
      step: this step and no other.
      devices: the devices to use; all of this process by default.
      warn: gets the loud line; standard error by default.
      guard: as for `spanax.start`; it goes on from what it had seen.

    Raises:
      DataError: no good step, or one of another program.
      SpanaxError: the plan is another program's.

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
    found = checkpoint.restore(directory, targets, step=step, warn=warn)
    meta = _meta(found.meta, directory)
    differences = compared(program, found.leaves, found.meta).differences
    if differences and is_first():
        message = f"step {found.step} was saved by another program: {'; '.join(differences)}"
        (warn or to_stderr)(f"WARNING: {message}")
    program = program.with_seed(meta.build_seed if meta.build_seed is not None else program.init.seed or 0)
    state = [found.arrays[leaf.path] for leaf in program.leaves]
    state = state if rows is None else rows.to_rows(state)
    assert_placed(plan, state, mesh)
    history = History.of(meta.history, found.step)
    position = None if meta.position is None else dict(meta.position)
    return Run(program, plan, mesh, state, num_steps=found.step, position=position, guard=guard, history=history)


def _meta(values: Mapping[str, Any], directory: str | os.PathLike[str]) -> Meta:
    """What a run saved of itself with its arrays.

    Raises:
      DataError: it is not what a run saves.
    """
    try:
        return parsed(Meta, values, is_open=True, is_strict=False)
    except SchemaError as error:
        raise DataError("the checkpoint was not saved by a run.", where=f"{directory}: {error}") from None
