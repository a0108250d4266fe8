"""Requirements of a `pipe` mesh axis on schedule and program, and the plan of one stage."""

from dataclasses import replace

from spanax.errors import PipelineError
from spanax.hardware.mesh import MeshShape
from spanax.hardware.torus import divisors
from spanax.plan.layout import PIPE, Layout
from spanax.plan.pipeline.schedules import check_counts
from spanax.plan.plan import Plan, Schedule
from spanax.plan.presets import name_in_stages
from spanax.plan.sharding.assign import divided_layers
from spanax.trace.jaxpr.remat_policies import partial_policy
from spanax.trace.program import Program

AXIS = PIPE
"""The mesh axis of the stages."""

ANY = "any"
"""The pipeline of a requested schedule that leaves it open: a search chooses it; without one, it is 1F1B."""

SUITS = 4
"""Default microbatches per stage: the bubble, (S - 1) / (M + S - 1), is then at most a fifth of a step.

Source: Huang et al., GPipe, arXiv 1811.06965, section 2.3: negligible from M >= 4 S on.
"""


def in_stages(
    program: Program, layout: Layout, mesh: MeshShape, schedule: Schedule
) -> tuple[Layout, MeshShape, Schedule]:
    """Returns the layout, mesh and schedule with consistent stages.

    Args:
      program: the program to train.
      layout: the axes that each mesh axis shards.
      mesh: the devices; without `pipe`, those of one stage.
      schedule: microbatches and stages; 0 microbatches chooses a number.

    Raises:
      SpanaxError: the batch or the program does not support the schedule.
    """
    stages = mesh.ways([AXIS])
    if stages == 1 and schedule.num_stages > 1:
        mesh = mesh_of_stages(mesh, schedule.num_stages)
    pipeline = "1f1b" if schedule.pipeline == ANY else schedule.pipeline
    schedule = replace(schedule, num_stages=mesh.ways([AXIS]), pipeline=pipeline)
    if schedule.num_stages > 1 and not layout.splits(AXIS):
        layout = replace(layout, name=name_in_stages(layout.name), computed=((AXIS, ("layers",)), *layout.computed))
    if not schedule.microbatches:
        schedule = replace(schedule, microbatches=_suiting(program, layout, mesh, schedule))
    if schedule.num_stages > 1:
        _check(program, layout, mesh, schedule)
    return layout, mesh, schedule


def mesh_of_stages(mesh: MeshShape, num_stages: int) -> MeshShape:
    """Returns the mesh of all stages, given that of one.

    Example:
      >>> mesh_of_stages(MeshShape.of("data=1,fsdp=4"), 2)
      pipe=2,fsdp=4
    """
    inside = tuple(pair for pair in mesh.axes if pair[0] != AXIS and pair[1] > 1)
    return MeshShape(((AXIS, num_stages), *inside)) if num_stages > 1 else mesh


def requested_schedule(
    *, remat: str | None = None, microbatches: int | None = None, schedule: str | None = None, chunks: int | None = None
) -> Schedule | None:
    """Returns the schedule of the requested options, or None without any.

    Example:
      >>> requested_schedule(schedule="interleaved").num_chunks, requested_schedule() is None
      (2, True)
      >>> [requested_schedule(chunks=3).pipeline, requested_schedule(microbatches=8).pipeline]
      ['interleaved', 'any']
    """
    if remat is None and microbatches is None and schedule is None and chunks is None:
        return None
    if schedule is None:
        schedule = "interleaved" if chunks is not None and chunks > 1 else ANY
    return Schedule(
        remat=remat,
        microbatches=microbatches or 0,
        num_chunks=chunks or (2 if schedule == "interleaved" else 1),
        pipeline=schedule,
    )


def mesh_of_stage(mesh: MeshShape) -> MeshShape:
    """Returns the mesh of one stage, given that of all.

    Example:
      >>> mesh_of_stage(MeshShape.of("pipe=2,fsdp=4")), mesh_of_stage(MeshShape.of("pipe=8"))
      (fsdp=4, data=1)
    """
    return MeshShape(tuple(pair for pair in mesh.axes if pair[0] != AXIS) or (("data", 1),))


def inside_stage(plan: Plan) -> Plan:
    """Returns a plan with the mesh and layout of one stage; its placements are those of all stages."""
    computed = tuple(pair for pair in plan.layout.computed if pair[0] != AXIS)
    return replace(plan, mesh=mesh_of_stage(plan.mesh), layout=replace(plan.layout, computed=computed))


def _possible(program: Program, layout: Layout, mesh: MeshShape) -> list[int]:
    """Returns the numbers of microbatches whose examples the mesh axes divide."""
    num_shards = mesh.ways([axis for axis, names in layout.computed if "batch" in names])
    size = program.batch_size
    return [*divisors(size // num_shards)] if size % num_shards == 0 else [1]


def _check_chunks(num_layers: int, schedule: Schedule) -> None:
    stages = schedule.num_stages
    chunks = schedule.num_chunks
    if stages * chunks > num_layers >= stages:
        possible = num_layers // stages
        raise PipelineError(
            f"{num_layers} layers are too few for {stages} stages of {chunks} chunks each.",
            fix=f"{possible} chunks" if possible > 1 else "schedule '1f1b', or fewer stages",
        )


def _suiting(program: Program, layout: Layout, mesh: MeshShape, schedule: Schedule) -> int:
    stages = schedule.num_stages
    if stages == 1:
        return program.microbatches
    possible = _possible(program, layout, mesh)
    groups = [count for count in possible if count % stages == 0] or possible
    return max([count for count in groups if count <= SUITS * stages], default=min(groups))


def _check_accumulates(program: Program, mesh: MeshShape) -> None:
    accumulates = program.accumulates
    if accumulates.error is not None:
        raise accumulates.error
    if accumulates.num_passes > 1:
        raise PipelineError(
            "a pipeline evaluates the loss once, and this one needs its sums over the batch beforehand.",
            where=f"mesh {mesh}: the weight of a sum in the loss depends on the model's outputs",
            fix=f"a mesh without '{AXIS}', or accumulate=\"mean\" for the mean over microbatches",
        )


def _check(program: Program, layout: Layout, mesh: MeshShape, schedule: Schedule) -> None:
    stages = schedule.num_stages
    count = schedule.microbatches
    remat = schedule.remat or program.options.remat
    if parts := partial_policy(remat):
        raise PipelineError(
            f"remat '{remat}' partitions the layers into two loops, and a pipeline needs one for its stages.",
            where=f"mesh {mesh}",
            fix=f"remat '{parts.first}' for all layers, or a mesh without '{AXIS}'",
        )
    check_counts(schedule.pipeline, stages, count, schedule.num_chunks)
    possible = _possible(program, layout, mesh)
    enough = [candidate for candidate in possible if candidate >= stages] or possible[-1:]
    if count == 1:
        suiting = _suiting(program, layout, mesh, schedule)
        needed = f"{suiting} microbatches" if suiting > 1 else f"a batch of {2 * program.batch_size}"
        raise PipelineError(
            f"a pipeline of {stages} stages needs microbatches, and there is one.",
            where=f"mesh {mesh}, a batch of {program.batch_size}",
            fix=f"{needed}, or a mesh without '{AXIS}'",
        )
    if count not in possible:
        near = min(enough, key=lambda candidate: (abs(candidate - count), candidate))
        raise PipelineError(
            f"{count} microbatches do not divide the batch of {program.batch_size} on mesh {mesh}.",
            where=f"possible are {', '.join(map(str, possible))}",
            fix=f"{near} microbatches",
        )
    labels = divided_layers(program)
    if not labels:
        raise PipelineError(
            "the step has no loop over equal layers that could be divided into stages.",
            where=f"mesh {mesh}; blocks in a list run one by one, in no loop",
            fix="spanax.stack(model), which makes loops of lists of equal blocks, or in a workload "
            f"build=lambda rngs: spanax.stack(Model(rngs)); or a mesh without '{AXIS}'",
        )
    _check_accumulates(program, mesh)
    if schedule.num_chunks > 1:
        _check_chunks(program.step.axes.ways[labels[0]], schedule)
