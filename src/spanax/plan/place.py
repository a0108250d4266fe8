"""Resolves a layout on a mesh into a Plan: the sharding of every array of a program, with reasons."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from spanax.errors import IdleAxisError, PlanMismatchError, VariantError
from spanax.hardware.mesh import MeshShape
from spanax.plan.defaults import check_quantized_alike, options_in
from spanax.plan.layout import Layout
from spanax.plan.pipeline.stages import in_stages
from spanax.plan.plan import Plan, Schedule
from spanax.plan.presets import context_word, in_words
from spanax.plan.sharding.assign import Pins, pinned_to
from spanax.plan.sharding.placement import DEVICE, HOST, Placement, is_offloaded
from spanax.plan.sharding.resolve import Resolver, Spec, axes_of, resolve
from spanax.trace.jaxpr.remat_policies import GATHERED, KERNELS, ULYSSES, known_offload
from spanax.trace.program import Program
from spanax.trace.rewrites.padding import padded_sizes
from spanax.trace.rewrites.remat import ATTENTION
from spanax.trace.variables import Leaf, itemsize


def placed(
    program: Program, layout: Layout, mesh: MeshShape, *, pins: Pins, why: str, schedule: Schedule | None = None
) -> Plan:
    """Returns the plan of a program under a layout on a mesh.

    Args:
      program: the program to train.
      layout: what each mesh axis shards.
      mesh: the devices; without an axis of stages, those of one stage.
      pins: the user's pins for single axes.
      why: a line on why this layout.
      schedule: remat, microbatches and stages; by default as the program was traced.

    Raises:
      SpanaxError: the layout does not apply to this program on this mesh.
    """
    dtypes = program.options.dtypes
    schedule = replace(schedule or Schedule(), compute_dtype=dtypes.compute, quantize=dtypes.quantize)
    known_offload(schedule.offload)
    if program.context in (*KERNELS, ULYSSES) and schedule.context == GATHERED:
        schedule = replace(schedule, context=program.context)
    layout, mesh, schedule = in_stages(program, layout, mesh, schedule)
    program = program.variant(**_options(schedule))
    if program.context == GATHERED and f"{ATTENTION}." in program.remat:
        raise VariantError(
            f"remat '{program.remat}' stores results of fused attention, and none is fused.", fix="attention 'flash'"
        )
    layout = replace(layout, name=in_words(layout.name, context_word(program)))
    resolver = resolve(program, layout, mesh, pins, schedule.num_chunks)
    placements = _placements(resolver, schedule.offload)
    _check_stored(resolver, placements)
    if schedule.offload and all(place.memory_kind == DEVICE for place in placements):
        raise VariantError(
            "the optimizer has no arrays to store in host memory.", where="offload 'optimizer'", fix="leave offload out"
        )
    return Plan(
        fingerprint=program.fingerprint,
        mesh=mesh,
        layout=layout,
        pins=tuple((name, pinned_to(pin)) for name, pin in pins.items()),
        leaves=tuple(placements[: len(program.leaves)]),
        batch=tuple(placements[len(program.leaves) :]),
        why=why + _padding(resolver) + "".join(f"; attention {note}" for note in program.attention),
        schedule=schedule,
    )


def resolver_of(program: Program, plan: Plan) -> Resolver:
    """Returns the resolver that made a plan, so that the step runs as planned.

    Raises:
      SpanaxError: the plan was made for another program.
    """
    check_made_for(program, plan)
    pins = {name: to or None for name, to in plan.pins}
    program = program.variant(padded=plan.schedule.padded)
    specs = {leaf.path: leaf.spec for leaf in plan.leaves} if plan.anchors else {}
    anchors = {path: specs[path] for path in plan.anchors}
    return resolve(program, plan.layout, plan.mesh, pins, plan.schedule.num_chunks, anchors)


def anchored(program: Program, plan: Plan, specs: Mapping[str, Spec]) -> Plan:
    """Returns a plan with the specs of leaves that are sharded already; leaves joined with them are sharded alike.

    Args:
      program: the program of the plan.
      plan: the plan.
      specs: by path.

    Raises:
      SpanaxError: the plan was made for another program.
    """
    leaves = tuple(replace(leaf, spec=specs.get(leaf.path, leaf.spec)) for leaf in plan.leaves)
    if leaves == plan.leaves:
        return plan
    plan = replace(plan, leaves=leaves, anchors=tuple(specs))
    placements = tuple(_placements(resolver_of(as_planned(program, plan), plan), plan.schedule.offload))
    return replace(plan, leaves=placements[: len(leaves)], batch=placements[len(leaves) :])


def check_made_for(program: Program, plan: Plan) -> None:
    """Checks that a plan was made for a program.

    Raises:
      SpanaxError: the plan was made for another program.
    """
    if plan.fingerprint != program.fingerprint:
        planned = {(leaf.path, leaf.shape, leaf.dtype) for leaf in plan.leaves + plan.batch}
        have = {(leaf.path, leaf.shape, str(leaf.dtype)) for leaf in program.leaves + program.batch}
        odd = sorted(planned ^ have, key=str)
        raise PlanMismatchError(
            "the plan was made for another program.",
            where="; ".join(f"{path} {dtype}{list(shape)}" for path, shape, dtype in odd[:2]) + " differ",
            fix="make a plan for this model and batch: spanax.plan(program, ...)",
        )


def as_planned(program: Program, plan: Plan) -> Program:
    """Returns the program that a plan was made for, traced according to its schedule.

    Raises:
      SpanaxError: the plan was made for another program, or this program does not support its schedule.
    """
    schedule, program = plan.schedule, in_variant(program, plan)
    policy = program.options.remat if schedule.remat in (None, program.remat) else schedule.remat
    microbatches = program.microbatches if schedule.microbatches == 1 else schedule.microbatches
    return program.variant(remat=policy, microbatches=microbatches)


def in_variant(program: Program, plan: Plan, **changes: Any) -> Program:
    """Returns the program in the compute dtype of a plan, with its attention, chunks of the logits and padded axes.

    Args:
      program: the program of the plan.
      plan: the plan.
      **changes: other fields of `Variant`.

    Raises:
      SpanaxError: the plan was made for another program, or the program was traced with another compute dtype.
    """
    check_made_for(program, plan)
    schedule = plan.schedule
    check_quantized_alike(program, schedule.quantize)
    return program.variant(options_in(program, schedule.compute_dtype), **_options(schedule), **changes)


def _options(schedule: Schedule) -> dict[str, Any]:
    return {"context": schedule.context, "loss_chunks": schedule.loss_chunks, "padded": schedule.padded}


def _placements(resolver: Resolver, offload: Sequence[str]) -> list[Placement]:
    program = resolver.program
    leaves = (*program.leaves, *program.batch)
    values = program.step.graph.body.inputs
    return [_place(resolver, leaf, value, offload) for leaf, value in zip(leaves, values, strict=True)]


def _place(resolver: Resolver, leaf: Leaf, value: int, offload: Sequence[str]) -> Placement:
    labels = resolver.program.step.axes.classes[value]
    spec, reasons = resolver.placed(leaf, labels)
    padded = resolver.padded_shape(labels, leaf.shape)
    local = tuple(size // resolver.mesh.ways(by) for size, by in zip(padded, spec, strict=True))
    num_bytes = itemsize(leaf.dtype) * math.prod(local)
    text = "; ".join(map(str, reasons))
    memory_kind = HOST if is_offloaded(leaf, offload) else DEVICE
    return Placement(
        leaf.path, leaf.shape, str(leaf.dtype), leaf.kind, leaf.axes, spec, local, num_bytes, text, memory_kind
    )


def _padding(resolver: Resolver) -> str:
    """Returns the plan's note on padded axes, and on layers that its stages do not divide evenly."""
    text = padding_text(resolver.program, resolver.mesh, resolver.layout)
    uneven = [parts for parts in resolver.assignment.parts.values() if parts.num_short]
    note = "; {0.num_layers} layers in {0.num_parts} parts of {0.num_rows}, the last {0.num_short} with one fewer"
    return (f"; {text}" if text else "") + "".join(map(note.format, uneven))


def _check_stored(resolver: Resolver, placements: Sequence[Placement]) -> None:
    """Raises if a layout with sharded storage shards no stored array."""
    axes = resolver.layout.stored_optimizer
    layout = resolver.layout
    if resolver.mesh.ways(axes) == 1:
        return
    kinds = ("param", "optimizer") if layout.stored_params else ("optimizer",)
    arrays = [place for place in placements if place.kind in kinds and place.shape]
    if any(set(axes) & axes_of(place.spec) for place in arrays):
        return
    if not arrays:
        leaves = resolver.program.leaves
        owner = "optimizer has no arrays" if leaves else "function has no NNX objects"
        raise IdleAxisError(
            f"the {owner}: {layout.name} would shard nothing in storage.",
            axis=axes[0],
            in_storage=True,
            where="" if leaves else "arrays that are not in NNX objects are sharded as batches",
            fix="layout 'data'" if leaves else "parameters in an nnx.Module or an nnx.State, or layout 'data'",
        )
    largest = max(arrays, key=lambda place: place.local_bytes)
    raise IdleAxisError(
        f"no parameter is divisible by {resolver.mesh.ways(axes)}: {layout.name} would shard nothing in storage.",
        axis=axes[0],
        in_storage=True,
        where=f"the largest is {largest.path} {list(largest.shape)}",
        fix="a smaller mesh axis, or layout 'data'",
    )


def padding_text(program: Program, mesh: MeshShape, layout: Layout) -> str:
    """Returns the padded axes of a program as text: `25 heads padded to 32 over model=8`; empty without padding."""
    step = program.unpadded.step
    texts = dict[str, None]()
    for name, number in program.options.padded:
        over = ",".join(f"{axis}={mesh.ways([axis])}" for axis, names in layout.computed if name in names)
        for old, new in padded_sizes(step, ((name, number),)).values():
            texts[f"{old:,} {name} padded to {new:,} over {over}"] = None
    return "; ".join(texts)
