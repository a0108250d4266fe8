"""From a program and a cluster to a Plan: check what was asked for, choose what was not, resolve the rest."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial

from spanax.errors import SpanaxError
from spanax.hardware.cluster import Cluster, cluster_of
from spanax.hardware.flags import default_flags
from spanax.hardware.mesh import MeshShape
from spanax.plan.assign import Pins
from spanax.plan.attention import with_attention
from spanax.plan.candidate import plan_of, shortfall
from spanax.plan.guide import rule
from spanax.plan.layout import Layout
from spanax.plan.logits import chunks_to_try, in_chunks
from spanax.plan.place import placed
from spanax.plan.plan import Plan, Schedule
from spanax.plan.presets import check_ring, default_mesh, layout_for, layout_named
from spanax.plan.search import REMAT, TOO_LARGE, search
from spanax.plan.stages import AXIS
from spanax.trace.policies import AS_WRITTEN, RING, known_chunks
from spanax.trace.program import Program
from spanax.units import bytes_text

STATE_FRACTION = 0.5
"""Share of a device's memory that the state may take under `data`; the rest is for gradients and activations."""


def plan(
    program: Program,
    cluster: Cluster | str,
    *,
    layout: str | Layout | None = None,
    mesh: Mapping[str, int] | str | MeshShape | None = None,
    sequence_parallel: bool = False,
    pin: Pins | None = None,
    forbid: Sequence[str] = (),
    schedule: Schedule | None = None,
    attention: str | None = None,
    loss_chunks: int | str | None = None,
) -> Plan:
    """Say where every array of a program lives on a cluster. No device is touched.

    Args:
      program: what `spanax.trace` returned.
      cluster: what `spanax.cluster` or `spanax.local` returned, or the name of one.
      layout: a preset's name (`data`, `zero1`, `zero2`, `fsdp`, `hsdp`, `tensor`, `data+tensor`, `fsdp+tensor`,
        `context`, `ring`, `expert`, `pipeline`, `pipeline+tensor`, `3d`; `+seq` behind a tensor one), or a Layout. Left
        out: what the mesh's names mean; with neither given, the fastest of all that fit, as `spanax.search` finds it,
        keys gathered. Of chips whose speed is not known: `data` where the state fits on one device and `fsdp` where it
        does not.
      mesh: axis sizes, slowest axis first; left out, one that suits the layout.
      sequence_parallel: also split the sequence over the model axis wherever that axis splits nothing else.
      pin: axis name -> mesh axis (or several, or None to keep the axis whole), before the layout's own choice.
      forbid: names of axes that must not be split.
      schedule: remat, microbatches and stages; as the program was traced if left out, with as many microbatches as
        suit the stages. A mesh without `pipe` is that of one stage.
      attention: `plain`, as the model wrote it, also if left out; `flash`, by the platform's kernel (splash on TPUs,
        cuDNN on NVIDIA GPUs); `auto`, by the kernel where it can be.
      loss_chunks: the logits in so many chunks of tokens, one after the other and never there as a whole; `auto` takes
        chunks where that saves a large part of the memory. Left out: as the program was traced, which is whole.

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
    cluster = cluster_of(cluster)
    pins = dict(pin or {}) | dict.fromkeys(forbid)
    count = program.loss_chunks if loss_chunks is None else known_chunks(loss_chunks)
    if not count:
        make = partial(
            plan, cluster=cluster, layout=layout, mesh=mesh, sequence_parallel=sequence_parallel, pin=pins,
            schedule=schedule, attention=attention,
        )  # fmt: skip
        return in_chunks(program.with_loss_chunks(1), cluster, make)
    program = program if count == program.loss_chunks else program.with_loss_chunks(count)
    program = with_attention(program, cluster, attention)
    if layout is None and mesh is None and schedule is None and cluster.chip.peak_flops:
        return _searched(program, cluster, pins)
    why, chosen, shape = _choose(program, cluster, layout, mesh, sequence_parallel)
    num_stages = schedule.num_stages if schedule else 1
    num_devices = shape.size * (num_stages if shape.ways([AXIS]) == 1 else 1)
    if num_devices != cluster.num_devices:
        near = chosen.name if not isinstance(layout, Layout) else "fsdp"
        raise SpanaxError(
            f"mesh {shape} takes {num_devices} devices, and the cluster has {cluster.num_devices}.",
            where=" x ".join(f"{name} {size}" for name, size in shape.axes) + f" = {shape.size}",
            fix=f"mesh {_near_mesh(near, cluster.num_devices)}, or --devices {num_devices}",
        )
    if schedule is None and shape.ways([AXIS]) > 1:
        schedule = Schedule(microbatches=0)
    if isinstance(layout, str) and RING in layout.split("+"):
        schedule = replace(schedule or Schedule(), context=RING)
    if schedule is not None and schedule.context == RING:
        check_ring(chosen, shape)
    schedule = replace(schedule or Schedule(), loss_chunks=count)
    made = placed(program, chosen, shape, pins=pins, why=why, schedule=schedule)
    made = replace(made, xla_flags=default_flags(cluster))
    if schedule.microbatches == 0:
        return replace(made, why=f"{why}; {made.schedule.microbatches} microbatches, as suits the stages")
    return made


def _searched(program: Program, cluster: Cluster, pins: Pins) -> Plan:
    """The best of all layouts; what the program was traced with, remat or microbatches, is kept."""
    find = partial(
        search,
        program,
        cluster,
        microbatches=None if program.microbatches == 1 else program.microbatches,
        pipeline=False,  # stages are for who asks for them: what they take on real machines has not been measured
        pins=pins,
        top=1,
    )
    found = find(remat=(program.remat if program.remat != AS_WRITTEN else "none",))
    if program.remat == AS_WRITTEN and TOO_LARGE in found.rejected:
        found = find(remat=REMAT)  # where all fits, to compute anything again only takes longer
    if found.best is None:
        more = "more devices or smaller microbatches; spanax plan prices both"
        raise SpanaxError(
            "no layout fits into the memory.",
            where=shortfall(found),
            fix="; or ".join(filter(None, (chunks_to_try(found), more))),
        )
    return replace(plan_of(found, found.best), why=rule(found, found.best))


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


def _near_mesh(name: str, num_devices: int) -> MeshShape:
    try:
        return default_mesh(name, num_devices)
    except SpanaxError:
        return default_mesh("fsdp", num_devices)
