"""`spanax inspect` and `spanax checkpoint`: where arrays of a plan or a run are placed, and what is saved of them."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from tyro.conf import Positional

from spanax.commands.answer import Answer
from spanax.errors import FileErrors, MissingFileError, PipelineError, WriteError
from spanax.printable import printable, printable_lines
from spanax.units import bytes_text

if TYPE_CHECKING:
    from spanax.check.array_placement import ArrayPlacement
    from spanax.entries.folder import Folder
    from spanax.plan.pipeline.ticks import Ticks
    from spanax.train.store.view import SavedStep


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


@dataclass(frozen=True)
class CheckpointCommand:
    """List or verify checkpoints without starting JAX.

    Attributes:
      action: show lists the steps; verify compares every file with its checksum, and exits with 65 if any differs.
      directory: the folder of checkpoints, or a run folder.
      json: print one JSON object.
    """

    action: Positional[Literal["show", "verify"]]
    directory: Positional[Path]
    json: bool = False


def checkpoint_answer(command: CheckpointCommand) -> Answer:
    """Returns the saved steps, or the result of verification.

    Raises:
      DataError: there is no such folder.
    """
    return show(command.directory) if command.action == "show" else verify(command.directory)


def show(directory: Path) -> Answer:
    """Returns the saved steps, newest last, each with its first problem."""
    from spanax.train.store import view

    root = _root(directory)
    steps = view.describe(root)
    data = {"directory": str(root), "steps": [asdict(step) for step in steps]}
    return Answer(steps_text(root, steps), data, is_styled=True)


def verify(directory: Path) -> Answer:
    """Compares every file of every step with its checksum; the problems name the file and the difference."""
    from spanax.train.store import view

    root = _root(directory)
    seen = view.describe(root)
    problems = view.verify(root, seen)
    steps = sorted({step.step for step in seen if step.state in ("good", "bad")})
    saving, unfinished = (
        [step.step for step in seen if step.state == state and not step.problems]
        for state in (view.SAVING, "unfinished")
    )
    listed: dict[str, list[Any]] = {"steps": steps, "saving": saving, "unfinished": unfinished, "problems": problems}
    data = {"directory": str(root), **listed}
    return Answer(verified_text(root, listed), data, exit_code=65 if problems else 0, is_styled=True)


def _root(directory: Path) -> "Folder":
    """Returns the folder of checkpoints: the one named, or that of the run folder named."""
    from spanax.entries.kind import Kind
    from spanax.train.store import manifest

    root = manifest.steps_of_run(directory)
    if root.kind() is not Kind.FOLDER:
        raise MissingFileError(f"there is no folder '{directory}'.", fix="a run folder, or its checkpoints folder")
    return root


def steps_text(root: "Folder", steps: "Sequence[SavedStep]") -> str:
    """Returns one line per saved step, with its size, state and first problem."""
    lines = []
    for step in steps:
        state = ": ".join([step.state, *step.problems[:1]])
        line = f"step {step.step}  {bytes_text(step.bytes)}  {step.num_leaves} arrays  {step.when}  {state}"
        lines.append(printable(line))
    return "\n".join(lines) or f"no checkpoint in '{printable(root)}'"


def verified_text(root: "Folder", listed: Mapping[str, Sequence[Any]]) -> str:
    """Returns the problems, or that every file matches its checksum.

    Args:
      root: the folder of checkpoints.
      listed: the lists of `spanax checkpoint verify --json`.
    """
    if listed["problems"]:
        return "\n".join(map(printable, listed["problems"]))
    saving, unfinished = (", ".join(map(str, listed[key])) for key in ("saving", "unfinished"))
    suffix = f"; step {saving} is being saved" if saving else ""
    suffix += f"; step {unfinished} is unfinished" if unfinished else ""
    return f"{len(listed['steps'])} steps in '{printable(root)}', every file matches its checksum{suffix}"
