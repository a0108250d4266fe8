"""Shrink: a workload in sizes that this machine can run, laid out as the large one is."""

import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from spanax.check.parity.parity import Parity, parity, same_layout
from spanax.errors import SpanaxError
from spanax.hardware.cluster import cluster
from spanax.hardware.mesh import MeshShape
from spanax.plan.plan import Plan
from spanax.plan.search import search
from spanax.trace.analysis.op_groups import contraction_flops
from spanax.trace.jaxpr.graph import CONTRACTIONS
from spanax.trace.program import Program
from spanax.trace.workload import Workload
from spanax.units import bytes_text, count_text

MAX_FLOPS = 5e11
"""Operations of one step that are still run: a few seconds on a laptop."""

LEAST = {"num_layers": 2, "batch_size": 1, "seq_len": 32, "embed_dim": 1}
"""The sizes that a workload may take, in the order in which they are made smaller, and where that ends."""

POWER = {"num_layers": 1.0, "batch_size": 1.0, "seq_len": 0.5, "embed_dim": 0.5}
"""How a size must shrink for the operations to shrink by a factor, at best."""

Trace = Callable[[Workload], Program]


@dataclass(frozen=True)
class ShrunkProgram:
    """A program that fits, its plan, and which sizes are smaller than asked for: from and to."""

    program: Program
    plan: Plan
    shrunk: dict[str, tuple[int, int]]


def parity_of(
    load: Callable[..., Workload], trace: Trace, program: Program, plan: Plan, *, steps: int, devices: list[Any]
) -> Parity:
    """`parity` of a workload, in smaller sizes where it is too big for this machine.

    Args:
      load: makes the workload, given any of the sizes in LEAST.
      trace: makes its program.
      program: the workload's in full size.
      plan: the plan for it.
      steps: how many to take.
      devices: the devices of this machine, simulated ones as a rule.

    Raises:
      SpanaxError: the workload cannot be made small enough; or as `parity`.
    """
    found = shrink_to_fit(load, trace, program, plan, num_devices=len(devices))
    return replace(parity(found.program, found.plan, steps=steps, devices=devices), shrunk=found.shrunk)


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
    """The program itself where it can be run here, else the largest smaller one that is laid out alike.

    Mesh axes are halved down to the devices there are, none below 2. Then layers, batch, sequence and width are made
    smaller, in this order and one after the other, as far as the workload lets them. A size counts only where every
    array is split over the same mesh axes along the same dims as before.

    Raises:
      SpanaxError: even the smallest one is too big.
    """
    limit = _free_bytes() / 2 if memory_bytes is None else memory_bytes
    mesh = _smaller_mesh(plan.mesh, num_devices)
    now = ShrunkProgram(program, _on(program, plan, mesh), _changed(dict(plan.mesh.axes), dict(mesh.axes)))
    full, sizes = _sizes(program), dict[str, int]()
    reason = exceeds_budget(now.program, now.plan, limit, flops)
    for name in LEAST:
        for smaller in _order(now.program, name, flops):
            if not reason:
                return now
            tried = sizes | {name: smaller}
            if smaller >= sizes.get(name, full[name]):
                continue
            try:
                made = trace(load(**tried))
                there = _on(made, plan, mesh)
            except SpanaxError:
                continue  # a size that the workload or the layout does not take: the next one is tried
            if _splits(there) == _splits(plan):
                sizes = tried
                now = ShrunkProgram(made, there, now.shrunk | _changed(full, _sizes(made)))
                reason = exceeds_budget(made, there, limit, flops)
    if reason:
        raise SpanaxError(
            f"the workload cannot be made small enough to be run here: {reason}.",
            where=", ".join(f"{name} {to}" for name, (_, to) in now.shrunk.items()) or "its sizes are its own",
            fix="a workload that takes batch_size, seq_len, num_layers or embed_dim, or a smaller one",
        )
    return now


def exceeds_budget(program: Program, plan: Plan, memory_bytes: float, flops: float) -> str:
    """Why a program cannot be run here, on one device and as planned one after the other; empty if it can."""
    needed = step_flops(program)
    if needed > flops:
        return f"a step takes {count_text(needed)} operations, and {count_text(flops)} are the limit"
    state = sum(leaf.num_bytes for leaf in program.leaves)
    # What is compared lies on the host beside it: the numbers at birth, and those after, in double precision.
    held = 6 * state + plan.mesh.size * plan.state_bytes()
    if held <= memory_bytes:
        held += 2 * _peak_bytes(program)
    if held > memory_bytes:
        return f"it takes about {bytes_text(held)}, and {bytes_text(memory_bytes)} are free for it"
    return ""


def step_flops(program: Program) -> float:
    """Operations of all matmuls of one step, what is computed twice included."""
    graph = program.step.graph
    kinds = [kind for kind in program.step.op_groups if kind.op.name in CONTRACTIONS]
    return float(sum(kind.runs * contraction_flops(graph, kind.op) for kind in kinds))


def _peak_bytes(program: Program) -> int:
    """What one device would hold, as the planner has it."""
    found = search(program, cluster("cpu:1"), remat=(program.remat,), pipeline=False, microbatches=1, top=1)
    return (found.candidates or found.nearest)[0].peak_bytes


def _on(program: Program, plan: Plan, mesh: MeshShape) -> Plan:
    return plan if mesh == plan.mesh and program.fingerprint == plan.fingerprint else same_layout(
        program, replace(plan, mesh=mesh)
    )  # fmt: skip


def _sizes(program: Program) -> dict[str, int]:
    """The sizes that the program has, by the names in LEAST; 0 where it has no such axis."""
    largest = {axis.name: max(axis.sizes) for axis in program.axes}
    return {
        "num_layers": program.step.layer_carry[1],
        "batch_size": program.batch[0].shape[0],
        "seq_len": largest.get("seq", 0),
        "embed_dim": largest.get("embed", 0),
    }


def _order(program: Program, name: str, flops: float) -> list[int]:
    """Smaller sizes of a name, those first that may be enough, the largest of them first; a width by whole heads."""
    size, heads = _sizes(program)[name], max((max(a.sizes) for a in program.axes if a.name == "heads"), default=1)
    unit = size // heads if name == "embed_dim" and size and size % heads == 0 else 1
    sizes = [count * unit for count in _halves(size // unit) if count * unit >= LEAST[name]]
    enough = size * (flops / max(step_flops(program), flops)) ** POWER[name]
    return [one for one in sizes if one <= enough] + [one for one in reversed(sizes) if one > enough]


def _halves(size: int) -> list[int]:
    """Halves of a size and powers of two, below it, the largest first."""
    found = {size >> power for power in range(1, size.bit_length())} | {
        1 << power for power in range(size.bit_length())
    }
    return sorted((count for count in found if count < size), reverse=True)


def _smaller_mesh(mesh: MeshShape, num_devices: int) -> MeshShape:
    sizes = dict(mesh.axes)
    while MeshShape(tuple(sizes.items())).size > num_devices:
        largest = max(sizes, key=lambda axis: sizes[axis])
        if sizes[largest] <= 2 or sizes[largest] % 2:
            raise SpanaxError(
                f"mesh {mesh} takes more than the {num_devices} devices there are, however it is halved.",
                fix=f"--devices {mesh.size} to simulate them",
            )
        sizes[largest] //= 2
    return MeshShape(tuple(sizes.items()))


def _splits(plan: Plan) -> dict[str, set[Any]]:
    """The specs of every array, those of repeated blocks together."""
    found: dict[str, set[Any]] = {}
    for leaf in plan.leaves + plan.batch:
        found.setdefault(re.sub(r"\.\d+\b", ".*", leaf.path), set()).add(leaf.spec)
    return found


def _changed(before: Mapping[str, int], after: Mapping[str, int]) -> dict[str, tuple[int, int]]:
    return {name: (size, after[name]) for name, size in before.items() if after[name] != size}


def _free_bytes() -> float:
    return float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES"))
