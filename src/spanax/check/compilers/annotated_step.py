"""The train step of a plan as StableHLO, annotated with its shardings and the paths of its arrays."""

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from spanax.entries.folder import Folder
from spanax.entries.names import CONFIG
from spanax.errors import WorkloadError
from spanax.plan.place import as_planned
from spanax.plan.plan import Plan
from spanax.trace.program import Program
from spanax.trace.workload import Workload
from spanax.train.config import TrainConfig, with_settings
from spanax.train.record.folder import recorded
from spanax.train.run import Run
from spanax.train.workload_tracing import trace_workload

SIZES = {"batch": "batch_size", "seq": "seq_len", "vocab": "vocab_size", "layers": "num_layers", "embed": "embed_dim"}
"""The named axes whose size a workload may take as an argument -> the name of the argument."""


def annotated_program(program: Program, plan: Plan, devices: Sequence[Any]) -> str:
    """Returns the step as StableHLO, before XLA, with all shardings and with array paths instead of indices.

    Args:
      program: the program of the plan.
      plan: the plan whose shardings are written.
      devices: at least as many devices as the mesh has, which may be simulated. Nothing is compiled or allocated.

    Raises:
      SpanaxError: the plan was made for another program, or there are too few devices.
    """
    program = as_planned(program, plan)
    run = Run(program, plan, plan.mesh.build(devices), [])
    text = run.lower().as_text(debug_info=True)
    for name, leaves in (("state", plan.leaves), ("batch", plan.batch)):
        paths = [leaf.path for leaf in leaves]
        text = re.sub(rf'"{name}\[(\d+)\]"', lambda match, paths=paths: f'"{paths[int(match[1])]}"', text)  # type: ignore[misc]
    header = [f"// {plan.title}: {plan.why}"]
    for leaf in plan.leaves + plan.batch:
        spec = ", ".join("+".join(by) or "-" for by in leaf.spec)
        reason = f": {leaf.reason}" if leaf.reason else ""
        header.append(f"// {leaf.path} {leaf.dtype}{list(leaf.shape)} ({spec}){reason}")
    return "\n".join([*header, text])


def program_for(path: Path, plan: Plan, load: Callable[..., Workload], workload: str | None) -> Program:
    """Returns the program of a plan, from the config of a run folder or from the name of a workload.

    Args:
      path: the plan file or run folder.
      plan: the plan at `path`.
      load: returns a workload, given its name and sizes.
      workload: the name of the workload; required for a plan file.

    Raises:
      SpanaxError: `workload` is missing, or the plan was made for another program.
    """
    if Folder.of(path).kind(CONFIG) is not None:
        settings = with_settings(TrainConfig(), recorded(path), str(path / CONFIG))
        return trace_workload(lambda **sizes: load(settings.workload, **sizes), settings, plan, "cpu")[2]
    if workload is None:
        raise WorkloadError("a plan file does not record its workload.", fix="--workload NAME with --hlo")
    return program_of(plan, load, workload)


def program_of(plan: Plan, load: Callable[..., Workload], workload: str) -> Program:
    """Returns the program of a plan, with the default sizes of a workload or with those of the plan's axes.

    The program is that of the plan if their fingerprints are equal.

    Args:
      plan: the plan.
      load: returns a workload, given its name and sizes.
      workload: the name of the workload.
    """
    schedule = plan.schedule
    program = None
    # With its default sizes, or else with the sizes of the plan's axes.
    for sizes in ({}, _sizes(plan)):
        program = load(workload, **sizes).trace(compute_dtype=schedule.compute_dtype, quantize=schedule.quantize)
        if program.fingerprint == plan.fingerprint:
            break
    assert program is not None
    return program


def _sizes(plan: Plan) -> dict[str, int]:
    """Returns the workload arguments for the sizes of the plan's axes; axes with several sizes are omitted."""
    sizes_by_axis: dict[str, set[int]] = {}
    for leaf in plan.leaves + plan.batch:
        for name, size in zip(leaf.axes, leaf.shape, strict=True):
            if name in SIZES:
                sizes_by_axis.setdefault(name, set()).add(size)
    return {SIZES[name]: sizes.pop() for name, sizes in sizes_by_axis.items() if len(sizes) == 1}
