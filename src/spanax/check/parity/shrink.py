"""Reduces a workload to sizes that this machine can run, with the same shardings."""

import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from spanax.check.parity.parity import Parity, parity, same_layout
from spanax.errors import DeviceCountError, SpanaxError, WorkloadError
from spanax.hardware.cluster import cluster
from spanax.hardware.mesh import MeshShape, simulated
from spanax.plan.plan import Plan
from spanax.plan.search import search
from spanax.trace.analysis.op_groups import executed_flops
from spanax.trace.jaxpr.graph import CONTRACTIONS
from spanax.trace.program import Program
from spanax.trace.workload import Workload
from spanax.units import bytes_text, count_text

MAX_FLOPS = 5e11
"""The limit on the FLOPs of a step: a few seconds on a laptop."""

MIN_SIZES = {"num_layers": 2, "batch_size": 1, "seq_len": 32, "embed_dim": 1}
"""The sizes of a workload in the order of reduction -> the smallest value."""

EXPONENTS = {"num_layers": 1.0, "batch_size": 1.0, "seq_len": 0.5, "embed_dim": 0.5}
"""The exponent with which a size must shrink for a given reduction of FLOPs, at best."""

Trace = Callable[[Workload], Program]


@dataclass(frozen=True)
class ShrunkProgram:
    """A program that fits, its plan, and its reduced sizes as (from, to)."""

    program: Program
    plan: Plan
    shrunk: dict[str, tuple[int, int]]


def parity_of(
    load: Callable[..., Workload], trace: Trace, program: Program, plan: Plan, *, steps: int, devices: list[Any]
) -> Parity:
    """Returns the `parity` of a workload, with reduced sizes if it is too large for this machine.

    Args:
      load: returns the workload, given any of the sizes in `MIN_SIZES`.
      trace: returns the program of a workload.
      program: the program of the workload at full size.
      plan: a plan for the program.
      steps: the number of steps.
      devices: the devices of this machine, usually simulated.

    Raises:
      SpanaxError: the workload cannot be reduced enough; or as `parity`.
    """
    reduced = shrink_to_fit(load, trace, program, plan, num_devices=len(devices))
    return replace(parity(reduced.program, reduced.plan, steps=steps, devices=devices), shrunk=reduced.shrunk)


def shrink_to_fit(
    load: Callable[..., Workload],
    trace: Trace,
    program: Program,
    plan: Plan,
    *,
    num_devices: int,
    memory_bytes: float | None = None,
    flops: float = MAX_FLOPS,
) -> ShrunkProgram:
    """Returns the program if it can run here, or else the largest reduced program with the same shardings.

    Mesh axes are halved until the mesh fits the available devices, but not below 2. Then the number of layers, batch
    size, sequence length and width are reduced in this order, as far as the workload supports it. A size is valid only
    if every array is sharded over the same mesh axes along the same dims as before.

    Raises:
      SpanaxError: the smallest program is still too large.
    """
    limit = free_bytes() / 2 if memory_bytes is None else memory_bytes
    mesh = _smaller_mesh(plan.mesh, num_devices)
    result = ShrunkProgram(program, _plan_on(program, plan, mesh), _changed(dict(plan.mesh.axes), dict(mesh.axes)))
    full = _sizes(program)
    sizes = dict[str, int]()
    reason = exceeds_budget(result.program, result.plan, limit, flops)
    for name in MIN_SIZES:
        for smaller in _candidate_sizes(result.program, name, flops):
            if not reason:
                return result
            trial_sizes = sizes | {name: smaller}
            if smaller >= sizes.get(name, full[name]):
                continue
            try:
                traced = trace(load(**trial_sizes))
                trial_plan = _plan_on(traced, plan, mesh)
            except SpanaxError:
                continue  # The workload or the layout does not support this size.
            if _specs(trial_plan) == _specs(plan):
                sizes = trial_sizes
                result = ShrunkProgram(traced, trial_plan, result.shrunk | _changed(full, _sizes(traced)))
                reason = exceeds_budget(traced, trial_plan, limit, flops)
    if reason:
        raise WorkloadError(
            f"the workload cannot be reduced enough to run here: {reason}.",
            where=", ".join(f"{name} {to}" for name, (_, to) in result.shrunk.items()) or "no size could be reduced",
            fix="a workload with the arguments batch_size, seq_len, num_layers or embed_dim, or a smaller one",
        )
    return result


def exceeds_budget(program: Program, plan: Plan, memory_bytes: float, flops: float) -> str:
    """Returns why a program cannot run here, on one device and then as planned; empty if it can."""
    needed = step_flops(program)
    if needed > flops:
        return f"a step has {count_text(needed)} FLOPs, and the limit is {count_text(flops)}"
    state = sum(leaf.num_bytes for leaf in program.leaves)
    # The host also stores the initial parameters and, in double precision, the compared results.
    num_bytes = 6 * state + plan.mesh.size * plan.state_bytes()
    if num_bytes <= memory_bytes:
        num_bytes += 2 * _peak_bytes(program)
    if num_bytes > memory_bytes:
        return f"it needs about {bytes_text(num_bytes)}, and {bytes_text(memory_bytes)} are available"
    return ""


def step_flops(program: Program) -> float:
    """Returns the FLOPs of all matmuls of a step, including recomputation."""
    graph = program.step.graph
    groups = [group for group in program.step.op_groups if group.op.name in CONTRACTIONS]
    return float(sum(group.runs * executed_flops(graph, group.op) for group in groups))


def _peak_bytes(program: Program) -> int:
    """Returns the predicted peak memory of the program on one device."""
    searched = search(
        program, cluster("cpu:1"), remat=(program.remat,), pipeline=False, microbatches=1, top=1, assign=False
    )
    return (searched.candidates or searched.nearest)[0].peak_bytes


def _plan_on(program: Program, plan: Plan, mesh: MeshShape) -> Plan:
    return (
        plan
        if mesh == plan.mesh and program.fingerprint == plan.fingerprint
        else same_layout(program, replace(plan, mesh=mesh))
    )


def _sizes(program: Program) -> dict[str, int]:
    """Returns the sizes of a program, by the names in `MIN_SIZES`; 0 for missing axes."""
    largest = {axis.name: max(axis.sizes) for axis in program.axes}
    return {
        "num_layers": program.step.layer_carry[1],
        "batch_size": program.batch_size,
        "seq_len": largest.get("seq", 0),
        "embed_dim": largest.get("embed", 0),
    }


def _candidate_sizes(program: Program, name: str, flops: float) -> list[int]:
    """Returns smaller sizes, starting with the largest that may suffice; a width is a multiple of the head dim."""
    size = _sizes(program)[name]
    heads = max((max(a.sizes) for a in program.axes if a.name == "heads"), default=1)
    unit = size // heads if name == "embed_dim" and size and size % heads == 0 else 1
    sizes = [count * unit for count in _halves(size // unit) if count * unit >= MIN_SIZES[name]]
    sufficient = size * (flops / max(step_flops(program), flops)) ** EXPONENTS[name]
    return [candidate for candidate in sizes if candidate <= sufficient] + [
        candidate for candidate in reversed(sizes) if candidate > sufficient
    ]


def _halves(size: int) -> list[int]:
    """Returns the repeated halves of a size and the powers of two below it, largest first."""
    counts = {size >> power for power in range(1, size.bit_length())} | {
        1 << power for power in range(size.bit_length())
    }
    return sorted((count for count in counts if count < size), reverse=True)


def _smaller_mesh(mesh: MeshShape, num_devices: int) -> MeshShape:
    sizes = dict(mesh.axes)
    while MeshShape(tuple(sizes.items())).size > num_devices:
        largest = max(sizes, key=lambda axis: sizes[axis])
        if sizes[largest] <= 2 or sizes[largest] % 2:
            raise DeviceCountError(
                f"mesh {mesh} cannot be halved to fit the {num_devices} available devices.",
                fix=f"{simulated(mesh.size)} to simulate them",
            )
        sizes[largest] //= 2
    return MeshShape(tuple(sizes.items()))


def _specs(plan: Plan) -> dict[str, set[Any]]:
    """Returns the specs of every array, merged over repeated blocks."""
    specs: dict[str, set[Any]] = {}
    for leaf in plan.leaves + plan.batch:
        specs.setdefault(re.sub(r"\.\d+\b", ".*", leaf.path), set()).add(leaf.spec)
    return specs


def _changed(before: Mapping[str, int], after: Mapping[str, int]) -> dict[str, tuple[int, int]]:
    return {name: (size, after[name]) for name, size in before.items() if after[name] != size}


def free_bytes() -> float:
    """Returns the bytes of free memory of this machine."""
    return float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES"))
