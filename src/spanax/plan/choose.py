"""From a program and a cluster to a Plan: check what was asked for, choose what was not, resolve the rest."""

from collections.abc import Mapping, Sequence

from spanax.errors import SpanaxError
from spanax.hardware.cluster import Cluster
from spanax.hardware.mesh import MeshShape
from spanax.plan.assign import Pins
from spanax.plan.layout import Layout
from spanax.plan.plan import Placement, Plan, Schedule
from spanax.plan.presets import default_mesh, layout_for, layout_named
from spanax.plan.resolve import Resolver, resolve
from spanax.trace.program import Program
from spanax.trace.variables import Leaf, itemsize
from spanax.units import bytes_text

STATE_FRACTION = 0.5
"""Share of a device's memory that the state may take under `data`; the rest is for gradients and activations."""


def plan(
    program: Program,
    cluster: Cluster,
    *,
    layout: str | Layout | None = None,
    mesh: Mapping[str, int] | str | MeshShape | None = None,
    sequence_parallel: bool = False,
    pin: Pins | None = None,
    forbid: Sequence[str] = (),
    schedule: Schedule | None = None,
) -> Plan:
    """Say where every array of a program lives on a cluster. No device is touched.

    Args:
      program: what `spanax.trace` returned.
      cluster: what `spanax.cluster` or `spanax.local` returned.
      layout: a preset's name (`data`, `zero1`, `zero2`, `fsdp`, `hsdp`, `tensor`, `data+tensor`, `fsdp+tensor`,
        `context`, `expert`; `+seq` behind a tensor one), or a Layout. Left out: what the mesh's names mean, or
        `data` where the state fits on one device and `fsdp` where it does not.
      mesh: axis sizes, slowest axis first; left out, one that suits the layout.
      sequence_parallel: also split the sequence over the model axis wherever that axis splits nothing else.
      pin: axis name -> mesh axis (or several, or None to keep the axis whole), before the layout's own choice.
      forbid: names of axes that must not be split.
      schedule: remat, microbatches and stages; as the program was traced if left out. A mesh is that of one stage.

    Raises:
      SpanaxError: what was asked for cannot be laid over this program on this cluster.

    Example:
      >>> import jax, optax, spanax
      >>> from flax import nnx
      >>> program = spanax.trace(
      ...     build=lambda rngs: nnx.Linear(16, 32, rngs=rngs),
      ...     optimizer=optax.sgd(0.1),
      ...     batch=jax.ShapeDtypeStruct((8, 16), "float32"),
      ...     loss=lambda model, x: (model(x) ** 2).mean(),
      ... )
      >>> plan(program, spanax.cluster("cpu:8"), layout="fsdp")["kernel"].spec
      ((), ('fsdp',))
    """
    why, chosen, shape = _choose(program, cluster, layout, mesh, sequence_parallel)
    schedule = schedule or Schedule()
    if shape.size * schedule.num_stages != cluster.num_devices:
        near = chosen.name if not isinstance(layout, Layout) else "fsdp"
        raise SpanaxError(
            f"mesh {shape} takes {shape.size} devices, and the cluster has {cluster.num_devices}.",
            where=" x ".join(f"{name} {size}" for name, size in shape.axes) + f" = {shape.size}",
            fix=f"mesh {_near_mesh(near, cluster.num_devices)}, or --devices {shape.size}",
        )
    pins = dict(pin or {}) | dict.fromkeys(forbid)
    resolver = resolve(program, chosen, shape, pins)
    values = program.step.graph.body.inputs
    everything = [*program.leaves, *program.batch]
    placements = [_place(resolver, leaf, value) for leaf, value in zip(everything, values, strict=True)]
    _check_stored(resolver, placements)
    return Plan(
        fingerprint=program.fingerprint,
        mesh=shape,
        layout=chosen,
        pins=tuple((name, (to,) if isinstance(to, str) else tuple(to or ())) for name, to in pins.items()),
        leaves=tuple(placements[: len(program.leaves)]),
        batch=tuple(placements[len(program.leaves) :]),
        why=why,
        schedule=schedule,
    )


def resolver_of(program: Program, plan: Plan) -> Resolver:
    """The resolver that made a plan, so that the step runs what was planned.

    Raises:
      SpanaxError: the plan was made for another program.
    """
    check_made_for(program, plan)
    return resolve(program, plan.layout, plan.mesh, {name: to or None for name, to in plan.pins})


def check_made_for(program: Program, plan: Plan) -> None:
    """Hold a plan against the program it is to place.

    Raises:
      SpanaxError: the plan was made for another program.
    """
    if plan.fingerprint != program.fingerprint:
        planned = {(leaf.path, leaf.shape, leaf.dtype) for leaf in plan.leaves + plan.batch}
        have = {(leaf.path, leaf.shape, str(leaf.dtype)) for leaf in program.leaves + program.batch}
        odd = sorted(planned ^ have, key=str)
        raise SpanaxError(
            "the plan was made for another program.",
            where="; ".join(f"{path} {dtype}{list(shape)}" for path, shape, dtype in odd[:2]) + " differ",
            fix="make a plan for this model and batch: spanax.plan(program, ...)",
        )


def as_planned(program: Program, plan: Plan) -> Program:
    """The program that a plan was made for, traced as its schedule has it.

    Raises:
      SpanaxError: the plan was made for another program, or divides it into stages, which cannot be run yet.
    """
    check_made_for(program, plan)
    schedule = plan.schedule
    if schedule.num_stages > 1:
        raise SpanaxError(
            f"the plan divides the layers into {schedule.num_stages} stages, and pipelines cannot be run yet.",
            fix="spanax plan --pipeline False, for a plan that can",
        )
    if schedule.remat is not None and schedule.remat != program.remat:
        program = program.with_remat(schedule.remat)
    if schedule.microbatches not in (1, program.microbatches):
        program = program.with_microbatches(schedule.microbatches)
    return program


def _choose(
    program: Program,
    cluster: Cluster,
    layout: str | Layout | None,
    mesh: Mapping[str, int] | str | MeshShape | None,
    sequence_parallel: bool,
) -> tuple[str, Layout, MeshShape]:
    if isinstance(layout, Layout):
        if mesh is None:
            raise SpanaxError("a Layout of your own needs a mesh.", fix=f"mesh={{'data': {cluster.num_devices}}}")
        return "as asked", layout, MeshShape.of(mesh)
    if layout is not None:
        shape = MeshShape.of(mesh) if mesh is not None else default_mesh(layout, cluster.num_devices)
        return "as asked", layout_named(layout, shape, sequence_parallel=sequence_parallel), shape
    if mesh is not None:
        shape = MeshShape.of(mesh)
        return "what the mesh's names mean", layout_for(shape), shape
    state = sum(leaf.num_bytes for leaf in program.leaves)
    held = cluster.memory_bytes
    fits = held is None or state <= STATE_FRACTION * held
    name = "data" if fits else "fsdp"
    shape = default_mesh(name, cluster.num_devices)
    limit = "unknown" if held is None else bytes_text(held)
    verdict = "fits" if fits else "does not fit"
    why = f"the state ({bytes_text(state)}) {verdict} on one device ({limit})"
    return why, layout_named(name, shape), shape


def _place(resolver: Resolver, leaf: Leaf, value: int) -> Placement:
    labels = resolver.program.step.axes.classes[value]
    spec, reason = resolver.placed(leaf, labels)
    local = tuple(size // resolver.mesh.ways(by) for size, by in zip(leaf.shape, spec, strict=True))
    num_bytes = itemsize(leaf.dtype)
    for size in local:
        num_bytes *= size
    return Placement(leaf.path, leaf.shape, str(leaf.dtype), leaf.kind, leaf.axes, spec, local, num_bytes, reason)


def _check_stored(resolver: Resolver, placements: Sequence[Placement]) -> None:
    """A layout that stores something split must find something to split."""
    axes, layout = resolver.layout.stored_optimizer, resolver.layout
    if resolver.mesh.ways(axes) == 1:
        return
    kinds = ("param", "optimizer") if layout.stored_params else ("optimizer",)
    arrays = [place for place in placements if place.kind in kinds and place.shape]
    if any(set(axes) & {axis for by in place.spec for axis in by} for place in arrays):
        return
    if not arrays:
        raise SpanaxError(f"the optimizer has no arrays: {layout.name} would store nothing split.", fix="layout 'data'")
    largest = max(arrays, key=lambda place: place.local_bytes)
    raise SpanaxError(
        f"no parameter divides {resolver.mesh.ways(axes)} ways: {layout.name} would store nothing split.",
        where=f"the largest is {largest.path} {list(largest.shape)}",
        fix="a smaller mesh axis, or layout 'data'",
    )


def _near_mesh(name: str, num_devices: int) -> MeshShape:
    try:
        return default_mesh(name, num_devices)
    except SpanaxError:
        return default_mesh("fsdp", num_devices)
