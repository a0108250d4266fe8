"""Annotated: the train step as it goes to XLA, with the shardings of a plan and the paths of its arrays."""

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from spanax.entries.folder import Folder
from spanax.entries.names import CONFIG
from spanax.errors import SpanaxError
from spanax.plan.plan import Plan
from spanax.plan.sharding.place import as_planned
from spanax.run.config import TrainConfig, with_settings
from spanax.run.record.folder import recorded
from spanax.run.run import Run
from spanax.run.workload_tracing import trace_workload
from spanax.trace.program import Program
from spanax.trace.workload import Workload

SIZES = {"batch": "batch_size", "seq": "seq_len", "vocab": "vocab_size", "layers": "num_layers", "embed": "embed_dim"}
"""Axes whose size a workload may take, and as what."""


def annotated_program(program: Program, plan: Plan, devices: Sequence[Any]) -> str:
    """The step as StableHLO, before XLA: every sharding in it, and arrays by path where JAX has numbers.

    Args:
      program: what the plan was made for.
      plan: its shardings are written out.
      devices: as many as its mesh has; simulated ones do. Nothing is compiled, and nothing is allocated on them.

    Raises:
      SpanaxError: the plan is another program's, or there are too few devices.

    Example:
      >>> import jax, optax, spanax
      >>> from flax import nnx
      >>> program = spanax.trace(
      ...     build=lambda rngs: nnx.Linear(16, 32, rngs=rngs),
      ...     optimizer=optax.sgd(0.1),
      ...     batch=jax.ShapeDtypeStruct((8, 16), "float32"),
      ...     loss=lambda model, x: (model(x) ** 2).mean(),
      ... )
      >>> text = annotated_program(program, spanax.plan(program, spanax.cluster("cpu:8"), layout="fsdp"), jax.devices())
      >>> [line for line in text.splitlines() if "kernel" in line][0]
      '// kernel float32[16, 32] (-, fsdp): stored over fsdp'
    """
    program = as_planned(program, plan)
    run = Run(program, plan, plan.mesh.build(devices), [])
    text = run.lower().as_text(debug_info=True)
    for name, leaves in (("state", plan.leaves), ("batch", plan.batch)):
        paths = [leaf.path for leaf in leaves]
        text = re.sub(rf'"{name}\[(\d+)\]"', lambda at, paths=paths: f'"{paths[int(at[1])]}"', text)  # type: ignore[misc]
    heads = [f"// {plan.layout.name} on {plan.mesh}: {plan.why}"]
    for leaf in plan.leaves + plan.batch:
        split = ", ".join("+".join(by) or "-" for by in leaf.spec)
        reason = f": {leaf.reason}" if leaf.reason else ""
        heads.append(f"// {leaf.path} {leaf.dtype}{list(leaf.shape)} ({split}){reason}")
    return "\n".join([*heads, text])


def program_for(path: Path, plan: Plan, load: Callable[..., Workload], workload: str | None) -> Program:
    """The program that a plan was made for: a run folder says which; of a plan file, `workload` does.

    Args:
      path: the plan file or run folder.
      plan: the plan found there.
      load: makes a workload, given its name and sizes.
      workload: its name.

    Raises:
      SpanaxError: nobody says which, or the plan is another's.
    """
    if Folder.of(path).kind(CONFIG) is not None:
        settings = with_settings(TrainConfig(), recorded(path), str(path / CONFIG))
        return trace_workload(lambda **sizes: load(settings.workload, **sizes), settings, plan)[2]
    if workload is None:
        raise SpanaxError("a plan file does not say what it was made for.", fix="--workload NAME, beside --hlo")
    dtype, program = plan.schedule.compute_dtype, None
    # As it is; or else in the sizes that the plan's axes have.
    for sizes in ({}, _sizes(plan)):
        made = load(workload, **sizes)
        program = made.trace(learning_rate=made.learning_rate, num_steps=made.num_steps, compute_dtype=dtype)
        if program.fingerprint == plan.fingerprint:
            break
    assert program is not None
    return program


def _sizes(plan: Plan) -> dict[str, int]:
    """The sizes of the plan's axes that a workload takes, and of these only what the batch and the leaves agree on."""
    found: dict[str, set[int]] = {}
    for leaf in plan.leaves + plan.batch:
        for name, size in zip(leaf.axes, leaf.shape, strict=True):
            if name in SIZES:
                found.setdefault(name, set()).add(size)
    return {SIZES[name]: sizes.pop() for name, sizes in found.items() if len(sizes) == 1}
