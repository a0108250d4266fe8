"""`spanax inspect`: shows where the arrays of a plan or a run are placed."""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from tyro.conf import Positional

from spanax.commands.answer import Answer
from spanax.errors import FileErrors, PipelineError, WriteError
from spanax.printable import printable_lines

if TYPE_CHECKING:
    from spanax.check.array_placement import ArrayPlacement
    from spanax.plan.pipeline.ticks import Ticks


@dataclass(frozen=True)
class InspectCommand:
    """Show where the arrays of a plan or a run are placed, drawn on the mesh. Uses no devices, except with --hlo.

    Attributes:
      path: a plan file, or a run folder: the placement of its newest checkpoint.
      leaf: draw this array.
      svg: write the drawing to this file; without --leaf, of every kind of parameter and the batch.
      schedule: draw the task of each stage at each tick of the plan's pipeline.
      hlo: write the train step to this file as it is passed to XLA, with its shardings and the paths of its arrays.
      workload: the workload of the plan, for --hlo; a run folder records it.
      json: print one JSON object.
      traceback: show the full traceback of an error.
    """

    path: Positional[Path]
    leaf: str | None = None
    svg: Path | None = None
    schedule: bool = False
    hlo: Path | None = None
    workload: str | None = None
    json: bool = False
    traceback: bool = False


def answer(command: InspectCommand) -> Answer:
    """Returns the placement; writes the requested files.

    Raises:
      SpanaxError: the plan has no such array, or no pipeline.
      DataError: the plan or checkpoint cannot be read.
      WriteError: a file cannot be written.
    """
    from spanax.check.array_placement import array_placement, shards
    from spanax.show.placement import (
        distinct_arrays,
        drawing_svg,
        drawing_text,
        leaf_json,
        placement_json,
        placement_text,
    )
    from spanax.show.schedules import ticks_json, ticks_text

    placement = array_placement(command.path)
    plan = placement.plan
    chosen = [plan[command.leaf]] if command.leaf is not None else distinct_arrays(placement)
    text = printable_lines(placement_text(placement))
    data = placement_json(placement)
    if command.leaf is not None:
        (leaf,) = chosen
        text = drawing_text(leaf, plan.mesh)
        data["leaf"] = leaf_json(placement, leaf) | {"shards": [asdict(shard) for shard in shards(leaf, plan.mesh)]}
    if command.schedule:
        table = _ticks(placement)
        text = ticks_text(table)
        data["schedule"] = ticks_json(table)
    lines = [text]
    if command.svg is not None:
        _write(command.svg, drawing_svg(chosen, plan.mesh, plan.title))
        lines.append(f"written to {command.svg}: {len(chosen)} arrays drawn")
    if command.hlo is not None:
        _write(command.hlo, _program_text(command, placement))
        lines.append(f"written to {command.hlo}: the step with its shardings, before XLA")
    return Answer("\n".join(lines), data, is_styled=True)


def _program_text(command: InspectCommand, placement: "ArrayPlacement") -> str:
    """Returns the lowered train step; brings up as many devices as the plan has."""
    from spanax.check.compilers.annotated_step import annotated_program, program_for
    from spanax.models.workloads import load
    from spanax.processes.devices import devices

    present = devices(placement.plan.mesh.size)  # before the workload, whose file may start JAX with fewer
    program = program_for(command.path, placement.plan, load, command.workload)
    return annotated_program(program, placement.plan, present)


def _ticks(placement: "ArrayPlacement") -> "Ticks":
    from spanax.plan.pipeline.ticks import ticks_of

    schedule = placement.plan.schedule
    if schedule.num_stages == 1:
        raise PipelineError(
            "the plan has no pipeline whose schedule could be drawn.",
            where=f"mesh {placement.plan.mesh}",
            fix="a plan with 'pipe' in its mesh: spanax train --mesh pipe=2,data=4",
        )
    return ticks_of(schedule)


def _write(path: Path, text: str) -> None:
    with FileErrors(WriteError, f"cannot write '{path}'."):
        path.write_text(text)
